"""Test whether text differs from that of plain `generate` by more than rounding.

The reference is one plain forward over a whole row. The gap of an emitted token is how far its score lies there below
the largest one, in nats. (If text is sampled, scores are perturbed by the noise by which `generate` samples, so that
there is one best token too.) Each token is judged after the row's own text, also after a first difference.

Two plain forwards of different shapes round differently. By how much is measured on this model and these prompts:
`measure_rounding` compares the scores of the steps of plain `generate` with those of one forward over the same text.
It is assumed that a correct verifier chooses a token with gap g with probability exp(-g / scale) / 2 at most, as in
Laplace's distribution. `scale` is the mean difference measured, times `ALLOWANCE`: a round has yet another shape.
Chernoff's bound then gives the p-value of the sum of all gaps.
"""

import copy
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteria

from hf_specx.common.devices import execution_device
from hf_specx.engine.requests import Request, RequestPreparer

from .settings import POWER


ALLOWANCE = 1.5
RIVALS = 16  # tokens next to the best that rounding may choose
TILTS = torch.linspace(0.02, 0.9, 45, dtype=torch.float64, device="cpu")  # of Chernoff's bound, in units of 1 / scale
RESAMPLES, DELTAS = 400, 100
NUM_SHIFTS, FINEST, FACTOR = 1400, 1e-9, 1.02  # of a logit until a token is chosen; after all of them it never is


class Noise(NamedTuple):
    """The noise by which `generate` samples a row: seed and number of rows of its batch, and the number of the row."""

    seed: int
    rows: int
    row: int

    def exponentials(self, like: Tensor) -> Iterator[Tensor]:
        """The Exp(1) numbers [V] that `generate` draws for the row, position by position."""
        generator = torch.Generator(like.device).manual_seed(self.seed)
        batch_noise = torch.empty(self.rows, like.shape[-1], dtype=torch.float32, device=like.device)
        while True:
            yield batch_noise.exponential_(generator=generator)[self.row].double()


class Text(NamedTuple):
    """A row of `generate`: the prompt with the pads of its batch, the prompt alone, and the emitted tokens."""

    padded: list[int]
    prompt: list[int]
    emitted: list[int]


class Reference:
    """Plain scores at each emitted token of a text, from one forward over the whole row."""

    @torch.no_grad()
    def __init__(self, target: PreTrainedModel, options: dict[str, Any], text: Text):
        self.target, self.options, self.text = target, options, text
        device = execution_device(target)
        ids = torch.tensor([text.prompt + text.emitted], device=device)
        logits = target(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        self.logits = logits[0, len(text.prompt) - 1 : -1].to(device)  # [T, V]
        self.ids = torch.tensor([text.padded + text.emitted], device=device)

    @property
    def largest(self) -> float:
        """The largest absolute value of a finite logit."""
        return float(self.logits.masked_fill(self.logits.isinf(), 0).abs().max())

    def processors(self) -> LogitsProcessorList:
        """New logits processors, since some keep state."""
        request = RequestPreparer(self.target, self.options).prepare_request(0, Request(self.text.padded))
        return LogitsProcessorList(request.processors)

    def processed(self, processors: LogitsProcessorList, position: int, logits: Tensor) -> Tensor:
        """The scores [V] that processors make of logits [V] at a position."""
        before = self.ids[:, : len(self.text.padded) + position]
        return processors(before, logits[None].to(torch.float32, copy=True))[0]  # type: ignore[arg-type]

    def scores(self) -> Iterator[Tensor]:
        """Yield the scores [V] at each position, after all processors."""
        processors = self.processors()
        for position, logits in enumerate(self.logits):
            yield self.processed(processors, position, logits)

    def edge_gap(self, position: int, token: int, best: int, exponentials: Tensor | None, gap: float) -> float:
        """The least shift of one logit that makes a token the best: its own up, or that of the best down.

        It is smaller than the `gap` of the scores where one of the two is at the edge of what top-k and the like keep.
        """
        processors = self.processors()
        for earlier in range(position):
            self.processed(processors, earlier, self.logits[earlier])

        def is_chosen(token_shifted: int, shift: float) -> bool:
            logits = self.logits[position].double()
            logits[token_shifted] += shift
            copies = copy.deepcopy(processors, {id(self.target): self.target})  # some have a state, and ask the model
            scores = perturbed(self.processed(copies, position, logits), exponentials)
            return int(scores.argmax()) == token

        temperature = self.options.get("temperature", 1.0) if self.options.get("do_sample") else 1.0
        half = gap * temperature / 2
        if math.isfinite(gap) and not (is_chosen(token, half) or is_chosen(best, -half)):
            return gap
        shifts = [FINEST * FACTOR**step for step in range(NUM_SHIFTS)] + [math.inf]
        up = bisect_left(shifts, True, hi=NUM_SHIFTS, key=lambda shift: is_chosen(token, shift))
        down = bisect_left(shifts, True, hi=NUM_SHIFTS, key=lambda shift: is_chosen(best, -shift))
        return min(gap, shifts[min(up, down)] / temperature)


def perturbed(scores: Tensor, exponentials: Tensor | None) -> Tensor:
    """Scores [V] of which `generate` chooses the largest: as they are if text is greedy, else with its noise."""
    return scores.double() if exponentials is None else scores.double().log_softmax(-1) - exponentials.log()


class StepScores(StoppingCriteria):
    """A stopping criterion that records the two best tokens of each step with their scores, and stops nothing."""

    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, Tensor]] = []  # scores and ids, each [B, 2]

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        best = scores[-1].topk(2)
        self.steps.append((best.values, best.indices))
        scores[-1].set_()  # frees it: all steps together take much
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def measure_rounding(reference: Reference, steps: Sequence[tuple[Tensor, Tensor]], row: int) -> list[float]:
    """The differences between plain steps and the reference in the lead of the best token over the second, in nats."""
    sizes = []
    for scores, (values, ids) in zip(reference.scores(), steps, strict=False):
        step_scores, reference_scores = values[row].double(), scores[ids[row]].double()
        if step_scores.isfinite().all() and reference_scores.isfinite().all():
            lead, reference_lead = step_scores[0] - step_scores[1], reference_scores[0] - reference_scores[1]
            sizes.append(abs(float(lead - reference_lead)))
    return sizes


class Gaps(NamedTuple):
    """The gaps of a row at each of its T emitted tokens, in nats.

    Attributes:
        chosen: [T] float64, of the emitted tokens; 0 up to the first difference to plain text.
        rivals: [T, up to `RIVALS`], of the tokens next to the best.
        rejected: [T], of the candidates that were not kept; NaN where there was none.
    """

    chosen: Tensor
    rivals: Tensor
    rejected: Tensor


@torch.no_grad()
def gaps_of(reference: Reference, noise: Noise | None, first_difference: int, candidates: Sequence[int]) -> Gaps:
    """The gaps of a text; it equals plain text before `first_difference`, and `candidates` [T] has -1 for none."""
    draws = None if noise is None else noise.exponentials(reference.logits)
    chosen, rejected, rivals = [], [], []
    emitted = zip(reference.text.emitted, candidates, reference.scores(), strict=True)
    for position, (token, candidate, processed) in enumerate(emitted):
        exponentials = None if draws is None else next(draws)
        scores = perturbed(processed, exponentials)
        near = scores.topk(min(RIVALS + 1, len(scores)))
        top, best = float(near.values[0]), int(near.indices[0])
        gap = top - float(scores[token]) if position >= first_difference else 0.0
        if gap > 0 and processed.isinf().any():
            gap = reference.edge_gap(position, token, best, exponentials, gap)
        chosen.append(gap)
        rejected.append(math.nan if candidate in (-1, token) else top - float(scores[candidate]))
        rivals.append((top - near.values[1:]).cpu())
    columns = [torch.tensor(gaps, dtype=torch.float64, device="cpu") for gaps in (chosen, rejected)]
    return Gaps(columns[0], torch.stack(rivals), columns[1])


def rounding_scale(mean: float, largest: float) -> float:
    """The scale of rounding, by the mean difference measured; float32 limits it from below for the `largest` logit."""
    return max(ALLOWANCE * mean, torch.finfo(torch.float32).eps * largest)


class Rounding:
    """The test of rows of text, each with its `Gaps`, and the faults that it would detect."""

    def __init__(self, rows: Sequence[Gaps], scale: float):
        self.rows, self.scale = rows, scale
        self.sums = torch.stack([row.chosen.sum() for row in rows])  # [R]
        self.cumulants = torch.stack([self.cumulant(row.rivals) for row in rows])  # [R, tilts]

    def cumulant(self, rivals: Tensor) -> Tensor:
        """A bound [tilts] of the logarithm of E exp(tilt * sum of gaps / scale), if rounding chooses."""
        gaps = rivals[..., None] / self.scale  # [T, rivals, 1]
        return ((-gaps * (1 - TILTS)).exp() - (-gaps).exp()).sum(1).div(2).log1p().sum(0)

    @property
    def expected(self) -> float:
        """The mean of the sum of gaps under rounding, at most."""
        gaps = torch.cat([row.rivals.flatten() for row in self.rows])
        return float((gaps * (-gaps / self.scale).exp()).nan_to_num(0.0).sum() / 2)

    @property
    def p_value(self) -> float:
        """The chance, at most, of so large a sum of gaps by rounding."""
        return float(self.bound(self.sums.sum(), self.cumulants.sum(0)))

    def bound(self, sums: Tensor, cumulants: Tensor) -> Tensor:
        """The least Chernoff bound over the tilts: [...] of sums [...] and cumulants [..., tilts]."""
        return (cumulants - TILTS * sums[..., None] / self.scale).amin(-1).clamp(max=0).exp()

    def detectable(self, level: float, seed: int = 0) -> float | None:
        """The least d for which a verifier that keeps candidates with gaps up to d fails with probability `POWER`.

        It would have kept candidates that were rejected here. Rows are drawn anew, with replacement. None if even one
        that keeps all of them might pass.
        """
        rejected = [(row.rejected, row.rejected - row.chosen) for row in self.rows]
        finite = torch.cat([gap[gap.isfinite() & (gap > 0)] for gap, _ in rejected])
        if not len(finite):
            return None
        ends = math.log10(self.scale / 10), math.log10(float(finite.max()))
        deltas = torch.logspace(*ends, DELTAS, dtype=torch.float64, device="cpu")
        more = [torch.where(gap[:, None] <= deltas, gain[:, None], 0.0).sum(0) for gap, gain in rejected]
        sums = self.sums[:, None] + torch.stack(more)  # [R, deltas]
        generator = torch.Generator("cpu").manual_seed(seed)
        drawn = torch.randint(len(sums), (RESAMPLES, len(sums)), generator=generator, device="cpu")
        p_values = self.bound(sums[drawn].sum(1), self.cumulants[drawn].sum(1)[:, None])  # [resamples, deltas]
        fails = (p_values < level).double().mean(0) >= POWER
        return float(deltas[fails][0]) if fails.any() else None
