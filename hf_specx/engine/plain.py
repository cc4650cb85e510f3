"""Calls that cannot be speculated exactly: transformers' own sampler decodes them, exact by construction."""

import time
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_specx.common.errors import require
from hf_specx.sampling.stopping import Stopping

from .call import Call
from .check_inputs import method_of
from .outputs import Stream
from .report import PLAINLY, SpeculationReport
from .run import make_batch


def decode_plainly(call: Call) -> tuple[Any, SpeculationReport]:
    """What `generate` gives without a strategy, under its own random numbers or those of one seed; and the report."""
    prompt, begun = call.prompt, time.perf_counter()
    ids, config, method = prompt.input_ids, prompt.generation_config, method_of(prompt)
    message = f"seeds= for {len(ids)} rows cannot be kept apart by transformers' own sampler, which decodes them: "
    alone = call.seeds is None or len(ids) == 1 or not config.do_sample
    require(alone, f"{message}{call.fallback_reason}; call generate for each row, or leave the seeds out.")
    stream = None if call.options.streamer is None else Stream(call)
    steps = method == "_sample"  # which asks the criteria after each token of each row
    watch = _Watch(call.stopping, stream if steps else None, ids)
    if stream is not None:
        stream.prompt(make_batch(call))
    arguments: dict[str, Any] = {"synced_gpus": call.synced_gpus, **prompt.kwargs}
    if method == "_assisted_decoding":
        arguments["inputs_tensor"] = prompt.inputs_tensor
    # under a seed the default generator is left as it was
    with torch.random.fork_rng([ids.device] if ids.device.type == "cuda" else [], enabled=call.seeds is not None):
        if call.seeds is not None:
            torch.manual_seed(call.seeds[0])
        output = getattr(prompt.model, method)(ids, prompt.processors, watch, config, **arguments)
    text = getattr(output, "sequences", output)[:, ids.shape[1] :]
    rows, columns = text.shape
    if stream is not None and not steps:
        stream.hand_on(text.tolist(), [])
    report = SpeculationReport(PLAINLY, PLAINLY, f"transformers' own sampler: {call.fallback_reason}", rows)
    report.plain_steps = columns
    report.emitted_per_row = watch.emitted(columns).tolist() if steps else [columns] * rows
    report.seconds["total"] = time.perf_counter() - begun
    return output, report


class _Watch(StoppingCriteriaList):
    """The criteria of a call, which hand on each token of a row that is not finished; `stopped` has a [B] a token."""

    def __init__(self, stopping: Stopping, stream: Stream | None, input_ids: torch.Tensor):
        super().__init__(stopping.all)
        self.stream, self.pads = stream, stopping.pads_finished_rows
        self.stopped: list[torch.Tensor] = []
        self.over = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        stopped = super().__call__(input_ids, scores, **kwargs)
        self.stopped.append(stopped)
        if self.stream is not None:
            last = zip(input_ids[:, -1].tolist(), self.over.tolist(), strict=True)
            ended = (stopped & ~self.over & self.pads).nonzero()[:, 0].tolist()
            self.stream.hand_on([[token] * (not is_over) for token, is_over in last], ended)
            self.over |= stopped & self.pads
        return stopped

    def emitted(self, columns: int) -> torch.Tensor:
        """[B], how many tokens rows have up to their ends."""
        over = torch.stack(self.stopped).cumsum(0).bool() & self.pads
        return (1 + (~over).sum(0)).clamp(max=columns)
