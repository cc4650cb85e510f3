"""What forwards should cost, told without a clock: by parameters, layers, precision and kind of device.

It stands in for times until these are measured, so that a first call starts at once. Only ratios of these numbers
matter for the choice of a number of candidates; the same models on the same kind of device always give the same ones.
"""

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel


QUERY_LENGTHS = (1, 3, 9)  # of the target forwards whose times are known; others are on a line between them
AROUND = 1.5  # what a forward does outside of its layers, in layers


class ForwardSize(NamedTuple):
    """What a forward computes.

    Attributes:
        layers: how many.
        dense: bytes of the weights that every token needs.
        experts: bytes of all routed experts.
        share: of the experts, what one token needs.
        weight: bytes of one weight.
    """

    layers: int
    dense: float
    experts: float = 0.0
    share: float = 1.0
    weight: float = 4.0


class Speed(NamedTuple):
    """A kind of device.

    Attributes:
        layer: seconds that a layer takes for next to nothing.
        bandwidth: bytes of weights that are read in a second.
        operations: multiplications and additions in a second, of one thread on a processor.
        overlaps: whether the device computes while the next layers are started.
    """

    layer: float
    bandwidth: float
    operations: float
    overlaps: bool


LAYERS = ("num_decoder_layers", "decoder_layers", "num_hidden_layers")  # in configs; the first that is there
NOTHING = ForwardSize(0, 0.0)
CPU = Speed(0.9e-3, 6e9, 30e9, overlaps=False)  # fitted to three pairs of 14M to 163M in float32 on an AMD EPYC
ACCELERATOR = Speed(0.25e-3, 1.5e12, 60e12, overlaps=True)


def size_of(model: PreTrainedModel) -> ForwardSize | None:
    """What one forward after the prompt computes; None if weights are elsewhere until they are needed."""
    config: Any = model.config.get_text_config(decoder=True)
    head = model.get_output_embeddings()
    found = {id(weight): (name, weight) for name, weight in model.get_decoder().named_parameters()}
    looked_up = model.get_input_embeddings()
    if looked_up is not None:
        found = {key: each for key, each in found.items() if all(each[1] is not w for w in looked_up.parameters())}
    if head is not None:
        found |= {id(weight): ("head", weight) for weight in head.parameters()}
    if any(weight.device.type == "meta" for _, weight in found.values()):
        return None
    sizes = [(".experts." in name, weight.numel() * weight.element_size()) for name, weight in found.values()]
    experts = sum(size for is_expert, size in sizes if is_expert)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    routed = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    share = min(1.0, chosen / routed) if routed and chosen else 1.0
    weights = [weight.element_size() for _, weight in found.values()]
    dense = sum(size for is_expert, size in sizes if not is_expert)
    layers = next(getattr(config, name) for name in LAYERS if getattr(config, name, None))
    return ForwardSize(layers, dense, experts, share, max(weights, default=4.0))


def forward_seconds(size: ForwardSize, tokens: int, device: torch.device) -> float:
    """How long a forward of so many tokens in all rows should take."""
    speed = CPU if device.type == "cpu" else ACCELERATOR
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    starting = speed.layer * (size.layers + AROUND) if size.layers else 0.0
    read = size.dense + size.experts * min(1.0, size.share * tokens)
    computed = 2 * tokens * (size.dense + size.experts * size.share) / size.weight
    working = read / speed.bandwidth + computed / (speed.operations * threads)
    return max(starting, working) if speed.overlaps else starting + working


def assumed_times(target: ForwardSize, draft: ForwardSize, batch: int, device: torch.device) -> dict[str, Any]:
    """A row of `Costs.table` for B rows: the target's forwards by query length, and a draft step."""
    times = {query: forward_seconds(target, batch * query, device) for query in QUERY_LENGTHS}
    return {"target": times, "draft": forward_seconds(draft, batch, device)}
