"""The drafter of one call: a head is fed the target's states of accepted tokens, and candidates are drawn from it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_specx.common.batch import Batch
from hf_specx.common.devices import moved, sent, synchronize
from hf_specx.common.round import Draft, Round
from hf_specx.drafting.candidates import SampledCandidateGenerator
from hf_specx.drafting.drafter import DraftContext, no_candidates
from hf_specx.drafting.forward_times import ForwardSize
from hf_specx.models.compiled import ROOM
from hf_specx.models.prompts import HiddenStateTap

from .body import Body
from .layers import Places, read_by
from .misread import MisreadWatch
from .running import Layers


MOST_WAITING = 64  # columns of states that wait for candidates to be wanted; beyond, they are taken up in any case
AT_ONCE = 1024  # entries of a prompt that are taken up together, since the mask grows with them


class HeadDrafter(SampledCandidateGenerator):
    """Samples candidates from a head, as `SampledCandidateGenerator` does from a model.

    Entries of a row are in its slots from 0 on. States come with rounds and wait until candidates are wanted. What is
    written while drafting lies behind `held`, and is written over.

    Args:
        body: the head's layers.
        embedding, output: its own, or the target's; without an output the body gives scores.
        ids: [V_d], the target's ids of its tokens; None if they are the same.
        hidden_state_taps: where in the target it reads states.
        owner: the model that the layers are of, by which torch compiles them; None if it does not.
        mask: [H], what masks are embedded as, in place of the row of the mask token.

    Attributes:
        held, prompted: [B], entries of each row, and those of its prompt; `offset` [B, 1], their positions less slots.
        prompts: states [n, W] and positions of rows whose prompts are not taken up yet.
        unread: states [R, m, W] of the decoding rows, of which each has its own number.
        states, scores: [R, H] and [R, V_d] of each place that a candidate is drawn for; `number`, how many at most.
        state: [R, 1, H], what the next entry begins with; `ends` [R, 1], the slot behind each row's last true entry.
        sure: [R, 1], what the head itself says of each place; `least`, below which a row ends there.
    """

    source = "head"
    needs_hidden = True

    def __init__(
        self,
        body: Body,
        embedding: Any,
        output: Any = None,
        ids: torch.Tensor | None = None,
        hidden_state_taps: Sequence[HiddenStateTap] = (),
        owner: PreTrainedModel | None = None,
        mask: torch.Tensor | None = None,
    ):
        super().__init__(None)  # type: ignore[arg-type]
        self.body, self.embedding, self.output = body, embedding, output
        self.ids, self.hidden_state_taps, self.owner, self.mask = ids, hidden_state_taps, owner, mask
        weight = next(body.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.max_candidates = None if body.chained else body.most

    def start(self, context: DraftContext) -> None:
        """Take up the states of all prompts; they are read when candidates are wanted first, if ever."""
        rows = len(context.batch.counts)
        self.target, self.number = context.target, 1
        super().start(context)
        self.apart = self.apart or not self.body.chained  # a place has its candidate though those before are forced
        self.least = 0.0
        if self.body.config.confidence_head:  # which knows better than the candidate's own probability
            self.least, self.threshold = self.threshold, 0.0
        if self.ids is not None:
            nothing = torch.zeros(context.vocab_size, dtype=torch.bool, device="cpu")
            self.known = nothing.index_fill_(0, self.ids.cpu(), True)
        self.held, self.prompted = [0] * rows, [0] * rows
        self.prompts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.unread: torch.Tensor | None = None
        self.states, self.scores, self.sure = [list[torch.Tensor]() for _ in range(3)]
        self.every, self.watch = torch.arange(rows, device=self.device), MisreadWatch()
        self.admit(context.batch, context.batch.rows)

    def _make_runner(self, context: DraftContext) -> Any:
        room = self.target.width + min(self.target.prompt.longest, ROOM)
        return Layers(self.body, len(context.batch.rows), room, self.owner if context.compiled else None)

    def _ready(self, batch: Batch) -> Any:
        return self

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """Draft for every decoding row that has shown new states; see there."""
        most, fresh = self.body.most or max(lengths), self.fresh(batch)
        limits = [min(length, most) if new else 0 for length, new in zip(lengths, fresh, strict=True)]
        if any(limits):
            self.number, self.sure = self.runner.number(max(limits)), []
            return self._sure_part(super().propose(batch, limits))
        return no_candidates(batch)

    def _sure_part(self, draft: Draft) -> Draft:
        """The candidates of each row before the first that the head itself is not sure of; it was not looked at."""
        if not self.sure:
            return draft
        unsure = (torch.cat(self.sure, 1) < self.least).tolist()
        ends = [flags.index(True) if True in flags else draft.tokens.shape[1] for flags in unsure]
        return draft._replace(lengths=[min(pair) for pair in zip(draft.lengths, ends, strict=True)])

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """Note the states of new prompts but the last, which the next round gives."""
        self.watch.forget(rows)
        states, placed = self.target.prompt_hidden, self.target.prompt.kwargs.get("position_ids")
        assert states is not None
        if placed is not None and (placed.ndim < 3 or len(rows) < len(self.held)):
            placed = None  # only images have positions that do not follow from slots
        for row in rows:
            self.held[row] = self.prompted[row] = max(1, min(batch.prompt_lengths[row], states.shape[1])) - 1
        first = self.target.first_position
        first = batch.starts.new_zeros(len(self.held), 1) if first is None else first[-3] if first.ndim == 3 else first
        self.offset = first.to(self.device) - 1 - sent(self.prompted, self.device)[:, None]
        for index, row in enumerate(rows):
            known = self.prompted[row]
            own = torch.arange(known, device=self.device) + self.offset[row]
            if placed is not None:
                own = moved(placed[-3].expand(len(rows), -1)[index, -known - 1 : -1], self.device)
            self.prompts[row] = states[index, states.shape[1] - known - 1 : -1], own
        self.target.prompt_hidden = states[:, -1:].clone()  # all that is asked for from now on

    def fresh(self, batch: Batch) -> list[int]:
        """[R], how many states of each row wait."""
        return [self.prompted[row] + batch.counts[row] - self.held[row] for row in batch.rows]

    def observe(self, done: Round) -> None:
        """Note the states of what was kept, one for each emitted token, and let go of rows that have left."""
        self.watch.observe(done, self.source)
        batch, states = done.batch, done.forward.hidden[:, : max(done.emitted)]
        taken = [self.held[row] - self.prompted[row] for row in done.rows]
        starts = [before - number for before, number in zip(done.before, taken, strict=True)]
        if self.unread is not None and any(starts):
            index = sent(starts, states.device)[:, None] + torch.arange(states.shape[1], device=states.device)
            joined = nn.functional.pad(self.unread, (0, 0, 0, states.shape[1]))
            states = joined.scatter(1, index[..., None].expand(-1, -1, states.shape[2]), states)
        self.unread = states
        if done.stay is not None:
            self.prompts = {row: self.prompts[row] for row in batch.rows if row in self.prompts}
            self.unread = states.index_select(0, done.stay.to(states.device))
            self.runner.gather_rows(done.stay)
        if self.unread.shape[1] > MOST_WAITING and not done.finished:
            self._read_waiting(batch)

    def decode_step(self, batch: Batch, ahead: int, skipped: int = 0) -> torch.Tensor:
        """Logits [R, 1, V] after `ahead` candidates; for the `skipped` ones before these there were none."""
        for place in range(ahead - skipped, ahead + 1):
            if place == 0:
                self.begin(batch)
            tokens = batch.last(1, place) if place else self.last
            if place >= len(self.states):
                self._next(batch, place, tokens)
            scores = self._score(place, tokens)
        return self._in_vocabulary(scores).to(batch.ids.device)[:, None]

    def begin(self, batch: Batch) -> None:
        """Take up what waits, and have the states by which the first candidates are scored."""
        self._read_prompts(batch)
        assert self.unread is not None
        fresh, extra, device = self.fresh(batch), self.body.extra(self.number), self.device
        width = self.runner.width(max(fresh))
        held, new = sent([[self.held[row] for row in batch.rows], fresh], device)[..., None]
        step = torch.arange(width + extra, device=device)
        self.rows, self.ends = moved(batch.index, device), held + new
        newest = None if self.body.sees_ahead else (new - 1).clamp(min=0)
        states = moved(self.unread[:, :width], device, self.dtype)
        if states.shape[1] < width:
            states = nn.functional.pad(states, (0, 0, 0, width - states.shape[1]))
        self.last = batch.last(1)
        extent = max([self.held[row] for row in batch.rows]) + width + extra + 1
        slots = held + step
        if extra and min(fresh) < width:  # what fills up shorter rows goes to the last slot, where nobody looks
            own = torch.where(step < new, slots, extent - 1)
            slots = torch.where(step < width, own, slots - width + new)
        for row, count in zip(batch.rows, fresh, strict=True):
            self.held[row] += count
        self.unread, self.states, self.scores = None, [], []
        starts = batch.ends - sent(fresh, batch.ids.device)
        embedded = self._embedded(batch.ids, batch.index, starts, width, extra)
        block = extra if self.body.sees_ahead else 0
        self._note(self.runner("begin", self._at(slots, extent, block), embedded, states, newest, self.number))

    def _read_prompts(self, batch: Batch) -> None:
        """Take up prompts that wait."""
        order = [row for row in batch.rows if row in self.prompts]
        found, self.prompts = [self.prompts[row] for row in order], {}
        if not (width := max((len(states) for states, _ in found), default=0)):
            return
        states, positions = (pad_sequence(list(parts), batch_first=True) for parts in zip(*found, strict=True))
        rows, index = sent(order, batch.ids.device), sent([batch.rows.index(row) for row in order], self.device)
        starts = batch.width - sent([self.prompted[row] for row in order], batch.ids.device)
        slots = torch.arange(width, device=self.device).expand(len(order), -1)
        for first in range(0, width, AT_ONCE):
            last = min(first + AT_ONCE, width)
            embedded = self._embedded(batch.ids, rows, starts + first, last - first)
            part = moved(states[:, first:last], self.device, self.dtype)
            places = Places(slots[:, first:last], positions[:, first:last], last, rows=index)
            self.runner("read", places, embedded, part)

    def _read_waiting(self, batch: Batch) -> None:
        """Take up the states that wait but the last of each row, which its next candidates are drafted from."""
        assert self.unread is not None
        self._read_prompts(batch)
        fresh, device = self.fresh(batch), self.device
        before, earlier = [self.held[row] for row in batch.rows], [max(0, count - 1) for count in fresh]
        if width := max(earlier):  # else rows with more have left
            slots = sent(before, device)[:, None] + torch.arange(width, device=device)
            positions = slots + self.offset[moved(batch.index, device)]
            embedded = self._embedded(batch.ids, batch.index, batch.ends - sent(fresh, batch.ids.device), width)
            places = Places(slots, positions, max(before) + width, rows=self.every[: len(slots)])
            self.runner("read", places, embedded, moved(self.unread[:, :width], device, self.dtype))
        last = sent(earlier, self.unread.device)[:, None, None]
        self.unread = self.unread.gather(1, last.expand(-1, -1, self.unread.shape[2]))
        for row, count in zip(batch.rows, earlier, strict=True):
            self.held[row] += count

    def _next(self, batch: Batch, place: int, tokens: torch.Tensor) -> None:
        """Have the state behind the candidates [R, 1] before a place."""
        slots, extent = self.ends + (place - 1), max([self.held[row] for row in batch.rows]) + place
        self._note(self.runner("next", self._at(slots, extent), self.embed(tokens), self.state))

    def _at(self, slots: torch.Tensor, extent: int, block: int = 0) -> Places:
        """The places of entries of the decoding rows."""
        return Places(slots, slots + self.offset[self.rows], extent, block, self.every[: len(slots)])

    def tokens(self, ids: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, width: int) -> torch.Tensor:
        """[r, width] of the text, from columns [r] on: what stands behind the states of entries."""
        columns = starts[:, None] + torch.arange(width, device=ids.device)
        return ids[rows[:, None], columns.clamp(max=ids.shape[1] - 1)]

    def _embedded(
        self, ids: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, width: int, extra: int = 0
    ) -> Any:
        """Of entries: the tokens behind their states and masks; of a block the last token and masks alone."""
        block = self.body.sees_ahead
        if not self.body.has_keys or (block and not extra):
            return None
        tokens, masks = (self.last, extra - 1) if block else (self.tokens(ids, rows, starts, width), extra)
        return self.embed(tokens, masks)

    def embed(self, tokens: torch.Tensor, masks: int = 0) -> torch.Tensor:
        """[r, m + masks, H] of tokens [r, m] and masks behind them, by the head's own embeddings or the target's."""
        if masks and self.mask is None:
            tokens = nn.functional.pad(tokens, (0, masks), value=self.body.config.mask_token_id)
        embedded = moved(self.embedding(read_by(self.embedding, tokens)), self.device, self.dtype)
        if masks and self.mask is not None:  # a row of the table, which may scale its rows
            mask = self.mask * getattr(self.embedding, "embed_scale", 1.0)
            embedded = torch.cat([embedded, mask.expand(len(embedded), masks, -1)], 1)
        return embedded

    def _note(self, found: tuple[torch.Tensor, Any]) -> None:
        """Have the scores of states [R, n, H], and keep what the next entry begins with."""
        states, self.state = found
        self.states += states.unbind(1)
        self.scores += self.scored(states).unbind(1)

    def scored(self, states: torch.Tensor) -> torch.Tensor:
        """Scores [..., V_d] of normed states [..., H], by the head's own output or the target's."""
        if self.output is None:
            return states
        dtype = self.output.weight.dtype
        given = states.to(dtype) if dtype.is_floating_point else states  # quantised ones take those of any precision
        return moved(self.output(read_by(self.output, given)), self.device)

    def _score(self, place: int, tokens: torch.Tensor) -> torch.Tensor:
        """[R, V_d] for the candidate of a place, behind tokens [R, 1]."""
        before = self.embed(tokens) if self.body.embeds_tokens else moved(tokens, self.device)
        given = self.scores[place], self.states[place], before, self.state, self.least > 0
        score = partial(self.runner, "scored", None) if self.body.corrects else self.body.scored
        scores, self.state, sure = score(*given)
        self.sure += [] if sure is None else [sure]
        return scores

    def _in_vocabulary(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [R, V] by the target's ids; what the head does not know has none."""
        if self.ids is None:
            return scores
        return scores.new_full((len(scores), self.vocab_size or 0), -torch.inf).index_copy_(1, self.ids, scores)

    def misread_reason(self, batch: Batch) -> str:
        return self.watch.reason(self.body.config, batch)

    def cost(self, batch: Batch) -> Callable[[int], object] | None:
        return (lambda count: self.rehearse(batch)) if self.body.chained else None

    def rehearse(self, batch: Batch) -> None:
        """Run the step that finds one more candidate, after the prompts, and wait for it; nothing of it is kept."""
        tokens = batch.last(1).to(self.device)
        self.rows, self.ends = batch.index.to(self.device), tokens * 0 + max(self.held)
        self.state = torch.zeros(len(tokens), 1, self.body.config.hidden_size, device=self.device, dtype=self.dtype)
        self.states, self.scores = [], []
        self._next(batch, 1, tokens)
        self._in_vocabulary(self._score(0, tokens))
        synchronize(self.device)

    def size(self) -> ForwardSize | None:
        scored = self.output.parameters() if isinstance(self.output, nn.Module) else ()
        weights = [weight.numel() * weight.element_size() for weight in (*self.body.parameters(), *scored)]
        return ForwardSize(self.body.config.num_hidden_layers, sum(weights) / (self.body.most or 1))
