"""Rounds as long as transformers' own arguments ask for, in every way to call; the text stays stock's."""

from typing import Any

import pytest
import torch
from all_pairs import each_value
from tiny import near, prompts, tiny
from transformers import GenerationConfig, PreTrainedModel

from hf_specx import DraftTargetPair, SpeculationReport, SpeculativeDecoding, generate


GREEDY = {"do_sample": False, "max_new_tokens": 25}
ASKED = {"num_assistant_tokens": 3}


@pytest.fixture
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny()
    return target, near(target, 0.05)


FORMS = {
    "strategy": lambda target, draft, **call: target.generate(**call, custom_generate=SpeculativeDecoding(draft)),
    "function": lambda target, draft, **call: generate(**call, model=target, draft_model=draft),
    "pair": lambda target, draft, **call: DraftTargetPair(target, draft).generate(**call),
}


@pytest.mark.parametrize(("form", "where"), each_value(FORMS, ["argument", "config", "draft"]))
def test_the_number_counts_wherever_it_is_set(models: Any, form: str, where: str):
    settings: dict[str, Any] = GREEDY | {"return_dict_in_generate": True}
    if where == "argument":
        settings |= ASKED
    elif where == "config":
        settings = {"generation_config": GenerationConfig(**settings, **ASKED)}
    else:
        models[1].generation_config.num_assistant_tokens = 3
    output = FORMS[form](*models, **prompts(3), **settings)
    assert output.speculation_report.num_draft_tokens == 3
    assert torch.equal(output.sequences, models[0].generate(**prompts(3), **GREEDY))


def drafted(report: SpeculationReport) -> list[int]:
    """Candidates of each round of row 0."""
    return [record.drafted for record in report.history[0] if record.drafted]


@pytest.mark.parametrize(("mode", "where"), each_value(["greedy", "coupled", "token", "block"], ["argument", "draft"]))
def test_threshold(models: Any, mode: str, where: str):
    """At 1 a round ends with its first candidate, which is kept; at next to nothing it never ends early."""
    target, draft = models
    settings = {"do_sample": mode != "greedy", "max_new_tokens": 25}
    torch.manual_seed(0)
    expected = target.generate(**prompts(3), **settings)
    for threshold, most in ((1.0, 1), (1e-9, 4), (0.0, 4)):
        arguments = {"num_assistant_tokens": 4, "assistant_confidence_threshold": threshold}
        draft.generation_config.update(**arguments if where == "draft" else dict.fromkeys(arguments))
        verification = None if mode == "greedy" else mode
        strategy = SpeculativeDecoding(draft, verification=verification)
        torch.manual_seed(0)
        call = arguments if where == "argument" else {}
        output = target.generate(**prompts(3), **settings, **call, custom_generate=strategy)
        assert set(drafted(strategy.report)[:-4]) == {most}
        if mode in ("greedy", "coupled"):
            assert torch.equal(output, expected)
