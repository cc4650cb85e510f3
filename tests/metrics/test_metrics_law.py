"""sampled_law: right samples pass as often as they should, at level 0.001 or as stated, and the model is left alone.

Samples that are not from the law are seen, each with a p-value below 1e-6, and what is wrong shows where.
All seeds are fixed.
"""

import copy
import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from metric_modules import load, script
from scipy import stats
from tiny import VOCAB_SIZE, near, prompts, tiny
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process as host
from zoo import build

from hf_specx import SpeculativeDecoding


END, PLAIN, NEW_TOKENS = 7, {"top_k": 0}, 32
Choose = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]


@cache
def target() -> PreTrainedModel:
    return tiny(initializer_range=0.25)


def split(inputs: dict, out: torch.Tensor, end: int | None = None) -> dict[str, list]:
    """Rows as the metric takes them, from padded prompts and what `generate` returned."""
    width, texts = inputs["input_ids"].shape[1], out[:, inputs["input_ids"].shape[1] :].tolist()
    if end is not None:
        texts = [row[: row.index(end) + 1] if end in row else row for row in texts]
    prompts = [ids[mask > 0].tolist() for ids, mask in zip(*inputs.values(), strict=True)]
    assert width == max(map(len, prompts))
    return {"predictions": texts, "references": prompts}


def sampled(rows: int = 64, seed: int = 0, model: PreTrainedModel | None = None, **settings) -> dict[str, list]:
    torch.manual_seed(seed)
    inputs, options = prompts(rows), {"do_sample": True, "max_new_tokens": NEW_TOKENS} | PLAIN | settings
    out = (model or target()).generate(**inputs, **options)
    return split(inputs, out, options.get("eos_token_id"))


@torch.no_grad()
def drawn(choose: Choose, rows: int, steps: int) -> dict[str, list]:
    """Sampled by hand from one prompt: `choose` gets the law p [rows, V], the step, and fresh uniforms [rows]."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[3, 1, 4]]).repeat(rows, 1)
    for step in range(steps):
        p = target()(ids).logits[:, -1].double().softmax(-1)
        token = choose(p, step, torch.rand(rows, generator=generator, dtype=torch.float64))
        ids = torch.cat([ids, token[:, None]], 1)
    return {"predictions": ids[:, 3:].tolist(), "references": ids[:, :3].tolist()}


def pick(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """By cumulated sums."""
    return (p.cumsum(-1) <= u[:, None] * p.sum(-1, keepdim=True)).sum(-1).clamp(max=p.shape[-1] - 1)


def judge(rows: dict[str, list], **options) -> dict:
    if "processors" not in options:
        options = {"generation_config": GenerationConfig(**PLAIN)} | options
    return load("sampled_law").compute(**rows, **{"model": target()} | options)


def rejected(result: dict) -> bool:
    return not result["passed"] and result["p_value"] < 1e-6


def test_moments_are_those_of_an_enumeration():
    """E f, Var f and E|f - E f|^3 from the values at all tokens; for cdf the last is a bound."""
    law = script("sampled_law")
    p = torch.tensor([0.4, 0.0, 0.15, 0.15, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.3, 0.1, 0.15, 0.2, 0.2, 0.05], dtype=torch.float64)
    seen = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0, 1.0]).double()
    moments = law.function_moments(
        p.expand(6, -1), q.expand(6, -1), torch.arange(6), law.random_halves(6), seen.expand(6, -1)
    )
    values = moments[:, 0]  # [functions, tokens]
    mean = (values * p).sum(-1, keepdim=True)
    off = (values - mean).abs()
    torch.testing.assert_close(moments[:, 1], mean.expand(-1, 6))
    torch.testing.assert_close(moments[:, 2], (p * off**2).sum(-1, keepdim=True).expand(-1, 6))
    third = (p * off**3).sum(-1, keepdim=True).expand(-1, 6)
    exact = [i for i, name in enumerate(law.FUNCTIONS) if name != "cdf"]
    torch.testing.assert_close(moments[exact, 3], third[exact])
    assert (moments[:, 3] >= third - 1e-12).all()
    named = dict(zip(law.FUNCTIONS, values.tolist(), strict=True))
    assert named["top_1"] == [1, 0, 0, 0, 0, 0]
    assert named["rank_2_3"] == [0, 0, 1, 0, 1, 0]  # of equals, the first
    assert named["rank_4_10"] == [0, 1, 0, 1, 0, 1]
    assert named["cdf"] == pytest.approx([0.2, 0.4, 0.475, 0.625, 0.8, 0.95])
    assert named["repeated"] == seen.tolist()
    assert named["overrated"] == [0, 1, 0, 1, 0, 0]
    assert named["surprisal"][4] == pytest.approx(-math.log(0.2))


def test_p_values_by_the_normal_and_by_freedman():
    law = script("sampled_law")
    assert law.p_value(30.0, 100.0, 10.0, 1.0) == pytest.approx(2 * stats.norm.sf(3) * math.cosh(0.01 * 27 / 6))
    for chance in (0.001, 0.02):
        variance = 50 * chance * (1 - chance)
        for hits in range(1, 8):
            bound = law.p_value(hits - 50 * chance, variance, variance, 1.0)
            assert bound >= min(1.0, stats.binom.sf(hits - 1, 50, chance))
    assert law.p_value(7 - 0.05, 0.05, 0.05, 1.0) < 1e-8
    assert law.p_value(7.0, 0.05, 0.05, math.inf) is None
    assert law.p_value(0.0, 0.0, 0.0, 1.0) is None


@pytest.mark.parametrize(("number", "chance"), [(100, 0.5), (1000, 0.15), (2000, 0.06), (10_000, 0.011), (4000, 0.36)])
def test_skewed_sums_are_no_more_often_far_out_than_p_values_say(number: int, chance: float):
    """By the exact law of a sum of equal indicators, at levels that a check shares out; a normal's are up to 2.3 times
    too small here."""
    law, variance, mean = script("sampled_law"), number * chance * (1 - chance), number * chance
    third = variance * (chance**2 + (1 - chance) ** 2)
    assert third <= law.MOST_LYAPUNOV * variance**1.5
    binomial = stats.binom(number, chance)
    steps = np.arange(0, 8 * math.sqrt(variance), 0.5)
    chances = np.array([law.p_value(excess, variance, third, 1.0) for excess in steps])
    for level in (1e-3, 1e-4, 5e-6, 1e-6):
        limit = steps[chances <= level][0]
        beyond = binomial.cdf(math.floor(mean - limit)) + binomial.sf(math.ceil(mean + limit) - 1)
        assert 0 < beyond <= 1.05 * level


def test_false_alarms_are_as_rare_as_the_level():
    """40 independent samples at level 0.1: as many alarms as were seen have probability 1e-4 at least.

    And the squares of each statistic's z sum up to a chi-square, at 1e-5 on either side.
    """
    rows, groups = sampled(40 * 8), 40
    results = [judge({name: values[i::groups] for name, values in rows.items()}, level=0.1) for i in range(groups)]
    assert sum(not result["passed"] for result in results) <= stats.binom.isf(1e-4, groups, 0.1)
    for name in set.intersection(*(set(result["statistics"]) for result in results)):
        total = sum(result["statistics"][name]["z"] ** 2 for result in results)
        assert stats.chi2.ppf(1e-5, groups) < total < stats.chi2.isf(1e-5, groups), name


SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 8},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "repetition penalty": {"repetition_penalty": 1.5},
    "end": {"eos_token_id": END, "min_new_tokens": 4},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_right_samples_pass_and_plain_ones_do_not_under_other_settings(settings: str):
    """As if a processor was skipped, or the temperature was another."""
    options = PLAIN | SETTINGS[settings]
    assert settings == "plain" or rejected(judge(sampled(), generation_config=GenerationConfig(**options)))
    result = judge(sampled(**options), generation_config=GenerationConfig(**options, max_new_tokens=NEW_TOKENS))
    assert result["passed"], result
    assert result["impossible"] == 0
    assert result["comparisons"] == len(result["statistics"]) >= 10
    least = min(statistic["p_value"] for statistic in result["statistics"].values())
    assert result["p_value"] == pytest.approx(min(1, least * result["comparisons"]))
    for statistic in result["statistics"].values():
        off = statistic["observed"] - statistic["expected"]
        assert off == pytest.approx(statistic["z"] * statistic["standard_error"])


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
def test_speculative_samples_pass(verification: str):
    """And they are not the draft's."""
    draft = near(target(), 0.3)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification=verification)
    rows = sampled(seed=1, custom_generate=strategy)
    assert strategy.report.accepted > 100
    assert judge(rows)["passed"]
    assert rejected(judge(rows, model=draft))


SHOWN: list[tuple[int, list[int]]] = []


class Counts(LogitsProcessor):
    """Has a state: how often it was called."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        SHOWN.append((self.calls, input_ids[0].tolist()))
        return scores


def test_processors_see_exact_prefixes_and_each_row_has_its_own():
    counts, rows = Counts(), sampled(3)
    SHOWN.clear()
    judge(rows, processors=LogitsProcessorList([host.TemperatureLogitsWarper(1.0), counts]))
    assert counts.calls == 0
    texts = zip(*rows.values(), strict=True)
    assert [(i + 1, prompt + text[:i]) for text, prompt in texts for i in range(len(text))] == SHOWN


def test_without_a_config_it_is_the_models_own_and_all_is_left_as_it_was():
    model, config = copy.deepcopy(target()), GenerationConfig(temperature=1.0, **PLAIN)
    model.generation_config.update(temperature=0.5, top_k=0)
    rows = sampled(32, model=model, temperature=0.5)
    before = model.generation_config.to_dict(), config.to_dict(), torch.get_rng_state()
    assert judge(rows, model=model, generation_config=None)["passed"]
    assert rejected(judge(rows, model=model, generation_config=config))
    assert (model.generation_config.to_dict(), config.to_dict()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


ROW = {"predictions": [[1, 2]], "references": [[3]]}


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (ROW, {"model": None}, "NoneType"),
        (ROW, {"model": build("seq2seq", "t5")}, "T5"),
        (ROW, {"model": tiny().train()}, "eval"),
        (ROW, {"processors": LogitsProcessorList(), "generation_config": GenerationConfig()}, "processors"),
        (ROW, {"level": 0}, "level=0"),
        (ROW | {"references": [[]]}, {}, "row 0"),
        (ROW | {"predictions": [[]]}, {}, "predictions"),
        (ROW | {"predictions": [[VOCAB_SIZE]]}, {}, f"0 to {VOCAB_SIZE - 1}"),
    ],
)
def test_what_has_no_law_is_refused(rows: dict, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        judge(rows, **options)


def test_wrong_samples_are_seen():
    """`shifted`: the law of each token is taken a position too early. A temperature may be a tenth off."""
    right = sampled()
    wrong = {
        "greedy": sampled(do_sample=False),
        "drafted": sampled(model=near(target(), 0.3)),
        "shifted": right | {"predictions": [row[1:] for row in right["predictions"]]},
        "wrong prompt": right | {"references": [[1 + row[0] % 9, *row[1:]] for row in right["references"]]},
    }
    for name, rows in wrong.items():
        assert rejected(judge(rows)), name
    result = judge(right, generation_config=GenerationConfig(temperature=0.9, **PLAIN))
    assert (result["positions"], rejected(result)) == (2048, True)


def of_temperature(p: torch.Tensor, temperature: float) -> torch.Tensor:
    return (p.log() / temperature).softmax(-1)


@pytest.mark.parametrize(
    ("temperatures", "statistic"),
    [
        ((1.0,) * 12, None),
        ((0.6, *(1.0,) * 11), "surprisal_first"),  # a wrong first token among right ones
        ((0.8, 1.3) * 6, "surprisal_alternating"),  # errors that cancel
    ],
)
def test_errors_at_some_steps_are_seen_by_the_statistic_for_them(temperatures: tuple, statistic: str | None):
    result = judge(drawn(lambda p, step, u: pick(of_temperature(p, temperatures[step]), u), rows=256, steps=12))
    assert (result["passed"], rejected(result)) == (statistic is None, statistic is not None)
    z = {name: abs(statistic["z"]) for name, statistic in result["statistics"].items()}
    assert statistic is None or z[statistic] > max(6, 2 * z["surprisal"])


def test_noise_that_is_used_twice_is_seen():
    """Every second token is drawn by the uniform of the one before, so each by itself is right."""
    uniforms = []

    def choose(p, step, u):
        uniforms.append(u if step % 2 == 0 else uniforms[-1])
        return pick(p, uniforms[-1])

    result = judge(drawn(choose, rows=256, steps=12))
    assert rejected(result)
    below = {name for name, statistic in result["statistics"].items() if statistic["p_value"] < 1e-6}
    assert {"cdf_after", "top_1_after"} <= below
    assert not below & {"cdf", "surprisal", "top_1"}


def test_an_impossible_token_fails_whatever_the_rest():
    options = PLAIN | {"top_k": 8}
    rows = sampled(**options)
    result = judge(rows, generation_config=GenerationConfig(**options))
    assert result["passed"]
    with torch.no_grad():
        logits = target()(torch.tensor([rows["references"][5] + rows["predictions"][5][:-1]])).logits[0, -1]
    rows["predictions"][5][-1] = int(logits.argmin())
    result = judge(rows, generation_config=GenerationConfig(**options))
    assert (result["passed"], result["p_value"], result["impossible"]) == (False, 0.0, 1)
    assert all(statistic["p_value"] > 1e-4 for statistic in result["statistics"].values())


def test_tokens_on_the_edge_of_what_is_kept_are_told_from_impossible_ones():
    """By top-k 1 the second token is left out, unless its logit may be off by as much as lacks it."""
    prompts, config = [[3, 1, 4], [5, 6]], GenerationConfig(top_k=1)
    rows = {"references": prompts, "predictions": []}
    with torch.no_grad():
        logits = [target()(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    rows["predictions"] = [row.topk(2).indices[1:].tolist() for row in logits]
    top = [row.topk(2).values for row in logits]
    units = [
        float(a - b) / (torch.finfo(a.dtype).eps * float(row.abs().max()))
        for (a, b), row in zip(top, logits, strict=True)
    ]
    for rounding, impossible in ((0.0, 2), (0.99 * min(units), 2), (1.01 * min(units), 1), (1.01 * max(units), 0)):
        result = judge(rows, generation_config=config, rounding=rounding)
        assert (result["impossible"], result["on_the_edge"]) == (impossible, 2 - impossible)
        assert (result["passed"], result["p_value"]) == (not impossible, float(not impossible))


def test_tokens_of_the_draft_are_seen_best_where_it_is_known_what_it_offered():
    draft = near(target(), 0.3)
    with torch.no_grad():
        q = draft(torch.tensor([[3, 1, 4]])).logits[:, -1].double().softmax(-1)
    rows = drawn(lambda p, step, u: pick(0.2 * p + 0.8 * q, u), rows=250, steps=1)
    offer = [top[0].tolist() for top in (q.topk(8).indices, q.topk(8).values)]
    result = judge(rows, offers=250 * [[offer]])
    statistics = result["statistics"]
    assert rejected(result)
    assert min(statistics, key=lambda name: statistics[name]["p_value"]) == "overrated"
    right = judge(drawn(lambda p, step, u: pick(p, u), rows=250, steps=1), offers=250 * [[offer]])
    assert right["passed"]
    assert 0 < right["statistics"]["overrated"]["expected"] < 250
    assert "overrated" not in judge(rows, offers=250 * [[([], [])]])["statistics"]


def test_a_law_of_single_tokens_compares_nothing():
    result = judge(sampled(do_sample=False), generation_config=GenerationConfig(top_k=1))
    assert (result["passed"], result["comparisons"], result["p_value"], result["impossible"]) == (True, 0, 1.0, 0)


def test_rare_events_are_not_left_to_the_normal():
    """Near temperature 0 hardly anything varies: right samples pass, a few other tokens are seen."""
    cold = GenerationConfig(temperature=0.02, **PLAIN)
    rows = sampled(8, temperature=0.02)
    result = judge(rows, generation_config=cold)
    assert result["passed"]
    assert "surprisal" not in result["statistics"]
    for row in rows["predictions"][:6]:
        row[-1] = (row[-1] + 1) % VOCAB_SIZE
    assert rejected(judge(rows, generation_config=cold))
