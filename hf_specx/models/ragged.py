"""The ragged layout: each token stays in the slot of its column, and a mask by position hides the rest."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation import utils

from hf_specx.common.architectures import WINDOW_IN_CACHE
from hf_specx.common.batch import Batch
from hf_specx.common.devices import to_device_async
from hf_specx.common.round import Round

from .attention import SLIDING, Mask, Masks, TreeAttention, grouped_queries
from .layers import RingLayer, SlotLayer
from .prompts import UNLIMITED, PreparedInputs, prepare
from .runner import ModelRunner, SharedKeys
from .slots import MARGIN, KeysValues, SlotCache, is_window, self_attention, with_slots


MIN_COPIED_COLUMNS = 32  # fewer are not worth a copy
MIN_SAVED_TOKENS = 1024  # for fewer a forward over the shared prefix alone is not worth its time
TOKEN_INPUTS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep"}  # what follows from the tokens alone
PREFILL_INPUTS = set(getattr(utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()))  # fed with prompts only


class RaggedRunner(ModelRunner):
    """Rows of unequal length side by side; the model must take positions and 4D masks as given.

    It caches prefixes: where a prompt begins with the same tokens as one whose keys are in the cache, these keys are
    copied, and only the rest is computed. What all prompts begin with is computed once, before them.

    Attributes:
        cached_prompts: [B, n] int64, the prompts whose keys are in the slots of each row, with -1 behind their ends;
            None where keys depend on more than tokens.
        donors: rows whose slots hold their prompts, so that later prompts may copy from them.
        cached_hidden: by row, the hidden states [l, H] of its prompt; empty unless they are wanted in a queue.
        prefix_hidden: [B, n, H], hidden states of what was copied; None if nothing was, or they are not wanted.
    """

    prefix_hidden: torch.Tensor | None = None

    def __init__(self, prompt: PreparedInputs, draft_vocab_size: int | None = None):
        super().__init__(prompt, draft_vocab_size)
        self.masks = Masks(self.model)
        limit, window = prompt.input_ids.shape[1] + prompt.max_new_tokens_now + MARGIN, self.masks.longest_window
        # the user's cache is filled with what its layers keep
        of_user = getattr(self.cache, "_is_user_defined", False)
        if of_user and not any(map(is_window, self_attention(self.cache).layers)):
            window = 0
        self.cache = with_slots(self.cache, self._slot_cache(limit, window and window + MARGIN))
        assert isinstance(self.cache, SlotCache)
        self.cached_prompts = self._prompts_of_tokens()
        self.cached_hidden: dict[int, torch.Tensor] = {}
        self.donors = set(range(len(prompt.input_ids)))

    def _slot_cache(self, limit: int, ring: int) -> SlotCache:
        """An empty cache; its layers with a sliding window are ring buffers of `ring` slots, unless that is 0."""
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
        if self.cached_prompts is not None and not (self.cache.get_seq_length() or self.prompt.synced_gpus):
            self._prefill_shared_prefix(self.cached_prompts)
        output = super().prefill()
        if self.prefix_hidden is not None and self.prompt_hidden is not None:
            self.prompt_hidden = torch.cat([self.prefix_hidden, self.prompt_hidden], 1)
        is_queue = self.prompt.max_new_tokens == UNLIMITED
        if is_queue and self.prompt.all_prompt_hidden and self.prompt_hidden is not None:
            self.cached_hidden = {row: self.prompt_hidden[row, pads:] for row, pads in enumerate(self.pad_counts)}
        return output

    def _prefill_shared_prefix(self, prompts: torch.Tensor) -> None:
        """Compute what all prompts [B, n] begin with, as a batch of one, if that saves enough tokens."""
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
        """A runner with the same model and a cache of its own, for other prompts, ids [R, L]."""
        prompt = prepare(self.model, UNLIMITED, {"input_ids": ids, "attention_mask": mask})
        prompt = replace(
            prompt,
            returns_hidden=self.prompt.returns_hidden,
            all_prompt_hidden=self.prompt.all_prompt_hidden,
            hidden_state_taps=self.prompt.hidden_state_taps,
            max_new_tokens_now=0,
        )
        prompt.generation_config.prefill_chunk_size = self.prompt.generation_config.prefill_chunk_size
        runner = RaggedRunner(prompt, self.draft_vocab_size)
        runner.cache = self._slot_cache(ids.shape[1], self.cache.slots.ring)
        return runner

    def copy_shared_prefix(self, other: "RaggedRunner", rows: list[int]) -> None:
        """Copy the keys of what these prompts share with `rows` [D] of another cache, at the beginning of both.

        All rows then go on from one column, the first that some row could not copy. The last token of each prompt is
        never copied, since its logits are wanted.
        """
        others = [index for index, row in enumerate(rows) if row not in other.donors]  # whose slots hold other text
        has_no_donor = other.cache.slots.has_lost or len(others) == len(rows)
        if self.cached_prompts is None or other.cached_prompts is None or has_no_donor:
            return
        width, lengths = self.cached_prompts.shape[1], (self.cached_prompts >= 0).sum(-1)
        donors = other.cached_prompts[to_device_async(rows, self.cached_prompts.device)]
        shared_with_rows = shared_prefix_lengths(self.cached_prompts, donors)  # [B, D]
        if others:
            index = to_device_async(others, self.cached_prompts.device, torch.int64)
            shared_with_rows = shared_with_rows.index_fill(1, index, -1)
        best = shared_with_rows.max(-1)
        shared = best.values.minimum(lengths - 1)
        prompt_lengths, shared_lengths, donor_indices = torch.stack([lengths, shared, best.indices]).tolist()
        num_to_compute = max(whole - part for whole, part in zip(prompt_lengths, shared_lengths, strict=True))
        num_copied = width - num_to_compute  # columns, pads of shorter prompts among them
        if num_copied < MIN_COPIED_COLUMNS:
            return
        donor_rows = [rows[index] for index in donor_indices]
        pads = to_device_async([width - length for length in prompt_lengths], self.device)[:, None]
        # [B, n], which token of its prompt each copied column has; in a pad any will do
        token_numbers = (torch.arange(num_copied, device=self.device) - pads).clamp(min=0)
        donor_pads = to_device_async([other.pad_counts[row] for row in donor_rows], self.device)[:, None]
        self.cache.write_from(other.cache, to_device_async(donor_indices, self.device), token_numbers + donor_pads)
        self.reused_tokens = sum(max(0, num_copied - width + length) for length in prompt_lengths)
        if self.hidden is not None and self.prompt.all_prompt_hidden:
            states = []
            for row, numbers in zip(donor_rows, token_numbers, strict=True):
                donor_states = other.cached_hidden[row]
                states.append(donor_states[numbers.to(donor_states.device)])
            self.prefix_hidden = torch.stack(states)

    def _forward(self, batch: Batch, tokens: torch.Tensor, ahead: int, logits_to_keep: int) -> torch.Tensor:
        count, counts = tokens.shape[1], [batch.counts[row] for row in batch.rows]
        emitted_index = batch.columns(ahead - count, count) - batch.width  # [R, q], 0 for a row's first emitted token
        first_missing = self._first_missing(batch, count - ahead)
        is_aligned = first_missing is None and len(set(counts)) == 1  # then all rows write the same slots
        if first_missing is not None:
            index = torch.arange(count, device=tokens.device).maximum(first_missing)
            emitted_index, tokens = emitted_index.gather(1, index), tokens.gather(1, index)
        slots = (self.width + emitted_index).to(self.device)
        kv_length = self.width + max(counts) + ahead
        self._set_write_slots(slots, kv_length, ahead, is_aligned)
        inputs = self._row_inputs(count) if self.per_row_inputs else {}
        tree = self._tree_attention(batch, count, ahead)
        if tree is not None:  # positions follow from depths
            depths = tree.node_depths[:, 1 + ahead - count :].to(emitted_index.device)
            emitted_index = batch.columns(-1, 1) - batch.width + depths
        positions = self._positions(batch, emitted_index)
        if positions is not None and "position_ids" in self.parameters:
            inputs["position_ids"] = positions.to(self.device)
        mask = self._mask(batch, slots, kv_length, is_aligned, tree)
        with contextlib.nullcontext() if mask is None else grouped_queries():
            return self._logits(tokens.to(self.device), logits_to_keep, attention_mask=mask, **inputs)

    def _first_missing(self, batch: Batch, num_emitted: int) -> torch.Tensor | None:
        """[R, 1], which of the last `num_emitted` emitted tokens is the first that a row lacks; None if all lack all.

        A row that lacks fewer is fed that one several times, and none before it: a sliding window may have lost what
        those attended to.
        """
        num_missing = self.num_missing_tokens(batch)
        if num_emitted <= 1 or num_emitted <= min(num_missing):
            return None
        num_present = [num_emitted - number for number in num_missing]
        return to_device_async(num_present, batch.ids.device)[:, None]

    def _set_write_slots(self, slots: torch.Tensor, kv_length: int, ahead: int, is_aligned: bool) -> None:
        """Have the forward write to `slots` [R, q], the last of `kv_length`; in rings behind a whole window."""
        count = slots.shape[1]
        ring = self.masks.longest_window + count + ahead
        if 0 < self.cache.slots.ring < ring:
            self._enlarge_rings(ring, slots[:, :1] - 1)
        self.cache.slots.set_write_slots(None if is_aligned else slots, kv_length - count, kv_length)

    def _tree_attention(self, batch: Batch, count: int, ahead: int) -> TreeAttention | None:
        """That of the last `count` nodes of a tree, where the first `ahead` candidates are fed; None in a chain."""
        if batch.tree is None or not ahead:
            return None
        root_slots = (batch.ends - 1 + self.width - batch.width)[:, None].to(self.device)
        node_depths = batch.tree.node_depths[:, : 1 + ahead]
        node_mask = batch.tree.node_mask[:, 1 + ahead - count : 1 + ahead, : 1 + ahead]
        return TreeAttention(root_slots, node_depths.to(self.device), node_mask.to(self.device))

    def shared_keys(self, batch: Batch, layers: dict[str, int]) -> SharedKeys:
        emitted_index, max_count = self._newest_computed(batch), max([batch.counts[row] for row in batch.rows])
        kv_length = self.width + max(0, max_count - 1)
        masks: Any = self._mask(batch, (self.width + emitted_index).to(self.device), kv_length, is_aligned=False)
        keys, rows = {}, len(batch.rows)
        for kind, number in layers.items():
            layer, slots = self.cache.layers[number], masks[kind].shape[-1]
            keys[kind] = layer.keys[:rows, :, :slots], layer.values[:rows, :, :slots]
        positions = self._positions(batch, emitted_index)
        assert positions is not None
        return SharedKeys(positions, masks, keys)

    def _enlarge_rings(self, ring: int, newest: torch.Tensor) -> None:
        """Give layers with a window ring buffers of `ring` slots; `newest` [R, 1] are the newest columns to keep."""
        for layer in self.cache.layers:
            if isinstance(layer, RingLayer) and layer.is_initialized:
                layer.enlarge(ring, newest)
        self.cache.slots.ring = ring

    def _mask(
        self,
        batch: Batch,
        slots: torch.Tensor,
        kv_length: int,
        is_aligned: bool,
        tree: TreeAttention | None = None,
    ) -> Mask | None:
        """The mask of queries at slots [R, q]; None if each row has one query that sees all `kv_length` slots.

        `is_aligned` says whether all rows have emitted equally many tokens.
        """
        pads = gaps = None
        if self.gaps is not None:
            gaps = nn.functional.pad(self.gaps[batch.index], (0, kv_length - self.width)).to(self.device)
        if gaps is not None or max([self.pad_counts[row] for row in batch.rows]):
            pads = self.pads[batch.index].to(self.device)
        elif is_aligned and slots.shape[1] == 1 and self.masks.only_causal and tree is None:
            return None
        return self.masks(slots, pads, kv_length, gaps, self.cache.slots.ring, tree)

    def _row_inputs(self, count: int) -> dict[str, Any]:
        """The per-row inputs of the forward beside tokens, mask and positions, as `generate` gives them."""
        names = self.per_row_inputs & self.parameters.keys() - PREFILL_INPUTS
        inputs = {name: value for name, value in self.kwargs.items() if name in names}
        return inputs | self._token_types(count)

    def observe(self, round_: Round) -> None:
        """Move what was accepted on branches to the slots of a chain, and then do as in other layouts."""
        moved = []
        of_rows = zip(round_.accepted_candidates, round_.emitted_before, strict=False)
        for index, (candidates, before) in enumerate(of_rows):
            end = self.width + before  # the slot of candidate 0
            for position, candidate in enumerate(candidates):
                if position != candidate:
                    moved.append((index, end + candidate, end + position))
        if moved and (self.prompt.returns_cache or not round_.finished):
            self.cache.move(*to_device_async(moved, self.device).unbind(1))
        super().observe(round_)

    def admit(self, batch: Batch, rows: list[int]) -> None:
        if batch.width > self.width:
            self.widen(batch.width - self.width)
        index = to_device_async(rows, batch.ids.device)
        width = max(batch.row_states[row].prompt_length for row in rows)
        ids = batch.ids[index, batch.width - width : batch.width]
        mask = torch.arange(batch.width - width, batch.width, device=index.device) >= batch.starts[index, None]
        refills = self._prefill_runner(ids, mask.long())
        refills.copy_shared_prefix(self, batch.rows)
        refills.prefill()
        self._note_prompts(refills, rows, index)
        self.prompt_hidden, self.prompt_logits = refills.prompt_hidden, refills.prompt_logits
        self.has_all_prompt_logits = rows == list(range(len(batch.counts)))
        self.cache.slots.limit = self.width + max(row_state.limit for row_state in batch.row_states) + MARGIN
        self.cache.write_rows(refills.cache, [batch.rows.index(row) for row in rows], self.width - width, self.width)
        self.pads = self.pads.index_copy(0, index, refills.pads + self.width - width)
        for row, pads in zip(rows, refills.pad_counts, strict=True):
            self.num_computed_tokens[row] = 0
            self.pad_counts[row] = pads + self.width - width
        if self.gaps is not None:
            self.gaps = self.gaps.index_fill(0, index, False)
        if self.first_position is not None and refills.first_position is not None:
            self.first_position = self.first_position.index_copy(-2, index, refills.first_position)

    def add_rows(self, batch: Batch, previous_indices: torch.Tensor) -> None:
        more = len(batch.counts) - len(self.pad_counts)
        if more:
            self.num_computed_tokens += [0] * more
            self.pad_counts += [0] * more
            self.pads = nn.functional.pad(self.pads, (0, more))
            if self.gaps is not None:
                self.gaps = nn.functional.pad(self.gaps, (0, 0, 0, more))
            if self.cached_prompts is not None:
                self.cached_prompts = nn.functional.pad(self.cached_prompts, (0, 0, 0, more), value=-1)
            if self.first_position is not None:
                self.first_position = nn.functional.pad(self.first_position, (0, 0, 0, more))
        self.gather_rows(previous_indices)  # rows that come have copies of another until their prompts are written

    def forget_prompts(self, rows: list[int]) -> None:
        self.donors.difference_update(rows)

    def _note_prompts(self, refills: "RaggedRunner", rows: list[int], index: torch.Tensor) -> None:
        """Note that the slots of `rows` now hold the prompts of another runner; `index` is the same as a tensor."""
        self.reused_tokens += refills.reused_tokens
        self.donors.update(rows)
        if refills.cached_hidden:
            self.cached_hidden |= {row: refills.cached_hidden[number] for number, row in enumerate(rows)}
        if self.cached_prompts is None or refills.cached_prompts is None:
            self.cached_prompts = None
            return
        width = max(self.cached_prompts.shape[1], refills.cached_prompts.shape[1])
        before = nn.functional.pad(self.cached_prompts, (0, width - self.cached_prompts.shape[1]), value=-1)
        new = nn.functional.pad(refills.cached_prompts, (0, width - refills.cached_prompts.shape[1]), value=-1)
        self.cached_prompts = before.index_copy(0, index, new)

    def widen(self, count: int) -> None:
        """Put `count` slots of pads before the prompts of all rows."""
        self._widen_cache(count)
        self.width += count
        self.pads = self.pads + count
        self.pad_counts = [number + count for number in self.pad_counts]
        if self.gaps is not None:
            self.gaps = nn.functional.pad(self.gaps, (count, 0))

    def _widen_cache(self, count: int) -> None:
        self.cache.widen(count)

    def row_keys_values(self, index: int, row: int) -> Iterator[KeysValues]:
        columns = self.width + self.num_computed_tokens[row]
        return self.cache.read_row(index, torch.arange(columns, device=self.device))

    def common_slots(self, length: int) -> slice | None:
        return slice(length)


def why_no_prefix_reuse(model: PreTrainedModel) -> str:
    """Why no keys are copied from other prompts with the same beginning; empty if they can be."""
    if model.config.model_type in WINDOW_IN_CACHE:
        return f"{type(model).__name__} reads prompts without its window"
    is_part = model.config.get_text_config(decoder=True) is not model.config
    return f"{type(model).__name__} reads more than tokens" if is_part else ""


def shared_prefix_lengths(texts: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """[R, D], how many leading tokens of texts [R, n] and others [D, m] are equal, fillers behind their ends too."""
    width = min(texts.shape[1], others.shape[1])
    equal = texts[:, None, :width] == others[None, :, :width]
    return nn.functional.pad(equal, (0, 1)).byte().argmin(-1)
