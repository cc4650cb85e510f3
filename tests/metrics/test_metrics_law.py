"""sampled_law: right samples pass as often as they should, at level 0.001 or as stated, and the model is left alone.

All seeds are fixed. Wrong samples are in test_metrics_law_wrong.py.
"""

import copy
import math

import numpy as np
import pytest
import torch
from law_samples import NEW_TOKENS, PLAIN, judge, rejected, sampled, target
from metric_modules import script
from scipy import stats
from tiny import VOCAB_SIZE, near, tiny
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as host
from zoo import build

from hf_specx import SpeculativeDecoding


END = 7


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
    found = [judge({name: values[i::groups] for name, values in rows.items()}, level=0.1) for i in range(groups)]
    assert sum(not f["passed"] for f in found) <= stats.binom.isf(1e-4, groups, 0.1)
    for name in set.intersection(*(set(f["statistics"]) for f in found)):
        total = sum(f["statistics"][name]["z"] ** 2 for f in found)
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
    found = judge(sampled(**options), generation_config=GenerationConfig(**options, max_new_tokens=NEW_TOKENS))
    assert found["passed"], found
    assert found["impossible"] == 0
    assert found["comparisons"] == len(found["statistics"]) >= 10
    least = min(statistic["p_value"] for statistic in found["statistics"].values())
    assert found["p_value"] == pytest.approx(min(1, least * found["comparisons"]))
    for statistic in found["statistics"].values():
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
        (ROW, {"model": None}, "model=NoneType: pass the decoder"),
        (ROW, {"model": build("seq2seq", "t5")}, "model=T5ForConditionalGeneration: pass the decoder"),
        (ROW, {"model": tiny().train()}, "after model.eval"),
        (ROW, {"processors": LogitsProcessorList(), "generation_config": GenerationConfig()}, "both given; .*pass"),
        (ROW, {"level": 0}, "level=0 is no probability"),
        (ROW | {"references": [[]]}, {}, "the prompt of row 0 is empty; give"),
        (ROW | {"predictions": [[]]}, {}, "predictions has no tokens; give"),
        (ROW | {"predictions": [[VOCAB_SIZE]]}, {}, f"row 0 has ids that are not 0 to {VOCAB_SIZE - 1}; give"),
        (ROW | {"references": [[-1]]}, {}, "row 0 has ids that are not"),
    ],
)
def test_what_has_no_law_is_refused(rows: dict, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        judge(rows, **options)
