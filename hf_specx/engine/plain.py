"""Calls that cannot be speculated exactly: transformers' own sampler decodes them, exact by construction."""

import time
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_specx.common.errors import require
from hf_specx.sampling.stopping import Stopping

from .call import Call
from .check_inputs import decoding_method_of
from .outputs import Stream
from .report import PLAINLY, SpeculationReport


def decode_plainly(call: Call) -> tuple[Any, SpeculationReport]:
    """The output of `generate` without a strategy, under its own random numbers or those of one seed; and the report.

    Raises:
        ValueError: if several sampled rows have seeds of their own.
    """
    prompt, started = call.prompt, time.perf_counter()
    ids, config, method = prompt.input_ids, prompt.generation_config, decoding_method_of(prompt)
    has_one_generator = call.seeds is None or len(ids) == 1 or not config.do_sample
    message = (
        f"seeds= for {len(ids)} rows cannot be kept apart by transformers' own sampler, which decodes them: "
        f"{call.fallback_reason}; call generate for each row, or leave the seeds out."
    )
    require(has_one_generator, message)
    stream = None if call.strategy.streamer is None else Stream(call)
    asks_criteria_each_token = method == "_sample"  # beams and the like do not
    criteria = _CriteriaWithStream(call.stopping, stream if asks_criteria_each_token else None, ids)
    if stream is not None:
        stream.prompt(call.make_batch())
    arguments: dict[str, Any] = {"synced_gpus": call.synced_gpus, **prompt.kwargs}
    if method == "_assisted_decoding":
        arguments["inputs_tensor"] = prompt.inputs_tensor
    # under a seed the default generator is left as it was
    with torch.random.fork_rng([ids.device] if ids.device.type == "cuda" else [], enabled=call.seeds is not None):
        if call.seeds is not None:
            torch.manual_seed(call.seeds[0])
        output = getattr(prompt.model, method)(ids, prompt.processors, criteria, config, **arguments)
    new_tokens = getattr(output, "sequences", output)[:, ids.shape[1] :]
    rows, columns = new_tokens.shape
    if stream is not None and not asks_criteria_each_token:
        stream.put_tokens(new_tokens.tolist(), [])
    report = SpeculationReport(PLAINLY, PLAINLY, f"transformers' own sampler: {call.fallback_reason}", rows)
    report.plain_steps = columns
    report.emitted_per_row = [columns] * rows
    if asks_criteria_each_token:
        report.emitted_per_row = criteria.num_emitted(columns).tolist()
    report.seconds["total"] = time.perf_counter() - started
    return output, report


class _CriteriaWithStream(StoppingCriteriaList):
    """The criteria of a call, which stream each token of a row that has not ended, and count the tokens of rows.

    Attributes:
        stopped: [B] bool for each token, which rows the criteria stopped there.
        has_ended: [B] bool, rows that get pads from now on.
    """

    def __init__(self, stopping: Stopping, stream: Stream | None, input_ids: torch.Tensor):
        super().__init__(stopping.all)
        self.stream, self.has_eos_stopping_criteria = stream, stopping.has_eos_stopping_criteria
        self.stopped: list[torch.Tensor] = []
        self.has_ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        stopped = super().__call__(input_ids, scores, **kwargs)
        self.stopped.append(stopped)
        if self.stream is not None:
            new_tokens = []
            for token, has_ended in zip(input_ids[:, -1].tolist(), self.has_ended.tolist(), strict=True):
                new_tokens.append([] if has_ended else [token])
            ends_now = (stopped & ~self.has_ended & self.has_eos_stopping_criteria).nonzero()[:, 0].tolist()
            self.stream.put_tokens(new_tokens, ends_now)
            self.has_ended |= stopped & self.has_eos_stopping_criteria
        return stopped

    def num_emitted(self, columns: int) -> torch.Tensor:
        """[B], how many tokens rows have up to their ends, at most `columns`."""
        has_ended = torch.stack(self.stopped).cumsum(0).bool() & self.has_eos_stopping_criteria
        return (1 + (~has_ended).sum(0)).clamp(max=columns)
