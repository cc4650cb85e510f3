"""Slots, growth and the invariant of the ragged cache."""

import torch
from tiny import near, prompts, tiny

from hf_specx import SpeculativeDecoding
from hf_specx.cache import RaggedCache
from hf_specx.layouts import RaggedDecoder


def test_tokens_are_written_at_their_positions_and_pads_nowhere_visible():
    cache = RaggedCache(1)
    states = torch.arange(1.0, 7.0).reshape(2, 1, 3, 1)  # [B, H, q, D]
    cache.aim(torch.tensor([[0, 1, 2], [-1, 0, 1]]), extent=3, start=None)
    keys, _ = cache.update(states, states, 0)
    assert keys[0, 0, :, 0].tolist() == [1, 2, 3]
    assert keys[1, 0, :, 0].tolist() == [5, 6, 0]


def test_growth_keeps_what_was_written():
    cache = RaggedCache(1)
    for start in range(0, 40, 5):
        states = torch.arange(start, start + 5.0).reshape(1, 1, 5, 1)
        cache.aim(torch.arange(start, start + 5)[None], extent=start + 5, start=start)
        keys, values = cache.update(states, -states, 0)
    assert keys.flatten().tolist() == list(range(40))
    assert values.flatten().tolist() == [-float(i) for i in range(40)]


def test_rows_that_leave_take_their_slots_along():
    cache = RaggedCache(1)
    states = torch.arange(3.0).reshape(3, 1, 1, 1)
    cache.aim(torch.zeros(3, 1, dtype=torch.int64), extent=1, start=0)
    cache.update(states, states, 0)
    cache.select(torch.tensor([2, 0]))
    assert cache.layers[0].keys[:, 0, 0, 0].tolist() == [2, 0]


def test_after_a_round_the_cache_holds_the_row_but_its_last_token(monkeypatch):
    """When a row leaves, its keys are those of a plain forward over its text but the last token; float64."""
    target = tiny("llama").double()
    select, left = RaggedDecoder.select, []

    def noted(self, places):
        if self.model is target and places is not None and not left:
            rows = sorted(set(range(3)) - set(places.tolist()))
            left.append((rows, self.cache.layers[0].keys.clone()))
        select(self, places)

    monkeypatch.setattr(RaggedDecoder, "select", noted)
    inputs = prompts(3)
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=3, verification="coupled")
    output = target.generate(**inputs, do_sample=True, max_new_tokens=21, custom_generate=strategy)
    (rows, held), *_ = left
    assert rows
    for row in rows:
        text = output[row][inputs["attention_mask"][row].argmax() :][:-1]
        plain = target(text[None], use_cache=True).past_key_values.layers[0].keys[0]
        torch.testing.assert_close(held[row, :, : len(text)], plain.detach(), rtol=0, atol=1e-12)
