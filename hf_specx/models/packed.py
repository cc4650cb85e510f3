"""The packed layout: the tokens of all rows lie in one row without pads; a mask hides other rows from each token.

The prompts come first, column by column, then a slot for each row and emitted token, so that the last tokens of all
rows always come last. Nothing is moved until a row leaves.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_specx.common.batch import Batch
from hf_specx.common.devices import to_device_async
from hf_specx.common.errors import require
from hf_specx.common.wrappers import without_cache_reset

from .attention import Masks, grouped_queries
from .prompts import PreparedInputs
from .runner import ModelRunner, SharedKeys
from .slots import CACHE, MARGIN, KeysValues, SlotCache


PACKED_INPUTS = {"input_ids", "position_ids", "attention_mask", CACHE}


class PackedRunner(ModelRunner):
    """A batch of one that holds all rows; the model must take positions and masks as given.

    Attributes:
        lengths: [R], tokens in the prompts of the decoding rows.
        row_of_slot: [n] int64, for each slot the index of its row.
        number_in_row: [n] int64, for each slot how many tokens of its row come before.
    """

    lengths: list[int]
    row_of_slot: torch.Tensor
    number_in_row: torch.Tensor

    def __init__(self, prompt: PreparedInputs, draft_vocab_size: int | None = None):
        super().__init__(prompt, draft_vocab_size)
        self.inputs = self._prompt_inputs()
        self.cache = SlotCache()
        self.masks = Masks(self.model)

    def _prompt_inputs(self) -> dict[str, Any]:
        """What `generate` would feed the model first; raises ValueError if that is more than tokens and positions."""
        kwargs, cached = self.kwargs, self.cache.get_seq_length()
        _require(not cached, f"starts empty, and {CACHE} holds {cached} tokens")
        mask = kwargs.get("attention_mask")
        has_gaps = mask is not None and bool((mask.bool().cummax(-1).values != mask.bool()).any())
        _require(not has_gaps, "takes rows without gaps, and attention_mask has zeros between tokens")
        size = self.prompt.generation_config.prefill_chunk_size
        _require(size is None, f"reads prompts at once, not prefill_chunk_size={size}")
        ids = self._clamp_ids(self.prompt.input_ids)
        inputs: dict[str, Any] = without_cache_reset(self.model).prepare_inputs_for_generation(
            ids, is_first_iteration=True, next_sequence_length=ids.shape[1], **{self.cache_name: self.cache}, **kwargs
        )
        others = [name for name, value in inputs.items() if name not in PACKED_INPUTS and _has_tensors(value)]
        _require(not others, f"takes tokens and positions, and {''.join(others[:1])} was passed too")
        positions = inputs.get("position_ids")
        _require(
            "position_ids" in self.parameters and positions is not None and positions.ndim == 2,
            f"needs one position a token; {type(self.model).__name__} has "
            + ("no position_ids" if positions is None else f"position_ids of shape {tuple(positions.shape)}"),
        )
        return inputs

    def prefill(self) -> Any:
        """Compute the prompts of all rows in one forward of their tokens alone; returns an empty output."""
        home, mask = self.prompt.input_ids.device, self.prompt.kwargs.get("attention_mask")
        ids = self.inputs["input_ids"].to(self.device)
        positions = self.inputs["position_ids"].to(self.device).expand(ids.shape)
        rows, self.width = ids.shape
        is_token = torch.ones_like(ids) if mask is None else mask.to(self.device).bool().long()
        column, self.row_of_slot = is_token.T.nonzero().unbind(1)
        self.number_in_row = (is_token.cumsum(-1) - 1)[self.row_of_slot, column]
        self._set_lengths(is_token.sum(-1).tolist())
        self.pads = (self.width - is_token.sum(-1)).to(home)
        self.first_position = positions[:, -1:].to(home) + 1
        row, total = self.row_of_slot, len(self.row_of_slot)
        with self.hidden or contextlib.nullcontext():
            logits = self._feed(ids[row, column], positions[row, column], None, total, rows)
        if self.hidden is not None:
            states = self.hidden.last()[0]  # [N, H], column by column; of Gemma 4 with shared keys the last [R, H]
            self.prompt_hidden = states.new_zeros(rows, self.width, states.shape[1])
            self.prompt_hidden[row[-len(states) :], column[-len(states) :]] = states
        self.prompt_logits = logits[:, None].to(home)
        self.inputs.clear()
        return CausalLMOutputWithPast()

    def _forward(self, batch: Batch, tokens: torch.Tensor, ahead: int, logits_to_keep: int) -> torch.Tensor:
        rows, count = tokens.shape
        counts = [batch.counts[row] for row in batch.rows]
        emitted_index = batch.columns(ahead - count, count) - batch.width  # [R, q], 0 for a row's first emitted token
        positions = self._positions(batch, emitted_index)
        assert positions is not None
        start = sum(self.lengths)
        kv_length = start + (max(counts) + ahead) * rows
        self._assign_slots(kv_length)
        slots = start + emitted_index * rows + torch.arange(rows, device=tokens.device)[:, None]  # [R, q]
        tokens, positions, slots = (x.T.reshape(-1).to(self.device) for x in (tokens, positions, slots))
        is_aligned = len(set(counts)) == 1
        with grouped_queries():
            logits = self._feed(tokens, positions, None if is_aligned else slots, kv_length, logits_to_keep * rows)
        return logits.view(logits_to_keep, rows, -1).transpose(0, 1)

    def _last_hidden(self, logits_to_keep: int) -> torch.Tensor | None:
        rows = len(self.lengths)
        states = super()._last_hidden(logits_to_keep * rows)  # [1, logits_to_keep * R, H], position by position
        return None if states is None else states.view(logits_to_keep, rows, -1).transpose(0, 1)

    def _feed(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor | None,
        kv_length: int,
        logits_to_keep: int,
    ) -> torch.Tensor:
        """The last logits of tokens [N], which are written to `slots` [N], or to the last of `kv_length` slots."""
        start = kv_length - len(tokens)
        self.cache.slots.set_write_slots(None if slots is None else slots[None], start, kv_length)
        key_rows, key_numbers = self.row_of_slot[:kv_length], self.number_in_row[:kv_length]
        written = slice(start, None) if slots is None else slots
        query_rows, query_numbers = key_rows[written], key_numbers[written]
        mask = self.masks.between(query_numbers[None, None, :, None], key_numbers, query_rows[:, None] == key_rows)
        return self._logits(tokens[None], logits_to_keep, attention_mask=mask, position_ids=positions[None])[0]

    def shared_keys(self, batch: Batch, layers: dict[str, int]) -> SharedKeys:
        rows, emitted_index = len(batch.rows), self._newest_computed(batch)
        longest = max([batch.counts[row] for row in batch.rows])
        kv_length = sum(self.lengths) + max(0, longest - 1) * rows
        index = torch.arange(rows, device=self.device)
        numbers = to_device_async(self.lengths, self.device) + emitted_index[:, 0].to(self.device)  # [R]
        is_of_row = self.row_of_slot[:kv_length] == index[:, None]
        masks: Any = self.masks.between(numbers[None, None, :, None], self.number_in_row[:kv_length], is_of_row)
        keys = {}
        for kind, number in layers.items():
            layer = self.cache.layers[number]
            keys[kind] = layer.keys[:, :, :kv_length], layer.values[:, :, :kv_length]
        positions = self._positions(batch, emitted_index)
        assert positions is not None
        return SharedKeys(positions.T, masks, keys)

    def _assign_slots(self, kv_length: int) -> None:
        """Assign at least `kv_length` slots to rows."""
        assigned = len(self.row_of_slot)
        if kv_length <= assigned:
            return
        start, rows = sum(self.lengths), len(self.lengths)
        emitted_index = torch.arange((assigned - start) // rows, 2 * (kv_length - start) // rows, device=self.device)
        row = torch.arange(rows, device=self.device).repeat(len(emitted_index))
        numbers = torch.tensor(self.lengths, device=self.device)[row] + emitted_index.repeat_interleave(rows)
        self.row_of_slot = torch.cat([self.row_of_slot, row])
        self.number_in_row = torch.cat([self.number_in_row, numbers])

    def gather_rows(self, keep_indices: torch.Tensor) -> None:
        # [R], the index that a row gets
        index = torch.full((len(self.lengths),), -1, dtype=torch.int64, device=self.device)
        index[keep_indices.to(self.device)] = torch.arange(len(keep_indices), device=self.device)
        row = index[self.row_of_slot[: self.cache.slots.kv_length]]
        slots = (row >= 0).nonzero()[:, 0]  # those of other rows are dropped
        self.cache.gather_slots(slots)
        self.row_of_slot, self.number_in_row = row[slots], self.number_in_row[slots]
        self._set_lengths([self.lengths[n] for n in keep_indices.tolist()])

    def row_keys_values(self, index: int, row: int) -> Iterator[KeysValues]:
        length = self.lengths[index] + self.num_computed_tokens[row]
        is_text = (self.row_of_slot == index) & (self.number_in_row < length)
        slots = is_text.nonzero()[:, 0]  # in the order of the text
        pads = self.width - self.lengths[index]
        return self.cache.read_row(0, torch.nn.functional.pad(slots, (pads, 0), value=-1))

    def _set_lengths(self, lengths: list[int]) -> None:
        """Note how long the prompts of the decoding rows are, and how many slots these rows may need."""
        self.lengths = lengths
        self.cache.slots.limit = sum(lengths) + (self.prompt.max_new_tokens + MARGIN) * len(lengths)


def _require(ok: bool, need: str) -> None:
    """Raise ValueError, which says what this layout needs and was not given, unless it is `ok`."""
    require(ok, f"layout='packed' {need}; use layout='ragged' or 'auto'.")


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    return isinstance(value, torch.Tensor) or (isinstance(value, tuple | list) and any(map(_has_tensors, value)))
