"""`strategy.attached(model)`: for code that calls `model.generate`, also while the model trains without dropout."""

import pytest
import torch
from tiny import Forwards, near, prompts, tiny

from hf_specx import SpeculativeDecoding


SAMPLED = {"do_sample": True, "max_new_tokens": 20, "pad_token_id": 0}


def text(model, **options) -> torch.Tensor:
    torch.manual_seed(0)
    return model.generate(**prompts(3), **SAMPLED | options)


def test_generate_is_speculative_within():
    target = tiny()
    expected, before = text(target), dict(vars(target))
    strategy = SpeculativeDecoding(near(target, 0.1), num_draft_tokens=4, verification="coupled")
    with strategy.attached(target) as same, Forwards(target) as forwards:
        assert same is target
        assert torch.equal(text(target), expected)
    assert len(forwards.ids) < 20
    assert strategy.report.emitted == 60
    assert vars(target) == before


def test_one_context_within_another_and_an_error():
    target = tiny()
    outer, inner = (SpeculativeDecoding(near(target, 0.1), num_draft_tokens=2) for _ in range(2))
    with outer.attached(target):
        with inner.attached(target):
            text(target)
        assert outer.report is None
        text(target)
    assert outer.report.emitted == inner.report.emitted == 60
    with pytest.raises(ZeroDivisionError), outer.attached(target):
        raise ZeroDivisionError
    assert "generate" not in vars(target)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_model_that_trains_without_dropout(model_type: str):
    """Its weights change between calls, and each call takes those of the moment."""
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if model_type == "gpt2" else {}
    target = tiny(model_type, **none)
    draft = near(target, 0.1)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=4, verification="coupled")
    target.train()
    optimizer = torch.optim.SGD(target.parameters(), lr=0.1)
    for _ in range(2):
        expected = text(target)
        with strategy.attached(target), Forwards(target) as forwards:
            assert torch.equal(text(target), expected)
        assert len(forwards.ids) < 20
        assert target.training
        ids = prompts(3)["input_ids"]
        target(ids, labels=ids).loss.backward()
        optimizer.step()
        assert not torch.equal(text(target), expected)
