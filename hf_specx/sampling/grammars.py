"""The processors of structured output that users pass, recognised by their type; none of these libraries is imported.

Each is replaced for one call by matchers of its own, made from the same grammar. So the user's processor stays unused:
a later call begins afresh, also after an exception, and two calls may share it.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessor, PrefixConstrainedLogitsProcessor

from hf_specx.common.errors import require

from .processors import Processor
from .rewindable import RewindableProcessor, TokenMasks
from .stopping import Stopping


BITS = (torch.arange(256)[:, None] >> torch.arange(8)) & 1 == 1  # [256, 8], of each byte
BYTES = BITS.view(torch.int64).flatten()  # [256], eight bools in one number, so that they are copied together
MOST_BACK = 4096  # tokens that an outlines guide can take back; by default 32


class Matchers:
    """A matcher for each row, each of which fills a row of a bit mask.

    Tokens after a matcher has ended are not shown to it, and its last mask stays, as in the libraries' own processors.

    Args:
        matchers: [B].
        vocab_size: V of the target.
        words: of 32 bits, in the mask of a matcher.
        beyond: whether tokens after those of its mask are allowed.
    """

    def __init__(self, matchers: Sequence[Any], vocab_size: int, words: int, beyond: bool):
        self.matchers, self.vocab_size, self.beyond = matchers, vocab_size, beyond
        self.words = torch.full((len(matchers), words), -1, dtype=torch.int32)
        self.after_end = [0] * len(matchers)  # tokens of each row that its matcher was not shown
        self.last: list[torch.Tensor | None] = [None] * len(matchers)

    def accept(self, row: int, token: int) -> None:
        if self.after_end[row] or self.ended(self.matchers[row], token):
            self.after_end[row] += 1
        elif not self.show(self.matchers[row], token):
            self.refuse(row, token)

    def rollback(self, row: int, count: int) -> None:
        unseen = min(count, self.after_end[row])
        self.after_end[row] -= unseen
        if count > unseen:
            self.take_back(self.matchers[row], count - unseen)

    def mask(self, rows: list[int]) -> torch.Tensor:
        for row in rows:
            self.fill(self.matchers[row], row)
        masks = expanded(self.words[rows])[:, : self.vocab_size]
        return torch.nn.functional.pad(masks, (0, self.vocab_size - masks.shape[1]), value=self.beyond)

    def ended(self, matcher: Any, token: int) -> bool:
        """Whether a matcher is not shown this token, since it has ended."""
        raise NotImplementedError

    def show(self, matcher: Any, token: int) -> bool:
        """Show it a token; False if it refuses it."""
        raise NotImplementedError

    def refuse(self, row: int, token: int) -> None:
        """The matcher of a row has refused a token of the text; raises where the library's own processor does."""
        why = "another processor brought it back, or it is not of its vocabulary"
        raise RuntimeError(f"{type(self).__name__} refuses token {token} in row {row}: {why}.")

    def take_back(self, matcher: Any, count: int) -> None:
        raise NotImplementedError

    def fill(self, matcher: Any, row: int) -> None:
        """Write the mask of a matcher into `words[row]`."""
        raise NotImplementedError

    def place(self, row: int) -> tuple[int, int]:
        """Address and size in bytes of `words[row]`."""
        words = self.words[row]
        return words.data_ptr(), words.numel() * words.element_size()


def expanded(words: torch.Tensor) -> torch.Tensor:
    """The bits of int32 words [R, W] as [R, 32 W] bool, the lowest bit of a word first."""
    return BYTES[words.view(torch.uint8).int()].view(torch.bool)


class XGrammarMatchers(Matchers):
    """Matchers of xgrammar, for its own processor and that of outlines."""

    strict = True

    def ended(self, matcher: Any, token: int) -> bool:
        return matcher.is_terminated()

    def show(self, matcher: Any, token: int) -> bool:
        return matcher.accept_token(token)

    def take_back(self, matcher: Any, count: int) -> None:
        matcher.rollback(count)

    def fill(self, matcher: Any, row: int) -> None:
        terminated = matcher.is_terminated()
        if terminated:  # it has no mask; the processors leave the one before the stop token
            matcher.rollback(1)
        matcher.fill_next_token_bitmask(self.words, row)
        if terminated:
            self._stop_again(matcher)

    def _stop_again(self, matcher: Any) -> None:
        next(token for token in matcher.stop_token_ids if matcher.accept_token(token))


class LLGuidanceMatchers(Matchers):
    """Matchers of llguidance, for the processor of outlines."""

    strict = True

    def ended(self, matcher: Any, token: int) -> bool:
        return matcher.is_stopped()

    def show(self, matcher: Any, token: int) -> bool:
        return matcher.consume_token(token)

    def refuse(self, row: int, token: int) -> None:
        self.after_end[row] += 1  # it allows the end token only from now on

    def take_back(self, matcher: Any, count: int) -> None:
        matcher.rollback(count)

    def fill(self, matcher: Any, row: int) -> None:
        matcher.unsafe_compute_mask_ptr(*self.place(row))


class OutlinesGuides(Matchers):
    """Guides of outlines-core, for the processor of outlines."""

    max_rollback = MOST_BACK

    def ended(self, matcher: Any, token: int) -> bool:
        return matcher.is_finished() and not matcher.accepts_tokens([token])

    def show(self, matcher: Any, token: int) -> bool:
        matcher.advance(token, return_tokens=False)
        return True

    def take_back(self, matcher: Any, count: int) -> None:
        matcher.rollback_state(count)

    def fill(self, matcher: Any, row: int) -> None:
        address, size = self.place(row)
        matcher.write_mask_into(address, self.words.shape[1], size // self.words.shape[1])


class PrefixFunction:
    """`prefix_allowed_tokens_fn`: a function of the text, so it has no state but the text itself.

    Attributes:
        barred: its errors, by row and by tokens emitted before: it allowed no token, or raised.
    """

    def __init__(self, function: Callable[[int, torch.Tensor], Any], input_ids: torch.Tensor, vocab_size: int):
        self.function, self.vocab_size = function, vocab_size
        self.prompts, self.texts = input_ids, [[] for _ in input_ids]  # type: ignore[var-annotated]
        self.barred: dict[tuple[int, int], Exception] = {}

    def accept(self, row: int, token: int) -> None:
        self.texts[row].append(token)

    def rollback(self, row: int, count: int) -> None:
        left = len(self.texts[row]) - count
        del self.texts[row][left:]
        for key in [key for key in self.barred if key[0] == row and key[1] > left]:
            del self.barred[key]

    def mask(self, rows: list[int]) -> torch.Tensor:
        masks = torch.zeros(len(rows), self.vocab_size, dtype=torch.bool, device=self.prompts.device)
        for number, row in enumerate(rows):
            emitted = self.texts[row]
            text = torch.cat([self.prompts[row], self.prompts.new_tensor(emitted)])
            try:
                allowed = self.function(row, text)
                if not len(allowed):
                    after = f"in row {row} after {len(emitted)} new ones"
                    raise ValueError(f"prefix_allowed_tokens_fn allows no token {after}")
                masks[number, allowed] = True
            except Exception as error:  # it counts only if this candidate is accepted
                self.barred[row, len(emitted)] = error
        return masks


def masked(
    processors: Sequence[LogitsProcessor], input_ids: torch.Tensor, vocab_size: int, stopping: Stopping
) -> list[Processor]:
    """The same processors, with `TokenMasks` in place of those whose state can be taken back.

    Args:
        processors: as `generate` prepared them.
        input_ids: [B, L], the prompts.
        vocab_size: V of the target.
        stopping: of the call.

    Raises:
        ValueError: if one was used before, or is for another vocabulary or batch size.
    """
    limits = stopping.eos_token_id, stopping.max_new_tokens
    found: list[Processor] = []
    for processor in processors:
        maker = MAKERS.get(f"{type(processor).__module__}.{type(processor).__qualname__}")
        if type(processor) is PrefixConstrainedLogitsProcessor and processor._num_beams == 1:
            made: RewindableProcessor = PrefixFunction(processor._prefix_allowed_tokens_fn, input_ids, vocab_size)
            found.append(TokenMasks(made, vocab_size, *limits, of_call=True))
        elif maker is not None:
            found.append(TokenMasks(maker(processor, len(input_ids), vocab_size), vocab_size, *limits, of_call=True))
        elif isinstance(processor, RewindableProcessor):
            found.append(TokenMasks(processor, vocab_size, *limits))
        else:
            found.append(processor)
    return found


def _xgrammar(processor: Any, rows: int, vocab_size: int) -> RewindableProcessor:
    grammars = processor.compiled_grammars
    require(
        not processor.prefilled,
        "this xgrammar LogitsProcessor was used before, and is where that text ended; make a new one for each call.",
    )
    require(
        len(grammars) in (1, rows),
        f"there are {len(grammars)} compiled grammars for {rows} rows (num_return_sequences included); give one, or "
        "one a row.",
    )
    size = processor.full_vocab_size
    remedy = f"TokenizerInfo.from_huggingface(tokenizer, vocab_size={vocab_size})"
    require(size >= vocab_size, f"{_other_size(size, vocab_size)}, and {remedy}.")
    return _xgrammar_matchers(grammars * (1 if len(grammars) == rows else rows), vocab_size)


def _xgrammar_matchers(grammars: Sequence[Any], vocab_size: int) -> RewindableProcessor:
    """Ids that only fill up a vocabulary may be beyond the target's, since no grammar allows them."""
    known = grammars[0].tokenizer_info
    size, fillers = known.vocab_size, set(known.special_token_ids)
    largest = next((token for token in reversed(range(size)) if token not in fillers), 0)
    require(largest < vocab_size, f"{_other_size(size, vocab_size)}.")
    make = sys.modules["xgrammar"].GrammarMatcher
    return XGrammarMatchers([make(grammar) for grammar in grammars], vocab_size, -(-size // 32), beyond=True)


def _outlines_xgrammar(processor: Any, rows: int, vocab_size: int) -> RewindableProcessor:
    _check_outlines(processor)
    return _xgrammar_matchers([processor.compiled_grammar] * rows, vocab_size)


def _outlines_llguidance(processor: Any, rows: int, vocab_size: int) -> RewindableProcessor:
    _check_outlines(processor)
    make, tokenizer = sys.modules["llguidance"].LLMatcher, processor.llg_tokenizer
    require(tokenizer.vocab_size <= vocab_size, f"{_other_size(tokenizer.vocab_size, vocab_size)}.")
    matchers = [make(tokenizer, processor.grammar) for _ in range(rows)]
    require(not matchers[0].is_error(), f"llguidance cannot read the grammar: {matchers[0].get_error()}")
    return LLGuidanceMatchers(matchers, vocab_size, -(-tokenizer.vocab_size // 32), beyond=False)


def _outlines_core(processor: Any, rows: int, vocab_size: int) -> RewindableProcessor:
    _check_outlines(processor)
    guide = sys.modules["outlines_core"].Guide
    guides = [guide(processor.index, max_rollback=MOST_BACK) for _ in range(rows)]
    made = OutlinesGuides(guides, vocab_size, -(-vocab_size // 32), beyond=False)
    try:
        made.mask([0])
    except ValueError as error:  # the mask of its vocabulary is larger
        raise ValueError(f"{_other_size('more', vocab_size)}.") from error
    return made


def _check_outlines(processor: Any) -> None:
    name = type(processor).__name__
    told = f"this {name} was used before, and is where that text ended; call its reset(), or make a new one."
    require(processor.is_first_token, told)
    library = processor.tensor_library_name
    require(library == "torch", f"this {name} is for {library!r}; make it from outlines.from_transformers(...).")


def _other_size(size: int | str, vocab_size: int) -> str:
    return f"the grammar is for {size} tokens and the target has {vocab_size}; use the target's tokenizer"


MAKERS: dict[str, Callable[[Any, int, int], RewindableProcessor]] = {
    "xgrammar.contrib.hf.LogitsProcessor": _xgrammar,
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": _outlines_xgrammar,
    "outlines.backends.llguidance.LLGuidanceLogitsProcessor": _outlines_llguidance,
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": _outlines_core,
}
