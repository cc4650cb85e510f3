"""What one call feeds a head: the target's states of accepted tokens, row by row, and candidates while it drafts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_specx.common.batch import Batch
from hf_specx.common.devices import sent, synchronize
from hf_specx.common.round import Draft, Round
from hf_specx.models.decoder import Decoder

from .layers import Slots


MOST_WAITING = 64  # columns of states that wait for candidates to be wanted; then they are taken up in any case
AT_ONCE = 1024  # entries of a prompt that are taken up together, since the mask grows with them


class Feed:
    """The rows of one call as a head sees them; a `decoder` of drafters.

    The entry in slot s of a row belongs to the state of its text's token `first` + s. States come with rounds and wait
    until candidates are wanted. What is written while drafting lies behind `held`, and is written over.

    Attributes:
        first, held: [B], of each row; `offset` [B, 1], by which an entry's position is more than its slot.
        prompts: states [n, W] and positions of rows whose prompts are not taken up yet.
        waiting: states [R, m, W] of the decoding rows, of which each has its own number.
        states: [r, m, W], of the entries that come now; `slots` knows where. `newest` [R, 1] is the last of a row's,
            and `last` [R, 1] the last token of its text.
        behind: ids, rows [r] and columns [r] where the tokens behind these states begin.
        kept: what the head keeps during a round.
        number: candidates that are wanted of the row with most; `threshold` for what the head itself says of them.
    """

    found: torch.Tensor
    width = 0  # of prompts in a cache: there is none

    def __init__(self, body: Any, embed: nn.Module, output: Any, ids: torch.Tensor | None):
        self.body, self.embedding, self.output, self.ids = body, embed, output, ids
        weight = next(body.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.slots, self.number, self.threshold = Slots(body.config), 1, 0.0
        self.kept: dict[str, torch.Tensor] = {}

    def start(self, batch: Batch, target: Decoder, vocab_size: int) -> None:
        """Begin a call, whose prompts a target has read."""
        rows = len(batch.counts)
        self.target, self.vocab_size = target, vocab_size
        self.first, self.held, self.known = [0] * rows, [0] * rows, [0] * rows
        self.prompts: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.waiting: torch.Tensor | None = None
        self.admit(batch, batch.rows)

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """Note the states of new prompts but the last, which the next round gives."""
        states, placed = self.target.prompt_hidden, self.target.prompt.kwargs.get("position_ids")
        assert states is not None
        if placed is not None and placed.ndim == 3 and len(rows) == len(self.held):  # as images have them
            placed = placed[-3].expand(len(rows), -1)
        else:
            placed = None
        for index, row in enumerate(rows):
            self.known[row] = known = min(batch.prompt_lengths[row], states.shape[1]) - 1
            self.first[row], self.held[row] = batch.prompt_lengths[row] - known - 1, known
            own = None if placed is None else placed[index, -known - 1 : -1]
            self.prompts[row] = states[index, states.shape[1] - known - 1 : -1], own
        self.target.prompt_hidden = states[:, -1:].clone()  # all that is asked for from now on
        first = self.target.first_position
        first = batch.starts.new_zeros(len(self.held), 1) if first is None else first[-3] if first.ndim == 3 else first
        self.offset = first.to(self.device) - 1 - sent(self.known, self.device)[:, None]

    def fresh(self, batch: Batch) -> list[int]:
        """[R], how many states of each row wait."""
        return self._since([batch.counts[row] for row in batch.rows], batch)

    def _since(self, counts: list[int], batch: Batch) -> list[int]:
        pairs = zip(batch.rows, counts, strict=True)
        return [batch.prompt_lengths[row] + count - 1 - self.first[row] - self.held[row] for row, count in pairs]

    def observe(self, done: Round) -> None:
        """Note the states of what was kept, one for each emitted token, and let go of rows that have left."""
        batch, states = done.batch, done.forward.hidden[:, : max(done.emitted)]
        starts = self._since(done.before, batch.until(list(batch.counts), done.rows))
        if self.waiting is not None and any(starts):
            index = sent(starts, states.device)[:, None] + torch.arange(states.shape[1], device=states.device)
            joined = nn.functional.pad(self.waiting, (0, 0, 0, states.shape[1]))
            states = joined.scatter(1, index[..., None].expand(-1, -1, states.shape[2]), states)
        self.waiting = states
        if done.stay is not None:
            self.prompts = {row: self.prompts[row] for row in batch.rows if row in self.prompts}
            self.waiting = states.index_select(0, done.stay.to(states.device))
            self.slots.select(done.stay)

    def step(self, batch: Batch, ahead: int, skipped: int = 0) -> torch.Tensor:
        """Logits [R, 1, V] after `ahead` candidates; for the `skipped` ones before these there were none."""
        for place in range(ahead - skipped, ahead + 1):
            if place == 0:
                self.begin(batch)
            tokens = batch.last(1, place).to(self.device) if place else self.last
            if place >= self.found.shape[1]:
                self._aim(batch, place)
                self.found = torch.cat([self.found, self.body.next(self, tokens)], 1)
            scores = self.body.score(self, self.found[:, place], place, tokens)
        return self._in_vocabulary(scores).to(batch.ids.device)[:, None]

    def begin(self, batch: Batch) -> None:
        """Take up what waits, and have the states by which the first candidates are scored."""
        self.read(batch)
        assert self.waiting is not None
        fresh, extra, device = self.fresh(batch), self.body.extra(self.number), self.device
        width = max(fresh)
        held, new = sent([[self.held[row] for row in batch.rows], fresh], device)[..., None]
        step = torch.arange(width + extra, device=device)
        self.rows, self.ends = batch.index.to(device), held + new
        if not self.body.sees_ahead:
            self.newest = (new - 1).clamp(min=0)
        self.states = self.waiting[:, :width].to(device, self.dtype)
        self.behind = batch.ids, batch.index, batch.ends - new[:, 0].to(batch.ids.device)
        self.last = batch.last(1).to(device)
        extent = max([self.held[row] for row in batch.rows]) + width + extra
        self.slots.reserve(len(batch.rows), extent + self.number, self.states)
        slots = held + step
        if extra and min(fresh) < width:  # what fills up shorter rows goes where nobody looks
            own = torch.where(step < new, slots, self.slots.capacity - 1)
            slots = torch.where(step < width, own, slots - width + new)
        self.slots.aim(slots, slots + self.offset[self.rows], extent, extra if self.body.sees_ahead else 0)
        for row, count in zip(batch.rows, fresh, strict=True):
            self.held[row] += count
        self.waiting = None
        self.found = self.body.begin(self, extra)

    def read(self, batch: Batch) -> None:
        """Take up prompts that wait."""
        order = [row for row in batch.rows if row in self.prompts]
        found, self.prompts = [self.prompts[row] for row in order], {}
        if not (width := max((len(states) for states, _ in found), default=0)):
            return
        rows, index = sent(order, batch.ids.device), sent([batch.rows.index(row) for row in order], self.device)
        states, positions = padded([states for states, _ in found]), padded([placed for _, placed in found])
        assert states is not None
        starts = batch.starts[rows] + sent([self.first[row] for row in order], batch.ids.device) + 1
        slots = torch.arange(width, device=self.device).expand(len(order), -1)
        positions = slots + self.offset[rows.to(self.device)] if positions is None else positions.to(self.device)
        self.slots.reserve(len(batch.rows), width, states.to(self.device, self.dtype))
        self.slots.rows = None if len(order) == len(batch.rows) else index
        for first in range(0, width, AT_ONCE):
            last = min(first + AT_ONCE, width)
            self.behind, self.states = (
                (batch.ids, rows, starts + first),
                states[:, first:last].to(self.device, self.dtype),
            )
            self.slots.aim(slots[:, first:last], positions[:, first:last], last)
            self.body.read(self)
        self.slots.rows = None

    def sure_part(self, draft: Draft) -> Draft:
        """The candidates of each row before the first that the head itself is not sure of; it was not looked at."""
        if not self.threshold:
            return draft
        unsure = (self.kept["sure"][:, : draft.tokens.shape[1]] < self.threshold).tolist()
        ends = [flags.index(True) if True in flags else len(flags) for flags in unsure]
        lengths = [min(pair) for pair in zip(draft.lengths, ends, strict=True)]
        return draft._replace(lengths=lengths)

    @property
    def tokens(self) -> torch.Tensor:
        """[r, m], what stands behind the states of the entries that come now."""
        ids, rows, starts = self.behind
        columns = starts[:, None] + torch.arange(self.states.shape[1], device=ids.device)
        return ids[rows[:, None], columns.clamp(max=ids.shape[1] - 1)].to(self.device)

    def catch_up(self, batch: Batch) -> None:
        """Take up what waits if it is much, though no candidates are wanted."""
        if self.waiting is not None and self.waiting.shape[1] > MOST_WAITING and min(self.fresh(batch)):
            self.begin(batch)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[r, m, H] of tokens [r, m], by the head's own embeddings or the target's."""
        return self.embedding(tokens).to(self.device, self.dtype)

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Scores [..., V_d] of normed states [..., H], by the head's own output or the target's."""
        weight = self.output.weight
        return self.output(states.to(weight.device, weight.dtype)).to(self.device)

    def _aim(self, batch: Batch, place: int) -> None:
        """The next entries are of the candidates before `place`."""
        slots = self.ends + (place - 1)
        extent = max([self.held[row] for row in batch.rows]) + place
        self.slots.reserve(len(batch.rows), extent, self.states)
        self.slots.aim(slots, slots + self.offset[self.rows], extent)

    def _in_vocabulary(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [R, V] by the target's ids; what the head does not know has none."""
        if self.ids is None:
            return scores
        return scores.new_full((len(scores), self.vocab_size), -torch.inf).index_copy_(1, self.ids, scores)

    def rehearse(self, batch: Batch, count: int) -> None:
        """Run the step that finds one more candidate, after the prompts; nothing of it is kept."""
        config = self.body.config
        tokens = batch.last(1).to(self.device)
        self.rows, self.ends = batch.index.to(self.device), tokens * 0 + max(self.held)
        self.states = torch.zeros(len(tokens), 1, config.hidden_size, device=self.device, dtype=self.dtype)
        self.kept["state"] = self.states
        self._aim(batch, 1)
        states = self.body.next(self, tokens)[:, 0]
        self._in_vocabulary(self.body.score(self, states, 1, tokens))
        synchronize(self.device)


def padded(rows: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """[r, m, ...] of tensors [m, ...], filled up at their ends; None if one is missing."""
    known = [row for row in rows if row is not None]
    return nn.utils.rnn.pad_sequence(known, batch_first=True) if len(known) == len(rows) else None
