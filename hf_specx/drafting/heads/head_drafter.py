"""The drafter of one call: a head is fed the target's states of accepted tokens, and candidates are drawn from it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_specx.common.batch import Batch
from hf_specx.common.devices import synchronize, to_device, to_device_async
from hf_specx.common.round import Draft, Round
from hf_specx.drafting.drafter import DraftContext, no_candidates
from hf_specx.drafting.forward_times import ForwardSize
from hf_specx.models.attention import TreeAttention
from hf_specx.models.compiled import ROOM
from hf_specx.models.prompts import HiddenStateTap

from .layers import SlotMapping, to_device_of
from .levels import Level, TreeDrafter
from .misread import MisreadWatch
from .network import HeadNetwork, StepOutput
from .runner import HeadRunner


MAX_PENDING = 64  # columns of states that wait for candidates to be wanted; beyond, they are appended in any case
PREFILL_CHUNK = 1024  # entries of a prompt that are appended together, since the mask grows with them


class HeadDrafter(TreeDrafter):
    """Samples candidates from a head, as `SampledCandidateGenerator` does from a model.

    The entries of a row are in its slots from 0 on. The target's states come with rounds, and are pending until
    candidates are wanted. What is written while drafting lies behind `num_computed_tokens`, and is written over.

    Args:
        network: the head's layers.
        embedding: the head's own, or the target's.
        output: the same; without one the network gives logits.
        ids: [V_d], the target's ids of the head's tokens; None if they are the same.
        hidden_state_taps: where in the target it reads states.
        owner: the model that the layers are of, by which torch compiles them; None if it does not.
        mask: [H], what masks are embedded as, in place of the row of the mask token.

    Attributes:
        num_computed_tokens: [B], entries of each row whose keys and values are computed.
        num_prompt_states: [B], those of its prompt.
        position_offset: [B, 1], positions less slots.
        pending_prompts: states [n, W] and positions [n] of rows whose prompts are not read yet.
        pending_states: [R, m, W] of the decoding rows, of which each has its own number.
        num_candidates: of this round, at most.
        draft_states, draft_logits: [R, H] and [R, V_d] of each candidate, before it is drawn.
        carried: the state that the network carries from one candidate to the next.
        end_slots: [R, 1], the slot behind each row's last context entry.
        confidences: [R, 1] of each candidate, by the head itself.
        confidence_threshold: below it a row ends; 0 is off.
    """

    source = "head"
    needs_hidden = True
    finds_own_number = False
    carried: torch.Tensor

    def __init__(
        self,
        network: HeadNetwork,
        embedding: Any,
        output: Any = None,
        ids: torch.Tensor | None = None,
        hidden_state_taps: Sequence[HiddenStateTap] = (),
        owner: PreTrainedModel | None = None,
        mask: torch.Tensor | None = None,
    ):
        super().__init__(None)  # type: ignore[arg-type]
        self.network, self.embedding, self.output = network, embedding, output
        self.ids, self.hidden_state_taps, self.owner, self.mask = ids, hidden_state_taps, owner, mask
        weight = next(network.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.max_candidates = network.max_candidates
        self.drafts_blocks = not network.autoregressive
        has_marginals = not network.autoregressive and not network.adjusts_logits
        if has_marginals:  # a candidate depends on none before it
            self.tree_kind = "full"

    def start(self, context: DraftContext) -> None:
        """Note the states of all prompts; they are read when candidates are wanted first, if ever."""
        num_rows = len(context.batch.counts)
        self.target = context.target
        self.num_candidates = 1
        super().start(context)
        self.grows_trees = self.network.grows_trees and self.runner.forwards is None
        # a candidate of a block is there though those before it are forced
        self.counts_forced = self.counts_forced or not self.network.autoregressive
        self.confidence_threshold = 0.0
        if self.network.config.confidence_head:  # which knows better than the candidate's own probability
            self.confidence_threshold = self.threshold
            self.threshold = 0.0
        if self.ids is not None:
            no_tokens = torch.zeros(context.vocab_size, dtype=torch.bool, device="cpu")
            self.draftable = no_tokens.index_fill_(0, self.ids.cpu(), True)
        self.num_computed_tokens = [0] * num_rows
        self.num_prompt_states = [0] * num_rows
        self.pending_prompts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.pending_states: torch.Tensor | None = None
        self.draft_states: list[torch.Tensor] = []
        self.draft_logits: list[torch.Tensor] = []
        self.confidences: list[torch.Tensor] = []
        self.row_numbers = torch.arange(num_rows, device=self.device)
        self.misread_watch = MisreadWatch(self.network.config)
        self.admit(context.batch, context.batch.rows)

    def _make_runner(self, context: DraftContext) -> Any:
        expected_slots = self.target.width + min(self.target.prompt.max_new_tokens_now, ROOM)
        owner = self.owner if context.compiled else None
        return HeadRunner(self.network, len(context.batch.rows), expected_slots, owner)

    def _ready(self, batch: Batch) -> Any:
        return self

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """Draft for every decoding row that has new states, as `SampledCandidateGenerator` does."""
        most = self.network.max_candidates or max(lengths)
        pending = self.num_pending_states(batch)
        limits = [min(length, most) if number else 0 for length, number in zip(lengths, pending, strict=True)]
        if not any(limits):
            return no_candidates(batch)
        self.num_candidates = self.runner.padded_candidates(max(limits))
        self.confidences = []
        return super().propose(batch, limits)

    def _confident_part(self, draft: Draft) -> Draft:
        """The candidates of each row before the first of which the head itself is not sure; it was not looked at."""
        if not self.confidences:
            return draft
        unsure = (torch.cat(self.confidences, 1) < self.confidence_threshold).tolist()
        ends = [flags.index(True) if True in flags else draft.tokens.shape[1] for flags in unsure]
        return draft._replace(lengths=[min(length, end) for length, end in zip(draft.lengths, ends, strict=True)])

    def add_rows(self, batch: Batch, previous_indices: torch.Tensor) -> None:
        more = len(batch.counts) - len(self.num_computed_tokens)
        self.num_computed_tokens += [0] * more
        self.num_prompt_states += [0] * more
        self.row_numbers = torch.arange(len(batch.counts), device=self.device)
        if self.pending_states is not None:
            self.pending_states = self.pending_states.index_select(0, previous_indices.to(self.pending_states.device))
        self.runner.gather_rows(previous_indices)

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """Note the states of new prompts but the last one of each, which the next round gives: see `observe`.

        Prompts end in the last column. Of one of three tokens a b c in a batch that is four wide:

            tokens     pad   a     b     c
            states     -     s_a   s_b   s_c
                             pending     behind c its first new token stands, and is not there yet
        """
        self.misread_watch.forget_rows(rows)
        states = self.target.prompt_hidden  # [r, m, W] of these rows
        assert states is not None
        for row in rows:
            num_states = max(1, min(batch.row_states[row].prompt_length, states.shape[1]))
            self.num_computed_tokens[row] = self.num_prompt_states[row] = num_states - 1
        self.position_offset = self._first_positions(batch) - 1 - self._on_device(self.num_prompt_states)
        image_positions = self._image_positions(len(rows))
        for index, row in enumerate(rows):
            number = self.num_prompt_states[row]
            if image_positions is None:
                positions = torch.arange(number, device=self.device) + self.position_offset[row]
            else:
                positions = to_device(before_last(image_positions[index], number), self.device)
            self.pending_prompts[row] = before_last(states[index], number), positions
        self.target.prompt_hidden = states[:, -1:].clone()  # all that is asked for from now on

    def _first_positions(self, batch: Batch) -> torch.Tensor:
        """[B, 1], the position of the first token behind each prompt; 0 where the target says none."""
        first = self.target.first_position
        if first is None:
            first = batch.starts.new_zeros(len(self.num_computed_tokens), 1)
        elif first.ndim == 3:  # of images, where text has one of three
            first = first[-3]
        return first.to(self.device)

    def _image_positions(self, num_prompts: int) -> torch.Tensor | None:
        """[r, L] of prompts with images, whose positions do not follow from slots; None for any other."""
        position_ids = self.target.prompt.kwargs.get("position_ids")
        is_refill = num_prompts < len(self.num_computed_tokens)  # whose requests are text
        if position_ids is None or position_ids.ndim < 3 or is_refill:
            return None
        return position_ids[-3].expand(num_prompts, -1)

    def _on_device(self, numbers: list[int]) -> torch.Tensor:
        """[n, 1] of numbers [n]."""
        return to_device_async(numbers, self.device)[:, None]

    def num_pending_states(self, batch: Batch) -> list[int]:
        """[R], how many states of each row are pending, those of prompts left out."""
        return [self.num_prompt_states[row] + batch.counts[row] - self.num_computed_tokens[row] for row in batch.rows]

    def observe(self, round_: Round) -> None:
        """Add the states of what was kept, one for each emitted token, and drop rows that have left."""
        self.misread_watch.observe(round_, self.source)
        batch = round_.batch
        states = round_.forward.hidden[:, : max(round_.emitted)]
        computed = [self.num_computed_tokens[row] - self.num_prompt_states[row] for row in round_.rows]
        starts = [before - number for before, number in zip(round_.emitted_before, computed, strict=True)]
        if self.pending_states is not None and any(starts):
            columns = torch.arange(states.shape[1], device=states.device)
            index = to_device_async(starts, states.device)[:, None] + columns
            padded = nn.functional.pad(self.pending_states, (0, 0, 0, states.shape[1]))
            states = padded.scatter(1, index[..., None].expand(-1, -1, states.shape[2]), states)
        self.pending_states = states
        if round_.keep_indices is not None:
            waiting = [row for row in batch.rows if row in self.pending_prompts]
            self.pending_prompts = {row: self.pending_prompts[row] for row in waiting}
            self.pending_states = states.index_select(0, round_.keep_indices.to(states.device))
            self.runner.gather_rows(round_.keep_indices)
        if self.pending_states.shape[1] > MAX_PENDING and not round_.finished:
            self._append_pending_states(batch)

    def decode_step(self, batch: Batch, ahead: int, num_unfed: int = 0) -> torch.Tensor:
        """Logits [R, 1, V] after `ahead` candidates; for the `num_unfed` ones before these there were none."""
        for index in range(ahead - num_unfed, ahead + 1):
            if index == 0:
                self.first_step(batch)
            previous = batch.last(1, index) if index else self.last_tokens
            if index >= len(self.draft_states):
                self._next_step(batch, index, previous)
            logits = self._candidate_logits(index, previous)
        return self._to_target_vocabulary(logits).to(batch.ids.device)[:, None]

    def first_step(self, batch: Batch) -> None:
        """Append the pending states, and have the states by which the first candidates are drawn.

        The entries of a row are its context entries, one for each pending state, and behind them draft entries. Rows
        with fewer context entries than the one with most, or than were compiled, have padding between the two.
        """
        self._prefill_prompts(batch)
        num_pending = self.num_pending_states(batch)
        num_computed = [self.num_computed_tokens[row] for row in batch.rows]
        width = self.runner.padded_width(max(num_pending))
        num_draft_entries = self.network.num_draft_entries(self.num_candidates)
        kv_length = max(num_computed) + width + num_draft_entries + 1  # the last slot is for padding
        first_slots, num_context_entries = to_device_async([num_computed, num_pending], self.device)[..., None]
        slots = first_slots + torch.arange(width + num_draft_entries, device=self.device)
        if num_draft_entries and min(num_pending) < width:  # else padding is behind all that a row sees
            slots = without_padding(slots, num_context_entries, width, unseen=kv_length - 1)
        self.row_index = to_device(batch.index, self.device)
        self.end_slots = first_slots + num_context_entries
        self.last_tokens = batch.last(1)
        starts = batch.ends - to_device_async(num_pending, batch.ids.device)
        embedded = self._embedded_entries(batch.ids, batch.index, starts, width, num_draft_entries)
        newest = None if self.network.drafts_block else (num_context_entries - 1).clamp(min=0)
        mapping = self._slot_mapping(slots, kv_length, num_draft_entries if self.network.drafts_block else 0)
        states = self._take_pending_states(width)
        for row, number in zip(batch.rows, num_pending, strict=True):
            self.num_computed_tokens[row] += number
        self.draft_states, self.draft_logits = [], []
        self._add_output(self.runner("first_step", mapping, embedded, states, newest, self.num_candidates))

    def _take_pending_states(self, width: int) -> torch.Tensor:
        """[R, width, W], the pending states, filled up with zeros; none are pending any more."""
        assert self.pending_states is not None
        states = to_device(self.pending_states[:, :width], self.device, self.dtype)
        self.pending_states = None
        missing = width - states.shape[1]
        return nn.functional.pad(states, (0, 0, 0, missing)) if missing else states

    def _prefill_prompts(self, batch: Batch) -> None:
        """Append the states of pending prompts."""
        order = [row for row in batch.rows if row in self.pending_prompts]
        prompts = [self.pending_prompts[row] for row in order]
        self.pending_prompts = {}
        width = max((len(states) for states, _ in prompts), default=0)
        if not width:
            return
        states, positions = (pad_sequence(list(parts), batch_first=True) for parts in zip(*prompts, strict=True))
        rows = to_device_async(order, batch.ids.device)
        cache_rows = to_device_async([batch.rows.index(row) for row in order], self.device)
        starts = batch.width - to_device_async([self.num_prompt_states[row] for row in order], batch.ids.device)
        slots = torch.arange(width, device=self.device).expand(len(order), -1)
        for first in range(0, width, PREFILL_CHUNK):
            end = min(first + PREFILL_CHUNK, width)
            embedded = self._embedded_entries(batch.ids, rows, starts + first, end - first)
            mapping = SlotMapping(slots[:, first:end], positions[:, first:end], end, rows=cache_rows)
            self.runner("append_context", mapping, embedded, to_device(states[:, first:end], self.device, self.dtype))

    def _append_pending_states(self, batch: Batch) -> None:
        """Append the pending states but the last of each row, which its next candidates are drafted from."""
        assert self.pending_states is not None
        self._prefill_prompts(batch)
        device = self.device
        pending = self.num_pending_states(batch)
        computed = [self.num_computed_tokens[row] for row in batch.rows]
        appended = [max(0, number - 1) for number in pending]
        width = max(appended)
        if width:  # else rows with more have left
            slots = self._on_device(computed) + torch.arange(width, device=device)
            positions = slots + self.position_offset[to_device(batch.index, device)]
            starts = batch.ends - to_device_async(pending, batch.ids.device)
            embedded = self._embedded_entries(batch.ids, batch.index, starts, width)
            mapping = SlotMapping(slots, positions, max(computed) + width, rows=self.row_numbers[: len(slots)])
            states = to_device(self.pending_states[:, :width], device, self.dtype)
            self.runner("append_context", mapping, embedded, states)
        last = to_device_async(appended, self.pending_states.device)[:, None, None]
        self.pending_states = self.pending_states.gather(1, last.expand(-1, -1, self.pending_states.shape[2]))
        for row, number in zip(batch.rows, appended, strict=True):
            self.num_computed_tokens[row] += number

    def _next_step(self, batch: Batch, index: int, previous: torch.Tensor) -> None:
        """Have the state of candidate `index`, behind the previous ones [R, 1]."""
        slots = self.end_slots + (index - 1)
        kv_length = max([self.num_computed_tokens[row] for row in batch.rows]) + index
        self._add_output(
            self.runner("next_step", self._slot_mapping(slots, kv_length), self.embed(previous), self.carried)
        )

    def level_logits(self, batch: Batch, tokens: torch.Tensor, level: Level) -> torch.Tensor:
        """As in `TreeDrafter`. Fed candidates have the slots behind the text, each seen by those that follow it."""
        if level.tree is None:
            self.first_step(batch)
            logits = self.draft_logits[0][:, None]
        else:
            tree, first, count = level.tree, level.first_slot, tokens.shape[1]
            node_depths, node_mask = (to_device(x, self.device) for x in (tree.node_depths, tree.node_mask))
            attention = TreeAttention(self.end_slots - 1, node_depths, node_mask[:, 1 + first :])
            slots = self.end_slots + torch.arange(first, first + count, device=self.device)
            positions = attention.node_positions(slots) + self.position_offset[self.row_index]
            kv_length = max([self.num_computed_tokens[row] for row in batch.rows]) + first + count
            mapping = SlotMapping(slots, positions, kv_length, 0, self.row_numbers[: len(slots)], attention)
            carried = self.carried.index_select(1, to_device(level.fed_parents, self.device))
            states, self.carried = self.runner("next_step", mapping, self.embed(tokens), carried)
            logits = self.compute_logits(states)
        return self._to_target_vocabulary(logits).to(batch.ids.device)

    def _slot_mapping(self, slots: torch.Tensor, kv_length: int, block_size: int = 0) -> SlotMapping:
        """That of entries of the decoding rows in these slots."""
        positions = slots + self.position_offset[self.row_index]
        return SlotMapping(slots, positions, kv_length, block_size, self.row_numbers[: len(slots)])

    def shifted_tokens(self, ids: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, width: int) -> torch.Tensor:
        """[r, width] of the text, from columns [r] on: the tokens behind those of the entries' states."""
        columns = starts[:, None] + torch.arange(width, device=ids.device)
        return ids[rows[:, None], columns.clamp(max=ids.shape[1] - 1)]

    def _embedded_entries(
        self, ids: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, width: int, num_draft_entries: int = 0
    ) -> Any:
        """Of entries: the tokens behind their states and masks; of a block the last token and masks alone."""
        if not self.network.has_attention:
            return None
        if not self.network.drafts_block:
            return self.embed(self.shifted_tokens(ids, rows, starts, width), num_draft_entries)
        return self.embed(self.last_tokens, num_draft_entries - 1) if num_draft_entries else None

    def embed(self, tokens: torch.Tensor, num_masks: int = 0) -> torch.Tensor:
        """[r, m + masks, H] of tokens [r, m] and masks behind them, by the head's own embeddings or the target's."""
        if num_masks and self.mask is None:
            tokens = nn.functional.pad(tokens, (0, num_masks), value=self.network.config.mask_token_id)
        embedded = to_device(self.embedding(to_device_of(self.embedding, tokens)), self.device, self.dtype)
        if num_masks and self.mask is not None:  # a row of the embedding matrix, which Gemma scales
            mask = self.mask * getattr(self.embedding, "embed_scale", 1.0)
            embedded = torch.cat([embedded, mask.expand(len(embedded), num_masks, -1)], 1)
        return embedded

    def _add_output(self, output: StepOutput) -> None:
        """Have the logits of the states [R, n, H] of a step, and note what it carries."""
        states, self.carried = output
        self.draft_states += states.unbind(1)
        self.draft_logits += self.compute_logits(states).unbind(1)

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [..., V_d] of normed states [..., H], by the head's own output or the target's."""
        if self.output is None:
            return states
        dtype = self.output.weight.dtype
        if dtype.is_floating_point:  # quantised ones take states of any precision
            states = states.to(dtype)
        return to_device(self.output(to_device_of(self.output, states)), self.device)

    def _candidate_logits(self, index: int, previous: torch.Tensor) -> torch.Tensor:
        """[R, V_d] of candidate `index`, behind the previous tokens [R, 1]."""
        network = self.network
        previous = self.embed(previous) if network.embeds_previous_token else to_device(previous, self.device)
        adjust = partial(self.runner, "adjust_logits", None) if network.adjusts_logits else network.adjust_logits
        logits, self.carried, confidence = adjust(
            self.draft_logits[index],
            self.draft_states[index],
            previous,
            self.carried,
            self.confidence_threshold > 0,
        )
        if confidence is not None:
            self.confidences.append(confidence)
        return logits

    def _to_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] by the target's ids; -inf for those that the head does not have."""
        if self.ids is None:
            return logits
        impossible = logits.new_full((*logits.shape[:-1], self.vocab_size or 0), -torch.inf)
        return impossible.index_copy_(-1, self.ids, logits)

    def misread_reason(self, batch: Batch) -> str:
        return self.misread_watch.reason()

    def cost(self, batch: Batch) -> Callable[[int], object] | None:
        return lambda count: self.dummy_run(batch)

    def dummy_run(self, batch: Batch) -> None:
        """Run the step that finds one more candidate, or a block, after the prompts; nothing of it is kept.

        Returns once the device has done it.
        """
        if self.drafts_blocks:
            self._dummy_block(batch)
        else:
            self._dummy_step(batch)
        synchronize(self.device)

    def _dummy_block(self, batch: Batch) -> None:
        """Draft a whole block behind one token after the prompts; its entries are written over by the first round."""
        before = self.num_computed_tokens, self.pending_states, self.pending_prompts
        batch.write(batch.last(1))
        self.num_computed_tokens = list(self.num_prompt_states)
        self.pending_states, self.pending_prompts = self.target.prompt_hidden, {}
        self.num_candidates = self.runner.padded_candidates(self.candidates_per_step)
        self.first_step(batch.view_at([1] * len(batch.counts)))
        for index in range(self.candidates_per_step):
            self._to_target_vocabulary(self._candidate_logits(index, self.last_tokens))
        self.num_computed_tokens, self.pending_states, self.pending_prompts = before

    def _dummy_step(self, batch: Batch) -> None:
        """Find one more candidate behind the prompts."""
        tokens = batch.last(1).to(self.device)
        self.row_index = batch.index.to(self.device)
        self.end_slots = tokens * 0 + max(self.num_computed_tokens)
        width = self.network.config.hidden_size
        self.carried = torch.zeros(len(tokens), 1, width, device=self.device, dtype=self.dtype)
        self.draft_states, self.draft_logits = [], []
        self._next_step(batch, 1, tokens)
        self._to_target_vocabulary(self._candidate_logits(0, tokens))

    def size(self) -> ForwardSize | None:
        output_weights = self.output.parameters() if isinstance(self.output, nn.Module) else ()
        sizes = [weight.numel() * weight.element_size() for weight in (*self.network.parameters(), *output_weights)]
        num_layers = self.network.config.num_hidden_layers
        if self.drafts_blocks:
            num_tokens = max(1, self.network.num_draft_entries(self.candidates_per_step))
            return ForwardSize(num_layers, sum(sizes), tokens_per_row=num_tokens)
        return ForwardSize(num_layers, sum(sizes) / (self.network.max_candidates or 1))  # a layer of its own for each


def before_last(values: torch.Tensor, number: int) -> torch.Tensor:
    """Of values [m, ...] so many in front of the last one."""
    last = len(values) - 1
    return values[last - number : last]


def without_padding(slots: torch.Tensor, num_context_entries: torch.Tensor, width: int, unseen: int) -> torch.Tensor:
    """The slots [R, width + d] of entries, such that draft entries are right behind the context entries of a row.

    Args:
        slots: [R, width + d], of `width` context entries and d draft entries of each row, one behind the other.
        num_context_entries: [R, 1], how many context entries each row has; those from there on are padding.
        width: of the row that has most, or more.
        unseen: the slot of the padding.
    """
    columns = torch.arange(slots.shape[1], device=slots.device)
    context_slots = torch.where(columns < num_context_entries, slots, unseen)
    draft_slots = slots - width + num_context_entries
    return torch.where(columns < width, context_slots, draft_slots)
