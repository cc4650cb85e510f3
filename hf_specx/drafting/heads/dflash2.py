"""DFlash2: the block of DFlash with convolutions in its layers, and a selector that chooses among the best tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_specx.common.errors import brief, is_int

from .block import Block
from .config import HeadConfig
from .layers import HeadCache, HeadLayer
from .network import AdjustedLogits, StepOutput
from .tensors import Weights


NOT_SELECTED = 10000.0  # logits of tokens that are not selected are lowered by this: at any temperature q is 0
SELECTOR, CODEBOOK = "candidate_selector.", "candidate_selector.predecessor_codebook"
BASE, PROJECTION = "layers.0.attention_conv.base_kernel", "layers.0.attention_conv.kernel_projection.weight"


class DFlash2(Block):
    """A block whose candidates are chosen by the previous token, among the `selector_top_k` tokens of most logits."""

    def __init__(self, config: HeadConfig):
        self.layer_class = ConvolvedLayer
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)
        self.adjusts_logits = True

    def first_step(
        self, cache: HeadCache, embedded: Any, states: torch.Tensor, newest: Any, num_candidates: int
    ) -> StepOutput:
        return super().first_step(cache, embedded * self.config.input_embedding_scale, states, newest, num_candidates)

    def adjust_logits(
        self, logits: Any, states: torch.Tensor, previous: torch.Tensor, carried: Any, with_confidence: bool
    ) -> AdjustedLogits:
        logits = self.selecting_logits(logits)
        return self.candidate_selector(logits, states, previous[:, 0]), carried, None

    def selecting_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[..., V] of the output's logits [..., V]: those by which the selector selects, scaled and capped."""
        logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(logits / cap) if cap else logits


class ConvolvedLayer(HeadLayer):
    """A layer with a convolution before and behind its attention, and its network; the context has none."""

    def __init__(self, config: HeadConfig, number: int):
        super().__init__(config, number)
        self.attention_conv, self.mlp_conv = DynamicConvolution(config), DynamicConvolution(config)

    def forward(self, states: torch.Tensor, context: torch.Tensor, cache: HeadCache) -> torch.Tensor:  # type: ignore[override]
        """As `BlockLayer`."""
        attention = self.self_attn
        normed = self.input_layernorm(states)
        kernel_before, kernel_behind = self.attention_conv(normed)
        inputs = convolved(normed, kernel_before)
        keys_values = attention.keys_values(torch.cat([context, inputs], 1), cache)
        attended = attention.o_proj(cache.attend(self.number, attention.queries(inputs, cache), *keys_values))
        states = states + convolved(attended, kernel_behind)
        normed = self.post_attention_layernorm(states)
        kernel_before, kernel_behind = self.mlp_conv(normed)
        return states + convolved(self.mlp(convolved(normed, kernel_before)), kernel_behind)


class DynamicConvolution(nn.Module):
    """Kernels of the convolutions before and behind a part of a layer, which depend on what the part reads."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.taps, self.groups = config.conv_kernel_size, config.hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * self.groups, bias=False)

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Two kernels [R, q, taps, G, H / G] for states [R, q, H].

        What stands at tap t is for the state that is t positions before.
        """
        added = self.kernel_projection(states).unflatten(-1, (2, self.taps, self.groups, 1))
        return (self.base_kernel.unflatten(-1, (self.groups, -1)) + added).unbind(2)


def convolved(states: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """States [R, q, H] of blocks, each with those before it in its own block, by a kernel [R, q, taps, G, H / G]."""
    grouped = states.unflatten(-1, kernel.shape[-2:])
    total = kernel[:, :, 0] * grouped
    for tap in range(1, min(kernel.shape[2], states.shape[1])):
        total[:, tap:].addcmul_(kernel[:, tap:, tap], grouped[:, :-tap])
    return total.flatten(-2)


class CandidateSelector(nn.Module):
    """What the previous token adds to the logits of the best tokens: its row of one codebook times theirs of another.

    The product is weighted by the state of the candidate.
    """

    def __init__(self, config: HeadConfig):
        super().__init__()
        vocab_size, rank, self.top_k = config.vocab_size, config.selector_rank, config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def forward(self, logits: torch.Tensor, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """[R, V] of logits [R, V] and states [R, H] of a candidate, and the tokens [R] before it.

        The tokens that are not selected keep their order, far behind: where a grammar allows none of the selected,
        the row proposes one of them.
        """
        top_tokens, scores = self.select(logits, states, previous)
        return (logits - NOT_SELECTED).scatter(-1, top_tokens, scores)

    def select(
        self, logits: torch.Tensor, states: torch.Tensor, previous: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens [R, K] of most logits, and their logits [R, K] with what the previous tokens add."""
        top_logits, top_tokens = logits.topk(self.top_k, -1)
        query = self.predecessor_codebook[previous] * self.hidden_projection(states)
        added = (self.successor_codebook[top_tokens] * query[:, None]).sum(-1)
        return top_tokens, top_logits + added.to(top_logits.dtype)


def is_dflash2(raw: dict[str, Any], weights: Weights) -> bool:
    """Whether files with this config and these tensors are of DFlash2."""
    parts = (SELECTOR, "attention_conv.", "mlp_conv.")
    stated = "dflash2" in str([raw.get("architectures"), raw.get("speculators_model_type")]).lower()
    return stated or any(part in name for name in weights for part in parts)


def dflash2_fields(
    raw: dict[str, Any], options: dict[str, Any], weights: Weights, need: Callable[[Any, str], None]
) -> dict[str, Any]:
    """The fields of `HeadConfig` whose values in DFlash2 do not follow the rules of other heads.

    Args:
        raw: the config.
        options: the same with the options of its parts.
        weights: the tensors.
        need: raises a ValueError that begins with the head's name, unless its first argument holds.
    """
    fields = _shapes(weights, need)
    for field in ("conv_kernel_size", "conv_group_size", "selector_rank"):
        stated, number = options.get(field), fields[field]
        need(
            stated in (None, number),
            f"has {field}={brief(stated)} in its config.json, and {number} by its tensors; get it again.",
        )
    top_k: Any = options.get("selector_top_k", 16 if "speculators_model_type" in raw else None)
    need(
        is_int(top_k) and 0 < top_k <= len(weights[CODEBOOK]),
        f"has selector_top_k={brief(top_k)} in its config.json, and no tensor says of how many tokens it selects; "
        "write the number of its makers there, 16 in most heads.",
    )
    for field, neutral in (("output_multiplier", 1.0), ("input_embedding_scale", 1.0), ("final_logit_softcapping", 0)):
        value = neutral if options.get(field) is None else options[field]
        need(
            isinstance(value, int | float) and value >= 0,
            f"has {field}={brief(value)} in its config.json, which is no number of 0 or more; get it again.",
        )
        fields[field] = value
    return fields | {"selector_top_k": top_k}


def _shapes(weights: Weights, need: Callable[[Any, str], None]) -> dict[str, Any]:
    """The fields that follow from shapes of tensors."""
    needed = (BASE, PROJECTION, CODEBOOK)
    missing = [name for name in needed if name not in weights]
    need(not missing, f"lacks {', '.join(missing)}, which DFlash2 has; get it again.")
    base, projection, codebook = (weights[name].shape for name in needed)
    need(len(base) == 3 and len(projection) == len(codebook) == 2, f"has {needed} of wrong shapes; get it again.")
    _, taps, width = base
    groups = projection[0] // (2 * taps)
    need(
        groups and projection[0] == 2 * taps * groups and width % groups == 0,
        f"has {taps} taps of {width} channels, and {projection[0]} rows in {PROJECTION}; get it again.",
    )
    scored = len(weights.get("lm_head.weight", weights[CODEBOOK]))
    need(
        scored == codebook[0],
        f"scores {scored} tokens and selects from {codebook[0]}, and DFlash2 has one vocabulary; choose another head.",
    )
    return {"conv_kernel_size": taps, "conv_group_size": width // groups, "selector_rank": codebook[1]}
