"""Reasoning models: a budget for what they think, and grammars that begin after it.

A tag such as `</think>` is known by its token ids, of which there may be several. A text is followed token by token,
so that candidates of a round can be taken back, also in the middle of a tag.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hf_specx.common.errors import brief, is_int, require

from .grammars import MAKE_MATCHERS, full_name
from .rewindable import PerCallProcessor, RewindableProcessor


Tag = str | int | Sequence[int]  # a text, or token ids


class ThinkingState(NamedTuple):
    """Where a text is.

    Attributes:
        is_thinking: whether what comes next is thinking.
        length: tokens of this thinking so far.
        num_matched: with how many first tokens of a tag the text ends: of the end in thinking, else of the start.
        forced_end: the tokens that have to end this thinking, once the budget is spent; else ().
        num_forced: with how many first tokens of these the text ends.
    """

    is_thinking: bool
    length: int = 0
    num_matched: int = 0
    forced_end: tuple[int, ...] = ()
    num_forced: int = 0

    @property
    def forced_token(self) -> int | None:
        """The one token that may come next; None if all may."""
        return self.forced_end[self.num_forced] if self.forced_end else None


class ThinkingBudget(PerCallProcessor):
    """Ends what a reasoning model thinks after so many tokens, by the tokens of an end tag.

    For `logits_processor=` of `generate`, with a strategy or without one, and of a `Request`; one object serves any
    number of calls and requests, and counts for each row by itself. After `tokens` of thinking, every token but the
    next one of the end has the score -inf. An end tag that the model has begun by then is completed; before that
    nothing is forced. Forced tokens take no step of the draft.

    With `start`, tokens are counted as `thinking_token_budget` of vLLM counts them: from that tag on, also if it is in
    the prompt, and anew after each one. So a chat template that has switched thinking off leaves nothing to count.

    Args:
        tokens: how many, 0 or more.
        end: the tag that ends thinking, "</think>" unless given: a text, which needs the tokenizer, or token ids.
        start: the tag that it begins with, as "<think>"; None if thinking begins with the first new token, whatever is
            in the prompt, and happens once.
        message: what is written before an end that is forced; by default nothing.
        tokenizer: of the target, for tags and a message that are texts.

    Raises:
        ValueError: for a number or a tag that is none, and, when a call begins, for tokens that the target lacks.
    """

    def __init__(
        self,
        tokens: int,
        *,
        end: Tag = "</think>",
        start: Tag | None = None,
        message: Tag = "",
        tokenizer: Any = None,
    ):
        require(
            is_int(tokens) and tokens >= 0,
            f"tokens={brief(tokens)} is no budget; give an int of 0 or more.",
        )
        self.tokens = tokens
        self.end = tag_ids("end", end, tokenizer)
        self.start_tag = () if start is None else tag_ids("start", start, tokenizer)
        self.message = () if isinstance(message, str) and not message else tag_ids("message", message, tokenizer)
        require(self.start_tag != self.end, f"start={brief(start)} is the end as well; give two tags.")

    def for_call(self, input_ids: torch.Tensor, vocab_size: int) -> "ThinkingRows":
        largest = max(*self.end, *self.start_tag, *self.message, 0)
        require(
            largest < vocab_size,
            f"the tags of ThinkingBudget have the token {largest}, and the target has {vocab_size} tokens; use the "
            "target's tokenizer.",
        )
        return ThinkingRows(self, input_ids, vocab_size)

    def state_after_prompt(self, prompt: Sequence[int]) -> ThinkingState:
        """Where a text is after its prompt, [L] ids, pads among them."""
        if not self.start_tag:
            return self._begin_thinking()
        state = ThinkingState(is_thinking=False)
        for token in prompt:
            state = self.next_state(state, token)
        return state

    def next_state(self, state: ThinkingState, token: int) -> ThinkingState:
        """Where a text is after one more token."""
        if state.is_thinking:
            return self._next_in_thinking(state, token)
        return self._next_outside(state, token) if self.start_tag else state

    def _next_outside(self, state: ThinkingState, token: int) -> ThinkingState:
        """Outside of thinking a text waits for the start tag."""
        num_matched = count_matched(self.start_tag, state.num_matched, token)
        if num_matched == len(self.start_tag):
            return self._begin_thinking()
        return state._replace(num_matched=num_matched)

    def _next_in_thinking(self, state: ThinkingState, token: int) -> ThinkingState:
        """In thinking a text waits for the end tag, and follows the forced end, if there is one."""
        num_matched = count_matched(self.end, state.num_matched, token)
        if num_matched == len(self.end):
            return ThinkingState(is_thinking=False)
        num_forced = count_matched(state.forced_end, state.num_forced, token) if state.forced_end else 0
        state = state._replace(length=state.length + 1, num_matched=num_matched, num_forced=num_forced)
        return self._with_forced_end(state)

    def _begin_thinking(self) -> ThinkingState:
        return self._with_forced_end(ThinkingState(is_thinking=True))

    def _with_forced_end(self, state: ThinkingState) -> ThinkingState:
        """A state in thinking, with the end that has to come if the budget is just spent."""
        if state.forced_end or state.length < self.tokens:
            return state
        if state.num_matched:  # the model has begun the end by itself
            return state._replace(forced_end=self.end, num_forced=state.num_matched)
        return state._replace(forced_end=(*self.message, *self.end))


class ThinkingRows:
    """The rows of a call under a `ThinkingBudget`, as a `RewindableProcessor`.

    Attributes:
        history: [B], where each row is after its prompt and after each token that follows.
    """

    def __init__(self, budget: ThinkingBudget, prompts: torch.Tensor, vocab_size: int):
        self.budget, self.vocab_size = budget, vocab_size
        self.history = [[budget.state_after_prompt(prompt)] for prompt in prompts.tolist()]

    def accept(self, row: int, token: int) -> None:
        self.history[row].append(self.budget.next_state(self.history[row][-1], token))

    def rollback(self, row: int, count: int) -> None:
        del self.history[row][len(self.history[row]) - count :]

    def allows_all(self, row: int) -> bool:
        """Whether all tokens may come next in a row."""
        return self.history[row][-1].forced_token is None

    def mask(self, rows: list[int]) -> torch.Tensor:
        masks = torch.ones(len(rows), self.vocab_size, dtype=torch.bool, device="cpu")
        for number, row in enumerate(rows):
            token = self.history[row][-1].forced_token
            if token is not None:
                masks[number] = False
                masks[number, token] = True
        return masks


class GrammarAfter(PerCallProcessor):
    """A grammar that begins after a tag: until then a row is free, and what follows is a text of the grammar.

    For `logits_processor=` of `generate`, with a strategy or without one, and of a `Request`. The tag has to be among
    the new tokens; of a prompt nothing is read. In a row without it all tokens may come.

    Args:
        processor: one of xgrammar, of outlines, or of your own with the methods of `RewindableProcessor`, which gets
            the tokens after the tag alone. One of your own serves one call.
        after: the tag, as "</think>" or "<tool_call>": a text, which needs the tokenizer, or token ids.
        tokenizer: of the target.

    Raises:
        ValueError: for another processor, or a tag that is none, and, when a call begins, for a processor that was
            used before, or is for another vocabulary or batch size.
    """

    def __init__(self, processor: Any, after: Tag, *, tokenizer: Any = None):
        require(
            full_name(processor) in MAKE_MATCHERS or isinstance(processor, RewindableProcessor),
            f"{full_name(processor)} is no grammar that can begin after a tag; give a processor of xgrammar or "
            "outlines, or one with the methods accept, rollback and mask.",
        )
        self.processor = processor
        self.after = tag_ids("after", after, tokenizer)

    @property
    def shared_processor(self) -> RewindableProcessor | None:
        return None if full_name(self.processor) in MAKE_MATCHERS else self.processor

    def for_call(self, input_ids: torch.Tensor, vocab_size: int) -> "GrammarRows":
        make_matchers = MAKE_MATCHERS.get(full_name(self.processor))
        require(
            make_matchers is not None or self.plain_call is None,
            f"{type(self.processor).__name__} was used before, and may be in the middle of its text; make one for "
            "each call.",
        )
        rows = len(input_ids)
        grammar = self.processor if make_matchers is None else make_matchers(self.processor, rows, vocab_size)
        return GrammarRows(grammar, self.after, rows, vocab_size)


class GrammarRows:
    """The rows of a call under a `GrammarAfter`, as a `RewindableProcessor`.

    Attributes:
        num_matched: [B], for each row with how many first tokens of the tag its text ended, after each token up to the
            tag; the first is 0.
        num_in_grammar: [B], how many tokens of each row came after the tag.
    """

    def __init__(self, grammar: RewindableProcessor, tag: tuple[int, ...], num_rows: int, vocab_size: int):
        self.grammar, self.tag, self.vocab_size = grammar, tag, vocab_size
        self.num_matched = [[0] for _ in range(num_rows)]
        self.num_in_grammar = [0] * num_rows
        self.strict = getattr(grammar, "strict", False)
        max_rollback = getattr(grammar, "max_rollback", None)
        if max_rollback is not None:
            self.max_rollback = max_rollback
        shape = tuple(grammar.mask(list(range(num_rows))).shape)
        require(
            shape == (num_rows, vocab_size),
            f"the mask of {type(grammar).__name__} is of shape {shape}, and the target needs "
            f"{(num_rows, vocab_size)}; make the processor for the target's vocabulary and batch.",
        )

    def allows_all(self, row: int) -> bool:
        """Whether the grammar of a row has not begun."""
        return self.num_matched[row][-1] < len(self.tag)

    def accept(self, row: int, token: int) -> None:
        matched = self.num_matched[row]
        if self.allows_all(row):
            matched.append(count_matched(self.tag, matched[-1], token))
        else:
            self.grammar.accept(row, token)
            self.num_in_grammar[row] += 1

    def rollback(self, row: int, count: int) -> None:
        in_grammar = min(count, self.num_in_grammar[row])
        if in_grammar:
            self.grammar.rollback(row, in_grammar)
            self.num_in_grammar[row] -= in_grammar
        matched = self.num_matched[row]
        del matched[len(matched) - (count - in_grammar) :]

    def mask(self, rows: list[int]) -> torch.Tensor:
        masks = torch.ones(len(rows), self.vocab_size, dtype=torch.bool, device="cpu")
        begun = [number for number, row in enumerate(rows) if not self.allows_all(row)]
        if begun:
            masks[begun] = self.grammar.mask([rows[number] for number in begun]).to("cpu")
        return masks


@functools.lru_cache(maxsize=4096)
def count_matched(tag: tuple[int, ...], num_matched: int, token: int) -> int:
    """With how many first tokens of a tag a text ends, which ended with `num_matched` of them before this token."""
    recent = (*tag[:num_matched], token)
    return next(number for number in range(len(recent), -1, -1) if recent[len(recent) - number :] == tag[:number])


def tag_ids(name: str, tag: Tag, tokenizer: Any) -> tuple[int, ...]:
    """The token ids of a tag; raise ValueError, naming the argument, if it has none."""
    if isinstance(tag, str):
        require(
            tokenizer is not None,
            f"{name}={tag!r} is a text; pass the target's tokenizer as tokenizer=, or give token ids.",
        )
        tag = list(tokenizer(tag, add_special_tokens=False)["input_ids"])
    ids: Any = [tag] if is_int(tag) else tag
    is_ids = isinstance(ids, Sequence) and len(ids) > 0 and all(is_int(token) and token >= 0 for token in ids)
    require(is_ids, f"{name}={brief(tag)} is no tag; give a text, or one token id or more.")
    return tuple(ids)
