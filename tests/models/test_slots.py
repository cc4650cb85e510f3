"""Slots: growth, memory that nobody wrote to, and the invariant of a round."""

import gc
from collections.abc import Iterator
from weakref import WeakSet

import pytest
import torch
from plain import assert_plain, coupled
from tiny import near, prompts, tiny
from transformers import DynamicCache

from hf_specx import EarlyExitDraft, SpeculativeDecoding
from hf_specx.models import layers
from hf_specx.models.choose import RUNNERS
from hf_specx.models.layers import RingLayer, SlotLayer
from hf_specx.models.runner import ModelRunner
from hf_specx.models.slots import SlotCache, fill_returned_cache


@pytest.mark.parametrize("limit", [0, 45, 400])
def test_growth_keeps_what_was_written_and_is_rare(limit: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layers, "MAX_COPIED_BYTES", 0)
    cache, text, buffers = SlotCache(limit), torch.arange(400.0).view(1, 1, 400, 1), []
    for start in range(0, 400, 5):
        cache.slots.set_write_slots(None, start, start + 5)
        keys, values = cache.update(text[:, :, start : start + 5], -text[:, :, start : start + 5], 0)
        assert torch.equal(keys, text[:, :, : start + 5])
        assert torch.equal(values, -keys)
        if not buffers or buffers[-1] is not cache.layers[0].keys:
            buffers.append(cache.layers[0].keys)
    assert 1 < len(buffers) <= 7
    assert limit < 400 or buffers[-1].shape[2] == limit  # not doubled beyond what will be needed


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    """Torch fills what it allocates without initialising it."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_uninitialised_memory_has_no_part_in_the_text(layout: str):
    target = tiny("llama")
    strategy = coupled(target, 0.05, layout=layout)
    assert_plain(target, strategy, do_sample=False, max_new_tokens=31)
    assert strategy.report.rounds < 30


@pytest.mark.parametrize("layout", ["ragged", "padded", "packed"])
def test_caches_are_free_as_soon_as_a_call_has_ended(layout: str, request, monkeypatch: pytest.MonkeyPatch):
    """As those of plain `generate`: they may be larger than the models, and nobody knows when garbage is collected."""
    caches, target, init = WeakSet(), tiny("llama"), SlotCache.__init__
    request.addfinalizer(gc.enable)
    gc.disable()

    def noting(cache, *args):
        init(cache, *args)
        caches.add(cache)
        assert caches

    monkeypatch.setattr(SlotCache, "__init__", noting)
    target.generate(**prompts(3), max_new_tokens=9, custom_generate=coupled(target, 0.05, layout=layout))
    assert not caches


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
@pytest.mark.parametrize(("layout", "draft"), [*((layout, "near") for layout in RUNNERS), ("ragged", "early exit")])
def test_after_a_round_the_cache_holds_the_row_but_its_last_token(
    layout: str, draft: str, monkeypatch: pytest.MonkeyPatch
):
    """What a plain forward over the row's text before its last token writes; float64. An early exit shares it."""
    target = tiny("llama").double()
    inputs, cached = prompts(3), []
    decode_tokens = ModelRunner.decode_tokens

    def noted(self, batch, count, ahead, logits_to_keep):
        logits = decode_tokens(self, batch, count, ahead, logits_to_keep)
        if self.model is target:
            for index, row in enumerate(batch.rows):
                text, pads = batch.row(row)[:-1], self.width - batch.row_states[row].prompt_length
                layers = [torch.cat(layer, -1)[:, pads:][:, : len(text)] for layer in self.row_keys_values(index, row)]
                cached.append((row, batch.counts[row], text, layers))
        return logits

    monkeypatch.setattr(ModelRunner, "decode_tokens", noted)
    drafter = EarlyExitDraft(1) if draft == "early exit" else near(target, 0.05)
    strategy = SpeculativeDecoding(drafter, num_draft_tokens=3, verification="coupled", layout=layout)
    torch.manual_seed(0)
    target.generate(**inputs, do_sample=True, max_new_tokens=21, custom_generate=strategy)
    assert 0 < strategy.report.accepted < strategy.report.drafted
    assert len({count for _, count, _, _ in cached}) > 5
    assert {row for row, *_ in cached} == {0, 1, 2}
    for _, count, text, cached_layers in cached:
        assert len(text) >= count
        with torch.no_grad():
            plain = target(text[None], use_cache=True).past_key_values
        for states, layer in zip(cached_layers, plain.layers, strict=True):
            torch.testing.assert_close(states, torch.cat([layer.keys[0], layer.values[0]], -1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("first", [0, 2])
def test_a_cache_that_is_handed_over_is_what_would_be_copied(first: int):
    """Of the same slots of all rows, with zeros where a row has ended; each layer is let go of."""
    ends, length, caches = [3, 20, 20], 20, []
    states = torch.randn(2, 3, 2, first + length + 1, 4, generator=torch.Generator().manual_seed(0))  # of two layers
    for shared in (slice(first, first + length), None):
        source = SlotCache(first + length + 1)
        for number, layer in enumerate(states):
            source.update(layer.clone(), layer + 1, number)
        rows = {row: source.read_row(row, torch.arange(first, first + length + 1)) for row in range(3)}
        caches.append(fill_returned_cache(DynamicCache(), source, rows, ends, length, shared, []))
        assert [layer.keys for layer in source.layers] == [None, None]
    for layer, copied in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.equal(layer.keys, copied.keys)
        assert torch.equal(layer.values, copied.values)
        assert layer.keys.untyped_storage().nbytes() > layer.keys.nbytes == copied.keys.untyped_storage().nbytes()
        assert layer.get_seq_length() == length
    assert not caches[0].layers[0].keys[0, :, 3:].any()


def test_layers_of_two_kinds_are_put_together():
    """One that keeps a window beside one that could be handed over."""
    states = torch.randn(3, 2, 2, 20, 4, generator=torch.Generator().manual_seed(0))  # of three layers
    source = SlotCache(20, ring=24, kinds=(SlotLayer, RingLayer, SlotLayer))
    for number, layer in enumerate(states):
        source.update(layer.clone(), layer + 1, number)
    rows = {row: source.read_row(row, torch.arange(20)) for row in range(2)}
    cache = fill_returned_cache(DynamicCache(), source, rows, [20, 20], 20, slice(20), [])
    for layer, written in zip(cache.layers, states, strict=True):
        assert torch.equal(layer.keys, written)
        assert torch.equal(layer.values, written + 1)
