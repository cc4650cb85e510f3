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
from hf_specx.common.devices import to_device_async

from .attention import SLIDING, Mask, Masks, grouped_queries
from .layers import RingLayer, SlotLayer
from .prompts import UNLIMITED, Prompt, prepare
from .runner import ModelRunner, SharedKeys
from .slots import MARGIN, KeysValues, SlotCache, is_window, self_attention, with_slots


MIN_COPIED_COLUMNS = 32  # columns at the beginning of prompts that are worth a copy
MIN_SAVED_TOKENS = 1024  # tokens of prompts for which one more forward is worth its while
TOKEN_INPUTS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep"}  # what follows from the tokens alone
PREFILL_INPUTS = set(getattr(utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()))  # fed with prompts only


class RaggedRunner(ModelRunner):
    """Rows of unequal length side by side; the model must take positions and 4D masks as given.

    Where a prompt begins with the same tokens as another one whose keys are there, these are copied, and only the rest
    is read. What all prompts begin with is read before them, once.

    Attributes:
        cached_prompts: [B, n] int64, the prompts whose keys are in the slots of each row, with -1 behind their ends;
            None where keys follow from more than tokens.
        cached_hidden: [l, H], hidden states of each row's prompt, if they are read and prompts come later.
        prefix_hidden: [B, n, H], those of what was copied.
    """

    prefix_hidden: torch.Tensor | None = None

    def __init__(self, prompt: Prompt, draft_vocab_size: int | None = None):
        super().__init__(prompt, draft_vocab_size)
        self.masks = Masks(self.model)
        limit, window = prompt.input_ids.shape[1] + prompt.longest + MARGIN, self.masks.longest_window
        # the user's cache is filled with what its layers keep
        of_user = getattr(self.cache, "_is_user_defined", False)
        if of_user and not any(map(is_window, self_attention(self.cache).layers)):
            window = 0
        self.cache = with_slots(self.cache, self._slot_cache(limit, window and window + MARGIN))
        assert isinstance(self.cache, SlotCache)
        self.cached_prompts = self._prompts_of_tokens()
        self.cached_hidden: dict[int, torch.Tensor] = {}

    def _slot_cache(self, limit: int, ring: int) -> SlotCache:
        """An empty cache in which layers with a window keep that alone, and what a round may feed."""
        windows = self.masks.windows if ring else ()
        kinds = [RingLayer if kind in windows else SlotLayer for kind in self.masks.layers or [SLIDING]]
        return SlotCache(limit, ring, kinds)

    def _prompts_of_tokens(self) -> torch.Tensor | None:
        """[B, n] int64, the prompts of this call, with -1 behind their ends; None if they are more than tokens."""
        ids, mask = self.prompt.input_ids, self.kwargs.get("attention_mask")
        only_tokens = not why_no_prefix_reuse(self.model) and self.kwargs.keys() <= TOKEN_INPUTS
        if not only_tokens or self.cache.get_seq_length() or (mask is not None and mask.shape != ids.shape):
            return None
        if mask is None:
            return ids
        columns = torch.arange(ids.shape[1], device=ids.device) + mask.bool().int().argmax(-1, keepdim=True)
        return ids.gather(1, columns.clamp(max=ids.shape[1] - 1)).masked_fill(columns >= ids.shape[1], -1)

    def prefill(self) -> Any:
        if self.cached_prompts is not None and not (self.cache.get_seq_length() or self.prompt.in_step):
            self._prefill_shared_prefix(self.cached_prompts)
        output = super().prefill()
        if self.prefix_hidden is not None and self.prompt_hidden is not None:
            self.prompt_hidden = torch.cat([self.prefix_hidden, self.prompt_hidden], 1)
        comes_later = self.prompt.max_new_tokens == UNLIMITED and self.prompt.hidden_of_all
        if comes_later and self.prompt_hidden is not None:
            self.cached_hidden = {row: self.prompt_hidden[row, pads:] for row, pads in enumerate(self.pad_counts)}
        return output

    def _prefill_shared_prefix(self, prompts: torch.Tensor) -> None:
        """Read what all prompts [B, n] begin with, as a batch of one, if that pays."""
        rows, width = prompts.shape
        if (rows - 1) * width < MIN_SAVED_TOKENS:
            return
        shortest = (prompts >= 0).sum(-1).min()
        shared = shared_prefix_lengths(prompts, prompts[:1]).min().minimum(shortest)
        count = int(shared * self._is_plain_text())
        if (rows - 1) * count >= MIN_SAVED_TOKENS:
            first = self._prefill_runner(prompts[:1, :count], torch.ones_like(prompts[:1, :count]))
            first.cache = SlotCache(count)  # windows would lose what is to be copied
            first.prefill()
            self.copy_shared_prefix(first, [0])

    def _is_plain_text(self) -> torch.Tensor:
        """Whether the prompts have no gaps, and each token's position is the number of those before it."""
        mask, positions = self.kwargs.get("attention_mask"), self.kwargs.get("position_ids")
        is_token = torch.ones_like(self.prompt.input_ids).bool() if mask is None else mask.bool()
        has_no_gaps = is_token.cummax(-1).values.eq(is_token).all()
        if positions is None:
            return has_no_gaps
        return has_no_gaps & (positions.eq(is_token.cumsum(-1) - 1) | ~is_token).all()

    def _prefill_runner(self, ids: torch.Tensor, mask: torch.Tensor) -> "RaggedRunner":
        """A runner that reads other prompts, ids [R, L], with the same model."""
        prompt = prepare(self.model, UNLIMITED, {"input_ids": ids, "attention_mask": mask})
        prompt.gives_hidden, prompt.hidden_of_all = self.prompt.gives_hidden, self.prompt.hidden_of_all
        prompt.hidden_state_taps = self.prompt.hidden_state_taps
        prompt.longest = 0
        prompt.generation_config.prefill_chunk_size = self.prompt.generation_config.prefill_chunk_size
        runner = RaggedRunner(prompt, self.draft_vocab_size)
        runner.cache = self._slot_cache(ids.shape[1], self.cache.slots.ring)
        return runner

    def copy_shared_prefix(self, other: "RaggedRunner", rows: list[int]) -> None:
        """Copy what the prompts begin with, but for their last tokens, from those of `rows` [D] in another's cache."""
        if self.cached_prompts is None or other.cached_prompts is None or other.cache.slots.has_lost:
            return
        width, lengths = self.cached_prompts.shape[1], (self.cached_prompts >= 0).sum(-1)
        donors = other.cached_prompts[to_device_async(rows, self.cached_prompts.device)]
        longest = shared_prefix_lengths(self.cached_prompts, donors).max(-1)
        shared = longest.values.minimum(lengths - 1)
        length, reusable, source = torch.stack([lengths, shared, longest.indices]).tolist()
        # rows are read from one column on, where they have pads before them also what they could have copied
        columns = width - max(whole - part for whole, part in zip(length, reusable, strict=True))
        if columns < MIN_COPIED_COLUMNS:
            return
        donor_rows = [rows[index] for index in source]
        tokens = (
            torch.arange(columns, device=self.device)
            - to_device_async([width - n for n in length], self.device)[:, None]
        )
        tokens = tokens.clamp(min=0)  # [B, n], of their prompts; before these there are pads
        first = to_device_async([other.pad_counts[row] for row in donor_rows], self.device)[:, None]
        self.cache.write_from(other.cache, to_device_async(source, self.device), tokens + first)
        self.reused_tokens = sum(max(0, columns - width + n) for n in length)
        if self.hidden is not None and self.prompt.hidden_of_all:
            states = []
            for row, numbers in zip(donor_rows, tokens, strict=True):
                donor_states = other.cached_hidden[row]
                states.append(donor_states[numbers.to(donor_states.device)])
            self.prefix_hidden = torch.stack(states)

    def _forward(self, batch: Batch, tokens: torch.Tensor, ahead: int, keep: int) -> torch.Tensor:
        count, counts = tokens.shape[1], [batch.counts[row] for row in batch.rows]
        emitted = batch.columns(ahead - count, count) - batch.width  # [R, q], those before each token
        longest, even = max(counts), len(set(counts)) == 1
        missing = self.num_missing_tokens(batch)
        num_emitted = count - ahead  # of the tokens that are fed; the others are candidates
        if num_emitted > 1 and num_emitted > min(missing):  # a window may have lost what earlier tokens saw
            first = to_device_async([num_emitted - number for number in missing], emitted.device)[:, None]
            again = torch.arange(count, device=emitted.device).maximum(first)  # the first that is missing
            emitted, tokens, even = emitted.gather(1, again), tokens.gather(1, again), False
        slots, extent = (self.width + emitted).to(self.device), self.width + longest + ahead
        ring = self.masks.longest_window + count + ahead
        if 0 < self.cache.slots.ring < ring:
            self._enlarge_rings(ring, slots[:, :1] - 1)
        self.cache.slots.set_write_slots(None if even else slots, extent - count, extent)
        inputs = self._row_inputs(count) if self.per_row_inputs else {}
        positions = self._positions(batch, emitted)
        if positions is not None and "position_ids" in self.parameters:
            inputs["position_ids"] = positions.to(self.device)
        mask = self._mask(batch, slots, extent, even)
        with contextlib.nullcontext() if mask is None else grouped_queries():
            return self._logits(tokens.to(self.device), keep, attention_mask=mask, **inputs)

    def shared_keys(self, batch: Batch, layers: dict[str, int]) -> SharedKeys:
        emitted, longest = self._newest(batch), max([batch.counts[row] for row in batch.rows])
        extent = self.width + max(0, longest - 1)
        masks: Any = self._mask(batch, (self.width + emitted).to(self.device), extent, even=False)
        keys, rows = {}, len(batch.rows)
        for kind, number in layers.items():
            layer, slots = self.cache.layers[number], masks[kind].shape[-1]
            keys[kind] = layer.keys[:rows, :, :slots], layer.values[:rows, :, :slots]
        positions = self._positions(batch, emitted)
        assert positions is not None
        return SharedKeys(positions, masks, keys)

    def _enlarge_rings(self, ring: int, newest: torch.Tensor) -> None:
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
        if holes is not None or max([self.pad_counts[row] for row in batch.rows]):
            pads = self.pads[batch.index].to(self.device)
        elif even and slots.shape[1] == 1 and self.masks.only_causal:
            return None
        return self.masks(slots, pads, extent, holes, self.cache.slots.ring)

    def _row_inputs(self, count: int) -> dict[str, Any]:
        """What else the forward is given for each row, as `generate` gives it to the next tokens."""
        names = self.per_row_inputs & self.parameters.keys() - PREFILL_INPUTS
        inputs = {name: value for name, value in self.kwargs.items() if name in names}
        return inputs | self._token_types(count)

    def admit(self, batch: Batch, rows: list[int]) -> None:
        if batch.width > self.width:
            self.widen(batch.width - self.width)
        index = to_device_async(rows, batch.ids.device)
        width = max(batch.table[row].prompt_length for row in rows)
        ids = batch.ids[index, batch.width - width : batch.width]
        mask = torch.arange(batch.width - width, batch.width, device=index.device) >= batch.starts[index, None]
        fresh = self._prefill_runner(ids, mask.long())
        fresh.copy_shared_prefix(self, batch.rows)
        fresh.prefill()
        self._note_prompts(fresh, rows, index)
        self.prompt_hidden, self.prompt_logits = fresh.prompt_hidden, fresh.prompt_logits
        self.has_all_prompt_logits = rows == list(range(len(batch.counts)))
        self.cache.slots.limit = self.width + max(row.limit for row in batch.table) + MARGIN
        self.cache.write_rows(fresh.cache, [batch.rows.index(row) for row in rows], self.width - width, self.width)
        self.pads = self.pads.index_copy(0, index, fresh.pads + self.width - width)
        for row, pads in zip(rows, fresh.pad_counts, strict=True):
            self.num_computed_tokens[row] = 0
            self.pad_counts[row] = pads + self.width - width
        if self.holes is not None:
            self.holes = self.holes.index_fill(0, index, False)
        if self.first_position is not None and fresh.first_position is not None:
            self.first_position = self.first_position.index_copy(-2, index, fresh.first_position)

    def seat_rows(self, batch: Batch, before: torch.Tensor) -> None:
        more = len(batch.counts) - len(self.pad_counts)
        if more:
            self.num_computed_tokens += [0] * more
            self.pad_counts += [0] * more
            self.pads = nn.functional.pad(self.pads, (0, more))
            if self.holes is not None:
                self.holes = nn.functional.pad(self.holes, (0, 0, 0, more))
            if self.cached_prompts is not None:
                self.cached_prompts = nn.functional.pad(self.cached_prompts, (0, 0, 0, more), value=-1)
            if self.first_position is not None:
                self.first_position = nn.functional.pad(self.first_position, (0, 0, 0, more))
        self.drop_rows(before)  # those that come have copies of another row, until their prompts are written

    def _note_prompts(self, fresh: "RaggedRunner", rows: list[int], index: torch.Tensor) -> None:
        """Note the prompts that the slots of rows hold from now on."""
        self.reused_tokens += fresh.reused_tokens
        if fresh.cached_hidden:
            self.cached_hidden |= {row: fresh.cached_hidden[number] for number, row in enumerate(rows)}
        if self.cached_prompts is None or fresh.cached_prompts is None:
            self.cached_prompts = None
            return
        width = max(self.cached_prompts.shape[1], fresh.cached_prompts.shape[1])
        before = nn.functional.pad(self.cached_prompts, (0, width - self.cached_prompts.shape[1]), value=-1)
        new = nn.functional.pad(fresh.cached_prompts, (0, width - fresh.cached_prompts.shape[1]), value=-1)
        self.cached_prompts = before.index_copy(0, index, new)

    def widen(self, count: int) -> None:
        """Put `count` columns of pads before the prompts of all rows."""
        self._widen_cache(count)
        self.width += count
        self.pads = self.pads + count
        self.pad_counts = [number + count for number in self.pad_counts]
        if self.holes is not None:
            self.holes = nn.functional.pad(self.holes, (count, 0))

    def _widen_cache(self, count: int) -> None:
        self.cache.widen(count)

    def row_columns(self, index: int, row: int) -> Iterator[KeysValues]:
        columns = self.width + self.num_computed_tokens[row]
        return self.cache.read_row(index, torch.arange(columns, device=self.device))

    def common_slots(self, length: int) -> slice | None:
        return slice(length)


def why_no_prefix_reuse(model: PreTrainedModel) -> str:
    """Why each prompt is read anew, also what others begin with; empty if keys of others can be copied."""
    if model.config.model_type in READS_WHOLE:
        return f"{type(model).__name__} reads prompts without its window"
    is_part = model.config.get_text_config(decoder=True) is not model.config
    return f"{type(model).__name__} reads more than tokens" if is_part else ""


def shared_prefix_lengths(texts: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """[R, D], with how many equal tokens texts [R, n] and others [D, m] begin; what lies behind their ends counts."""
    width = min(texts.shape[1], others.shape[1])
    equal = texts[:, None, :width] == others[None, :, :width]
    return nn.functional.pad(equal, (0, 1)).byte().argmin(-1)
