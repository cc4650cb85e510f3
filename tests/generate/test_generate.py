"""The entries: what they return, what they leave behind, and reproducibility."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import assert_plain
from tiny import near, prompts, tiny
from transformers import PreTrainedModel

from hf_specx import Costs, DraftTargetPair, SpeculativeDecoding, generate
from hf_specx.drafting.costs import PRIOR_ALPHA
from hf_specx.pairs.generate import TIMES


SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 20}


class Adapted(torch.nn.Module):
    """PEFT's wrapper as far as it counts here: it is no `PreTrainedModel`, and its layers are in the model."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.base_model = model

    def get_base_model(self) -> PreTrainedModel:
        return self.base_model


WRAPPERS = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "adapted": Adapted,
    "both": lambda model: torch.compile(Adapted(model), backend="eager"),
}


@pytest.mark.usefixtures("timed_first")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_models_that_something_is_put_around(wrapper: str):
    """A target that is compiled, and drafts; an adapter of a target is its own model to PEFT's `generate`."""
    target = tiny()
    draft, wrap, settings = near(target, 0.05), WRAPPERS[wrapper], {"do_sample": False, "max_new_tokens": 9}
    expected = target.generate(**prompts(2), **settings)
    around = wrap(target) if wrapper == "compiled" else target
    strategy = SpeculativeDecoding(wrap(draft), num_draft_tokens=2)
    pair = DraftTargetPair(around, wrap(draft))
    calls = [
        lambda: around.generate(**prompts(2), **settings, custom_generate=strategy),
        lambda: generate(**prompts(2), **settings, model=around, draft_model=wrap(draft)),
        lambda: pair.generate(**prompts(2), **settings, num_draft_tokens=2),
    ]
    assert all(torch.equal(call(), expected) for call in calls)
    strategy.calibrate(around, prompts(2)["input_ids"])
    assert strategy.report.accepted > 0
    assert strategy.draft_model is pair.draft is draft
    assert pair.target is target
    assert len(TIMES[draft]) == 1


def test_costs_start_anew_for_another_target():
    first, second = tiny(), tiny(seed=4)
    strategy = SpeculativeDecoding(near(first, 0.05))
    first.generate(**prompts(2), **SAMPLED, custom_generate=strategy)
    costs = strategy.costs
    assert costs.alpha["block"] != PRIOR_ALPHA
    first.generate(**prompts(2), **SAMPLED, custom_generate=strategy)
    assert strategy.costs is costs
    second.generate(**prompts(2), **SAMPLED, custom_generate=strategy)
    assert strategy.costs is not costs


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
def test_a_broken_draft_costs_acceptance_only(verification: str):
    """A draft whose logits are NaN drafts uniformly; the text is no constant, and coupled text stays stock's."""
    target, draft = tiny(), tiny(seed=1)
    draft.lm_head.weight.data[3] = torch.nan
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification=verification)
    if verification == "coupled":
        output = assert_plain(target, strategy, **SAMPLED).text
    else:
        output = target.generate(**prompts(4), **SAMPLED, custom_generate=strategy)
    assert min(len(set(row.tolist())) for row in output[:, 11:]) > 5
    assert strategy.report.accepted < strategy.report.drafted / 2


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
def test_a_target_without_a_law_is_an_error_as_in_stock(verification: str):
    """All tokens get banned in the end; stock's multinomial refuses, and so do we."""
    target, settings = tiny(vocab_size=12), SAMPLED | {"no_repeat_ngram_size": 1}
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(RuntimeError, match="inf"):
        target.generate(ids, **settings)
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=3, verification=verification)
    with pytest.raises(RuntimeError, match="row 0"):
        target.generate(ids, **settings, custom_generate=strategy)


def timed_calls(monkeypatch: pytest.MonkeyPatch, *calls: Callable) -> list[int]:
    """How often bare forwards were timed in each call, the costs being known exactly."""
    counts: list[int] = []

    def measure(costs: Costs, batch: int, *forwards: Any) -> None:
        counts[-1] += 1
        costs.forward_times[batch] = costs.measured[batch] = {"target": {1: 1.0, 9: 1.0}, "draft": 0.1}

    monkeypatch.setattr(Costs, "measure", measure)
    for call in calls:
        counts.append(0)
        call()
    return counts


@pytest.mark.usefixtures("timed_first")
def test_what_was_learned_serves_the_next_call(monkeypatch: pytest.MonkeyPatch):
    """Times alone, of the same draft beside a target of the same kind, at the same batch size."""
    target, alike, other = tiny(), tiny(seed=4), tiny(num_hidden_layers=1)
    draft = near(target, 0.05)

    def call(model: PreTrainedModel = target, rows: int = 2, **options: Any) -> Callable:
        return lambda: generate(**prompts(rows), **SAMPLED, model=model, draft_model=draft, **options)

    before = dict(vars(draft))
    calls = [call(), call(), call(rows=3), call(other), call(alike), call(), call(costs=Costs()), call()]
    assert timed_calls(monkeypatch, *calls) == [1, 0, 1, 1, 0, 0, 1, 0]
    assert vars(draft) == before
    assert [list(times) for times in TIMES[draft].values()] == [[2, 3], [2]]
    assert all(row.keys() == {"target", "draft"} for times in TIMES[draft].values() for row in times.values())


@pytest.mark.usefixtures("timed_first")
def test_the_same_seed_gives_the_same_text_in_the_next_call():
    """The number of candidates changes what is drawn: neither acceptance nor times at another batch size count."""
    target = tiny()
    draft = near(target, 0.3)
    texts = []
    for _ in range(3):
        torch.manual_seed(0)
        texts.append(generate(**prompts(2), **SAMPLED, model=target, draft_model=draft))
        (times,) = TIMES[draft].values()
        times[1] = {"target": {1: 1.0, 9: 9.0}, "draft": 5.0}  # a size at which no draft is worth its time
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


@pytest.mark.usefixtures("timed_first")
def test_what_was_learned_is_forgotten_with_the_models():
    target = tiny()
    draft = near(target, 0.05)
    generate(**prompts(2), **SAMPLED, model=target, draft_model=draft)
    assert TIMES[draft]
    gone = weakref.ref(target), weakref.ref(draft)
    del target
    gc.collect()
    assert gone[0]() is None
    del draft
    gc.collect()
    assert gone[1]() is None
