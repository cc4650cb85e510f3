"""The packed layout: the tokens of all rows lie in one row without pads, under a mask that keeps them apart.

The prompts come first, column by column, then a slot for each row and emitted token, so that the last tokens of all
rows always come last. Nothing is moved until a row leaves.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_specx.common.batch import Batch
from hf_specx.common.devices import sent
from hf_specx.common.errors import require
from hf_specx.common.wrappers import keeping_cache

from .attention import Masks, grouped_queries
from .prompts import Prompt
from .runner import ModelRunner, SharedKeys
from .slots import CACHE, MARGIN, KeysValues, SlotCache


PACKED_INPUTS = {"input_ids", "position_ids", "attention_mask", CACHE}


class PackedRunner(ModelRunner):
    """A batch of one that holds all rows; the model must take positions and masks as given."""

    lengths: list[int]  # tokens in the prompts of the R rows that are held
    row: torch.Tensor  # [n] int64, for each slot the index of its row
    before: torch.Tensor  # [n] int64, how many tokens of that row come before

    def __init__(self, prompt: Prompt, known_ids: int | None = None):
        super().__init__(prompt, known_ids)
        self.inputs = self._prompt_inputs()
        self.cache = SlotCache()
        self.masks = Masks(self.model)

    def _prompt_inputs(self) -> dict[str, Any]:
        """What `generate` would feed the model first; a `ValueError` if that is more than tokens and positions."""
        given, held = self.kwargs, self.cache.get_seq_length()
        _take(not held, f"starts empty, and {CACHE} holds {held} tokens")
        mask = given.get("attention_mask")
        gaps = mask is not None and bool((mask.bool().cummax(-1).values != mask.bool()).any())
        _take(not gaps, "takes rows without gaps, and attention_mask has zeros between tokens")
        size = self.prompt.generation_config.prefill_chunk_size
        _take(size is None, f"reads prompts at once, not prefill_chunk_size={size}")
        ids = self._known(self.prompt.input_ids)
        inputs: dict[str, Any] = keeping_cache(self.model).prepare_inputs_for_generation(
            ids, is_first_iteration=True, next_sequence_length=ids.shape[1], **{self.cache_name: self.cache}, **given
        )
        others = [name for name, value in inputs.items() if name not in PACKED_INPUTS and _has_tensors(value)]
        _take(not others, f"takes tokens and positions, and {''.join(others[:1])} was passed too")
        positions = inputs.get("position_ids")
        found = "no position_ids" if positions is None else f"position_ids of shape {tuple(positions.shape)}"
        takes = "position_ids" in self.parameters and positions is not None and positions.ndim == 2
        _take(takes, f"needs one position a token; {type(self.model).__name__} has {found}")
        return inputs

    def prefill(self) -> Any:
        """Read the prompts of all rows in one forward of their tokens alone; returns nothing but an empty output."""
        home, mask = self.prompt.input_ids.device, self.prompt.kwargs.get("attention_mask")
        ids = self.inputs["input_ids"].to(self.device)
        positions = self.inputs["position_ids"].to(self.device).expand(ids.shape)
        rows, self.width = ids.shape
        real = torch.ones_like(ids) if mask is None else mask.to(self.device).bool().long()
        column, self.row = real.T.nonzero().unbind(1)
        self.before = (real.cumsum(-1) - 1)[self.row, column]
        self._hold(real.sum(-1).tolist())
        self.pads = (self.width - real.sum(-1)).to(home)
        self.first_position = positions[:, -1:].to(home) + 1
        with self.hidden or contextlib.nullcontext():
            logits = self._fed(ids[self.row, column], positions[self.row, column], None, len(self.row), rows)
        if self.hidden is not None:
            states = self.hidden.last()[0]  # [N, H], column by column; of Gemma 4 with shared keys the last [R, H]
            self.prompt_hidden = states.new_zeros(rows, self.width, states.shape[1])
            self.prompt_hidden[self.row[-len(states) :], column[-len(states) :]] = states
        self.after_prompt = logits[:, None].to(home)
        self.inputs.clear()
        return CausalLMOutputWithPast()

    def _forward(self, batch: Batch, tokens: torch.Tensor, ahead: int, keep: int) -> torch.Tensor:
        rows, count = tokens.shape
        counts = [batch.counts[row] for row in batch.rows]
        emitted = batch.columns(ahead - count, count) - batch.width  # [R, q], those before each token
        positions = self._positions(batch, emitted)
        assert positions is not None
        start = sum(self.lengths)
        extent = start + (max(counts) + ahead) * rows
        self._foresee(extent)
        slots = start + emitted * rows + torch.arange(rows, device=tokens.device)[:, None]  # [R, q]
        tokens, positions, slots = (x.T.reshape(-1).to(self.device) for x in (tokens, positions, slots))
        even = len(set(counts)) == 1
        with grouped_queries():
            logits = self._fed(tokens, positions, None if even else slots, extent, keep * rows)
        return logits.view(keep, rows, -1).transpose(0, 1)

    def _last_hidden(self, keep: int) -> torch.Tensor | None:
        rows = len(self.lengths)
        states = super()._last_hidden(keep * rows)  # [1, keep * R, H], position by position
        return None if states is None else states.view(keep, rows, -1).transpose(0, 1)

    def _fed(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor | None, extent: int, keep: int
    ) -> torch.Tensor:
        """Logits [keep, V] after the last of tokens [N], written to slots [N] or the last of `extent` leading ones."""
        start = extent - len(tokens)
        self.cache.slots.aim(None if slots is None else slots[None], start, extent)
        row, before = self.row[:extent], self.before[:extent]
        own_row, own_before = (x[start:] if slots is None else x[slots] for x in (row, before))
        mask = self.masks.between(own_before[None, None, :, None], before, own_row[:, None] == row)
        return self._logits(tokens[None], keep, attention_mask=mask, position_ids=positions[None])[0]

    def shared_keys(self, batch: Batch, layers: dict[str, int]) -> SharedKeys:
        rows, emitted = len(batch.rows), self._newest(batch)
        extent = sum(self.lengths) + max(0, max([batch.counts[row] for row in batch.rows]) - 1) * rows
        index = torch.arange(rows, device=self.device)
        before = sent(self.lengths, self.device) + emitted[:, 0].to(self.device)  # [R], of the tokens of each row
        rows_of_keys = self.row[:extent] == index[:, None]
        masks: Any = self.masks.between(before[None, None, :, None], self.before[:extent], rows_of_keys)
        layer_of = {kind: self.cache.layers[number] for kind, number in layers.items()}
        keys = {kind: (layer.keys[:, :, :extent], layer.values[:, :, :extent]) for kind, layer in layer_of.items()}
        positions = self._positions(batch, emitted)
        assert positions is not None
        return SharedKeys(positions.T, masks, keys)

    def _foresee(self, extent: int) -> None:
        """Assign at least `extent` slots to rows."""
        if extent <= len(self.row):
            return
        start, rows = sum(self.lengths), len(self.lengths)
        emitted = torch.arange((len(self.row) - start) // rows, 2 * (extent - start) // rows, device=self.device)
        row = torch.arange(rows, device=self.device).repeat(len(emitted))
        before = torch.tensor(self.lengths, device=self.device)[row] + emitted.repeat_interleave(rows)
        self.row, self.before = torch.cat([self.row, row]), torch.cat([self.before, before])

    def drop_rows(self, stay: torch.Tensor) -> None:
        # [R], the index that a row gets
        index = torch.full((len(self.lengths),), -1, dtype=torch.int64, device=self.device)
        index[stay.to(self.device)] = torch.arange(len(stay), device=self.device)
        row = index[self.row[: self.cache.slots.extent]]
        kept = (row >= 0).nonzero()[:, 0]  # the slots of other rows are dropped
        self.cache.keep(kept)
        self.row, self.before = row[kept], self.before[kept]
        self._hold([self.lengths[n] for n in stay.tolist()])

    def columns(self, index: int, row: int) -> Iterator[KeysValues]:
        held = self.lengths[index] + self.held[row]
        slots = ((self.row == index) & (self.before < held)).nonzero()[:, 0]  # in the order of the text
        pads = self.width - self.lengths[index]
        return self.cache.row(0, torch.nn.functional.pad(slots, (pads, 0), value=-1))

    def _hold(self, lengths: list[int]) -> None:
        """Hold rows whose prompts have these lengths."""
        self.lengths = lengths
        self.cache.slots.limit = sum(lengths) + (self.prompt.max_new_tokens + MARGIN) * len(lengths)


def _take(ok: bool, told: str) -> None:
    """Raise a `ValueError` that says what this layout needs and was not given, unless it will do."""
    require(ok, f"layout='packed' {told}; use layout='ragged' or 'auto'.")


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    return isinstance(value, torch.Tensor) or (isinstance(value, tuple | list) and any(map(_has_tensors, value)))
