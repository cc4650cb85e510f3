"""DFlash2: the block of DFlash with convolutions in its layers, and a selector that chooses among the best tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_specx.common.errors import brief, is_int

from .block import Block
from .body import Found, Scored
from .config import HeadConfig
from .layers import Entries, HeadLayer
from .tensors import Weights


FAR = 10000.0  # how far below themselves the scores of tokens are that are no candidates: at any temperature q is 0
SELECTOR, CODEBOOK = "candidate_selector.", "candidate_selector.predecessor_codebook"
BASE, PROJECTION = "layers.0.attention_conv.base_kernel", "layers.0.attention_conv.kernel_projection.weight"


class DFlash2(Block):
    """A block whose places are corrected by the token before, among the `selector_top_k` tokens of the best scores."""

    def __init__(self, config: HeadConfig):
        self.layer_class = ConvolvedLayer
        super().__init__(config)
        self.candidate_selector, self.corrects = CandidateSelector(config), True

    def begin(self, entries: Entries, embedded: Any, states: torch.Tensor, newest: Any, number: int) -> Found:
        return super().begin(entries, embedded * self.config.input_embedding_scale, states, newest, number)

    def scored(self, scores: Any, states: torch.Tensor, tokens: torch.Tensor, memory: Any, asked: bool) -> Scored:
        scores, most = scores * self.config.output_multiplier, self.config.final_logit_softcapping
        scores = most * torch.tanh(scores / most) if most else scores
        return self.candidate_selector(scores, states, tokens[:, 0]), memory, None


class ConvolvedLayer(HeadLayer):
    """A layer with a convolution before and behind its attention, and its network; the context has none."""

    def __init__(self, config: HeadConfig, number: int):
        super().__init__(config, number)
        self.attention_conv, self.mlp_conv = DynamicConvolution(config), DynamicConvolution(config)

    def forward(self, states: torch.Tensor, context: torch.Tensor, entries: Entries) -> torch.Tensor:  # type: ignore[override]
        """As `BlockLayer`."""
        attention, read = self.self_attn, self.input_layernorm(states)
        before, behind = self.attention_conv(read)
        read = convolved(read, before)
        keys = attention.keys(torch.cat([context, read], 1), entries)
        attended = attention.o_proj(entries.attend(self.number, attention.queries(read, entries), *keys))
        states = states + convolved(attended, behind)
        read = self.post_attention_layernorm(states)
        before, behind = self.mlp_conv(read)
        return states + convolved(self.mlp(convolved(read, before)), behind)


class DynamicConvolution(nn.Module):
    """Kernels of the convolutions before and behind a part of a layer, which depend on what the part reads."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.taps, self.groups = config.conv_kernel_size, config.hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * self.groups, bias=False)

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Two kernels [R, q, taps, G, H / G] for states [R, q, H].

        What stands at tap t is for the state that is t places before.
        """
        added = self.kernel_projection(states).unflatten(-1, (2, self.taps, self.groups, 1))
        return (self.base_kernel.unflatten(-1, (self.groups, -1)) + added).unbind(2)


def convolved(states: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """States [R, q, H] of blocks, each with those before it in its own block, by a kernel [R, q, taps, G, H / G]."""
    parts = states.unflatten(-1, kernel.shape[-2:])
    total = kernel[:, :, 0] * parts
    for tap in range(1, min(kernel.shape[2], states.shape[1])):
        total[:, tap:].addcmul_(kernel[:, tap:, tap], parts[:, :-tap])
    return total.flatten(-2)


class CandidateSelector(nn.Module):
    """What the token before says of each candidate, by the state of the place: a product of two tables."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        tokens, rank, self.top_k = config.vocab_size, config.selector_rank, config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(tokens, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(tokens, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def forward(self, scores: torch.Tensor, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[R, V] of scores [R, V] and states [R, H] of a place, and the tokens [R] before it.

        The tokens that are no candidates keep their order, far behind: where a grammar allows no candidate, the row
        proposes one of them.
        """
        best, candidates = scores.topk(self.top_k, -1)
        asked = self.predecessor_codebook[tokens] * self.hidden_projection(states)
        added = (self.successor_codebook[candidates] * asked[:, None]).sum(-1)
        return (scores - FAR).scatter(-1, candidates, best + added.to(best.dtype))


def is_dflash2(raw: dict[str, Any], weights: Weights) -> bool:
    """Whether files with this config and these tensors are of DFlash2."""
    parts, made_for = (SELECTOR, "attention_conv.", "mlp_conv."), raw.get("architectures")
    stated = "dflash2" in str([made_for, raw.get("speculators_model_type")]).lower()
    return stated or any(part in weight for weight in weights for part in parts)


def dflash2_fields(
    raw: dict[str, Any], said: dict[str, Any], weights: Weights, need: Callable[[Any, str], None]
) -> dict[str, Any]:
    """The fields of `HeadConfig` whose values in DFlash2 do not follow the rules of other heads.

    Args:
        raw, said: its config, and that with the options of its parts.
        need: raises a ValueError that begins with the head's name, unless what it is given holds.
    """
    of_speculators = "speculators_model_type" in raw
    fields = _shapes(weights, need)
    for field in ("conv_kernel_size", "conv_group_size", "selector_rank"):
        stated, number = said.get(field), fields[field]
        message = f"has {field}={brief(stated)} in its config.json, and {number} by its tensors; get it again."
        need(stated in (None, number), message)
    most: Any = said.get("selector_top_k", 16 if of_speculators else None)
    message = (
        f"has selector_top_k={brief(most)} in its config.json, and no tensor says of how many tokens it selects; "
    )
    need(
        is_int(most) and 0 < most <= len(weights[CODEBOOK]),
        f"{message}write the number of its makers there, 16 in most heads.",
    )
    for field, neutral in (("output_multiplier", 1.0), ("input_embedding_scale", 1.0), ("final_logit_softcapping", 0)):
        value = neutral if said.get(field) is None else said[field]
        message = f"has {field}={brief(value)} in its config.json, which is no number of 0 or more; get it again."
        need(isinstance(value, int | float) and value >= 0, message)
        fields[field] = value
    return fields | {"selector_top_k": most}


def _shapes(weights: Weights, need: Callable[[Any, str], None]) -> dict[str, Any]:
    """The fields that follow from shapes of tensors."""
    needed = (BASE, PROJECTION, CODEBOOK)
    missing = [weight for weight in needed if weight not in weights]
    need(not missing, f"lacks {', '.join(missing)}, which DFlash2 has; get it again.")
    base, projection, codebook = (weights[weight].shape for weight in needed)
    need(len(base) == 3 and len(projection) == len(codebook) == 2, f"has {needed} of wrong shapes; get it again.")
    _, taps, width = base
    groups = projection[0] // (2 * taps)
    message = f"has {taps} taps of {width} channels, and {projection[0]} rows in {PROJECTION}; get it again."
    need(groups and projection[0] == 2 * taps * groups and width % groups == 0, message)
    scored = len(weights.get("lm_head.weight", weights[CODEBOOK]))
    message = (
        f"scores {scored} tokens and selects from {codebook[0]}, and DFlash2 has one vocabulary; choose another head."
    )
    need(scored == codebook[0], message)
    return {"conv_kernel_size": taps, "conv_group_size": width // groups, "selector_rank": codebook[1]}
