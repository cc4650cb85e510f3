"""`specx_config.json`: read as it was written, and believed nowhere."""

import json
from pathlib import Path

import pytest
from card_cases import full, measured

from hf_specx import Costs
from hf_specx.hub.pair_config import DraftTokenizer, ModelSource, PairConfig, SavedCosts


TIMES = {"target": {"1": 1.0, "5": 1.5, "9": 2.0}, "draft": 0.25}


def whole() -> PairConfig:
    """A config in which nothing is as it would be by default."""
    costs = SavedCosts("a clock", "float32", {"2": TIMES}, {"block": 0.5}, {"2": {"16": 0.5}})
    other = DraftTokenizer(9, 0.5, {"eos_token": "</s>"}, "0" * 64)
    return full(tree=12, costs=costs, prompts=["def f(", "naïve \u2014 日本"], draft_tokenizer=other)


def read(text: str | bytes) -> PairConfig:
    return PairConfig.from_text(text if isinstance(text, bytes) else text.encode(), "here")


def test_round_trip(tmp_path: Path):
    config, text = whole(), whole().to_text()
    assert read(text) == config
    assert read(text).to_text() == text
    assert "日本" in text
    (tmp_path / "c.json").write_text(text, encoding="utf-8")
    assert PairConfig.from_file(tmp_path / "c.json") == config
    defaults = vars(PairConfig(ModelSource(), ModelSource(subfolder="draft")))
    same = {name for name, value in vars(config).items() if value == defaults[name]}
    assert same == {"schema", "suffix", "early_exit", "processor"}  # not with a model of text


def test_whole_numbers_may_stand_for_times():
    """JSON of other programs has 2 where Python's has 2.0."""
    values = json.loads(whole().to_text())
    values["measurements"][0]["tokens_per_round"] = 2
    number = read(json.dumps(values)).measurements[0].tokens_per_round
    assert (type(number), number) == (float, 2.0)


def test_what_is_no_json_is_not_written():
    config = whole()
    config.measurements[0].alpha = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        config.to_text()


@pytest.mark.parametrize("times", [{"1": 1e-300, "5": 1e300}, {"1": 1e300, "5": 1e-300}, {"1": 5e-324, "9": 5e-324}])
def test_any_times_that_are_read_can_be_used(times: dict[str, float]):
    """Where they were measured, and nowhere else."""
    config = whole()
    config.costs = SavedCosts("a clock", "float32", {"2": {"target": times, "draft": 5e-324}}, {"block": 1.0})
    costs = read(config.to_text()).costs_on("a clock", "float32")
    assert 1 <= costs.best_fixed_num_draft_tokens(2, "block") <= 64
    assert costs.cost_coefficient(2) >= 0
    for elsewhere in (("another clock", "float32"), ("a clock", "bfloat16")):
        assert config.costs_on(*elsewhere).to_dict() == Costs().to_dict()


@pytest.mark.parametrize(
    ("changes", "is_faster"),
    [
        ({"interval_low": 1.01, "interval_high": 1.9}, True),
        ({"interval_low": 0.99, "interval_high": 1.9}, None),
        ({"interval_low": 0.5, "interval_high": 0.99}, False),
        ({}, None),  # too few turns for an interval, whatever they say
        ({"turns": None}, True),  # of a version that measured none
        ({"turns": None, "measured_speedup": 0.9}, False),
    ],
)
def test_what_a_measurement_has_shown(changes, is_faster):
    """Which is what a pair decodes by: plainly only if all was slower."""
    measurement = measured(**{"turns": 9, "measured_speedup": 1.3} | changes)
    config = full(measurements=[measurement])
    assert measurement.is_faster is is_faster
    assert config.pays == (is_faster is not False)
    assert PairConfig.from_text(config.to_text().encode(), "it") == config
    assert ("is not clear" in config.speeds()[0]) == (is_faster is None)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"measurements": [5]}, r"measurements\[0\] is 5"),
        ({"prompts": ["a", 5]}, r"prompts is \['a', 5\], not list\[str\]"),
        ({"costs": {"rounds": {"2": {"x": 1.0}}}}, r"rounds\['2'\]: a key is 'x'"),
        ({"costs": {"rounds": json.loads("[" * 900 + "]" * 900)}}, "costs: rounds is .*, not dict"),
        ({"costs": {"alpha": {"\x1b[2J": 0.5}}}, "a key in here: costs: alpha has the control character"),
        ({"costs": {"table": {"2": TIMES | {"more": 1}}}}, r"table\['2'\] has a field 'more'"),
    ],
)
def test_what_is_inside_of_a_field_is_refused_with_its_name(change: dict, field: str):
    values = json.loads(whole().to_text())
    for name, value in change.items():
        values[name] = values[name] | value if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=field):
        read(json.dumps(values))


def test_predictions_of_earlier_versions_are_dropped():
    values = json.loads(whole().to_text())
    values["measurements"][0] |= {"predicted_speedup": 3.0, "why_not_predicted": "slower rounds"}
    assert read(json.dumps(values)) == whole()
