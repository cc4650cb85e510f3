"""What bare forwards cost: assumed by the sizes of models, so that a first call starts at once, and timed later."""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel


QUERY_LENGTHS = (1, 3, 9)  # of the target forwards whose times are known; others are on a line between them
TIMED_ROUNDS = 4  # how often each forward is timed, after a first time that warms up
DRAFT_STEPS = 2  # draft steps that are timed after each of them
GRID = 2 ** (1 / 32)  # times are rounded to powers of this, so that noise rarely changes a choice
ROUNDS_PER_TIMING = (
    400  # rounds with candidates; timing the forwards of a batch size takes about as long as 20 of them
)
OUTER_LAYERS = 1.5  # what a forward does outside of its layers, in layers
LAYERS = ("num_decoder_layers", "decoder_layers", "num_hidden_layers")  # in configs; the first that is there
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(eq=False, repr=False)
class ForwardTimes:
    """Seconds of bare forwards of a target and a draft, with those in between on a line.

    Attributes:
        table: by batch size: {"target": {query length: seconds}, "draft": seconds}.
        clock: gives seconds; time is read nowhere else.
        measured: every row that was timed, by batch size; `prepare` takes it over instead of timing it again.
        assumed: batch sizes whose row is assumed by the models' sizes, and not timed yet.
        timing_budget: rounds with candidates since a row was timed; `ROUNDS_PER_TIMING` of them pay for the next.
        candidates_per_step: candidates that a draft step finds, at most: more than 1 for a head that drafts a block.
    """

    table: dict[int, dict[str, Any]] = field(default_factory=dict)
    clock: Callable[[], float] = field(default=time.perf_counter, kw_only=True)
    measured: dict[int, dict[str, Any]] = field(default_factory=dict, kw_only=True)
    assumed: set[int] = field(default_factory=set, kw_only=True)
    timing_budget: int = field(default=0, kw_only=True)
    candidates_per_step: int = field(default=1, kw_only=True)

    def knows(self, batch: int) -> bool:
        """Whether times were measured for a batch size."""
        return batch in self.table and batch not in self.assumed

    def target(self, batch: int, query_length: float) -> float:
        """T_t(B, q) in seconds, on a line between measured query lengths.

        For other batch sizes it is that of a forward of the nearest one with equally many tokens in all.
        """
        nearest = self._nearest(batch)
        points = sorted(self.table[nearest]["target"].items())
        return _interpolate(points, query_length * batch / nearest)

    def draft(self, batch: int) -> float:
        """T_d(B, 1) in seconds; for other batch sizes than the measured ones it grows as the target's."""
        nearest = self._nearest(batch)
        return self.table[nearest]["draft"] * self.target(batch, 1) / self.target(nearest, 1)

    def num_steps(self, num_candidates: int) -> int:
        """How many steps of the draft find so many candidates."""
        return math.ceil(num_candidates / self.candidates_per_step)

    def drafting(self, batch: int, num_candidates: int) -> float:
        """γ T_d(B, 1), or T_d for a block: what the draft takes to find so many candidates."""
        return self.num_steps(num_candidates) * self.draft(batch)

    def forwards(self, batch: int, num_draft_tokens: int) -> float:
        """T_t(B, γ+1) + γ T_d(B, 1): the forwards of a round; those of a head that drafts a block take one T_d."""
        return self.target(batch, num_draft_tokens + 1) + self.drafting(batch, num_draft_tokens)

    def cost_coefficient(self, batch: int) -> float:
        """c, the time of a draft step over that of a target step."""
        return self.draft(batch) / self.target(batch, 1)

    def prepare(
        self,
        batch: int,
        target: Callable[[int], object],
        draft: Callable[[int], object],
        assumed: dict[str, Any] | None = None,
    ) -> None:
        """Have a row for this batch size before a call goes by it.

        Args:
            batch: B.
            target, draft: as for `measure`.
            assumed: the row until earlier calls pay for timing; None times it at once.
        """
        if self.knows(batch):
            return
        if batch in self.measured:
            self._set_row(batch, self.measured[batch])
        elif assumed is None:
            self.measure(batch, target, draft)
        elif self.timing_budget >= ROUNDS_PER_TIMING:
            self.timing_budget -= ROUNDS_PER_TIMING
            self.measure(batch, target, draft)
        elif batch not in self.table:
            self.table[batch] = assumed
            self.assumed.add(batch)

    def measure(self, batch: int, target: Callable[[int], object], draft: Callable[[int], object]) -> None:
        """Fill in the row of batch size B by 15 target forwards and 30 draft steps.

        Args:
            batch: B.
            target, draft: run one forward of so many tokens of each row, and wait for it.
        """
        self._set_row(batch, timed(self.clock, target, draft))

    def _set_row(self, batch: int, row: dict[str, Any]) -> None:
        self.table[batch] = row
        self.measured[batch] = row
        self.assumed.discard(batch)

    def _nearest(self, batch: int) -> int:
        return min(self.table, key=lambda size: abs(math.log(size / batch)))


def _interpolate(points: list[tuple[int, float]], x: float) -> float:
    """The value at x, linear between and beyond known points; below the first at least in proportion to x."""
    for (q0, t0), (q1, t1) in itertools.pairwise(points):
        if x <= q1:
            value = t0 + (t1 - t0) * (x - q0) / (q1 - q0)
            return value if x >= q0 else min(t0, max(value, t0 * x / q0))
    (q0, t0), (q1, t1) = points[-2:]
    return t1 + max(0.0, (t1 - t0) / (q1 - q0)) * (x - q1)


class ForwardSize(NamedTuple):
    """How much a forward computes.

    Attributes:
        layers: of the model.
        dense: bytes of the weights that every token needs.
        experts: bytes of all routed experts, of which a token needs a `share`.
        weight: bytes of one weight.
        tokens_per_row: that it is fed: of a block, its whole length.
    """

    layers: int
    dense: float
    experts: float = 0.0
    share: float = 1.0
    weight: float = 4.0
    tokens_per_row: int = 1


NOTHING = ForwardSize(0, 0.0)
# seconds that a layer takes for next to nothing; bytes of weights read, and multiplications and additions, in a second
CPU = (0.9e-3, 6e9, 30e9)  # of one thread; fitted to three pairs of 14M to 163M in float32 on an AMD EPYC
ACCELERATOR = (0.25e-3, 1.5e12, 60e12)


def size_of(model: PreTrainedModel) -> ForwardSize | None:
    """What one forward after the prompt computes; None if weights are elsewhere until they are needed."""
    config: Any = model.config.get_text_config(decoder=True)
    head = model.get_output_embeddings()
    embeddings = model.get_input_embeddings()
    names = {weight: name for name, weight in model.get_decoder().named_parameters()}
    if embeddings is not None:  # whose rows are looked up
        for weight in embeddings.parameters():
            names.pop(weight, None)
    if head is not None:
        names |= dict.fromkeys(head.parameters(), "head")
    if any(weight.device.type == "meta" for weight in names):
        return None
    sizes = {weight: weight.numel() * weight.element_size() for weight in names}
    experts = sum(size for weight, size in sizes.items() if ".experts." in names[weight])
    num_experts = _first_in(config, EXPERTS)
    num_chosen = getattr(config, "num_experts_per_tok", None)
    share = min(1.0, num_chosen / num_experts) if num_experts and num_chosen else 1.0
    widest = max((weight.element_size() for weight in names), default=4.0)
    return ForwardSize(_first_in(config, LAYERS), sum(sizes.values()) - experts, experts, share, widest)


def _first_in(config: Any, names: tuple[str, ...]) -> Any:
    """The first of these numbers that a config has and that is not 0; None without any."""
    numbers = (getattr(config, name, None) for name in names)
    return next((number for number in numbers if number), None)


def forward_seconds(size: ForwardSize, tokens: int, device: torch.device) -> float:
    """How long a forward of so many tokens in all rows should take."""
    on_cpu = device.type == "cpu"
    layer, bandwidth, operations = CPU if on_cpu else ACCELERATOR
    starting = layer * (size.layers + OUTER_LAYERS) if size.layers else 0.0
    read = size.dense + size.experts * min(1.0, size.share * tokens)
    computed = 2 * tokens * (size.dense + size.experts * size.share) / size.weight
    working = read / bandwidth + computed / (operations * (torch.get_num_threads() if on_cpu else 1))
    return starting + working if on_cpu else max(starting, working)  # it computes while the next layers are started


def assumed_times(target: ForwardSize, draft: ForwardSize, batch: int, device: torch.device) -> dict[str, Any]:
    """A row of `ForwardTimes.table` for batch size B, assumed by sizes: only the ratios of these seconds matter."""
    times = {query: forward_seconds(target, batch * query, device) for query in QUERY_LENGTHS}
    return {"target": times, "draft": forward_seconds(draft, batch * draft.tokens_per_row, device)}


def timed(
    clock: Callable[[], float], target: Callable[[int], object], draft: Callable[[int], object]
) -> dict[str, Any]:
    """A row of `ForwardTimes.table`: medians over rounds in which the models take turns, as they do in a call.

    On a processor with a small cache each pushes the other's weights out of it. `target` and `draft` run one forward
    of so many tokens of each row, and wait for it.
    """

    def seconds(forward: Callable[[int], object], query: int) -> float:
        started = clock()
        forward(query)
        return clock() - started

    times: dict[int, list[float]] = {query: [] for query in QUERY_LENGTHS}
    steps = []
    for _ in range(1 + TIMED_ROUNDS):
        for query in QUERY_LENGTHS:
            times[query].append(seconds(target, query))
            steps.append(sum(seconds(draft, 1) for _ in range(DRAFT_STEPS)) / DRAFT_STEPS)
    medians = {query: on_grid(statistics.median(taken[1:])) for query, taken in times.items()}
    return {"target": medians, "draft": on_grid(statistics.median(steps[len(QUERY_LENGTHS) :]))}


def on_grid(seconds: float) -> float:
    """The nearest power of `GRID`."""
    return GRID ** round(math.log(max(seconds, 1e-9), GRID))  # a clock may not see the shortest
