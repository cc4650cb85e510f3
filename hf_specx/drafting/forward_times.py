"""What bare forwards cost: told by the sizes of models at first, so that a first call starts at once; timed later."""

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel


QUERY_LENGTHS = (1, 3, 9)  # of the target forwards whose times are known; others are on a line between them
TIMED_ROUNDS = 4  # how often each forward is timed, after a first time that warms up
DRAFT_STEPS = 2  # draft steps that are timed after each of them
GRID = 2 ** (1 / 32)  # times are rounded to powers of this, so that noise rarely changes a choice
AROUND = 1.5  # what a forward does outside of its layers, in layers
LAYERS = ("num_decoder_layers", "decoder_layers", "num_hidden_layers")  # in configs; the first that is there
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


class ForwardSize(NamedTuple):
    """What a forward computes.

    `dense` are bytes of the weights that every token needs, `experts` of all routed experts, of which a token needs a
    `share`, and `weight` of one weight.
    """

    layers: int
    dense: float
    experts: float = 0.0
    share: float = 1.0
    weight: float = 4.0


NOTHING = ForwardSize(0, 0.0)
# seconds that a layer takes for next to nothing; bytes of weights read, and multiplications and additions, in a second
CPU = (0.9e-3, 6e9, 30e9)  # of one thread; fitted to three pairs of 14M to 163M in float32 on an AMD EPYC
ACCELERATOR = (0.25e-3, 1.5e12, 60e12)


def size_of(model: PreTrainedModel) -> ForwardSize | None:
    """What one forward after the prompt computes; None if weights are elsewhere until they are needed."""
    config: Any = model.config.get_text_config(decoder=True)
    head, looked_up = model.get_output_embeddings(), model.get_input_embeddings()
    weights = {weight: name for name, weight in model.get_decoder().named_parameters()}
    for weight in looked_up.parameters() if looked_up is not None else ():
        weights.pop(weight, None)
    weights |= dict.fromkeys(head.parameters() if head is not None else (), "head")
    if any(weight.device.type == "meta" for weight in weights):
        return None
    sizes = {weight: weight.numel() * weight.element_size() for weight in weights}
    experts = sum(size for weight, size in sizes.items() if ".experts." in weights[weight])
    routed = next((count for name in EXPERTS if (count := getattr(config, name, None))), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    share = min(1.0, chosen / routed) if routed and chosen else 1.0
    layers = next(count for name in LAYERS if (count := getattr(config, name, None)))
    widest = max((weight.element_size() for weight in weights), default=4.0)
    return ForwardSize(layers, sum(sizes.values()) - experts, experts, share, widest)


def forward_seconds(size: ForwardSize, tokens: int, device: torch.device) -> float:
    """How long a forward of so many tokens in all rows should take."""
    on_cpu = device.type == "cpu"
    layer, bandwidth, operations = CPU if on_cpu else ACCELERATOR
    starting = layer * (size.layers + AROUND) if size.layers else 0.0
    read = size.dense + size.experts * min(1.0, size.share * tokens)
    computed = 2 * tokens * (size.dense + size.experts * size.share) / size.weight
    working = read / bandwidth + computed / (operations * (torch.get_num_threads() if on_cpu else 1))
    return starting + working if on_cpu else max(starting, working)  # it computes while the next layers are started


def assumed_times(target: ForwardSize, draft: ForwardSize, batch: int, device: torch.device) -> dict[str, Any]:
    """A row of `Costs.table` for B rows, told by sizes: only the ratios of these seconds matter."""
    times = {query: forward_seconds(target, batch * query, device) for query in QUERY_LENGTHS}
    return {"target": times, "draft": forward_seconds(draft, batch, device)}


def timed(
    clock: Callable[[], float], target: Callable[[int], object], draft: Callable[[int], object]
) -> dict[str, Any]:
    """A row of `Costs.table`: medians over rounds in which the models take turns, as they do in a call.

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
    medians = {query: on_grid(statistics.median(found[1:])) for query, found in times.items()}
    return {"target": medians, "draft": on_grid(statistics.median(steps[len(QUERY_LENGTHS) :]))}


def on_grid(seconds: float) -> float:
    """The nearest power of `GRID`."""
    return GRID ** round(math.log(max(seconds, 1e-9), GRID))  # a clock may not see the shortest
