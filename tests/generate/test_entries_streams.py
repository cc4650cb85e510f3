"""A streamer in every way to call: it gets what stock gives it, and ends once whatever happens."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forms import FORMS, GREEDY, OURS, Puts
from tiny import prompts
from transformers import LogitsProcessorList, MinLengthLogitsProcessor

from hf_specx import DraftTargetPair, generate


IDS, MASK = prompts(1).values()


@pytest.mark.parametrize("form", FORMS)
def test_streamer(world: SimpleNamespace, form: str):
    stock, ours = Puts(), Puts()
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    world.target.generate(**inputs, **GREEDY, streamer=stock)
    world.call[form](**inputs, **GREEDY, **OURS, streamer=ours)
    assert ours.ends == stock.ends == 1
    assert len(ours.pieces) == len(stock.pieces) == 15
    assert all(torch.equal(ours, stock) for ours, stock in zip(ours.pieces, stock.pieces, strict=True))
    by_run = Puts()
    world.call[form](**inputs, **GREEDY, **OURS, streamer=by_run, stream_by="run")
    assert torch.equal(torch.cat([p.view(-1) for p in by_run.pieces]), torch.cat([p.view(-1) for p in ours.pieces]))
    assert len(by_run.pieces) < len(ours.pieces)
    assert by_run.ends == 1


ERRORS: dict[str, dict[str, Any]] = {
    "an option": {"layout": "square"},
    "an argument of transformers": {"do_sample": True, "temperature": -1.0},
    "an argument that nobody knows": {"tepmerature": 1.0},
    "a prompt": {"input_ids": IDS[:, :0]},
    "a mode": {"num_beams": 3},
    "stop strings without a tokenizer": {"stop_strings": ["a"]},
    "healing without a tokenizer": {"token_healing": True},
    "a processor": {"logits_processor": LogitsProcessorList([MinLengthLogitsProcessor, None])},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("error", ERRORS)
def test_a_streamer_ends_once_whatever_fails(world: SimpleNamespace, form: str, error: str):
    """So that nobody waits for it in another thread."""
    streamer = Puts()
    settings = {"input_ids": IDS} | GREEDY | {"streamer": streamer} | ERRORS[error]
    if form == "pair":
        settings |= {"tokenizer": None} if error.endswith("a tokenizer") else {}
    pair = DraftTargetPair(world.target, world.draft) if form == "pair" else None
    call = world.call[form] if pair is None else pair.generate
    with pytest.raises((ValueError, TypeError, AttributeError)):
        call(**settings)
    assert streamer.ends == 1


@pytest.mark.parametrize("form", ["function", "override", "folder"])
def test_a_streamer_ends_once_without_a_draft(world: SimpleNamespace, form: str):
    streamer = Puts()
    call: dict[str, Callable] = {
        "function": lambda **kwargs: generate(model=world.target, **kwargs),
        "override": world.own.generate,
        "folder": lambda **kwargs: world.target.generate(
            **kwargs, custom_generate=str(world.folder), trust_remote_code=True
        ),
    }
    with pytest.raises(ValueError, match="no draft"):
        call[form](inputs=IDS, streamer=streamer)
    assert streamer.ends == 1
