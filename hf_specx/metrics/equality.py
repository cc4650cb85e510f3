"""Where text that should be the same is not, and whether rounding explains it.

Plain logits are computed once more after the tokens that both texts share, in the model's own precision. Two forwards
of different shapes round differently, by some units of the precision at the magnitude of the logits. So a difference
counts as explained where each of the two tokens would be chosen if its logit alone were so much larger.
"""

import copy
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from hf_specx.common.devices import execution_device
from hf_specx.engine.requests import Preparing, Request

from .settings import UNITS


STEPS = 3200  # by a hundredth each, from a hundredth of a unit on; then a token is taken to be out of reach


class Difference(NamedTuple):
    """The first token in which two texts differ."""

    row: int
    position: int  # tokens that both share
    plain: int  # ids; -1 where a text has ended there
    ours: int
    gap: float | None = None  # the rise of its logit by which each of the two is chosen; None where none is enough
    units: float | None = None  # the same in units of rounding
    limit: float | None = None  # the largest gap that counts as rounding there
    explained: bool = False  # whether the gap does


class Noise(NamedTuple):
    """Where the noise of a sampled token comes from: the seed and rows of its batch, and its own row among them."""

    seed: int
    rows: int
    row: int


@torch.no_grad()
def explain(
    target: PreTrainedModel,
    options: dict[str, Any],
    prompt: Sequence[int],
    plain: Sequence[int],
    ours: Sequence[int],
    row: int,
    position: int,
    noise: Noise | None,
) -> Difference:
    """Look at the first difference of two texts of a row, by its `position`; without `noise` they are greedy."""
    left, right = (text[position] if position < len(text) else -1 for text in (plain, ours))
    known = row, position, left, right
    if -1 in (left, right):
        return Difference(*known)
    ids = torch.tensor([[*prompt, *plain[:position]]], device=execution_device(target))
    logits = target(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].to(ids.device)
    processors = LogitsProcessorList(Preparing(target, options).entry(0, Request(prompt)).processors)
    for before in range(len(prompt), ids.shape[1]):  # some keep a state from token to token
        processors(ids[:, :before], logits[before - 1 : before].to(torch.float32, copy=True))  # type: ignore[arg-type]
    logits = logits[-1:]
    exponentials = None if noise is None else race_noise(noise, position, logits)

    def chosen(changed: torch.Tensor) -> int:
        own = copy.deepcopy(processors, {id(target): target})  # some have a state, and ask the model itself
        scores = own(ids, changed)  # type: ignore[arg-type]
        return int((scores if exponentials is None else scores.softmax(-1) / exponentials).argmax())

    # a unit of rounding: the precision's epsilon at the largest of the logits
    unit = torch.finfo(target.dtype).eps * float(logits.double().masked_fill(logits.isinf(), 0).abs().max())
    gap = max(least_rise(chosen, logits.double(), token, unit) for token in (left, right))
    if math.isinf(gap):
        return Difference(*known, limit=UNITS * unit)
    return Difference(*known, gap, gap / unit, UNITS * unit, gap <= UNITS * unit)


def least_rise(chosen: Callable[[torch.Tensor], int], logits: torch.Tensor, token: int, unit: float) -> float:
    """How much the logit of a token has to rise to be chosen, to within a hundredth; infinite if it never is."""

    def wins(rise: float) -> bool:
        changed = logits.clone()
        changed[0, token] += rise
        return chosen(changed) == token

    rises = [0.0, *(unit / 100 * 1.01**step for step in range(STEPS)), math.inf]
    return rises[bisect_left(rises, True, hi=len(rises) - 1, key=wins)]


def race_noise(noise: Noise, position: int, like: torch.Tensor) -> torch.Tensor:
    """The Exp(1) numbers [1, V] that `generate` draws for a row at a position: one [B, V] for each position so far."""
    generator = torch.Generator(like.device).manual_seed(noise.seed)
    drawn = torch.empty(noise.rows, like.shape[-1], dtype=torch.float32, device=like.device)
    for _ in range(position + 1):
        drawn.exponential_(generator=generator)
    return drawn[noise.row : noise.row + 1].double()
