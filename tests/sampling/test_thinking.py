"""A budget for thinking: the text of plain `generate`, which is that of an oracle over texts, in every layout."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from all_pairs import all_pairs, each_value, once
from automaton import Automaton
from many import GREEDY, MODES, assert_alone, requests
from plain import assert_plain
from tiny import VOCAB_SIZE, Forwards, near, prompts, tiny
from tiny_tokenizer import tiny_tokenizer
from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitsProcessor

from hf_specx import GrammarAfter, Request, SpeculativeDecoding, SuffixDraft, ThinkingBudget
from hf_specx.sampling.thinking import GrammarRows, ThinkingRows, count_matched


NEW, WIDTH, STOP = 24, 11, 7
END = (21, 22, 21, 23)
LAYOUTS = ["ragged", "padded", "packed", "lockstep"]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny()


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    return near(target, 0.1)


def as_text(tokens: Any) -> str:
    """A character for each token, so that texts are searched by what Python has."""
    return "".join(map(chr, tokens))


class Oracle(LogitsProcessor):
    """What a `ThinkingBudget` does, from whole texts, by searching."""

    def __init__(self, width: int, tokens: int, end: Any, start: Any = (), message: Any = ()):
        self.width, self.tokens = width, tokens
        self.end, self.start, self.message = map(as_text, (end, start, message))

    def forced(self, text: str) -> str | None:
        if self.start:
            while self.start in text:
                text = text.partition(self.start)[2]
                if self.end not in text:
                    break
                text = text.partition(self.end)[2]
            else:
                return None
        else:
            text = text[self.width :]
            if self.end in text:
                return None
        free, closed = text[: self.tokens], text[self.tokens :]
        if len(free) < self.tokens:
            return None
        begun = max(number for number in range(len(self.end)) if free.endswith(self.end[:number]))
        return (self.end[begun:] if begun else self.message + self.end)[len(closed)]

    def __call__(self, input_ids, scores):
        for row, tokens in enumerate(input_ids.tolist()):
            token = self.forced(as_text(tokens))
            if token is not None:
                scores[row, torch.arange(VOCAB_SIZE) != ord(token)] = -torch.inf
        return scores


class Biased(LogitsProcessor):
    """Makes tags likely, so that they come by themselves, also in part."""

    stateless = True

    def __init__(self, *tokens: int):
        self.tokens = list(tokens)

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, self.tokens] += 3.0
        return scores


BUDGETS: dict[str, dict[str, Any]] = {
    "one token": {"tokens": 5, "end": (21,)},
    "several": {"tokens": 5, "end": END},
    "none": {"tokens": 0, "end": END},
    "with a message": {"tokens": 4, "end": (21, 22), "message": (30, 31, 32)},
    "after a start": {"tokens": 3, "end": (21, 22), "start": (23,)},
    "after a start of several": {"tokens": 3, "end": (21, 22), "start": (22, 23)},
    "more than there is": {"tokens": 100, "end": (21, 22)},
}
DRAFTS: dict[str, Callable[[Any], Any]] = {
    "model": lambda draft: draft,
    "suffix": lambda draft: SuffixDraft(min_match=1),
    "both": lambda draft: [SuffixDraft(min_match=1), draft],
}


def compare(target: Any, strategy: Any, budget: dict[str, Any], rows: int = 3, **options: Any) -> list[list[int]]:
    """Assert that plain `generate`, the oracle and the strategy write one text; returns the new tokens of each row."""
    options = {"max_new_tokens": NEW, "eos_token_id": STOP, "pad_token_id": 0, "do_sample": False} | options
    inputs, likely = prompts(rows), Biased(21, 22, 23)
    processor = ThinkingBudget(**budget)
    fresh = lambda: {"logits_processor": [likely, processor]}  # noqa: E731
    text = assert_plain(target, strategy, inputs, fresh, seed=3, **options).text
    torch.manual_seed(3)
    oracle = target.generate(**inputs, **options, logits_processor=[likely, Oracle(WIDTH, **budget)])
    assert torch.equal(text, oracle)
    return text[:, WIDTH:].tolist()


@pytest.mark.parametrize(
    ("layout", "drafts", "name", "sampled", "rows"), each_value(LAYOUTS, DRAFTS, BUDGETS, [False, True], [1, 3])
)
def test_text_is_that_of_plain_generate(target, draft, layout: str, drafts: str, name: str, sampled: bool, rows: int):
    chosen = {"num_draft_tokens": 3, "layout": layout, "verification": "coupled"}
    strategy = SpeculativeDecoding(DRAFTS[drafts](draft), **chosen)
    texts = compare(target, strategy, BUDGETS[name], rows, do_sample=sampled, top_k=0)
    assert strategy.report.layout == layout
    assert drafts == "suffix" or strategy.report.accepted > 0
    if name == "none":
        assert [text[: len(END)] for text in texts] == [[*END]] * rows


@pytest.mark.parametrize(("name", "sampled"), once(BUDGETS, [False, True]))
def test_branches_of_a_tree_have_a_state_each(target, name: str, sampled: bool):
    strategy = SpeculativeDecoding(near(target, 0.3), num_draft_tokens=4, tree=12, verification="coupled")
    compare(target, strategy, BUDGETS[name], do_sample=sampled, top_k=0)
    assert strategy.report.accepted > 0


@pytest.mark.parametrize("name", ["several", "after a start"])
def test_by_rejection_all_texts_end_their_thinking(target, draft, name: str):
    """The law is shown for all masks; here that the masks are these."""
    budget, inputs = BUDGETS[name], prompts(3)
    oracle = Oracle(WIDTH, **budget)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification="block")
    torch.manual_seed(0)
    options = {"do_sample": True, "max_new_tokens": NEW, "custom_generate": strategy}
    processors = [Biased(21, 22, 23), ThinkingBudget(**budget)]
    num_forced = 0
    for text in target.generate(**inputs, **options, logits_processor=processors).tolist():
        for length in range(WIDTH, WIDTH + NEW):
            forced = oracle.forced(as_text(text[:length]))
            assert forced in (None, chr(text[length]))
            num_forced += forced is not None
    assert num_forced >= 6


def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much of an end there was, wherever candidates in the middle of one are taken back."""
    cut, rollback = [], ThinkingRows.rollback

    def noting(rows: ThinkingRows, row: int, count: int) -> None:
        cut.extend(state.num_matched for state in rows.history[row][-count:] if state.num_matched)
        rollback(rows, row, count)

    monkeypatch.setattr(ThinkingRows, "rollback", noting)
    return cut


@pytest.mark.parametrize("sampled", [False, True])
def test_an_end_of_several_tokens_is_interrupted_by_a_rejection(monkeypatch: pytest.MonkeyPatch, sampled: bool):
    """A draft that is often wrong begins ends that the target does not go on with."""
    target, cut = tiny(), interrupted(monkeypatch)
    strategy = SpeculativeDecoding(near(target, 0.4), num_draft_tokens=5, verification="coupled")
    for tokens in (4, 6, 9):
        compare(target, strategy, {"tokens": tokens, "end": (21, 22, 23)}, do_sample=sampled, top_k=0)
    assert cut


def test_without_taking_back_the_text_is_another(monkeypatch: pytest.MonkeyPatch):
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.4), num_draft_tokens=5, verification="coupled")
    monkeypatch.setattr(ThinkingRows, "rollback", lambda rows, row, count: None)
    with pytest.raises(AssertionError, match="another text"):
        compare(target, strategy, {"tokens": 6, "end": (21, 22, 23)}, do_sample=True, top_k=0)


def test_an_end_that_comes_by_itself_is_left_alone(target, draft):
    """An end that is cut out of the text itself comes where it came, or is finished where it had begun."""
    inputs, options = prompts(1), {"max_new_tokens": NEW, "do_sample": False}
    text = target.generate(**inputs, **options)[0, WIDTH:].tolist()
    end = tuple(text[6:9])
    assert as_text(end) not in as_text(text[:8])
    for tokens, comes_at in ((20, 6), (8, 6), (7, 6), (6, 6), (5, 5)):
        strategy = SpeculativeDecoding(draft, num_draft_tokens=3)
        processors = [ThinkingBudget(tokens, end=end)]
        fresh = lambda: {"logits_processor": processors}  # noqa: B023, E731
        found = assert_plain(target, strategy, inputs, fresh, **options).text[0, WIDTH:].tolist()
        assert as_text(found).find(as_text(end)) == comes_at
        assert (found == text) == (tokens > 5)


def test_a_stop_inside(target, draft):
    """In thinking, in the end tag, and at the limit of new tokens in the tag."""
    ids = torch.tensor([[5, 6, 7]])
    for options in ({"max_new_tokens": 6}, {"max_new_tokens": NEW, "eos_token_id": 22, "pad_token_id": 0}):
        strategy = SpeculativeDecoding(draft, num_draft_tokens=4)
        processor = ThinkingBudget(4, end=END)
        fresh = lambda: {"logits_processor": [processor]}  # noqa: B023, E731
        text = assert_plain(target, strategy, {"input_ids": ids}, fresh, do_sample=False, **options).text
        assert text[0, 7:].tolist() == [21, 22]
    first = target.generate(ids, max_new_tokens=3, do_sample=False)[0, -1].item()
    strategy = SpeculativeDecoding(draft, num_draft_tokens=4)
    fresh = lambda: {"logits_processor": [ThinkingBudget(9, end=END)]}  # noqa: E731
    options = {"max_new_tokens": NEW, "eos_token_id": first, "pad_token_id": 0, "do_sample": False}
    assert assert_plain(target, strategy, {"input_ids": ids}, fresh, **options).text.shape[1] <= 6


def test_forced_tokens_take_no_forward_of_the_draft(target, draft):
    message = tuple(range(24, 40))
    strategy = SpeculativeDecoding(draft, num_draft_tokens=2)
    with Forwards(draft) as forwards:
        compare(target, strategy, {"tokens": 0, "end": (21, 22), "message": message}, rows=1, max_new_tokens=20)
    report = strategy.report
    assert report.forced >= len(message)
    assert len(forwards.ids) - 1 <= report.drafted - report.forced
    assert report.rounds < 6


def test_beams_are_those_of_an_oracle(target):
    """Plain `generate` exchanges the rows."""
    options = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False}
    budget = {"tokens": 5, "end": END}
    expected = target.generate(**prompts(2), **options, logits_processor=[Oracle(WIDTH, **budget)])
    found = target.generate(**prompts(2), **options, logits_processor=[ThinkingBudget(**budget)])
    assert torch.equal(found, expected)


def test_a_start_in_the_prompt_is_counted_from(target, draft):
    """Two of five tokens are in the prompt; one that has ended there leaves nothing to count."""
    budget = {"tokens": 5, "end": (21, 22), "start": (23,)}
    for prompt, forced_at in (([5, 23, 8, 9], 3), ([5, 23, 8, 21, 22], None), ([23, 8, 21, 22, 4, 23, 3], 4)):
        strategy = SpeculativeDecoding(draft, num_draft_tokens=3)
        ids = torch.tensor([prompt])
        fresh = lambda: {"logits_processor": [ThinkingBudget(**budget)]}  # noqa: E731
        options = {"max_new_tokens": 12, "do_sample": False}
        new = assert_plain(target, strategy, {"input_ids": ids}, fresh, **options).text[0, len(prompt) :].tolist()
        plain = target.generate(ids, **options)[0, len(prompt) :].tolist()
        if forced_at is None:
            assert new == plain
        else:
            assert new[:forced_at] == plain[:forced_at]
            assert new[forced_at : forced_at + 2] == [21, 22]


@pytest.mark.parametrize(("mode", "shared"), once(MODES, [False, True]))
def test_requests_with_budgets_of_their_own(target, mode: str, shared: bool):
    """Rows are refilled, and share a batch; one budget may be that of all requests."""
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=3, verification="coupled")
    budgets = [ThinkingBudget(tokens, end=(21, 22), message=(30, 31)) for tokens in (0, 2, 5, 9)]
    asked, options = [], dict[str, Any]()
    for number, request in enumerate(requests(9)):
        own = None if number % 5 == 4 or shared else [budgets[number % 5]]
        asked.append(Request(request.input_ids, 6 + number, request.seed, logits_processor=own))
    if shared:
        options["logits_processor"] = [budgets[2]]
    done = assert_alone(strategy, target, asked, **MODES[mode] | options)
    assert strategy.report.accepted > 0
    assert any(as_text((30, 31, 21, 22)) in as_text(one.tokens) for one in done.values())


def test_rows_of_a_queue_are_beside_each_other(target):
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=2)
    asked = [Request([3, 4, 5], 8, logits_processor=[ThinkingBudget(tokens, end=END)]) for tokens in (1, 2, 3, 4)]
    with Forwards(target) as forwards:
        list(strategy.generate_many(target, asked, batch_size=4, **GREEDY))
    assert max(len(ids) for ids in forwards.ids) == 4


def test_one_object_serves_many_calls(target, draft):
    """Plain calls before, between and after; also of the same prompts, and of one that has ended within a tag."""
    budget = ThinkingBudget(3, end=END)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3)
    for rows, new in ((2, 5), (2, 5), (3, 9), (2, 9)):
        options = {"max_new_tokens": new, "do_sample": False}
        assert_plain(target, strategy, prompts(rows), lambda: {"logits_processor": [budget]}, **options)


class Restoring(LogitsProcessor):
    """Brings a token back that a budget has excluded, after a text of some length."""

    stateless = True

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == WIDTH + 6:
            scores = scores.clone()
            scores[:, 9] = 50.0
        return scores


def test_a_token_that_comes_back_begins_the_end_anew(target, draft):
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3)
    processors = [ThinkingBudget(4, end=END), Restoring()]
    options = {"max_new_tokens": NEW, "do_sample": False}
    fresh = lambda: {"logits_processor": processors}  # noqa: E731
    text = assert_plain(target, strategy, prompts(1), fresh, **options).text[0, WIDTH + 4 :].tolist()
    assert text[:7] == [21, 22, 9, *END]


def test_matched_tokens_are_those_of_a_search():
    """Over all short texts of two tokens."""
    for tag in ((1,), (1, 2), (1, 1, 2), (1, 2, 1, 1), (1, 2, 1, 2)):
        for number in range(2**9):
            matched, text = 0, ""
            for bit in range(9):
                token = 1 + (number >> bit & 1)
                text += chr(token)
                matched = count_matched(tag, matched % len(tag) if matched < len(tag) else 0, token)
                if matched == len(tag):
                    assert text.endswith(as_text(tag))
                    text = ""
                else:
                    assert matched == max(n for n in range(len(tag)) if text.endswith(as_text(tag[:n])))


def test_tags_are_texts_for_a_tokenizer():
    tokenizer = tiny_tokenizer(more=("<think>", "</think>"))
    budget = ThinkingBudget(3, start="<think>", message=" so:", tokenizer=tokenizer)
    assert (budget.start_tag, budget.end) == ((2,), (3,))
    assert tokenizer.decode(budget.message) == " so:"
    assert ThinkingBudget(3, end=4).end == (4,)


MISUSES: dict[str, tuple[Callable[[], Any], str]] = {
    "no number": (lambda: ThinkingBudget("9", end=[1]), "tokens='9' is no budget; give an int"),
    "a bool": (lambda: ThinkingBudget(True, end=[1]), "tokens=True is no budget"),
    "below 0": (lambda: ThinkingBudget(-1, end=[1]), "tokens=-1 is no budget"),
    "no tokenizer": (lambda: ThinkingBudget(9), "end='</think>' is a text; pass the target's tokenizer"),
    "an empty end": (lambda: ThinkingBudget(9, end=[]), "end=.. is no tag; give a text, or one token id"),
    "an end of floats": (lambda: ThinkingBudget(9, end=[1.0]), "end=.1.0. is no tag"),
    "two tags alike": (lambda: ThinkingBudget(9, end=[1], start=[1]), "is the end as well"),
    "no grammar": (lambda: GrammarAfter(Biased(1), [1]), "Biased is no grammar that can begin after a tag"),
    "no tag": (lambda: GrammarAfter(Automaton(VOCAB_SIZE, 1), []), "after=.. is no tag"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_what_is_refused(name: str):
    make, message = MISUSES[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_tags_of_another_vocabulary_are_refused(target, draft):
    strategy = SpeculativeDecoding(draft)
    with Forwards(target) as forwards, pytest.raises(ValueError, match="token 48, and the target has 48 tokens"):
        target.generate(**prompts(1), logits_processor=[ThinkingBudget(9, end=[48])], custom_generate=strategy)
    assert not forwards.ids


# grammars after a tag


class AutomatonOracle(LogitsProcessor):
    """What an `Automaton` after a tag does, from whole texts."""

    def __init__(self, automaton: Automaton, tag: Any):
        self.automaton, self.tag = automaton, as_text(tag)

    def __call__(self, input_ids, scores):
        for row, tokens in enumerate(input_ids[:, WIDTH:].tolist()):
            _, tag, after = as_text(tokens).partition(self.tag)
            if tag:
                state = self.automaton.state(row, map(ord, after))
                scores[row, ~self.automaton.table[state]] = -torch.inf
        return scores


@pytest.mark.parametrize(
    ("layout", "drafts", "tag", "sampled", "rows"),
    all_pairs(LAYOUTS, DRAFTS, [(21,), (21, 22)], [False, True], [1, 3]),
)
def test_a_grammar_begins_after_a_tag(target, draft, layout, drafts, tag, sampled: bool, rows: int):
    """Each row at a place of its own, some by a budget and others by themselves."""
    chosen = {"num_draft_tokens": 3, "layout": layout, "verification": "coupled"}
    strategy = SpeculativeDecoding(DRAFTS[drafts](draft), **chosen)
    make = partial(Automaton, VOCAB_SIZE, WIDTH, always=STOP)
    options = {"max_new_tokens": NEW, "do_sample": sampled, "top_k": 0, "eos_token_id": STOP, "pad_token_id": 0}
    before = [Biased(21, 22), ThinkingBudget(6, end=tag)]
    fresh = lambda: {"logits_processor": [*before, GrammarAfter(make(), tag)]}  # noqa: E731
    text = assert_plain(target, strategy, prompts(rows), fresh, seed=3, **options).text
    torch.manual_seed(3)
    oracle = [*before, AutomatonOracle(make(), tag)]
    assert torch.equal(text, target.generate(**prompts(rows), **options, logits_processor=oracle))
    assert strategy.report.layout == layout
    assert strategy.report.forced > 0


def test_a_grammar_that_is_not_taken_back_writes_another_text(monkeypatch: pytest.MonkeyPatch):
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.4), num_draft_tokens=5, verification="coupled")
    monkeypatch.setattr(GrammarRows, "rollback", lambda rows, row, count: None)
    make = lambda: [Biased(21), GrammarAfter(Automaton(VOCAB_SIZE, WIDTH), [21])]  # noqa: E731
    options = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0}
    with pytest.raises(AssertionError, match="another text"):
        assert_plain(target, strategy, prompts(3), lambda: {"logits_processor": make()}, **options)


def test_a_processor_of_ones_own_serves_one_call(target, draft):
    strategy = SpeculativeDecoding(draft, num_draft_tokens=2)
    options = {**prompts(2), "max_new_tokens": 12, "do_sample": False}
    for first, second in ((None, strategy), (strategy, strategy), (None, None)):
        processors = [ThinkingBudget(2, end=[21]), GrammarAfter(Automaton(VOCAB_SIZE, WIDTH), [21])]
        target.generate(**options, logits_processor=processors, custom_generate=first)
        with pytest.raises(ValueError, match="make one for each call"):
            target.generate(**options, logits_processor=processors, custom_generate=second)
