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

from .matchers import MOST_BACK, LLGuidanceMatchers, OutlinesGuides, PrefixFunction, XGrammarMatchers
from .processors import Processor
from .rewindable import RewindableProcessor, TokenMasks
from .stopping import Stopping


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
    made = LLGuidanceMatchers(matchers, vocab_size, -(-tokenizer.vocab_size // 32), beyond=False)
    made.ends = tokenizer.eos_tokens
    return made


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
