"""Any number of requests, in batches whose rows are filled again as they end."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from .call import Call
from .decode import rounds
from .queue import RequestQueue
from .report import SpeculationReport
from .requests import Completion, Prepared
from .run import Run


class Decodes(Protocol):
    """What `SpeculativeDecoding` does for a queue."""

    report: SpeculationReport | None

    def call(self, given: Prepared, seeds: list[int] | None = None, queue: RequestQueue | None = None) -> Call:
        """What a batch asks for, checked."""

    def begin(self, call: Call) -> Run:
        """What decodes it."""

    def complete(self, call: Call, earlier: SpeculationReport | None) -> Any:
        """Decode it to its end; the report goes on from an earlier one."""

    def end(self, run: Run, earlier: SpeculationReport | None) -> None:
        """Remember what a batch has shown; the report goes on from an earlier one."""


@torch.no_grad()
def complete_all(queue: RequestQueue, strategy: Decodes, batch_size: int) -> Iterator[Completion]:
    """What becomes of each request, as soon as it is done.

    Rows are filled again as long as the next request fits beside the others. If it does not, or rows cannot be filled
    again, they are completed first, and another batch begins. A request that needs a batch of its own is decoded as a
    call of its own.

    Args:
        queue: the requests.
        strategy: decodes them.
        batch_size: the most rows of a batch.
    """
    report: SpeculationReport | None = None
    while queue.begin(batch_size):
        given = queue.prepared()
        if queue.entries[0].alone:
            report = _complete_alone(queue, strategy, given, report)
        else:
            run = strategy.begin(strategy.call(given, queue.seeds(given), queue))
            for _ in rounds(run):
                yield from queue.handed_on()
                run.lap("handing on")
            run.finish()
            strategy.end(run, report)
            report = strategy.report
        yield from queue.handed_on()
    yield from queue.handed_on()
    if queue.failed is not None:
        raise queue.failed


def _complete_alone(
    queue: RequestQueue, strategy: Decodes, given: Prepared, earlier: SpeculationReport | None
) -> SpeculationReport | None:
    """Complete a request as any call of `generate`; its own processors may not allow that. Returns the report."""
    (entry,), config = queue.entries, given.config
    config.return_dict_in_generate, config.output_attentions, config.output_hidden_states = True, False, False
    processors = LogitsProcessorList(entry.processors)
    if queue.logprobs:
        config.output_scores = config.output_logits = True
        processors.insert(0, _Copied())
    own = Prepared(
        given.model, given.input_ids, processors, entry.stopping.all, config, given.kwargs, given.inputs_tensor
    )
    try:
        output = strategy.complete(strategy.call(own, queue.seeds(given)), earlier)
    except ValueError as error:
        if entry.alike:
            raise
        queue.refuse(entry.index, error)
        return earlier
    new = output.sequences[:, given.input_ids.shape[1] :]
    if queue.logprobs:
        kinds = [torch.cat(each).float().log_softmax(-1) for each in (output.scores, output.logits)]
        found = [each.gather(-1, new.mT.to(each.device))[:, 0].tolist() for each in kinds]
        queue.chances[0] = list(zip(*found, strict=True))
    queue.close(0, new[0].tolist(), entry.stopping.by_limit(output.sequences, new.shape[1]))
    return strategy.report


class _Copied(LogitsProcessor):
    """Keeps the logits of the model from processors that write to what they are given."""

    stateless = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.clone()
