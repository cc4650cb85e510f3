"""The processors of structured output that users pass, recognised by their type; none of these libraries is imported.

Each is replaced for one call by matchers of its own, made from the same grammar. So the user's processor stays unused:
a later call begins afresh, also after an exception, and two calls may share it.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from hf_specx.common.devices import sent
from hf_specx.common.errors import require


BITS = (torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu")) & 1 == 1  # [256, 8], of each byte
BYTES = BITS.view(torch.int64).flatten()  # [256], eight bools in one number, so that they are copied together
MOST_BACK = 4096  # tokens that an outlines guide can take back; by default 32
MOST_TOKENS = 1 << 22  # of any vocabulary


class Matchers:
    """What follows a grammar: a matcher for each of B rows, each of which fills a row of a bit mask.

    Tokens after a matcher has ended are not shown to it, and its last mask stays, as in the libraries' own processors.
    `mask_size` is how many tokens its mask has, and `beyond` whether tokens after those are allowed.
    """

    def __init__(self, matchers: Sequence[Any], vocab_size: int, mask_size: int, beyond: bool = False):
        self.matchers, self.vocab_size, self.beyond = matchers, vocab_size, beyond
        self.words = torch.full((len(matchers), -(-mask_size // 32)), -1, dtype=torch.int32, device="cpu")
        self.after_end = [0] * len(matchers)  # tokens of each row that its matcher was not shown

    def accept(self, row: int, token: int) -> None:
        shown = None if self.after_end[row] else self.show(self.matchers[row], token)
        if shown is None:
            self.after_end[row] += 1
        elif not shown:
            told = f"{type(self).__name__} refuses token {token} in row {row}, which a processor brought back or its "
            told += "vocabulary lacks; put that processor before this one, or make this for the target's tokenizer."
            raise RuntimeError(told)

    def rollback(self, row: int, count: int) -> None:
        unseen = min(count, self.after_end[row])
        self.after_end[row] -= unseen
        if count > unseen:
            self.take_back(self.matchers[row], count - unseen)

    def mask(self, rows: list[int]) -> torch.Tensor:
        for row in rows:
            self.fill(self.matchers[row], row)
        found = BYTES[self.words[rows].view(torch.uint8).int()].view(torch.bool)[:, : self.vocab_size]
        return torch.nn.functional.pad(found, (0, self.vocab_size - found.shape[1]), value=self.beyond)

    def show(self, matcher: Any, token: int) -> bool | None:
        """Show it a token; False if it refuses it, None if it is not shown this one, since it has ended."""
        raise NotImplementedError

    def take_back(self, matcher: Any, count: int) -> None:
        matcher.rollback(count)

    def fill(self, matcher: Any, row: int) -> None:
        """Write the mask of a matcher into `words[row]`."""
        raise NotImplementedError


class XGrammarMatchers(Matchers):
    """Matchers of xgrammar, for its own processor and that of outlines."""

    strict = True

    def show(self, matcher: Any, token: int) -> bool | None:
        return None if matcher.is_terminated() else matcher.accept_token(token)

    def fill(self, matcher: Any, row: int) -> None:
        terminated = matcher.is_terminated()
        if terminated:  # it has no mask; the processors leave the one before the stop token
            matcher.rollback(1)
        matcher.fill_next_token_bitmask(self.words, row)
        if terminated:
            next(token for token in matcher.stop_token_ids if matcher.accept_token(token))


class LLGuidanceMatchers(Matchers):
    """Matchers of llguidance, for the processor of outlines.

    After a token that it refuses a matcher allows the `ends` alone. It could not be taken back from there, so it is
    not shown that token.
    """

    ends: Sequence[int] = ()

    def mask(self, rows: list[int]) -> torch.Tensor:
        masks = super().mask(rows)
        for number, row in enumerate(rows):
            if self.after_end[row]:
                masks[number] = False
                masks[number, self.ends] = True
        return masks

    def show(self, matcher: Any, token: int) -> bool | None:
        return None if matcher.is_stopped() or not matcher.validate_tokens([token]) else matcher.consume_token(token)

    def fill(self, matcher: Any, row: int) -> None:
        words = self.words[row]
        matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.nbytes)


class OutlinesGuides(Matchers):
    """Guides of outlines-core, for the processor of outlines."""

    max_rollback = MOST_BACK
    strict = True

    def show(self, matcher: Any, token: int) -> bool | None:
        if matcher.is_finished() and not matcher.accepts_tokens([token]):
            return None
        matcher.advance(token, return_tokens=False)
        return True

    def take_back(self, matcher: Any, count: int) -> None:
        matcher.rollback_state(count)

    def fill(self, matcher: Any, row: int) -> None:
        words = self.words[row]
        matcher.write_mask_into(words.data_ptr(), len(words), words.element_size())


class PrefixFunction:
    """`prefix_allowed_tokens_fn`: a function of the text, so it has no state but the text itself.

    It is given the number of the prompt, which may have several `rows`.

    `barred` has its errors, by row and by tokens emitted before: it allowed no token, or raised. It `insists` where
    other processors have excluded all that it allows: that has scores of 0 then, in transformers that do so.
    """

    def __init__(
        self, function: Callable[[int, torch.Tensor], Any], input_ids: torch.Tensor, vocab_size: int, rows: int = 1
    ):
        self.function, self.vocab_size, self.prompts, self.rows_of_prompt = function, vocab_size, input_ids, rows
        self.texts: list[list[int]] = [[] for _ in input_ids]
        self.barred: dict[tuple[int, int], Exception] = {}
        nothing = torch.full((1, 1), -torch.inf, dtype=torch.float32, device="cpu")
        alone = PrefixConstrainedLogitsProcessor(lambda *_: [0], 1)(torch.zeros_like(nothing), nothing)
        self.insists = bool(alone.isfinite())

    def accept(self, row: int, token: int) -> None:
        self.texts[row].append(token)

    def rollback(self, row: int, count: int) -> None:
        left = len(self.texts[row]) - count
        del self.texts[row][left:]
        for key in [key for key in self.barred if key[0] == row and key[1] > left]:
            del self.barred[key]

    def mask(self, rows: list[int]) -> torch.Tensor:
        masks = torch.zeros(len(rows), self.vocab_size, dtype=torch.bool, device="cpu")
        for number, row in enumerate(rows):
            emitted = self.texts[row]
            text = torch.cat([self.prompts[row], sent(emitted, self.prompts.device, torch.int64)])
            try:
                allowed = self.function(row // self.rows_of_prompt, text)
                if not len(allowed):
                    told = f"prefix_allowed_tokens_fn allows no token in row {row} after {len(emitted)} new ones"
                    raise ValueError(f"{told}; it must return one id or more.")
                masks[number, allowed.cpu() if isinstance(allowed, torch.Tensor) else allowed] = True
            except Exception as error:  # it counts only if this candidate is accepted
                self.barred[row, len(emitted)] = error
        return masks


def _xgrammar(processor: Any, rows: int, vocab_size: int) -> Matchers:
    grammars = processor.compiled_grammars
    told = "this xgrammar LogitsProcessor was used before, and is where that text ended; make one for each call."
    require(not processor.prefilled, told)
    told = f"there are {len(grammars)} compiled grammars for {rows} rows (num_return_sequences included); give one, "
    require(len(grammars) in (1, rows), f"{told}or one a row.")
    size = processor.full_vocab_size
    remedy = f"TokenizerInfo.from_huggingface(tokenizer, vocab_size={vocab_size})"
    require(size >= vocab_size, f"{_other_size(size, vocab_size)}, and {remedy}.")
    return _xgrammar_matchers(grammars * (1 if len(grammars) == rows else rows), vocab_size)


def _xgrammar_matchers(grammars: Sequence[Any], vocab_size: int) -> Matchers:
    """Ids that only fill up a vocabulary may be beyond the target's, since no grammar allows them."""
    known = grammars[0].tokenizer_info
    size, fillers = known.vocab_size, set(known.special_token_ids)
    largest = next((token for token in reversed(range(size)) if token not in fillers), 0)
    require(largest < vocab_size, f"{_other_size(size, vocab_size)}.")
    make = sys.modules["xgrammar"].GrammarMatcher
    return XGrammarMatchers([make(grammar) for grammar in grammars], vocab_size, size, beyond=True)


def _outlines_xgrammar(processor: Any, rows: int, vocab_size: int) -> Matchers:
    _check_outlines(processor)
    return _xgrammar_matchers([processor.compiled_grammar] * rows, vocab_size)


def _outlines_llguidance(processor: Any, rows: int, vocab_size: int) -> Matchers:
    _check_outlines(processor)
    make, tokenizer = sys.modules["llguidance"].LLMatcher, processor.llg_tokenizer
    require(tokenizer.vocab_size <= vocab_size, f"{_other_size(tokenizer.vocab_size, vocab_size)}.")
    matchers = [make(tokenizer, processor.grammar) for _ in range(rows)]
    require(not matchers[0].is_error(), f"llguidance cannot read the grammar: {matchers[0].get_error()}")
    made = LLGuidanceMatchers(matchers, vocab_size, tokenizer.vocab_size)
    made.ends = tokenizer.eos_tokens
    return made


def _outlines_core(processor: Any, rows: int, vocab_size: int) -> Matchers:
    _check_outlines(processor)
    guide = sys.modules["outlines_core"].Guide
    guides = [guide(processor.index, max_rollback=MOST_BACK) for _ in range(rows)]
    matchers = OutlinesGuides(guides, vocab_size, vocab_size)
    try:
        matchers.mask([0])
    except ValueError as error:
        OutlinesGuides(guides, MOST_TOKENS, MOST_TOKENS).mask([0])  # raises too, unless the mask was only too small
        raise ValueError(f"{_other_size('more', vocab_size)}.") from error
    return matchers


def _check_outlines(processor: Any) -> None:
    name = type(processor).__name__
    told = f"this {name} was used before, and is where that text ended; call its reset(), or make a new one."
    require(processor.is_first_token, told)
    library = processor.tensor_library_name
    require(library == "torch", f"this {name} is for {library!r}; make it from outlines.from_transformers(...).")


def _other_size(size: int | str, vocab_size: int) -> str:
    return f"the grammar is for {size} tokens and the target has {vocab_size}; use the target's tokenizer"


MAKERS: dict[str, Callable[[Any, int, int], Matchers]] = {
    "xgrammar.contrib.hf.LogitsProcessor": _xgrammar,
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": _outlines_xgrammar,
    "outlines.backends.llguidance.LLGuidanceLogitsProcessor": _outlines_llguidance,
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": _outlines_core,
}
