"""Slots: where tokens are written, growth, what moves and what does not, and the invariant of a round."""

from collections.abc import Iterator

import pytest
import torch
from tiny import near, prompts, tiny
from transformers import DynamicCache, EncoderDecoderCache, MistralConfig
from transformers.cache_utils import Cache

from hf_specx import EarlyExitDraft, SpeculativeDecoding
from hf_specx.models import slots
from hf_specx.models.choose import DECODERS
from hf_specx.models.decoder import Decoder
from hf_specx.models.slots import MARGIN, SlotCache, has_columns, select_rows, self_attention, with_slots


def states(rows: list[list[float]], heads: int = 1) -> torch.Tensor:
    """[R, heads, q, 2], the number of each token in every place."""
    return torch.tensor(rows, dtype=torch.float32)[:, None, :, None].expand(-1, heads, -1, 2).contiguous()


def written(cache: Cache, rows: list[list[float]], layer: int = 0) -> list[list[float]]:
    """Write keys (and their negatives as values); the keys that attention sees."""
    keys, values = cache.update(states(rows), -states(rows), layer)
    assert torch.equal(values, -keys)
    return keys[:, 0, :, 0].tolist()


def test_tokens_go_to_the_slots_of_their_rows_and_nothing_else_changes():
    cache = SlotCache()
    written(cache, [[1, 2, 3, 4], [5, 6, 7, 8]])
    cache.slots.aim(torch.tensor([[4, 5], [2, 3]]), start=4, extent=6)
    assert cache.get_mask_sizes(2, 0) == (6, 0)
    assert written(cache, [[10, 11], [12, 13]]) == [[1, 2, 3, 4, 10, 11], [5, 6, 12, 13, 0, 0]]


@pytest.mark.parametrize("limit", [0, 45, 400])
def test_growth_keeps_what_was_written_and_is_rare(limit: int, monkeypatch):
    monkeypatch.setattr(slots, "COPIED_BYTES", 0)
    cache, buffers = SlotCache(limit), []
    for start in range(0, 400, 5):
        cache.slots.aim(None, start, start + 5)
        seen = written(cache, [[float(n) for n in range(start, start + 5)]])
        assert seen == [list(range(start + 5))]
        if not buffers or buffers[-1] is not cache.layers[0].keys:
            buffers.append(cache.layers[0].keys)
    assert 1 < len(buffers) <= 7
    assert limit < 400 or buffers[-1].shape[2] == limit  # not doubled beyond what will be needed


def test_a_short_text_of_even_rows_is_copied_and_what_was_not_kept_of_it_is_lost():
    cache = SlotCache()
    written(cache, [[1, 2, 3], [4, 5, 6]])
    cache.slots.aim(None, 2, 3)
    assert written(cache, [[7], [8]]) == [[1, 2, 7], [4, 5, 8]]
    cache.slots.aim(torch.tensor([[3, 4], [2, 3]]), 2, 5)
    assert written(cache, [[9, 10], [11, 12]]) == [[1, 2, 7, 9, 10], [4, 5, 11, 12, 0]]
    cache.slots.aim(None, 2, 3)
    assert written(cache, [[13], [14]]) == [[1, 2, 13], [4, 5, 14]]
    assert cache.layers[0].keys.is_contiguous()


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
    inputs, settings = prompts(4), {"do_sample": False, "max_new_tokens": 31}
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=4, layout=layout)
    output = target.generate(**inputs, **settings, custom_generate=strategy)
    assert torch.equal(output, target.generate(**inputs, **settings))
    assert strategy.report.rounds < 30


def test_rolled_rows_end_together():
    cache = SlotCache()
    for layer in (0, 1):
        written(cache, [[1, 2, 3, 4], [5, 6, 7, 8], [0, 0, 9, 10]], layer)
    cache.roll(torch.tensor([[0, 1, 2], [1, 2, 3], [0, 1, 2]]))
    cache.slots.aim(None, 3, 4)
    for layer in (0, 1):
        assert written(cache, [[20], [21], [22]], layer) == [[1, 2, 3, 20], [6, 7, 8, 21], [0, 0, 9, 22]]


def test_rows_of_the_hosts_caches_leave_as_well():
    text, cross = DynamicCache(), DynamicCache()
    for cache in (text, cross):
        written(cache, [[1], [2], [3]])
    both = EncoderDecoderCache(text, cross)
    select_rows(both, torch.tensor([2, 0]))
    for cache in (text, cross):
        assert cache.layers[0].keys[:, 0, 0, 0].tolist() == [3, 1]
    mixed = with_slots(both)
    select_rows(mixed, torch.tensor([1]))
    assert self_attention(mixed).layers[0].keys[:, 0, 0, 0].tolist() == [1]
    assert cross.layers[0].keys[:, 0, 0, 0].tolist() == [1]


def test_a_cache_of_the_user_is_copied():
    past = DynamicCache()
    written(past, [[1, 2], [3, 4]], 0)
    written(past, [[5, 6], [7, 8]], 1)
    cache = with_slots(past, max_length=9)
    assert isinstance(cache, SlotCache)
    assert cache.get_seq_length() == 2
    assert cache.slots.limit == 9 + MARGIN
    assert written(cache, [[9], [9]], 1) == [[5, 6, 9], [7, 8, 9]]
    cache.slots.aim(None, 0, 1)
    written(cache, [[0], [0]])
    assert past.layers[0].keys[:, 0, :, 0].tolist() == [[1, 2], [3, 4]]


def test_a_cache_that_forgot_tokens_is_refused():
    past, empty_layer = DynamicCache(config=MistralConfig(sliding_window=4, num_hidden_layers=1)), DynamicCache()
    written(past, [[1, 2]])
    assert has_columns(past)
    written(past, [[float(n) for n in range(9)]])
    written(empty_layer, [[1, 2]])
    empty_layer.layers.append(type(empty_layer.layers[0])())
    for cache in (past, empty_layer):
        assert not has_columns(cache)
        with pytest.raises(ValueError, match="without the keys of all its tokens"):
            with_slots(cache)


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
@pytest.mark.parametrize(("layout", "draft"), [*((layout, "near") for layout in DECODERS), ("ragged", "early exit")])
def test_after_a_round_the_cache_holds_the_row_but_its_last_token(
    layout: str, draft: str, monkeypatch: pytest.MonkeyPatch
):
    """The keys of a plain forward over the row's text before its last token; float64. An early exit shares them."""
    target = tiny("llama").double()
    inputs, found = prompts(3), []
    feed = Decoder.feed

    def noted(self, batch, count, ahead, keep):
        logits = feed(self, batch, count, ahead, keep)
        if self.model is target:
            for place, row in enumerate(batch.rows):
                text, pads = batch.row(row)[:-1], self.width - batch.prompt_lengths[row]
                held = [keys[:, pads:][:, : len(text)].clone() for keys, _ in self.columns(place, row)]
                found.append((row, batch.counts[row], text, held))
        return logits

    monkeypatch.setattr(Decoder, "feed", noted)
    drafter = EarlyExitDraft(1) if draft == "early exit" else near(target, 0.05)
    strategy = SpeculativeDecoding(drafter, num_draft_tokens=3, verification="coupled", layout=layout)
    torch.manual_seed(0)
    target.generate(**inputs, do_sample=True, max_new_tokens=21, custom_generate=strategy)
    assert 0 < strategy.report.accepted < strategy.report.drafted
    assert len({count for _, count, _, _ in found}) > 5
    assert {row for row, *_ in found} == {0, 1, 2}
    for _, count, text, held in found:
        assert len(text) >= count
        with torch.no_grad():
            plain = target(text[None], use_cache=True).past_key_values
        for keys, layer in zip(held, plain.layers, strict=True):
            torch.testing.assert_close(keys, layer.keys[0], rtol=0, atol=1e-12)
