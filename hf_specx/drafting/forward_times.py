"""How long bare forwards take: assumed by sizes of models, so that a first call starts at once, and timed later."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from transformers import PreTrainedModel


QUERY_LENGTHS = (1, 3, 9)  # of the target forwards whose times are known; others are on a line between them
TREE_QUERY_LENGTHS = (*QUERY_LENGTHS, 33)  # where up to 64 candidates branch
TIMED_ROUNDS = 4  # how often each forward is timed, after a first time that warms up
DRAFT_STEPS = 2  # draft steps that are timed after each of them
GRID = 2 ** (1 / 32)  # times are rounded to powers of this, so that noise rarely changes a choice
OUTER_LAYERS = 1.5  # what a forward does outside of its layers, in layers
LAYERS = ("num_decoder_layers", "decoder_layers", "num_hidden_layers")  # in configs; the first that is there
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


class ForwardTimes(TypedDict):
    """Seconds of forwards of one batch size: of the target by query length, and of a draft step."""

    target: dict[int, float]
    draft: float


class DeviceSpeed(NamedTuple):
    """What a device does in a second.

    Attributes:
        layer_seconds: that a layer takes for next to nothing.
        bandwidth: bytes of weights that are read in a second.
        operations: multiplications and additions in a second; on a CPU of one thread.
    """

    layer_seconds: float
    bandwidth: float
    operations: float


CPU = DeviceSpeed(0.9e-3, 6e9, 30e9)  # fitted to three pairs of 14M to 163M in float32 on an AMD EPYC
ACCELERATOR = DeviceSpeed(0.25e-3, 1.5e12, 60e12)


class ForwardSize(NamedTuple):
    """How much a forward computes.

    Attributes:
        num_layers: of the model.
        dense_bytes: of the weights that every token needs.
        expert_bytes: of all routed experts, of which a token needs an `expert_share`.
        bytes_per_weight: of the widest.
        tokens_per_row: that it is fed: of a block, its whole length.
    """

    num_layers: int
    dense_bytes: float
    expert_bytes: float = 0.0
    expert_share: float = 1.0
    bytes_per_weight: float = 4.0
    tokens_per_row: int = 1


NOTHING = ForwardSize(0, 0.0)


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


def assumed_times(target: ForwardSize, draft: ForwardSize, batch_size: int, device: torch.device) -> ForwardTimes:
    """Times of batch size B, assumed by sizes: only the ratios of these seconds matter."""
    times = {query: assumed_seconds(target, batch_size * query, device) for query in QUERY_LENGTHS}
    return {"target": times, "draft": assumed_seconds(draft, batch_size * draft.tokens_per_row, device)}


def assumed_seconds(size: ForwardSize, tokens: int, device: torch.device) -> float:
    """How long a forward of so many tokens in all rows should take."""
    on_cpu = device.type == "cpu"
    speed = CPU if on_cpu else ACCELERATOR
    starting = speed.layer_seconds * (size.num_layers + OUTER_LAYERS) if size.num_layers else 0.0
    bytes_read = size.dense_bytes + size.expert_bytes * min(1.0, size.expert_share * tokens)
    num_weights = (size.dense_bytes + size.expert_bytes * size.expert_share) / size.bytes_per_weight
    operations = speed.operations * (torch.get_num_threads() if on_cpu else 1)
    working = bytes_read / speed.bandwidth + 2 * tokens * num_weights / operations
    return starting + working if on_cpu else max(starting, working)  # it computes while the next layers are started


def time_forwards(
    clock: Callable[[], float],
    target: Callable[[int], object],
    draft: Callable[[int], object],
    query_lengths: Sequence[int] = QUERY_LENGTHS,
) -> ForwardTimes:
    """Medians over rounds in which the models take turns, as they do in a call.

    On a processor with a small cache each pushes the other's weights out of it. `target` and `draft` run one forward
    of so many tokens of each row, and wait for it.
    """

    def seconds(forward: Callable[[int], object], query: int) -> float:
        started = clock()
        forward(query)
        return clock() - started

    times: dict[int, list[float]] = {query: [] for query in query_lengths}
    steps = []
    for _ in range(1 + TIMED_ROUNDS):
        for query in query_lengths:
            times[query].append(seconds(target, query))
            steps.append(sum(seconds(draft, 1) for _ in range(DRAFT_STEPS)) / DRAFT_STEPS)
    medians = {query: on_grid(statistics.median(samples[1:])) for query, samples in times.items()}
    return {"target": medians, "draft": on_grid(statistics.median(steps[len(query_lengths) :]))}


def on_grid(seconds: float) -> float:
    """The nearest power of `GRID`."""
    return GRID ** round(math.log(max(seconds, 1e-9), GRID))  # a clock may not see the shortest
