"""Matchers for the grammars of users: those of xgrammar, outlines and llguidance, and `prefix_allowed_tokens_fn`.

A matcher follows the text of one row through a grammar. The processor that a user passes is recognised by its type, so
that none of these libraries is imported, and replaced for one call by matchers of the same grammar. So it stays
unused: a later call begins afresh, also after an exception, and two calls may share it.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from hf_specx.common.devices import to_device_async
from hf_specx.common.errors import require


BITS = (torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu")) & 1 == 1  # [256, 8], of each byte
BYTES = BITS.view(torch.int64).flatten()  # [256], eight bools in one number, so that they are copied together
OUTLINES_ROLLBACK = 4096  # tokens that an outlines guide can take back; by default 32
LARGEST_VOCABULARY = 1 << 22
MAX_BRANCH_CANDIDATES = 1024  # more than a round has on one branch


class Matchers:
    """Matchers of one grammar library, one for each of B rows; together they are a `RewindableProcessor`.

    Once a matcher has ended it is fed no more tokens, and its last mask stays, as in the libraries' own processors.

    Attributes:
        allows_beyond: whether token ids of `mask_size` and above are allowed, for which the library has no mask.
        bits: [B, words] int32, the masks of the matchers, a bit for each token.
        num_after_end: [B], how many tokens of each row came after its matcher had ended.
    """

    def __init__(self, matchers: Sequence[Any], vocab_size: int, mask_size: int, allows_beyond: bool = False):
        self.matchers = matchers
        self.vocab_size = vocab_size
        self.allows_beyond = allows_beyond
        self.bits = torch.full((len(matchers), -(-mask_size // 32)), -1, dtype=torch.int32, device="cpu")
        self.num_after_end = [0] * len(matchers)

    def accept(self, row: int, token: int) -> None:
        is_accepted = None if self.num_after_end[row] else self.feed(self.matchers[row], token)
        if is_accepted is None:
            self.num_after_end[row] += 1
        elif not is_accepted:
            raise RuntimeError(
                f"{type(self).__name__} refuses token {token} in row {row}, which a processor brought back or its "
                "vocabulary lacks; put that processor before this one, or make this for the target's tokenizer."
            )

    def rollback(self, row: int, count: int) -> None:
        num_not_fed = min(count, self.num_after_end[row])
        self.num_after_end[row] -= num_not_fed
        if count > num_not_fed:
            self.take_back(self.matchers[row], count - num_not_fed)

    def mask(self, rows: list[int]) -> torch.Tensor:
        for row in rows:
            self.write_mask(self.matchers[row], row)
        masks = BYTES[self.bits[rows].view(torch.uint8).int()].view(torch.bool)[:, : self.vocab_size]
        return torch.nn.functional.pad(masks, (0, self.vocab_size - masks.shape[1]), value=self.allows_beyond)

    def feed(self, matcher: Any, token: int) -> bool | None:
        """Feed a token to a matcher; returns whether it accepts it, or None if the matcher has ended before."""
        raise NotImplementedError

    def take_back(self, matcher: Any, count: int) -> None:
        """Take back the last `count` tokens of a matcher."""
        matcher.rollback(count)

    def write_mask(self, matcher: Any, row: int) -> None:
        """Write the mask of a matcher into `bits[row]`."""
        raise NotImplementedError


class XGrammarMatchers(Matchers):
    """Matchers of xgrammar, for its own processor and that of outlines.

    A rule with `max_tokens` counts a token only where a mask was asked for before it, as plain `generate` asks each
    time. So none is fed without that, also where its mask is known from before a rollback.

    Attributes:
        masked: ids of the matchers that were asked for a mask since their last token.
        unused_bits: [1, words], where such a mask goes that nobody needs.
    """

    strict = True

    def __init__(self, matchers: Sequence[Any], vocab_size: int, mask_size: int, allows_beyond: bool = False):
        super().__init__(matchers, vocab_size, mask_size, allows_beyond)
        self.masked: set[int] = set()
        self.unused_bits = torch.empty_like(self.bits[:1])

    def feed(self, matcher: Any, token: int) -> bool | None:
        if matcher.is_terminated():
            return None
        if id(matcher) not in self.masked:
            matcher.fill_next_token_bitmask(self.unused_bits, 0)
        self.masked.discard(id(matcher))
        return matcher.accept_token(token)

    def take_back(self, matcher: Any, count: int) -> None:
        self.masked.discard(id(matcher))
        super().take_back(matcher, count)

    def write_mask(self, matcher: Any, row: int) -> None:
        self.masked.add(id(matcher))
        is_terminated = matcher.is_terminated()
        if is_terminated:  # it has no mask; the processors leave the one before the stop token
            matcher.rollback(1)
        matcher.fill_next_token_bitmask(self.bits, row)
        if is_terminated:
            next(token for token in matcher.stop_token_ids if matcher.accept_token(token))


class LLGuidanceMatchers(Matchers):
    """Matchers of llguidance, for the processor of outlines.

    After a token that it refuses a matcher allows the `eos_token_ids` alone. It could not be taken back from there, so
    such a token counts as one after the end and is not fed.
    """

    eos_token_ids: Sequence[int] = ()

    def mask(self, rows: list[int]) -> torch.Tensor:
        masks = super().mask(rows)
        for number, row in enumerate(rows):
            if self.num_after_end[row]:
                masks[number] = False
                masks[number, self.eos_token_ids] = True
        return masks

    def feed(self, matcher: Any, token: int) -> bool | None:
        return None if matcher.is_stopped() or not matcher.validate_tokens([token]) else matcher.consume_token(token)

    def write_mask(self, matcher: Any, row: int) -> None:
        bits = self.bits[row]
        matcher.unsafe_compute_mask_ptr(bits.data_ptr(), bits.nbytes)


class OutlinesGuides(Matchers):
    """Guides of outlines-core, for the processor of outlines."""

    max_rollback = OUTLINES_ROLLBACK
    strict = True

    def feed(self, matcher: Any, token: int) -> bool | None:
        if matcher.is_finished() and not matcher.accepts_tokens([token]):
            return None
        matcher.advance(token, return_tokens=False)
        return True

    def take_back(self, matcher: Any, count: int) -> None:
        matcher.rollback_state(count)

    def write_mask(self, matcher: Any, row: int) -> None:
        bits = self.bits[row]
        matcher.write_mask_into(bits.data_ptr(), len(bits), bits.element_size())


class PrefixFunction:
    """`prefix_allowed_tokens_fn` as a `RewindableProcessor`, whose state is the text itself.

    Attributes:
        function: takes the number of a prompt, which may have several rows, and a text.
        emitted: [B], the tokens of each row after its prompt.
        prefix_errors: by (row, tokens before), the error where the function has raised or allowed no token.
        restores_allowed: whether the tokens that it allows get the score 0 where other processors have excluded all of
            them; some versions of transformers do that.
    """

    def __init__(
        self,
        function: Callable[[int, torch.Tensor], Any],
        input_ids: torch.Tensor,
        vocab_size: int,
        rows_of_prompt: int = 1,
    ):
        self.function = function
        self.prompts = input_ids
        self.vocab_size = vocab_size
        self.rows_of_prompt = rows_of_prompt
        self.emitted: list[list[int]] = [[] for _ in input_ids]
        self.prefix_errors: dict[tuple[int, tuple[int, ...]], Exception] = {}
        excluded = torch.full((1, 1), -torch.inf, dtype=torch.float32, device="cpu")
        constrained = PrefixConstrainedLogitsProcessor(lambda *_: [0], 1)(torch.zeros_like(excluded), excluded)
        self.restores_allowed = bool(constrained.isfinite())

    def accept(self, row: int, token: int) -> None:
        self.emitted[row].append(token)

    def rollback(self, row: int, count: int) -> None:
        del self.emitted[row][len(self.emitted[row]) - count :]

    def mask(self, rows: list[int]) -> torch.Tensor:
        masks = torch.zeros(len(rows), self.vocab_size, dtype=torch.bool, device="cpu")
        for number, row in enumerate(rows):
            emitted = self.emitted[row]
            input_ids = torch.cat([self.prompts[row], to_device_async(emitted, self.prompts.device, torch.int64)])
            try:
                allowed = self.function(row // self.rows_of_prompt, input_ids)
                if not len(allowed):
                    raise ValueError(
                        f"prefix_allowed_tokens_fn allows no token in row {row} after {len(emitted)} new ones; it "
                        "must return one id or more."
                    )
                masks[number, allowed.cpu() if isinstance(allowed, torch.Tensor) else allowed] = True
            except Exception as error:  # raised later, and only if this candidate is accepted
                for key in list(self.prefix_errors):  # of rounds that are long over
                    if key[0] == row and len(key[1]) < len(emitted) - MAX_BRANCH_CANDIDATES:
                        del self.prefix_errors[key]
                self.prefix_errors[row, tuple(emitted)] = error
        return masks


def _xgrammar(processor: Any, rows: int, vocab_size: int) -> Matchers:
    """Matchers for xgrammar's own processor; raise ValueError if it was used, or is for another model or batch."""
    grammars = processor.compiled_grammars
    require(
        not processor.prefilled,
        "this xgrammar LogitsProcessor was used before, and is where that text ended; make one for each call.",
    )
    require(
        len(grammars) in (1, rows),
        f"there are {len(grammars)} compiled grammars for {rows} rows (num_return_sequences included); give one, "
        "or one a row.",
    )
    size = processor.full_vocab_size
    remedy = f"TokenizerInfo.from_huggingface(tokenizer, vocab_size={vocab_size})"
    require(size >= vocab_size, f"{_other_size(size, vocab_size)}, and {remedy}.")
    of_rows = grammars if len(grammars) == rows else grammars * rows
    return _xgrammar_matchers(of_rows, vocab_size)


def _xgrammar_matchers(grammars: Sequence[Any], vocab_size: int) -> Matchers:
    """Matchers of compiled grammars; raise ValueError if they know a token that the target lacks.

    Ids that only fill up a vocabulary may be beyond the target's, since no grammar allows them.
    """
    tokenizer_info = grammars[0].tokenizer_info
    size = tokenizer_info.vocab_size
    fillers = set(tokenizer_info.special_token_ids)
    largest = next((token for token in reversed(range(size)) if token not in fillers), 0)
    require(largest < vocab_size, f"{_other_size(size, vocab_size)}.")
    matcher_type = sys.modules["xgrammar"].GrammarMatcher
    return XGrammarMatchers([matcher_type(grammar) for grammar in grammars], vocab_size, size, allows_beyond=True)


def _outlines_xgrammar(processor: Any, rows: int, vocab_size: int) -> Matchers:
    """Matchers for outlines' processor on xgrammar."""
    _check_outlines(processor)
    return _xgrammar_matchers([processor.compiled_grammar] * rows, vocab_size)


def _outlines_llguidance(processor: Any, rows: int, vocab_size: int) -> Matchers:
    """Matchers for outlines' processor on llguidance; raise ValueError if llguidance cannot read the grammar."""
    _check_outlines(processor)
    tokenizer = processor.llg_tokenizer
    require(tokenizer.vocab_size <= vocab_size, f"{_other_size(tokenizer.vocab_size, vocab_size)}.")
    matcher_type = sys.modules["llguidance"].LLMatcher
    of_rows = [matcher_type(tokenizer, processor.grammar) for _ in range(rows)]
    require(not of_rows[0].is_error(), f"llguidance cannot read the grammar: {of_rows[0].get_error()}")
    matchers = LLGuidanceMatchers(of_rows, vocab_size, tokenizer.vocab_size)
    matchers.eos_token_ids = tokenizer.eos_tokens
    return matchers


def _outlines_core(processor: Any, rows: int, vocab_size: int) -> Matchers:
    """Matchers for outlines' processor on its own core."""
    _check_outlines(processor)
    guide_type = sys.modules["outlines_core"].Guide
    guides = [guide_type(processor.index, max_rollback=OUTLINES_ROLLBACK) for _ in range(rows)]
    matchers = OutlinesGuides(guides, vocab_size, vocab_size)
    try:
        matchers.mask([0])
    except ValueError as error:
        # raises too, unless the mask was only too small
        OutlinesGuides(guides, LARGEST_VOCABULARY, LARGEST_VOCABULARY).mask([0])
        raise ValueError(f"{_other_size('more', vocab_size)}.") from error
    return matchers


def _check_outlines(processor: Any) -> None:
    """Raise ValueError if a processor of outlines was used before, or is not for torch."""
    name = type(processor).__name__
    require(
        processor.is_first_token,
        f"this {name} was used before, and is where that text ended; call its reset(), or make a new one.",
    )
    library = processor.tensor_library_name
    require(library == "torch", f"this {name} is for {library!r}; make it from outlines.from_transformers(...).")


def _other_size(size: int | str, vocab_size: int) -> str:
    """What is wrong with a grammar that is for another vocabulary."""
    return f"the grammar is for {size} tokens and the target has {vocab_size}; use the target's tokenizer"


def full_name(processor: Any) -> str:
    """The module and name of a processor's type, by which `MAKE_MATCHERS` has it."""
    return f"{type(processor).__module__}.{type(processor).__qualname__}"


# by the type of the user's processor: from this, the number of rows and the size of the target's vocabulary
MAKE_MATCHERS: dict[str, Callable[[Any, int, int], Matchers]] = {
    "xgrammar.contrib.hf.LogitsProcessor": _xgrammar,
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": _outlines_xgrammar,
    "outlines.backends.llguidance.LLGuidanceLogitsProcessor": _outlines_llguidance,
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": _outlines_core,
}
