"""What a round moves outside attention: the bytes of key-value storage that operations read and write."""

import contextlib
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from tiny import VOCAB_SIZE, near, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

import hf_specx.models.ragged
from hf_specx import SpeculativeDecoding
from hf_specx.models.decoder import Decoder


ROWS, WIDTH, NEW_TOKENS, NUM_DRAFT_TOKENS = 4, 40, 31, 4
GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
HEADS = {"grouped": GROUPED, "one each": {"num_key_value_heads": 4}}
OF_SHAPE_ALONE = {"empty_like", "new_empty", "zeros_like", "new_zeros"}
PICKING = {"gather", "index", "index_select"}  # read what they return, not all that they are given


def size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Traffic(TorchDispatchMode):
    """Bytes that operations other than attention itself move from or to a cache's storage, or copies of what it holds.

    Views cost nothing. A copy, such as `repeat_kv` makes, counts as it is read and written, and when it is used again.
    """

    def __init__(self, cache: Cache):
        super().__init__()
        self.tracked: dict[int, torch.Tensor] = {}  # held, so that no address is given to another tensor
        self.operations: Counter[str] = Counter()
        for layer in cache.layers:
            self.track(layer.keys)
            self.track(layer.values)

    @property
    def total(self) -> int:
        return self.operations.total()

    def track(self, tensor: torch.Tensor) -> None:
        self.tracked[storage(tensor)] = tensor

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = operation(*args, **kwargs)
        name = operation.overloadpacket.__name__
        if not name.startswith("_scaled_dot_product"):
            self.operations[name] += self.moved(operation, name, args, kwargs, output)
        return output

    def moved(self, operation, name: str, args: tuple, kwargs: dict, output) -> int:
        named = dict(zip([a.name for a in operation._schema.arguments], args, strict=False)) | kwargs
        written = [named[a.name] for a in operation._schema.arguments if a.alias_info and a.alias_info.is_write]
        given = [t for t in tree_leaves(named) if isinstance(t, torch.Tensor)]
        read = [t for t in given if storage(t) in self.tracked and not any(t is w for w in written)]
        known = {storage(t) for t in given}
        new = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and storage(t) not in known]
        if not new and not written:
            return 0  # a view
        count = 0
        if name in OF_SHAPE_ALONE:
            return sum(map(size, new)) if read and "zeros" in name else 0
        for tensor in read:
            count += size((written or new)[0]) if name in PICKING else size(tensor)
        for tensor in written + new:
            if read or storage(tensor) in self.tracked:
                self.track(tensor)
                count += size(named["values"]) if name == "index_put_" else size(tensor)
        return count


@dataclass
class Forward:
    """One forward behind the prompt: what it moved, and bytes of keys and values to compare with."""

    traffic: Traffic
    fed: int  # tokens a row
    new: int  # bytes of these tokens
    seen: int  # bytes of all that attention saw


def of_tokens(cache: Cache, tokens: int) -> int:
    """Bytes of the keys and values of so many tokens of each row."""
    return sum(size(x[:, :, :1]) * tokens for layer in cache.layers for x in (layer.keys, layer.values))


@pytest.fixture
def decoder_forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PreTrainedModel, Forward]]:
    """Every forward of a target or draft behind its prompt, the rollback before it counted in."""
    found, feed = [], Decoder.feed

    def counted(self, batch, count, ahead, keep):
        new = of_tokens(self.cache, count)
        with Traffic(self.cache) as traffic:
            logits = feed(self, batch, count, ahead, keep)
        seen = of_tokens(self.cache, self.cache.slots.written)
        found.append((self.model, Forward(traffic, count, new, seen)))
        return logits

    monkeypatch.setattr(Decoder, "feed", counted)
    return found


def generated(target: PreTrainedModel, **settings) -> torch.Tensor:
    """Prompts of unequal length, long enough for buffers that need not grow in so few tokens."""
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(1, VOCAB_SIZE, (ROWS, WIDTH), generator=generator)
    mask = (torch.arange(WIDTH) >= torch.tensor([0, 17, 5, 33])[:, None]).long()
    inputs = {"input_ids": input_ids * mask, "attention_mask": mask}
    return target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, **settings)


def decoded(target: PreTrainedModel, found: list) -> list[Forward]:
    """Forwards of the target behind the prompt."""
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=NUM_DRAFT_TOKENS, layout="ragged")
    assert torch.equal(generated(target, custom_generate=strategy), generated(target))
    forwards = [forward for model, forward in found if model is target]
    assert 0 < len(forwards) < NEW_TOKENS - 1
    return forwards


@pytest.mark.parametrize("heads", HEADS)
def test_ragged_rows_move_the_new_tokens_alone(heads: str, decoder_forwards: list):
    target = tiny("llama", **HEADS[heads])
    decoded(target, decoder_forwards)
    assert len({model for model, _ in decoder_forwards}) == 2
    for _, forward in decoder_forwards:
        assert forward.traffic.total == forward.new, forward.traffic.operations


def test_without_the_remedy_every_forward_repeats_the_keys(decoder_forwards: list, monkeypatch: pytest.MonkeyPatch):
    """The counter sees `repeat_kv`: each key is read and written once for every head of its group of 4."""
    monkeypatch.setattr(hf_specx.models.ragged, "grouped_queries", contextlib.nullcontext)
    target = tiny("llama", **GROUPED)
    rounds = [forward for forward in decoded(target, decoder_forwards) if forward.fed > 1]
    assert rounds
    for forward in rounds:
        assert forward.traffic.operations["clone"] == 2 * 4 * forward.seen
