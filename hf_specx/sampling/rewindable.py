"""Processors whose state follows the candidates of a round and is then taken back to what was kept.

Such a processor says which tokens may come next, as a grammar does. So it also acts on the draft, whose candidates are
then drawn from the masked distribution; each mask is computed once, and serves the verdict as well.
"""

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import torch
from transformers.generation.logits_process import LogitsProcessor, PrefixConstrainedLogitsProcessor

from hf_specx.common.batch import Batch
from hf_specx.common.devices import moved
from hf_specx.common.errors import require
from hf_specx.common.round import Draft

from .grammars import MAKERS, PrefixFunction
from .processors import Processor, RoundProcessor
from .stopping import Stopping


@runtime_checkable
class RewindableProcessor(Protocol):
    """A logits processor with a state for each row, which can be taken back token by token.

    Plain `generate` calls it as any other; here these methods are called instead. Its result must be the scores with
    -inf at every token that the mask does not have. An attribute `max_rollback` says how many tokens it can take back,
    if that is limited. After a call it has been shown the emitted text without each row's last token, as after plain
    `generate`, also where an exception has ended it; so each call needs a new one.
    """

    def accept(self, row: int, token: int) -> None:
        """Show it the next token of a row, 0 to B - 1 as in the whole batch; prompts are not shown.

        It may be one that the mask does not have: a later processor can bring it back, and a draft can propose it. An
        attribute `strict = True` says that such tokens are refused; then none is shown before it is in the text.
        """

    def rollback(self, row: int, count: int) -> None:
        """Take back the last `count` tokens of a row."""

    def mask(self, rows: list[int]) -> torch.Tensor:
        """[len(rows), V] bool: the tokens that may come next in these rows."""


@dataclass
class Followed:
    """What the processor of a row was shown: a `path` of emitted tokens, the first `sure` ones of them for good, and
    then of candidates; and `masks` [V] bool, by the number of tokens before.
    """

    path: list[int] = field(default_factory=list)
    sure: int = 0
    masks: dict[int, torch.Tensor] = field(default_factory=dict)

    def excludes(self, depth: int, token: int) -> bool:
        """Also where no mask was asked for: a row that drafts no further has any token there."""
        mask = self.masks.get(depth)
        return mask is None or token >= len(mask) or not mask[token]


class TokenMasks(RoundProcessor):
    """The tokens that a rewindable processor allows after each candidate of each row; nothing is asked after `ends`.

    Nothing is taken back before it must be: a state that is ahead of the text is still right if its tokens come.
    Where a processor was made for this call, `of_call`, nobody sees where it ends.
    """

    def __init__(
        self, processor: RewindableProcessor, vocab_size: int, ends: set[int] | None = None, of_call: bool = False
    ):
        self.processor, self.name = processor, type(processor).__name__
        self.vocab_size, self.ends, self.of_call = vocab_size, ends or set(), of_call
        self.strict = getattr(processor, "strict", False)
        self.max_rollback = getattr(processor, "max_rollback", self.max_rollback)
        self.barred = getattr(processor, "barred", self.barred)
        self.insists = getattr(processor, "insists", False)
        self.followed: dict[int, Followed] = {}
        self.moving = False  # while the processor is shown tokens, or they are taken back

    def __call__(self, batch: Batch, draft: Draft | None, scores: torch.Tensor, ahead: int) -> torch.Tensor:
        """Where a row has no candidates, and after one that ends it or is not shown, scores are left alone."""
        positions = scores.shape[1]
        wanted = [positions] * len(batch.rows) if draft is None else [1 + length for length in draft.lengths]
        masks = self.after(batch, ahead, wanted)
        every = torch.ones(self.vocab_size, dtype=torch.bool, device="cpu")
        cells = [row[i] if i < len(row) else every for row in masks for i in range(positions)]
        excluded = moved(torch.stack(cells), scores.device).logical_not_().view(scores.shape)
        found = scores.masked_fill(excluded, -torch.inf)
        if self.insists:
            nothing = found.amax(-1, keepdim=True).isneginf()
            found = torch.where(nothing, torch.zeros_like(found).masked_fill_(excluded, -torch.inf), found)
        return found

    def allowed(self, batch: Batch, ahead: int, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        return [masks[0] if masks else None for masks in self.after(batch, ahead, [int(x) for x in wanted])]

    def after(self, batch: Batch, ahead: int, wanted: Sequence[int]) -> list[list[torch.Tensor]]:
        """Masks [V] at consecutive positions of each row, the first after `ahead` candidates.

        Args:
            wanted: [R], how many. A row has fewer where a candidate before ends it, or is one that a strict processor
                excludes, or where its text has no room.
        """
        candidates = batch.candidates(ahead + max(wanted) - 1)
        found: list[list[torch.Tensor]] = [[] for _ in wanted]
        for row in batch.rows:
            self._follow(batch, row, batch.counts[row])
        for position in range(max(wanted)):
            here = {}  # by row: its index, and how many tokens it has
            for index, row in enumerate(batch.rows):
                depth = batch.counts[row] + ahead + position
                is_wanted = len(found[index]) == position < wanted[index] and depth < batch.limits[row]
                if is_wanted and self._try(row, batch.counts[row], candidates[index][: ahead + position]):
                    here[row] = index, depth
            missing = {row: depth for row, (_, depth) in here.items() if depth not in self.followed[row].masks}
            for row, depth in missing.items():
                self._rewind(row, depth)
            if missing:
                masks = self.processor.mask(list(missing)).to("cpu", copy=True)  # its memory may be reused
                for (row, depth), mask in zip(missing.items(), masks, strict=True):
                    self.followed[row].masks[depth] = mask
            for row, (index, depth) in here.items():
                found[index].append(self.followed[row].masks[depth])
        return found

    def _follow(self, batch: Batch, row: int, count: int) -> None:
        """Show the first `count` emitted tokens of a row, of which masks before their end are not needed again."""
        own = self.followed.setdefault(row, Followed())
        for number in range(min(own.sure, count), count):  # a text may have been cut
            self._show(row, number, batch.emitted[row][number])
        if own.sure != count:
            own.sure, own.masks = count, {depth: mask for depth, mask in own.masks.items() if depth >= count}

    def _try(self, row: int, count: int, candidates: Sequence[int]) -> bool:
        """Show candidates after `count` emitted tokens; False before one that ends the row or is not shown."""
        for number, token in enumerate(candidates, count):
            if token in self.ends or (self.strict and self.followed[row].excludes(number, token)):
                return False
            self._show(row, number, token)
        return True

    def _show(self, row: int, number: int, token: int) -> None:
        """Show the token of this number, unless it was shown already."""
        path = self.followed[row].path
        if number == len(path) or path[number] != token:
            self._rewind(row, number)
            self.moving = True
            self.processor.accept(row, token)
            path.append(token)
            self.moving = False

    def _rewind(self, row: int, depth: int) -> None:
        own = self.followed[row]
        if len(own.path) > depth:
            self.moving = True
            self.processor.rollback(row, len(own.path) - depth)
            del own.path[depth:]
            own.masks = {known: mask for known, mask in own.masks.items() if known <= depth}
            self.moving = False

    def begin(self, rows: int) -> None:
        """Ask for the first masks; a `ValueError` if they are not of the target's vocabulary."""
        masks = self.processor.mask(list(range(rows))).to("cpu", copy=True)
        shape = tuple(masks.shape)
        right = masks.dtype == torch.bool and shape == (rows, self.vocab_size)
        told = f"the mask of {self.name} is {masks.dtype} of shape {shape}, and the target needs torch.bool of shape "
        require(right, f"{told}{(rows, self.vocab_size)}; make the processor for the target's vocabulary and batch.")
        self.followed = {row: Followed(masks={0: masks[row]}) for row in range(rows)}

    def finish(self, batch: Batch) -> None:
        """Take the processor to where plain `generate` leaves it; warn if that cannot be done."""
        lost = []
        for row, own in self.followed.items():
            text = batch.emitted[row][:-1]
            known = list(takewhile(lambda pair: pair[0] == pair[1], zip(own.path, text, strict=False)))
            if self.moving or len(own.path) - len(known) > self.max_rollback:
                lost.append(str(row))
                continue
            self._follow(batch, row, len(text))
            self._rewind(row, len(text))
        if lost:
            told = f"the state of {self.name} is not at the end of the text of row {', '.join(lost)} after this call; "
            warnings.warn(f"{told}make a new one for the next call.", stacklevel=2)


def masked(
    processors: Sequence[LogitsProcessor], input_ids: torch.Tensor, vocab_size: int, stopping: Stopping
) -> list[Processor]:
    """The same processors, for prompts [B, L], with `TokenMasks` in place of those whose state can be taken back.

    Raises a ValueError if one was used before, or is for another vocabulary or batch size.
    """
    found: list[Processor] = []
    for processor in processors:
        maker = MAKERS.get(f"{type(processor).__module__}.{type(processor).__qualname__}")
        if maker is not None:
            matchers = maker(processor, len(input_ids), vocab_size)
            found.append(TokenMasks(matchers, vocab_size, stopping.ends, of_call=True))
        elif type(processor) is PrefixConstrainedLogitsProcessor and len(input_ids) % processor._num_beams == 0:
            rows = processor._num_beams  # of a prompt: from 5.24 on also those of num_return_sequences
            function = PrefixFunction(processor._prefix_allowed_tokens_fn, input_ids, vocab_size, rows)
            found.append(TokenMasks(function, vocab_size, stopping.ends, of_call=True))
        elif isinstance(processor, RewindableProcessor):
            found.append(TokenMasks(processor, vocab_size, stopping.ends))
        else:
            found.append(processor)
    return found


# by id, processors of users that a call uses, or has left in mid-text; calls may be in several threads
TAKEN: WeakValueDictionary[int, Any] = WeakValueDictionary()
TAKING = threading.Lock()


@contextmanager
def in_use(processors: Sequence[object], batch: Batch) -> Iterator[None]:
    """A context for one call, after which the rewindable processors of users are where plain `generate` leaves them.

    Raises a `ValueError` if another call uses one of them or has used it, or its masks do not fit.
    """
    masks = [one for one in processors if isinstance(one, TokenMasks)]
    users = [one for one in masks if not one.of_call]
    _take(users)
    try:
        for one in masks:
            one.begin(len(batch.rows))
        yield
    finally:
        try:
            for one in users:
                one.finish(batch)
        finally:
            for one in users:
                if not (one.moving or any(own.path for own in one.followed.values())):
                    TAKEN.pop(id(one.processor), None)


def _take(users: list[TokenMasks]) -> None:
    with TAKING:
        for one in users:
            told = f"{one.name} is used by another call, or was used by an earlier one and is in the middle of its "
            require(id(one.processor) not in TAKEN, f"{told}text; make one for each call.")
            told = f"{one.name} takes no weak references, by which a second use is seen; add '__weakref__' to its "
            require(type(one.processor).__weakrefoffset__ != 0, f"{told}slots.")
        TAKEN.update({id(one.processor): one.processor for one in users})
