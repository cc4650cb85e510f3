"""Any number of requests, in batches whose rows are filled again as they end."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.modeling_outputs import ModelOutput

from hf_specx.layouts.prompts import Prompt
from hf_specx.sampling.stopping import Stopping

from .decode import rounds
from .places import Places
from .report import SpeculationReport
from .requests import Completion, Waiting
from .run import Run


class Decodes(Protocol):
    """What `SpeculativeDecoding` does for a queue."""

    report: SpeculationReport | None

    def start_batch(
        self, places: Places, prompt: Prompt, inputs_tensor: torch.Tensor | None, seeds: list[int] | None
    ) -> Run:
        """What decodes a batch of requests."""

    def decode_prepared(
        self,
        prompt: Prompt,
        inputs_tensor: torch.Tensor | None,
        processors: LogitsProcessorList,
        stopping: Stopping,
        seeds: list[int] | None,
        earlier: SpeculationReport | None,
    ) -> ModelOutput:
        """Decode one batch to its end, as a call of its own; the report goes on from an earlier one."""

    def end(self, run: Run, earlier: SpeculationReport | None) -> SpeculationReport:
        """Remember what a batch has shown; returns the report of it and of what was before."""


@torch.no_grad()
def complete_all(waiting: Waiting, strategy: Decodes, batch_size: int, logprobs: bool) -> Iterator[Completion]:
    """What becomes of each request, as soon as it is done.

    Rows are filled again as long as the next request fits beside the others. If it does not, or rows cannot be filled
    again, they are completed first, and another batch begins. A request that needs a batch of its own is decoded as a
    call of its own.

    Args:
        waiting: the requests.
        strategy: decodes them.
        batch_size: the most rows of a batch.
        logprobs: whether completions have those of their tokens.
    """
    report: SpeculationReport | None = None
    while entries := waiting.take_while_fits(batch_size):
        places = Places(entries, waiting, logprobs)
        prompt, inputs_tensor = places.prompt()
        seeds = places.seeds if prompt.generation_config.do_sample else None
        if entries[0].alone:
            report = _complete_alone(places, strategy, prompt, inputs_tensor, seeds, report)
        else:
            run = strategy.start_batch(places, prompt, inputs_tensor, seeds)
            for _ in rounds(run):
                yield from places.handed_on()
                run.lap("handing on")
            run.finish()
            report = strategy.end(run, report)
        yield from places.handed_on()
    yield from waiting.hand_on()
    if waiting.failed is not None:
        raise waiting.failed


def _complete_alone(
    places: Places,
    strategy: Decodes,
    prompt: Prompt,
    inputs_tensor: torch.Tensor | None,
    seeds: list[int] | None,
    earlier: SpeculationReport | None,
) -> SpeculationReport | None:
    """Complete a request as any call of `generate`; its own processors may not allow that. Returns the report."""
    (entry,), config = places.entries, prompt.generation_config
    prompt.max_new_tokens, prompt.limits = entry.limit, None
    processors = LogitsProcessorList(entry.processors)
    config.return_dict_in_generate, config.output_attentions, config.output_hidden_states = True, False, False
    if places.logprobs:
        config.output_scores = config.output_logits = True
        processors.insert(0, _Copied())
    given: Any = prompt, inputs_tensor, processors, entry.stopping, seeds
    try:
        output = strategy.decode_prepared(*given, earlier)
    except ValueError as error:
        if entry.alike:
            raise
        places.waiting.refuse(entry.index, error)
        return earlier
    new = output.sequences[:, prompt.input_ids.shape[1] :]
    if places.logprobs:
        kinds = [torch.cat(each).float().log_softmax(-1) for each in (output.scores, output.logits)]
        found = [each.gather(-1, new.mT.to(each.device))[:, 0].tolist() for each in kinds]
        places.chances[0] = list(zip(*found, strict=True))
    places.close(0, new[0].tolist(), entry.stopping.by_limit(output.sequences, new.shape[1]))
    return strategy.report


class _Copied(LogitsProcessor):
    """Keeps the logits of the model from processors that write to what they are given."""

    stateless = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.clone()


def in_order(completions: Iterator[Completion]) -> Iterator[Completion]:
    """Completions in the order in which their requests were given."""
    early: dict[int, Completion] = {}
    number = 0
    for completion in completions:
        early[completion.index] = completion
        while number in early:
            yield early.pop(number)
            number += 1
