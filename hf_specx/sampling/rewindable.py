"""Processors with a state that follows the candidates of a round and is then taken back to what was accepted.

Such a processor says which tokens may come next, as a grammar does: it gives a mask. It acts on the draft too, so that
candidates are drawn from the masked distribution. Each mask is computed once, for the draft and for the verdict.
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

from .grammars import MAKE_MATCHERS, PrefixFunction, full_name
from .processors import Processor, RoundProcessor
from .stopping import Stopping


@runtime_checkable
class RewindableProcessor(Protocol):
    """A logits processor with a state for each row, which can be taken back token by token.

    Plain `generate` calls it as any other; here these methods are called instead. When called, it must give the scores
    with -inf at every token that is False in the mask. If it can take back only so many tokens, an attribute
    `max_rollback` says how many. Where a method `allows_all(row)` returns True, all tokens may come next in a row, and
    its mask is not asked for. After a call it has accepted the emitted text without each row's last token, as after
    plain `generate`, also where an exception has ended the call; so each call needs a new one.
    """

    def accept(self, row: int, token: int) -> None:
        """Take in the next token of a row, 0 to B - 1 as in the whole batch; tokens of prompts are not given.

        It may be a token that is False in the mask: a later processor can bring it back, and a draft can propose it. A
        processor that refuses such tokens has the attribute `strict = True`; then it gets none of them before it is in
        the text.
        """

    def rollback(self, row: int, count: int) -> None:
        """Take back the last `count` tokens of a row."""

    def mask(self, rows: list[int]) -> torch.Tensor:
        """[len(rows), V] bool: the tokens that may come next in these rows."""


class PerCallProcessor(LogitsProcessor):
    """A logits processor that makes a `RewindableProcessor` for each call, so that it serves any number of them.

    Plain `generate` calls it as any other. Texts that have one token more than the last ones, after the same prompts,
    go on with these, and others begin anew; two calls of plain `generate` at the same time need one each.

    Attributes:
        plain_call: the call of plain `generate` that it is in, or was in last.
    """

    plain_call: "PlainCall | None" = None

    def for_call(self, input_ids: torch.Tensor, vocab_size: int) -> RewindableProcessor:
        """What follows the texts of a call with prompts [B, L] and a target of this vocabulary.

        Raises:
            ValueError: if it is for another vocabulary, or for another number of rows.
        """
        raise NotImplementedError

    @property
    def shared_processor(self) -> RewindableProcessor | None:
        """The user's own processor whose state changes with a call; None if each call has a state of its own."""
        return None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """The scores [B, V] after the texts [B, L], with -inf at each token that may not come next."""
        if self.plain_call is None or not self.plain_call.goes_on(input_ids):
            self.plain_call = PlainCall(self.for_call(input_ids, scores.shape[1]), input_ids)
        mask = self.plain_call.mask_after(input_ids)
        return scores.masked_fill(~mask.to(scores.device), -torch.inf)  # type: ignore[return-value]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "plain_call"}


class PlainCall:
    """A call of plain `generate`, whose texts a `RewindableProcessor` follows token by token.

    Attributes:
        processor: what follows them.
        prompts: [B, L].
        width: columns of the last texts.
        fed_tokens: [B], the tokens of each row that the processor has accepted.
        masks: [B, V] bool, the last masks; None before the first.
    """

    def __init__(self, processor: RewindableProcessor, prompts: torch.Tensor):
        self.processor, self.prompts = processor, prompts
        self.width = prompts.shape[1] - 1
        self.fed_tokens: list[list[int]] = [[] for _ in prompts]
        self.masks: torch.Tensor | None = None

    def goes_on(self, input_ids: torch.Tensor) -> bool:
        """Whether these texts [B, L] have one token more than the last ones, after the same prompts."""
        if tuple(input_ids.shape) != (len(self.prompts), self.width + 1):
            return False
        return torch.equal(input_ids[:, : self.prompts.shape[1]], self.prompts)

    def mask_after(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The mask [B, V] after these texts, whose rows beam search may have exchanged."""
        self.width = input_ids.shape[1]
        strict = getattr(self.processor, "strict", False)
        for row, new_ids in enumerate(input_ids[:, self.prompts.shape[1] :].tolist()):
            fed = self.fed_tokens[row]
            common = _num_common(fed, new_ids)
            new = new_ids[common:]
            if common < len(fed):
                self.processor.rollback(row, len(fed) - common)
                del fed[common:]
            elif strict and new and self.masks is not None and not self.masks[row, new[0]]:
                continue  # the row has ended, and pads follow
            for token in new:
                self.processor.accept(row, token)
                fed.append(token)
        self.masks = self.processor.mask(list(range(len(input_ids)))).to("cpu", copy=True)
        return self.masks


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    if first == second[: len(first)]:
        return len(first)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


@dataclass
class FedTokens:
    """The tokens of a row that its processor was fed, and the masks that it gave after some of them.

    Attributes:
        tokens: `num_emitted` emitted tokens, then candidates.
        masks: [V] bool, by the candidates that stand between the emitted tokens and the mask's position.
    """

    tokens: list[int] = field(default_factory=list)
    num_emitted: int = 0
    masks: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def move_end(self, count: int, new: tuple[int, ...]) -> None:
        """Have the text end after `count` emitted tokens, of which the last, `new`, were candidates so far.

        Masks after these and further candidates stay, by the further ones alone.
        """
        behind_new = {}
        for candidates, mask in self.masks.items():
            if new and candidates[: len(new)] == new:
                behind_new[candidates[len(new) :]] = mask
        self.masks, self.num_emitted = behind_new, count

    def excludes(self, candidates: Sequence[int], token: int) -> bool:
        """Whether the mask after these candidates excludes a token; True where there is no mask, as at an end."""
        mask = self.masks.get(tuple(candidates))
        return mask is None or token >= len(mask) or not mask[token]


class TokenMasks(RoundProcessor):
    """Applies the masks of a rewindable processor after each candidate of each row, up to an end token.

    A mask is computed in three steps: the processor is fed what was emitted since, and then the candidates before the
    mask's position; then it is asked, once for all rows. The draft asks for the masks first, candidate by candidate;
    when the target's scores are masked, they are there already.

    The processor is rolled back as late as possible: where it was fed candidates that were not accepted, it goes back
    when another token has to be fed in their place. If the very same tokens come, nothing has to be done.

    Attributes:
        eos_token_ids: the end tokens.
        shared: the object of the user whose state changes with the processor's; None if the processor was made for
            this call alone, so that its state afterwards does not matter.
        restores_allowed: as in `PrefixFunction`.
        fed_tokens: by row, what the processor was fed.
    """

    def __init__(
        self,
        processor: RewindableProcessor,
        vocab_size: int,
        eos_token_ids: set[int] | None = None,
        shared: Any = None,
        name: str = "",
    ):
        self.processor = processor
        self.name = name or type(processor).__name__
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids or set()
        self.shared = shared
        self.all_allowed = torch.ones(vocab_size, dtype=torch.bool, device="cpu")
        self.allows_all = getattr(processor, "allows_all", None)
        self.strict = getattr(processor, "strict", False)
        self.max_rollback = getattr(processor, "max_rollback", self.max_rollback)
        self.prefix_errors = getattr(processor, "prefix_errors", self.prefix_errors)
        self.restores_allowed = getattr(processor, "restores_allowed", False)
        self.fed_tokens: dict[int, FedTokens] = {}
        self.is_updating = False  # while the processor accepts tokens, or takes them back

    def __call__(self, batch: Batch, draft: Draft | None, scores: torch.Tensor, ahead: int) -> torch.Tensor:
        """As in `RoundProcessor`; scores behind a row's candidates, or behind an end token, stay as they are."""
        positions = scores.shape[1]
        num_masks = [positions] * len(batch.rows) if draft is None else [1 + length for length in draft.lengths]
        masks = []
        for row_masks in self.masks_after(batch, ahead, num_masks):
            masks += [self.all_allowed if mask is None else mask for mask in row_masks]
            masks += [self.all_allowed] * (positions - len(row_masks))
        if all(mask is self.all_allowed for mask in masks):
            return scores
        excluded = to_device(torch.stack(masks), scores.device).logical_not_().view(scores.shape)
        masked_scores = scores.masked_fill(excluded, -torch.inf)
        if not self.restores_allowed:
            return masked_scores
        is_empty = masked_scores.amax(-1, keepdim=True).isneginf()
        restored = torch.zeros_like(scores).masked_fill_(excluded, -torch.inf)
        return torch.where(is_empty, restored, masked_scores)

    def allowed(self, batch: Batch, ahead: int, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        masks = self.masks_after(batch, ahead, [int(is_wanted) for is_wanted in wanted])
        return [row_masks[0] if row_masks else None for row_masks in masks]

    def masks_after(self, batch: Batch, ahead: int, num_masks: Sequence[int]) -> list[list[torch.Tensor | None]]:
        """Masks [V] at consecutive positions of each row, the first after `ahead` candidates; of a tree, at nodes.

        Args:
            num_masks: [R], how many are asked for. One is None where a candidate before ends the row, or is excluded
                by a strict processor, or where the row may emit no more tokens.
        """
        candidates = batch.candidates(ahead + max(num_masks) - 1)
        for row in batch.rows:
            self._feed_emitted(batch, row, batch.counts[row])
        masks: list[list[torch.Tensor | None]] = [[] for _ in num_masks]
        for position in range(max(num_masks)):
            indices = [index for index, number in enumerate(num_masks) if position < number]
            prefixes = {}  # by row, the candidates before its mask; of rows that get one here
            for index in indices:
                row = batch.rows[index]
                numbers = batch.candidates_before(index, ahead + position)
                prefix = tuple(candidates[index][number] for number in numbers)
                has_room = batch.counts[row] + len(prefix) < batch.row_states[row].limit
                if has_room and self._feed_candidates(row, batch.counts[row], prefix):
                    prefixes[row] = prefix
            self._compute_masks(prefixes)
            for index in indices:
                row = batch.rows[index]
                masks[index].append(self.fed_tokens[row].masks[prefixes[row]] if row in prefixes else None)
        return masks

    def _compute_masks(self, prefixes: dict[int, tuple[int, ...]]) -> None:
        """Ask the processor for the masks after these candidates of each row, unless it has given them before."""
        missing = {}
        for row, prefix in prefixes.items():
            fed = self.fed_tokens[row]
            if prefix in fed.masks:
                continue
            self._rewind(row, fed.num_emitted + len(prefix))
            if self.allows_all is not None and self.allows_all(row):
                fed.masks[prefix] = self.all_allowed
            else:
                missing[row] = prefix
        if missing:
            masks = self.processor.mask(list(missing)).to("cpu", copy=True)  # its memory may be reused
            for (row, prefix), mask in zip(missing.items(), masks, strict=True):
                self.fed_tokens[row].masks[prefix] = mask

    def _feed_emitted(self, batch: Batch, row: int, count: int) -> None:
        """Feed the first `count` emitted tokens of a row, and keep the masks after these alone."""
        fed = self.fed_tokens.setdefault(row, FedTokens())
        emitted_ids = batch.row_states[row].emitted_ids
        for number in range(min(fed.num_emitted, count), count):  # a text may have been cut
            self._feed(row, number, emitted_ids[number])
        if fed.num_emitted != count:
            fed.move_end(count, new=tuple(emitted_ids[fed.num_emitted : count]))

    def _feed_candidates(self, row: int, count: int, candidates: tuple[int, ...]) -> bool:
        """Feed candidates after `count` emitted tokens; returns False at one that ends the row or may not be fed.

        Nothing is fed where the mask after them is there already.
        """
        fed = self.fed_tokens[row]
        for number, token in enumerate(candidates):
            if token in self.eos_token_ids or (self.strict and fed.excludes(candidates[:number], token)):
                return False
        if candidates not in fed.masks:
            for number, token in enumerate(candidates, count):
                self._feed(row, number, token)
        return True

    def _feed(self, row: int, number: int, token: int) -> None:
        """Feed the token of this number, unless it was fed before."""
        tokens = self.fed_tokens[row].tokens
        if number == len(tokens) or tokens[number] != token:
            self._rewind(row, number)
            self.is_updating = True
            self.processor.accept(row, token)
            tokens.append(token)
            self.is_updating = False

    def _rewind(self, row: int, length: int) -> None:
        """Take back all but the first `length` tokens of a row."""
        fed = self.fed_tokens[row]
        if len(fed.tokens) > length:
            self.is_updating = True
            self.processor.rollback(row, len(fed.tokens) - length)
            del fed.tokens[length:]
            self.is_updating = False

    def begin(self, rows: int) -> None:
        """Ask for the first masks; raise ValueError if they are not of the target's vocabulary."""
        masks = self.processor.mask(list(range(rows))).to("cpu", copy=True)
        shape = (rows, self.vocab_size)
        require(
            masks.dtype == torch.bool and tuple(masks.shape) == shape,
            f"the mask of {self.name} is {masks.dtype} of shape {tuple(masks.shape)}, and the target needs torch.bool "
            f"of shape {shape}; make the processor for the target's vocabulary and batch.",
        )
        self.fed_tokens = {row: FedTokens(masks={(): masks[row]}) for row in range(rows)}

    def finish(self, batch: Batch) -> None:
        """Take the processor to where plain `generate` leaves it; warn if that cannot be done."""
        lost_rows = []
        for row, fed in self.fed_tokens.items():
            final_ids = batch.row_states[row].emitted_ids[:-1]
            if self.is_updating or len(fed.tokens) - _num_common(fed.tokens, final_ids) > self.max_rollback:
                lost_rows.append(str(row))
                continue
            self._feed_emitted(batch, row, len(final_ids))
            self._rewind(row, len(final_ids))
        if lost_rows:
            warnings.warn(
                f"the state of {self.name} is not at the end of the text of row {', '.join(lost_rows)} after this "
                "call; make a new one for the next call.",
                stacklevel=2,
            )


def with_token_masks(
    processors: Sequence[LogitsProcessor], input_ids: torch.Tensor, vocab_size: int, stopping: Stopping
) -> list[Processor]:
    """The processors of a call with prompts [B, L], with `TokenMasks` in place of those whose state can be taken back.

    Raises:
        ValueError: if one was used before, or is for another vocabulary or batch size.
    """
    replaced: list[Processor] = []
    for processor in processors:
        make_matchers = MAKE_MATCHERS.get(full_name(processor))
        if make_matchers is not None:
            matchers = make_matchers(processor, len(input_ids), vocab_size)
            replaced.append(TokenMasks(matchers, vocab_size, stopping.eos_token_ids))
        elif type(processor) is PrefixConstrainedLogitsProcessor and len(input_ids) % processor._num_beams == 0:
            rows_of_prompt = processor._num_beams  # from 5.24 on also those of num_return_sequences
            function = PrefixFunction(processor._prefix_allowed_tokens_fn, input_ids, vocab_size, rows_of_prompt)
            replaced.append(TokenMasks(function, vocab_size, stopping.eos_token_ids))
        elif hasattr(processor, "for_call"):  # a `PerCallProcessor`, perhaps of another copy of this package
            state, name = processor.for_call(input_ids, vocab_size), type(processor).__name__
            shared = getattr(processor, "shared_processor", None)
            replaced.append(TokenMasks(state, vocab_size, stopping.eos_token_ids, shared, name))
        elif isinstance(processor, RewindableProcessor):
            replaced.append(TokenMasks(processor, vocab_size, stopping.eos_token_ids, shared=processor))
        else:
            replaced.append(processor)
    return replaced


# by id, processors of users that a call uses, or has left in mid-text; calls may be in several threads
USED_PROCESSORS: WeakValueDictionary[int, Any] = WeakValueDictionary()
USED_LOCK = threading.Lock()


@contextmanager
def in_use(processors: Sequence[object], batch: Batch) -> Iterator[None]:
    """A context for one call, which leaves the rewindable processors of users as plain `generate` would.

    Raises:
        ValueError: if another call uses one of them or has used it, or its masks do not fit.
    """
    token_masks = [processor for processor in processors if isinstance(processor, TokenMasks)]
    of_user = [masks for masks in token_masks if masks.shared is not None]
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
                is_in_mid_text = masks.is_updating or any(fed.tokens for fed in masks.fed_tokens.values())
                if not is_in_mid_text:
                    USED_PROCESSORS.pop(id(masks.shared), None)


def _register(of_user: list[TokenMasks]) -> None:
    """Note that a call uses these processors of the user; raise ValueError if one is in use or in mid-text."""
    with USED_LOCK:
        for masks in of_user:
            require(
                id(masks.shared) not in USED_PROCESSORS,
                f"{masks.name} is used by another call, or was used by an earlier one and is in the middle of its "
                "text; make one for each call.",
            )
            require(
                type(masks.shared).__weakrefoffset__ != 0,
                f"{masks.name} takes no weak references, by which a second use is seen; add '__weakref__' to its "
                "slots.",
            )
        USED_PROCESSORS.update({id(masks.shared): masks.shared for masks in of_user})
