"""The ragged layout: each token stays in the slot of its column, and a mask by position hides the rest."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation import utils

from hf_specx.common.architectures import READS_WHOLE
from hf_specx.common.batch import Batch
from hf_specx.common.devices import sent

from .attention import SLIDING, Mask, Masks, grouped_queries
from .layers import RingLayer, SlotLayer
from .prompts import UNLIMITED, Prompt, prepare
from .runner import ModelRunner, SharedKeys
from .slots import MARGIN, KeysValues, SlotCache, is_window, self_attention, with_slots


LEAST = 32  # columns at the beginning of prompts that are worth a copy
PAYS = 1024  # tokens of prompts for which one more forward is worth its while
OF_TOKENS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep"}  # what follows from the tokens alone
DROPPED = set(getattr(utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()))  # fed with prompts only


class RaggedRunner(ModelRunner):
    """Rows of unequal length side by side; the model must take positions and 4D masks as given.

    Where a prompt begins like one whose keys are there, these are copied, and only the rest is read. Where all prompts
    begin alike, that is read before them, once.
    """

    begun: torch.Tensor | None = None  # [B, n, H], hidden states of what was copied

    def __init__(self, prompt: Prompt, known_ids: int | None = None):
        super().__init__(prompt, known_ids)
        self.masks = Masks(self.model)
        limit, window = prompt.input_ids.shape[1] + prompt.longest + MARGIN, self.masks.longest_window
        # the user's cache is filled with what its layers keep
        of_user = getattr(self.cache, "_is_user_defined", False)
        window = 0 if of_user and not any(map(is_window, self_attention(self.cache).layers)) else window
        self.cache = with_slots(self.cache, self._slot_cache(limit, window and window + MARGIN))
        assert isinstance(self.cache, SlotCache)
        self.texts = self._texts()
        self.text_states: dict[int, torch.Tensor] = {}  # [l, H] of each row, if they are read and prompts come later

    def _slot_cache(self, limit: int, ring: int) -> SlotCache:
        """An empty cache in which layers with a window keep that alone, and what a round may feed."""
        windows = self.masks.windows if ring else ()
        kinds = [RingLayer if kind in windows else SlotLayer for kind in self.masks.layers or [SLIDING]]
        return SlotCache(limit, ring, kinds)

    def _texts(self) -> torch.Tensor | None:
        """[B, n] int64, the prompts whose keys are in the slots of each row, with -1 behind their ends.

        None where keys follow from more than tokens.
        """
        ids, mask = self.prompt.input_ids, self.kwargs.get("attention_mask")
        alone = not why_read_anew(self.model) and self.kwargs.keys() <= OF_TOKENS and not self.cache.get_seq_length()
        if not alone or (mask is not None and mask.shape != ids.shape):
            return None
        if mask is None:
            return ids
        columns = torch.arange(ids.shape[1], device=ids.device) + mask.bool().int().argmax(-1, keepdim=True)
        return ids.gather(1, columns.clamp(max=ids.shape[1] - 1)).masked_fill(columns >= ids.shape[1], -1)

    def prefill(self) -> Any:
        if self.texts is not None and not (self.cache.get_seq_length() or self.prompt.in_step):
            self._read_beginning(self.texts)
        output = super().prefill()
        if self.begun is not None and self.prompt_hidden is not None:
            self.prompt_hidden = torch.cat([self.begun, self.prompt_hidden], 1)
        comes_later = self.prompt.max_new_tokens == UNLIMITED and self.prompt.hidden_of_all
        if comes_later and self.prompt_hidden is not None:
            self.text_states = {row: self.prompt_hidden[row, pads:] for row, pads in enumerate(self.padding)}
        return output

    def _read_beginning(self, texts: torch.Tensor) -> None:
        """Read what all prompts begin with, as a batch of one, if that pays."""
        rows, width = texts.shape
        if (rows - 1) * width < PAYS:
            return
        shortest = (texts >= 0).sum(-1).min()
        count = int(alike(texts, texts[:1]).min().minimum(shortest) * self._counted())
        if (rows - 1) * count >= PAYS:
            first = self._reader(texts[:1, :count], torch.ones_like(texts[:1, :count]))
            first.cache = SlotCache(count)  # windows would lose what is to be copied
            first.prefill()
            self.begin_like(first, [0])

    def _counted(self) -> torch.Tensor:
        """Whether the prompts have no gaps, and each token's position is the number of those before it."""
        mask, positions = self.kwargs.get("attention_mask"), self.kwargs.get("position_ids")
        known = torch.ones_like(self.prompt.input_ids).bool() if mask is None else mask.bool()
        whole = known.cummax(-1).values.eq(known).all()
        return whole if positions is None else whole & (positions.eq(known.cumsum(-1) - 1) | ~known).all()

    def _reader(self, ids: torch.Tensor, mask: torch.Tensor) -> "RaggedRunner":
        """What reads other prompts, ids [R, L], with the same model."""
        prompt = prepare(self.model, UNLIMITED, {"input_ids": ids, "attention_mask": mask})
        prompt.gives_hidden, prompt.places, prompt.longest = self.prompt.gives_hidden, self.prompt.places, 0
        prompt.hidden_of_all = self.prompt.hidden_of_all
        prompt.generation_config.prefill_chunk_size = self.prompt.generation_config.prefill_chunk_size
        reader = RaggedRunner(prompt, self.known_ids)
        reader.cache = self._slot_cache(ids.shape[1], self.cache.slots.ring)
        return reader

    def begin_like(self, other: "RaggedRunner", rows: list[int]) -> None:
        """Copy what the prompts begin with, but for their last tokens, from those of `rows` [D] in another's cache."""
        if self.texts is None or other.texts is None or other.cache.slots.has_lost:
            return
        width, lengths = self.texts.shape[1], (self.texts >= 0).sum(-1)
        found = alike(self.texts, other.texts[sent(rows, self.texts.device)]).max(-1)
        length, begin, source = torch.stack([lengths, found.values.minimum(lengths - 1), found.indices]).tolist()
        # rows are read from one column on, where they have pads before them also what they could have copied
        columns = width - max(all_ - known for all_, known in zip(length, begin, strict=True))
        if columns < LEAST:
            return
        donors = [rows[index] for index in source]
        tokens = torch.arange(columns, device=self.device) - sent([width - n for n in length], self.device)[:, None]
        tokens = tokens.clamp(min=0)  # [B, n], of their prompts; before these there are pads
        first = sent([other.padding[row] for row in donors], self.device)[:, None]
        self.cache.begin(other.cache, sent(source, self.device), tokens + first)
        self.copied = sum(max(0, columns - width + n) for n in length)
        if self.hidden is not None and self.prompt.hidden_of_all:
            states = (other.text_states[row] for row in donors)
            self.begun = torch.stack([x[each.to(x.device)] for x, each in zip(states, tokens, strict=True)])

    def _forward(self, batch: Batch, tokens: torch.Tensor, ahead: int, keep: int) -> torch.Tensor:
        count, counts = tokens.shape[1], [batch.counts[row] for row in batch.rows]
        emitted = batch.columns(ahead - count, count) - batch.width  # [R, q], those before each token
        longest, even = max(counts), len(set(counts)) == 1
        if 1 < count - ahead > min(missing := self.missing(batch)):  # a window may have lost what earlier tokens saw
            first = sent([count - ahead - number for number in missing], emitted.device)[:, None]
            again = torch.arange(count, device=emitted.device).maximum(first)  # the first that is missing
            emitted, tokens, even = emitted.gather(1, again), tokens.gather(1, again), False
        slots, extent = (self.width + emitted).to(self.device), self.width + longest + ahead
        if 0 < self.cache.slots.ring < (ring := self.masks.longest_window + count + ahead):
            self._enlarge(ring, slots[:, :1] - 1)
        self.cache.slots.aim(None if even else slots, extent - count, extent)
        given = self._others(count) if self.per_row else {}
        positions = self._positions(batch, emitted)
        if positions is not None and "position_ids" in self.parameters:
            given["position_ids"] = positions.to(self.device)
        mask = self._mask(batch, slots, extent, even)
        with contextlib.nullcontext() if mask is None else grouped_queries():
            return self._logits(tokens.to(self.device), keep, attention_mask=mask, **given)

    def shared_keys(self, batch: Batch, layers: dict[str, int]) -> SharedKeys:
        emitted, longest = self._newest(batch), max([batch.counts[row] for row in batch.rows])
        extent = self.width + max(0, longest - 1)
        masks: Any = self._mask(batch, (self.width + emitted).to(self.device), extent, even=False)
        keys = {}
        for kind, number in layers.items():
            layer, rows, slots = self.cache.layers[number], len(batch.rows), masks[kind].shape[-1]
            keys[kind] = layer.keys[:rows, :, :slots], layer.values[:rows, :, :slots]
        positions = self._positions(batch, emitted)
        assert positions is not None
        return SharedKeys(positions, masks, keys)

    def _enlarge(self, ring: int, newest: torch.Tensor) -> None:
        """Have rings of so many slots, where the newest columns that are needed have the numbers [R, 1]."""
        for layer in self.cache.layers:
            if isinstance(layer, RingLayer) and layer.is_initialized:
                layer.enlarge(ring, newest)
        self.cache.slots.ring = ring

    def _mask(self, batch: Batch, slots: torch.Tensor, extent: int, even: bool) -> Mask | None:
        """None if one token of each row sees all that the cache holds; `even` says whether rows are equally long."""
        pads = holes = None
        if self.holes is not None:
            holes = nn.functional.pad(self.holes[batch.index], (0, extent - self.width)).to(self.device)
        if holes is not None or max([self.padding[row] for row in batch.rows]):
            pads = self.pads[batch.index].to(self.device)
        elif even and slots.shape[1] == 1 and self.masks.only_causal:
            return None
        return self.masks(slots, pads, extent, holes, self.cache.slots.ring)

    def _others(self, count: int) -> dict[str, Any]:
        """What else the forward is given for each row, as `generate` gives it to the next tokens."""
        names = self.per_row & self.parameters.keys() - DROPPED
        given = {name: value for name, value in self.kwargs.items() if name in names}
        return given | self._token_types(count)

    def admit(self, batch: Batch, rows: list[int]) -> None:
        if batch.width > self.width:
            self.widen(batch.width - self.width)
        index = sent(rows, batch.ids.device)
        width = max(batch.table[row].prompt_length for row in rows)
        ids = batch.ids[index, batch.width - width : batch.width]
        mask = torch.arange(batch.width - width, batch.width, device=index.device) >= batch.starts[index, None]
        fresh = self._reader(ids, mask.long())
        fresh.begin_like(self, batch.rows)
        fresh.prefill()
        self._note_texts(fresh, rows, index)
        self.prompt_hidden = fresh.prompt_hidden
        self.opening, self.after_prompt = rows == list(range(len(batch.counts))), fresh.after_prompt
        self.cache.slots.limit = self.width + max(row.limit for row in batch.table) + MARGIN
        self.cache.take(fresh.cache, [batch.rows.index(row) for row in rows], self.width - width, self.width)
        self.pads = self.pads.index_copy(0, index, fresh.pads + self.width - width)
        for row, number in zip(rows, fresh.padding, strict=True):
            self.held[row], self.valid[row], self.padding[row] = 0, 0, number + self.width - width
        if self.holes is not None:
            self.holes = self.holes.index_fill(0, index, False)
        if self.first_position is not None and fresh.first_position is not None:
            self.first_position = self.first_position.index_copy(-2, index, fresh.first_position)

    def _note_texts(self, fresh: "RaggedRunner", rows: list[int], index: torch.Tensor) -> None:
        """Note the prompts that the slots of rows hold from now on."""
        self.copied += fresh.copied
        self.text_states |= {row: fresh.text_states[number] for number, row in enumerate(rows) if fresh.text_states}
        if self.texts is None or fresh.texts is None:
            self.texts = None
            return
        both = (self.texts, fresh.texts)
        width = max(texts.shape[1] for texts in both)
        held, new = (nn.functional.pad(x, (0, width - x.shape[1]), value=-1) for x in both)
        self.texts = held.index_copy(0, index, new)

    def widen(self, count: int) -> None:
        """Put `count` columns of pads before the prompts of all rows."""
        self._widen_cache(count)
        self.width += count
        self.pads = self.pads + count
        self.padding = [number + count for number in self.padding]
        if self.holes is not None:
            self.holes = nn.functional.pad(self.holes, (count, 0))

    def _widen_cache(self, count: int) -> None:
        self.cache.widen(count)

    def columns(self, index: int, row: int) -> Iterator[KeysValues]:
        return self.cache.row(index, torch.arange(self.width + self.held[row], device=self.device))

    def shared_slots(self, length: int) -> slice | None:
        return slice(length)


def why_read_anew(model: PreTrainedModel) -> str:
    """Why prompts that begin alike are read anew each; empty if one can have copies of another's keys."""
    if model.config.model_type in READS_WHOLE:
        return f"{type(model).__name__} reads prompts without its window"
    several = model.config.get_text_config(decoder=True) is not model.config
    return f"{type(model).__name__} reads more than tokens" if several else ""


def alike(texts: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """[R, D], with how many equal tokens texts [R, n] and others [D, m] begin; what lies behind their ends counts."""
    width = min(texts.shape[1], others.shape[1])
    equal = texts[:, None, :width] == others[None, :, :width]
    return nn.functional.pad(equal, (0, 1)).byte().argmin(-1)
