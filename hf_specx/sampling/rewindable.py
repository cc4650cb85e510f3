"""Processors whose state follows the candidates of a round and is then taken back to what was accepted.

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
from hf_specx.common.devices import to_device
from hf_specx.common.errors import require
from hf_specx.common.round import Draft

from .grammars import MAKE_MATCHERS, PrefixFunction
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
class ShownTokens:
    """What the processor of a row was shown, and which tokens it allowed.

    Attributes:
        tokens: emitted ones, the first `num_emitted` of them, and then candidates.
        masks: [V] bool, by the candidates before.
    """

    tokens: list[int] = field(default_factory=list)
    num_emitted: int = 0
    masks: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def excludes(self, candidates: Sequence[int], token: int) -> bool:
        """Whether the mask after these does not have a token, or no mask was asked for, as where a row ends."""
        mask = self.masks.get(tuple(candidates))
        return mask is None or token >= len(mask) or not mask[token]


class TokenMasks(RoundProcessor):
    """The tokens that a rewindable processor allows after each candidate of each row, up to an end token.

    Nothing is taken back before it must be: a state that is ahead of the text is still right if its tokens come.

    Attributes:
        eos_token_ids: the end tokens.
        of_call: whether the processor was made for this call, so that nobody sees where it ends.
        readmits: as in `PrefixFunction`.
        shown: by row, what the processor was shown.
    """

    def __init__(
        self,
        processor: RewindableProcessor,
        vocab_size: int,
        eos_token_ids: set[int] | None = None,
        of_call: bool = False,
    ):
        self.processor = processor
        self.name = type(processor).__name__
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids or set()
        self.of_call = of_call
        self.strict = getattr(processor, "strict", False)
        self.max_rollback = getattr(processor, "max_rollback", self.max_rollback)
        self.prefix_errors = getattr(processor, "prefix_errors", self.prefix_errors)
        self.readmits = getattr(processor, "readmits", False)
        self.shown: dict[int, ShownTokens] = {}
        self.is_moving = False  # while the processor is shown tokens, or they are taken back

    def __call__(self, batch: Batch, draft: Draft | None, scores: torch.Tensor, ahead: int) -> torch.Tensor:
        """Where a row has no candidates, and after one that ends it or is not shown, scores are left alone."""
        positions = scores.shape[1]
        wanted = [positions] * len(batch.rows) if draft is None else [1 + length for length in draft.lengths]
        all_allowed = torch.ones(self.vocab_size, dtype=torch.bool, device="cpu")
        masks = []
        for of_row in self.masks_after(batch, ahead, wanted):
            masks += [all_allowed if mask is None else mask for mask in of_row]
            masks += [all_allowed] * (positions - len(of_row))
        excluded = to_device(torch.stack(masks), scores.device).logical_not_().view(scores.shape)
        masked_scores = scores.masked_fill(excluded, -torch.inf)
        if not self.readmits:
            return masked_scores
        nothing_left = masked_scores.amax(-1, keepdim=True).isneginf()
        readmitted = torch.zeros_like(scores).masked_fill_(excluded, -torch.inf)
        return torch.where(nothing_left, readmitted, masked_scores)

    def allowed(self, batch: Batch, ahead: int, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        masks = self.masks_after(batch, ahead, [int(is_wanted) for is_wanted in wanted])
        return [of_row[0] if of_row else None for of_row in masks]

    def masks_after(self, batch: Batch, ahead: int, wanted: Sequence[int]) -> list[list[torch.Tensor | None]]:
        """Masks [V] at consecutive positions of each row, the first after `ahead` candidates; of a tree, at nodes.

        Args:
            wanted: [R], how many. One is None where a candidate before ends the row, or is one that a strict processor
                excludes, or where its text has no room.
        """
        candidates = batch.candidates(ahead + max(wanted) - 1)
        masks: list[list[torch.Tensor | None]] = [[] for _ in wanted]
        for row in batch.rows:
            self._show_emitted(batch, row, batch.counts[row])
        for position in range(max(wanted)):
            shown = {}  # by row: the candidates that it has been shown, if a mask is to follow
            for index, row in enumerate(batch.rows):
                if position >= wanted[index]:
                    continue
                numbers = batch.candidates_before(index, ahead + position)
                before = tuple(candidates[index][number] for number in numbers)
                has_room = batch.counts[row] + len(before) < batch.table[row].limit
                if has_room and self._show_candidates(row, batch.counts[row], before):
                    shown[row] = before
            self._compute_masks(shown)
            for index, row in enumerate(batch.rows):
                if position < wanted[index]:
                    masks[index].append(self.shown[row].masks[shown[row]] if row in shown else None)
        return masks

    def _compute_masks(self, shown: dict[int, tuple[int, ...]]) -> None:
        """Ask the processor for the masks after these candidates of each row that it was not asked for yet."""
        missing = {row: before for row, before in shown.items() if before not in self.shown[row].masks}
        for row, before in missing.items():
            self._rewind(row, self.shown[row].num_emitted + len(before))
        if missing:
            masks = self.processor.mask(list(missing)).to("cpu", copy=True)  # its memory may be reused
            for (row, before), mask in zip(missing.items(), masks, strict=True):
                self.shown[row].masks[before] = mask

    def _show_emitted(self, batch: Batch, row: int, count: int) -> None:
        """Show the first `count` emitted tokens of a row; of the masks only those behind them are needed again."""
        shown = self.shown.setdefault(row, ShownTokens())
        emitted = batch.table[row].emitted
        for number in range(min(shown.num_emitted, count), count):  # a text may have been cut
            self._show(row, number, emitted[number])
        if shown.num_emitted != count:
            new = tuple(emitted[shown.num_emitted : count])
            behind = {before: mask for before, mask in shown.masks.items() if before[: len(new)] == new}
            shown.masks = {before[len(new) :]: mask for before, mask in behind.items()} if new else {}
            shown.num_emitted = count

    def _show_candidates(self, row: int, count: int, candidates: tuple[int, ...]) -> bool:
        """Show candidates after `count` emitted tokens; False before one that ends the row or is not shown.

        Nothing is taken back where their mask is there already, as that of a draft is.
        """
        for number, token in enumerate(candidates):
            is_excluded = self.strict and self.shown[row].excludes(candidates[:number], token)
            if token in self.eos_token_ids or is_excluded:
                return False
        if candidates not in self.shown[row].masks:
            for number, token in enumerate(candidates, count):
                self._show(row, number, token)
        return True

    def _show(self, row: int, number: int, token: int) -> None:
        """Show the token of this number, unless it was shown already."""
        tokens = self.shown[row].tokens
        if number == len(tokens) or tokens[number] != token:
            self._rewind(row, number)
            self.is_moving = True
            self.processor.accept(row, token)
            tokens.append(token)
            self.is_moving = False

    def _rewind(self, row: int, length: int) -> None:
        """Take back all but the first `length` tokens of a row."""
        shown = self.shown[row]
        if len(shown.tokens) > length:
            self.is_moving = True
            self.processor.rollback(row, len(shown.tokens) - length)
            del shown.tokens[length:]
            self.is_moving = False

    def begin(self, rows: int) -> None:
        """Ask for the first masks; raise ValueError if they are not of the target's vocabulary."""
        masks = self.processor.mask(list(range(rows))).to("cpu", copy=True)
        shape = (rows, self.vocab_size)
        require(
            masks.dtype == torch.bool and tuple(masks.shape) == shape,
            f"the mask of {self.name} is {masks.dtype} of shape {tuple(masks.shape)}, and the target needs torch.bool "
            f"of shape {shape}; make the processor for the target's vocabulary and batch.",
        )
        self.shown = {row: ShownTokens(masks={(): masks[row]}) for row in range(rows)}

    def finish(self, batch: Batch) -> None:
        """Take the processor to where plain `generate` leaves it; warn if that cannot be done."""
        lost_rows = []
        for row, shown in self.shown.items():
            text = batch.table[row].emitted[:-1]
            common = list(takewhile(lambda pair: pair[0] == pair[1], zip(shown.tokens, text, strict=False)))
            if self.is_moving or len(shown.tokens) - len(common) > self.max_rollback:
                lost_rows.append(str(row))
                continue
            self._show_emitted(batch, row, len(text))
            self._rewind(row, len(text))
        if lost_rows:
            warnings.warn(
                f"the state of {self.name} is not at the end of the text of row {', '.join(lost_rows)} after this "
                "call; make a new one for the next call.",
                stacklevel=2,
            )


def masked(
    processors: Sequence[LogitsProcessor], input_ids: torch.Tensor, vocab_size: int, stopping: Stopping
) -> list[Processor]:
    """The same processors, for prompts [B, L], with `TokenMasks` in place of those whose state can be taken back.

    Raises a ValueError if one was used before, or is for another vocabulary or batch size.
    """
    replaced: list[Processor] = []
    for processor in processors:
        make_matchers = MAKE_MATCHERS.get(f"{type(processor).__module__}.{type(processor).__qualname__}")
        if make_matchers is not None:
            matchers = make_matchers(processor, len(input_ids), vocab_size)
            replaced.append(TokenMasks(matchers, vocab_size, stopping.eos_token_ids, of_call=True))
        elif type(processor) is PrefixConstrainedLogitsProcessor and len(input_ids) % processor._num_beams == 0:
            rows_of_prompt = processor._num_beams  # from 5.24 on also those of num_return_sequences
            function = PrefixFunction(processor._prefix_allowed_tokens_fn, input_ids, vocab_size, rows_of_prompt)
            replaced.append(TokenMasks(function, vocab_size, stopping.eos_token_ids, of_call=True))
        elif isinstance(processor, RewindableProcessor):
            replaced.append(TokenMasks(processor, vocab_size, stopping.eos_token_ids))
        else:
            replaced.append(processor)
    return replaced


# by id, processors of users that a call uses, or has left in mid-text; calls may be in several threads
USED_PROCESSORS: WeakValueDictionary[int, Any] = WeakValueDictionary()
USED_LOCK = threading.Lock()


@contextmanager
def in_use(processors: Sequence[object], batch: Batch) -> Iterator[None]:
    """A context for one call, after which the rewindable processors of users are where plain `generate` leaves them.

    Raises a `ValueError` if another call uses one of them or has used it, or its masks do not fit.
    """
    token_masks = [processor for processor in processors if isinstance(processor, TokenMasks)]
    of_user = [masks for masks in token_masks if not masks.of_call]
    _register(of_user)
    try:
        for masks in token_masks:
            masks.begin(len(batch.rows))
        yield
    finally:
        try:
            for masks in of_user:
                masks.finish(batch)
        finally:
            for masks in of_user:
                is_in_mid_text = masks.is_moving or any(shown.tokens for shown in masks.shown.values())
                if not is_in_mid_text:
                    USED_PROCESSORS.pop(id(masks.processor), None)


def _register(of_user: list[TokenMasks]) -> None:
    """Note that a call uses these processors of the user; raise ValueError if one is in use or in mid-text."""
    with USED_LOCK:
        for masks in of_user:
            require(
                id(masks.processor) not in USED_PROCESSORS,
                f"{masks.name} is used by another call, or was used by an earlier one and is in the middle of its "
                "text; make one for each call.",
            )
            require(
                type(masks.processor).__weakrefoffset__ != 0,
                f"{masks.name} takes no weak references, by which a second use is seen; add '__weakref__' to its "
                "slots.",
            )
        USED_PROCESSORS.update({id(masks.processor): masks.processor for masks in of_user})
