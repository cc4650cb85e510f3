"""Texts up to the end of a table of positions, and beyond it, where plain `generate` fails."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import zoo
from alike import WAYS
from counting import counting
from plain import assert_plain, coupled
from tiny import near, prompts, tiny
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding, SuffixDraft


TABLE, PROMPT = 128, 11
FITS = TABLE + 1 - PROMPT  # the last new token is not fed


@pytest.fixture(scope="module")
def learned() -> PreTrainedModel:
    return tiny("gpt2")


@pytest.mark.parametrize("way", WAYS)
def test_learned_positions(way: Callable, learned: PreTrainedModel):
    """The last text for which there is room is that of plain `generate`; one token more fails there."""
    call = partial(way, learned, near(learned, 0.05), **prompts(2), do_sample=False)
    expected = learned.generate(**prompts(2), max_new_tokens=FITS, do_sample=False)
    with counting(learned) as forwards:
        assert torch.equal(call(max_new_tokens=FITS), expected)
    assert len(forwards) < FITS / 2
    with pytest.raises(IndexError):
        learned.generate(**prompts(2), max_new_tokens=FITS + 1, do_sample=False)
    with counting(learned) as forwards, pytest.raises(ValueError, match="max_new_tokens=118"):
        call(max_new_tokens=FITS + 1)
    assert not forwards


def test_pads_have_no_positions(learned: PreTrainedModel):
    """So rows that were padded to more columns than there are positions are no reason to refuse."""
    inputs = {name: torch.nn.functional.pad(each, (TABLE, 0)) for name, each in prompts(2).items()}
    assert_plain(learned, coupled(learned, 0.05), inputs, max_new_tokens=20, do_sample=False)


@pytest.mark.parametrize("model_type", ["llama", "xglm", "bloom"])
def test_computed_positions(model_type: str):
    """They have no end, also where the config names one, and the text beyond it is that of plain `generate`."""
    target = tiny() if model_type == "llama" else zoo.build("causal", model_type)
    settings = {"max_new_tokens": FITS + 9, "min_new_tokens": FITS + 9, "do_sample": False}
    assert assert_plain(target, coupled(target, 0.05), prompts(2), **settings).forwards < FITS + 9


@pytest.mark.parametrize(("prompt", "new"), [(100, 60), (10, 128)])
def test_an_encoder_has_its_own_positions(prompt: int, new: int):
    """What it reads does not take those of the text that a decoder writes."""
    target = zoo.build("seq2seq", "bart")
    ids = torch.arange(prompt) % 60 + 4
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    expected = target.generate(ids[None], **settings)[0, 1:]
    strategy = SpeculativeDecoding(SuffixDraft())
    (done,) = strategy.generate_many(target, [ids], **settings)
    assert done.tokens == expected.tolist()
    (done,) = strategy.generate_many(target, [torch.arange(129) % 60 + 4], **settings)
    assert "129 tokens" in str(done.error)
