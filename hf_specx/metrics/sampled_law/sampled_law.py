"""Test whether text was sampled from a model's distribution: plain forwards recompute that of every emitted token."""

import copy
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import datasets
import evaluate
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel


DESCRIPTION = "Tests whether texts were sampled from exactly the distribution of a model and its logits processors."
INPUTS = """
One plain forward per row, without a cache, gives the distribution p of each emitted token after its exact prefix. For
a function f and the emitted token x, f(x) - E_p f has mean 0 whatever came before, so its sum over all tokens is a
martingale with variance sum Var_p f, also where a text ends at an end token. The functions are chosen beforehand:

    surprisal: -log p(x).
    top_1, rank_2_3, rank_4_10, rank_11_50, rank_51_on, half_1 to half_4: whether x has that rank in p (ties by id), or
        is in a fixed pseudo-random half of the vocabulary.
    cdf: p of all smaller ids plus half of p(x); it shows errors in sampling by cumulated sums.
    repeated: whether x is in the row already; it shows errors in processors that read the prefix.
    overrated, with offers: whether q(x) > p(x), since most faulty verifiers let too much of the draft through.

All of this stays true if f is multiplied by a weight that is known before x is sampled: `_first` counts only the first
token of each row (it comes from the prompt's forward), `_alternating` gives the tokens of a row the signs + - + -, and
`_after` weighs each token by the centred f of the one before it, which shows random numbers that are used twice.

The two-sided p-value of z = (observed - expected) / sqrt(variance) is a normal's times cosh(L z^3 / 6), for the longer
tails of skewed sums (Cramer), where L = sum E|f - E f|^3 / (sum Var f)^1.5 is at most 0.1 (a hundred fair coins). For
few or rare events Freedman's inequality bounds it, and surprisal is left out. The least is multiplied by the number of
statistics (Bonferroni).

Args:
    predictions: emitted ids of each row, with its end token, without pads.
    references: prompt ids of each row, without pads.
    model: the PreTrainedModel whose distribution is tested, a decoder in evaluation mode. Use float32: in half
        precision the test may find the rounding.
    generation_config: of the call that made the text, read as for do_sample=True; None is the model's own. As in
        `generate`, unset values are the model's, or transformers' defaults (among them top_k=50; 0 is none).
    processors: a LogitsProcessorList instead of a generation_config. Each row gets a copy of it.
    offers: for `overrated`, of each row and token the likeliest ids of the q that its candidate was drawn from, and
        their probabilities; both empty where no candidate was judged. None leaves it out.
    rounding: how far a logit may be off, in units of the precision's epsilon times the largest logit; 0 unless given.
        A token with p = 0 that would be kept with its logit raised by so much is `on_the_edge`, and not `impossible`.
    level: probability of a false alarm, above 0 and below 1, 0.001 unless given.

Returns:
    passed: whether p_value is at least `level` and no token was impossible.
    p_value: Bonferroni-adjusted, at most 1; 0 where a token was impossible. 1 where nothing could be compared.
    level, comparisons: as given, and how many statistics were tested.
    detectable_temperature: two factors of the temperature, below and above 1: text that is sampled that far off fails
        with probability 0.9, by its surprisal, to the first order. None where so few tokens tell nothing of it.
    positions, impossible, on_the_edge: the number of emitted tokens, and of those with p = 0.
    statistics: by name `observed`, `expected`, `standard_error`, `z`, `p_value` (without Bonferroni) and `weight` (sum
        of |weights|).

Raises:
    ValueError: for a model or for rows whose distribution is not known.

Example:
    >>> text = model.generate(prompt, do_sample=True, max_new_tokens=200)[:, prompt.shape[1] :].tolist()
    >>> sampled_law.compute(predictions=text, references=prompt.tolist(), model=model)["passed"]
    True
"""
CITATION = "Freedman 1975, On Tail Probabilities for Martingales, The Annals of Probability 3(1), 100-118."
BANDS = {"top_1": (0, 1), "rank_2_3": (1, 3), "rank_4_10": (3, 10), "rank_11_50": (10, 50), "rank_51_on": (50, 2**31)}
HALVES = ["half_1", "half_2", "half_3", "half_4"]
FUNCTIONS = ["surprisal", "cdf", *BANDS, *HALVES, "repeated", "overrated"]
JUMPS = dict.fromkeys(FUNCTIONS, 1.0) | {"surprisal": math.inf, "cdf": 0.5}  # the most that |f - E f| can be
WEIGHTS = {"surprisal": ["_first", "_alternating"], "top_1": ["_first", "_alternating", "_after"], "cdf": ["_after"]}
STATISTICS = [(name, weight) for name in FUNCTIONS for weight in ["", *WEIGHTS.get(name, [])]]
MOST_LYAPUNOV = 0.1
FAR = 30.0  # standard errors; larger deviations get the p-value of this one
LEAST_VARIANCE = 1e-9  # smaller ones are rounding
POWER = 0.9  # of `detectable_temperature`
MOST_CHANGE = 0.5  # of it; the first order tells nothing of larger ones
CHUNK = 32  # positions at a time
Offers = list[tuple[list[int], list[float]]]  # of a row


class SampledLaw(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        ids = datasets.Sequence(datasets.Value("int64"))
        features = datasets.Features({"predictions": ids, "references": ids})
        return evaluate.MetricInfo(
            description=DESCRIPTION, citation=CITATION, inputs_description=INPUTS, features=features
        )

    def _compute(
        self,
        predictions: list[list[int]],
        references: list[list[int]],
        model: PreTrainedModel | None = None,
        generation_config: GenerationConfig | None = None,
        processors: LogitsProcessorList | None = None,
        offers: list[Offers] | None = None,
        rounding: float = 0.0,
        level: float = 0.001,
    ) -> dict[str, object]:
        _check(model, generation_config, processors, level, predictions, references)
        rows = Rows(model, generation_config, processors, rounding)
        totals = torch.zeros(len(STATISTICS), 5, dtype=torch.float64, device="cpu")
        for row, (text, prompt) in enumerate(zip(predictions, references, strict=True)):
            if text:
                totals += weighted(rows.moments(prompt, text, None if offers is None else offers[row]))
        counts = {"positions": sum(map(len, predictions)), "on_the_edge": rows.on_the_edge}
        return verdict(totals, rows.impossible, level) | counts


class Rows:
    """Recomputes the distribution of each emitted token, row by row, and counts those that had p = 0."""

    def __init__(self, model: Any, config: Any, processors: Any, rounding: float):
        self.target, self.rounding, self.device = model, rounding, device_of(model)
        self.original_processors = processors
        self.impossible = self.on_the_edge = 0
        if processors is None:
            self.config, _ = model._prepare_generation_config(config)
            self.config.do_sample = True
            model._prepare_special_tokens(self.config, device=self.device)

    def processors(self, prompt: Tensor) -> Callable[..., Tensor]:
        """New ones for a prompt [1, L], since some keep a state: prepared as by `generate`, or copies."""
        if self.original_processors is not None:
            return LogitsProcessorList(copy.deepcopy(self.original_processors, {id(self.target): self.target}))
        length = prompt.shape[1]
        if self.config.max_new_tokens is not None:
            self.config.max_length = length + self.config.max_new_tokens
        return self.target._get_logits_processor(
            self.config, input_ids_seq_length=length, encoder_input_ids=prompt, device=self.device, model_kwargs={}
        )

    @torch.no_grad()
    def moments(self, prompt: list[int], text: list[int], offers: Offers | None = None) -> Tensor:
        """`function_moments` [functions, 4, T] of a row's T tokens, on the CPU; 0 where a token had p = 0."""
        ids = torch.tensor([prompt + text], device=self.device)
        first, parts = len(prompt), []
        logits, processors = plain_logits(self.target, ids, first), self.processors(ids[:, :first])
        vocabulary = logits.shape[1]
        halves = random_halves(vocabulary).to(self.device)
        for start in range(0, len(text), CHUNK):
            steps = range(start, min(start + CHUNK, len(text)))
            p = distributions(processors, logits, ids, first, steps)
            q = offered(p, [] if offers is None else offers[start : start + len(steps)])
            tokens, before = ids[0, first + start : first + start + len(steps)], ids[0, : first + start]
            possible = p.gather(1, tokens[:, None])[:, 0] > 0
            for step in (~possible).nonzero()[:, 0].tolist():
                is_kept = self.is_kept_when_raised(ids, logits, first, start + step)
                self.on_the_edge += is_kept
                self.impossible += not is_kept
            moments = function_moments(p, q, tokens, halves, seen(tokens, before, vocabulary))
            parts.append((moments * possible).cpu())
        return torch.cat(parts, -1)

    def is_kept_when_raised(self, ids: Tensor, logits: Tensor, first: int, step: int) -> bool:
        """Whether an impossible token would be possible if rounding had lowered its logit."""
        processors, token = self.processors(ids[:, :first]), int(ids[0, first + step])
        scores = logits[: step + 1].clone()
        largest = float(scores[step].masked_fill(scores[step].isinf(), 0).abs().max())
        scores[step, token] += self.rounding * torch.finfo(self.target.dtype).eps * largest
        return bool(distributions(processors, scores, ids, first, range(step + 1))[step, token] > 0)


def plain_logits(model: Any, ids: Tensor, first: int) -> Tensor:
    """The logits [T, V] of a model at the T tokens of ids [1, L] from position `first` on, as `generate` has them."""
    input_ids = ids.clamp(max=model.get_input_embeddings().weight.shape[0] - 1).to(device_of(model))
    logits = model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False).logits
    return logits[0, first - 1 : -1].to(ids.device, torch.float32, copy=True)


def distributions(processors: Callable[..., Tensor], logits: Tensor, ids: Tensor, first: int, steps: range) -> Tensor:
    """The processed distributions [n, V] float64 at some steps of a text; 0 where all scores are -inf."""
    scores = torch.cat([processors(ids[:, : first + i], logits[i : i + 1].clone()) for i in steps])
    return scores.double().softmax(-1).nan_to_num(0.0)


def offered(p: Tensor, offers: Offers) -> Tensor:
    """[n, V] like p, q of the tokens that are offered, and 0 for all others."""
    q = torch.zeros_like(p)
    for step, (ids, chances) in enumerate(offers):
        q[step, ids] = p.new_tensor(chances)
    return q


def device_of(model: PreTrainedModel) -> torch.device:
    """Where a model's inputs go; weights that are offloaded are on "meta" between forwards."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


def function_moments(p: Tensor, q: Tensor, tokens: Tensor, halves: Tensor, repeated: Tensor) -> Tensor:
    """[functions, 4, n]: f(x), E f, Var f and E|f - E f|^3 (for cdf a bound of it), in the order of `FUNCTIONS`.

    Of p and q [n, V] float64, the tokens x [n], and halves [V, halves] and repeated [n, V] of 0 and 1.
    """
    here = p.gather(1, tokens[:, None])  # [n, 1]
    surprisal = -p.clamp_min(torch.finfo(p.dtype).tiny).log()
    mean = (p * surprisal).sum(-1, keepdim=True)
    off = (surprisal - mean).abs()
    moments = [[surprisal.gather(1, tokens[:, None])[:, 0], mean[:, 0], (p * off**2).sum(-1), (p * off**3).sum(-1)]]
    variance = ((1 - (p**3).sum(-1)) / 12).clamp_min(0)  # of the mid-distribution transform
    middle = (p.cumsum(-1) - p / 2).gather(1, tokens[:, None])[:, 0]
    moments.append([middle, torch.full_like(middle, 0.5), variance, variance / 2])
    smaller = torch.arange(p.shape[1], device=p.device) < tokens[:, None]
    rank = ((p > here) | ((p == here) & smaller)).sum(-1)
    last = min(50, p.shape[1])
    top = torch.nn.functional.pad(p.topk(last).values.cumsum(-1), (1, 0))
    top = torch.nn.functional.pad(top, (0, 1), value=1.0)  # [n, last + 2], mass of the likeliest 0 to last, and of all
    for low, high in BANDS.values():
        mass = top[:, min(high, last + 1)] - top[:, min(low, last + 1)]
        moments.append(_indicator((rank >= low) & (rank < high), mass))
    moments += [_indicator(halves[tokens, i], p @ halves[:, i]) for i in range(halves.shape[1])]
    for inside in (repeated, (q > p).to(p.dtype)):
        moments.append(_indicator(inside.gather(1, tokens[:, None])[:, 0], (p * inside).sum(-1)))
    return torch.stack([torch.stack(parts) for parts in moments])


def _indicator(hit: Tensor, mass: Tensor) -> list[Tensor]:
    """Moments of the indicator of a set of that mass."""
    mass = mass.clamp(0, 1)
    variance = mass * (1 - mass)
    return [hit.to(mass.dtype), mass, variance, variance * (mass**2 + (1 - mass) ** 2)]


def random_halves(vocabulary: int) -> Tensor:
    """[V, 4] float64, 0 or 1: bits of a hash of the id like MurmurHash3's, the same everywhere."""
    x = torch.arange(1, vocabulary + 1, device="cpu")
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13), (0x27D4EB2F, 16)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return torch.stack([(x >> (31 - 3 * i)) & 1 for i in range(len(HALVES))], 1).double()


def seen(tokens: Tensor, before: Tensor, vocabulary: int) -> Tensor:
    """[n, V] float64: 1 for ids that occur in the row before each of the tokens [n]; `before` is what precedes all."""
    earlier = torch.nn.functional.one_hot(tokens, vocabulary).cumsum(0).roll(1, 0)
    earlier[0] = 0
    earlier[:, before] = 1
    return (earlier > 0).double()


def weighted(moments: Tensor) -> Tensor:
    """Weighted sums over a row [statistics, 5] from [functions, 4, T]: f, E f, Var f, third moment, |weight|."""
    steps = torch.arange(moments.shape[-1], device=moments.device)
    sums = []
    for name, kind in STATISTICS:
        value, mean, variance, third = moments[FUNCTIONS.index(name)]
        weights = {
            "": torch.ones_like(steps, dtype=value.dtype),
            "_first": (steps == 0).to(value.dtype),
            "_alternating": 1.0 - 2.0 * (steps % 2),
            "_after": torch.nn.functional.pad((value - mean)[:-1], (1, 0)),
        }[kind]
        size = weights.abs()
        parts = [weights * value, weights * mean, size**2 * variance, size**3 * third, size]
        sums.append(torch.stack(parts).sum(-1))
    return torch.stack(sums)


def p_value(excess: float, variance: float, third: float, jump: float) -> float | None:
    """The two-sided p-value of a sum with this variance that is off by `excess`; None where there is no bound."""
    if variance < LEAST_VARIANCE and excess < 0.1:
        return None
    if variance >= LEAST_VARIANCE and third <= MOST_LYAPUNOV * variance**1.5:
        skew = third / variance**1.5
        z = min(excess / math.sqrt(variance), FAR, 2 / max(skew, 1 / FAR))  # no expansion holds beyond 2 / skew
        return min(1.0, math.erfc(z / math.sqrt(2)) * math.cosh(skew * z**3 / 6))
    if math.isinf(jump):
        return None
    a, b = excess / jump, max(variance, LEAST_VARIANCE) / jump**2
    return min(1.0, 2 * math.exp(a + (a + b) * math.log(b / (a + b))))  # Freedman 1975, Theorem 1.6


def verdict(totals: Tensor, impossible: int, level: float) -> dict[str, object]:
    """The result of the test, from the sums [statistics, 5] of `weighted`."""
    sums = {name + kind: (JUMPS[name], *row) for (name, kind), row in zip(STATISTICS, totals.tolist(), strict=True)}
    statistics: dict[str, dict[str, float]] = {}
    for name, (jump, observed, expected, variance, third, weight) in sums.items():
        chance = p_value(abs(observed - expected), variance, third, jump)
        if chance is not None:
            error = math.sqrt(max(variance, LEAST_VARIANCE))
            statistics[name] = {
                "observed": observed,
                "expected": expected,
                "standard_error": error,
                "weight": weight,
                "z": (observed - expected) / error,
                "p_value": chance,
            }
    least = min((statistic["p_value"] for statistic in statistics.values()), default=1.0)
    adjusted = 0.0 if impossible else min(1.0, least * max(1, len(statistics)))
    factors = None
    if "surprisal" in statistics:
        _, _, _, variance, third, _ = sums["surprisal"]
        factors = detectable_temperature(variance, third, level / len(statistics))
    return {
        "passed": not impossible and adjusted >= level,
        "p_value": adjusted,
        "level": level,
        "detectable_temperature": factors,
        "comparisons": len(statistics),
        "impossible": impossible,
        "statistics": statistics,
    }


def detectable_temperature(variance: float, third: float, level: float) -> list[float] | None:
    """The factors of the temperature at which the sum of surprisals has a p-value below a level with chance `POWER`.

    If p is taken to the power b and normalized, E -log p changes by (1 - b) Var -log p to the first order.
    """
    error = math.sqrt(variance)

    def fails(z: float) -> bool:
        """Whether a sum that is off by so many standard errors is rejected."""
        chance = p_value(z * error, variance, third, math.inf)
        return chance is not None and chance < level

    least = next((step / 100 for step in range(int(100 * FAR)) if fails(step / 100)), math.inf)
    change = (least + NormalDist().inv_cdf(POWER)) / error
    return [1 / (1 + change), 1 / (1 - change)] if change < MOST_CHANGE else None


def _check(model: Any, config: object, processors: object, level: float, predictions: Any, references: Any) -> None:
    """Raise a ValueError for a model or rows whose distribution is not known."""
    if model is None or model.config.is_encoder_decoder or model.training:
        name = type(model).__name__
        raise ValueError(f"model={name}: pass the decoder that the text should be of, after model.eval().")
    if config is not None and processors is not None:
        raise ValueError("generation_config and processors were both given; pass one of them.")
    if not 0 < level < 1:
        raise ValueError(f"level={level} is no probability of a false alarm; give one above 0 and below 1.")
    if not any(predictions):
        raise ValueError("predictions has no tokens; give those that were emitted.")
    vocabulary = range(model.get_input_embeddings().weight.shape[0])
    for row, (text, prompt) in enumerate(zip(predictions, references, strict=True)):
        if not prompt:
            raise ValueError(f"the prompt of row {row} is empty; give the ids that generate began with.")
        if not all(token in vocabulary for token in prompt + text):
            raise ValueError(
                f"row {row} has ids that are not 0 to {len(vocabulary) - 1}; give ids of the model's own."
            )
