"""Calls that cannot be speculated exactly: transformers' own sampler decodes them, exact by construction."""

import time
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_specx.common.errors import require
from hf_specx.sampling.stopping import Stopping

from .call import Call
from .outputs import Stream
from .report import PLAINLY, SpeculationReport
from .run import make_batch


def decode_plainly(call: Call) -> tuple[Any, SpeculationReport]:
    """What `generate` gives without a strategy, under its own random numbers or those of one seed; and the report."""
    prompt, begun = call.prompt, time.perf_counter()
    ids, config = prompt.input_ids, prompt.generation_config
    told = f"seeds= for {len(ids)} rows cannot be kept apart by transformers' own sampler, which decodes this call: "
    alone = call.seeds is None or len(ids) == 1 or not config.do_sample
    require(alone, f"{told}{call.plain}; call generate for each row, or leave the seeds out.")
    stream = None if call.options.streamer is None else Stream(call)
    watch = _Watch(call.stopping, stream, ids)
    if stream is not None:
        stream.prompt(make_batch(prompt))
    model: Any = prompt.model
    # under a seed the default generator is left as it was
    with torch.random.fork_rng([ids.device] if ids.device.type == "cuda" else [], enabled=call.seeds is not None):
        if call.seeds is not None:
            torch.manual_seed(call.seeds[0])
        output = model._sample(ids, prompt.processors, watch, config, synced_gpus=call.synced, **prompt.kwargs)
    columns = getattr(output, "sequences", output).shape[1] - ids.shape[1]
    report = SpeculationReport(PLAINLY, PLAINLY, f"transformers' own sampler: {call.plain}", len(ids))
    report.plain_steps, report.emitted_per_row = columns, watch.emitted(columns).tolist()
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
