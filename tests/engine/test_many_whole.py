"""`generate_many` where rows cannot be filled again, and where requests have processors of their own."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import zoo
from all_pairs import each_value
from automaton import Automaton
from counting import counting
from criteria import Counting, Raising
from grammar_cases import installed, make, pair
from many import GREEDY, MODES, SAMPLED, alone, assert_alone, completed, requests
from plain import coupled
from tiny import near, tiny

from hf_specx import Request, SpeculativeDecoding, SuffixDraft
from hf_specx.sampling.rewindable import PerCallProcessor


LAYOUTS = {
    "padded": (lambda: tiny(), {"layout": "padded"}, "the layout is 'padded'"),
    "packed": (lambda: tiny(), {"layout": "packed"}, "the layout is 'packed'"),
    "lockstep": (lambda: tiny(), {"layout": "lockstep"}, "the layout is 'lockstep'"),
    "states": (lambda: zoo.build("causal", "lfm2"), {}, "the layout is 'lockstep'"),
    "encoder-decoder": (lambda: zoo.build("seq2seq", "t5"), {}, "has an encoder"),
}


@pytest.mark.parametrize(("name", "options"), each_value(LAYOUTS, [GREEDY, SAMPLED]))
def test_whole_batches(name: str, options: dict):
    make, chosen, reason = LAYOUTS[name]
    target = make()
    strategy = coupled(target, 0.1, num_draft_tokens=3, **chosen)
    with counting(target) as forwards:
        assert_alone(strategy, target, requests(9), **options)
    assert "; whole batches, since " in strategy.report.layout_reason
    assert strategy.report.layout_reason.endswith(reason)
    assert len(forwards) - strategy.report.emitted < strategy.report.emitted / 2  # plain ones came first


@pytest.mark.parametrize("batch_size", [1, 3, 5])  # the last batch of five has one request
def test_lockstep_takes_the_coupled_text_by_default(batch_size):
    """Under "block" a row's numbers of candidates would follow the others, and with them its text."""
    target, asked = tiny(), requests(6)
    strategy = SpeculativeDecoding(near(target, 0.1), num_draft_tokens=3, layout="lockstep")
    assert_alone(strategy, target, asked, batch_size=batch_size, **SAMPLED)
    block = SpeculativeDecoding(near(target, 0.1), layout="lockstep", verification="block")
    with pytest.raises(ValueError, match="requests have seeds"):
        list(block.generate_many(target, asked, batch_size=3, **SAMPLED))


OWN = {
    "alike": lambda number: [Raising(number)],
    "mixed": lambda number: [None, [Raising(7)], [Raising(8), Raising(number)]][number % 3],
    "stateful among others": lambda number: [Counting()] if number % 3 == 1 else None,
}


@pytest.mark.parametrize(("options", "kind"), each_value([GREEDY, SAMPLED], OWN))
def test_processors_of_the_requests(options: dict, kind: str):
    """Some have one of their own, some two, some none, beside those of the call; some keep state."""
    target = tiny()
    strategy = coupled(target, 0.1, num_draft_tokens=3)
    asked = lambda: [replace(one, logits_processor=OWN[kind](n)) for n, one in enumerate(requests(10))]  # noqa: E731
    completions = assert_alone(strategy, target, asked, logprobs=True, repetition_penalty=1.3, **options)
    assert all(len(done.logprobs) == len(done.tokens) for done in completions.values())
    assert strategy.report.accepted > 0


def test_state_that_requests_would_share_is_refused():
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.1), num_draft_tokens=3)
    completions = completed(strategy, target, [[1, 2]], logits_processor=[Counting()], **GREEDY)
    assert "Counting may keep state" in completions[0].error
    completions = completed(strategy, target, [[1, 2]], stopping_criteria=[Counting()], **GREEDY)
    assert "all requests would share it" in completions[0].error


def with_grammars(library: str, cases: dict[str, tuple[int, str | None]]) -> list[Request]:
    """Requests of {text: (limit, case)}, each with a new processor."""
    requests_of_cases = []
    for seed, (text, (limit, case)) in enumerate(cases.items()):
        ids = pair().tokenizer(text)["input_ids"]
        requests_of_cases.append(Request(ids, limit, seed, None, case and [make(library, case, 0)]))
    return requests_of_cases


@pytest.mark.parametrize(("library", "of_call", "mode"), each_value(["xgrammar", "outlines"], [True, False], MODES))
def test_grammars_share_a_batch(library: str, of_call: bool, mode: str):
    """Each request has a matcher of its own, whether its grammar is its own or that of the call."""
    if not installed(library):
        pytest.skip(f"{library} is not installed")
    target = pair().target
    options = MODES[mode] | {"eos_token_id": target.generation_config.eos_token_id}
    cases = {"On ": (24, "date"), "The cat": (5, "words"), "Colour: ": (20, "enum"), "a b c d": (9, "words")}
    cases |= {"Tom": (14, "date"), "{}": (24, "flat")}
    if of_call:
        cases = {text: (limit, "date") for text, (limit, _) in cases.items()}
    expected = [alone(target, request, **options) for request in with_grammars(library, cases)]
    asked, options_of_call = with_grammars(library, cases), {}
    if of_call:
        asked = [replace(request, logits_processor=None) for request in asked]
        options_of_call = {"logits_processor": [make(library, "date", 0)]}
    strategy = SpeculativeDecoding(pair().draft, num_draft_tokens=3, verification="coupled")
    completions = completed(strategy, target, asked, batch_size=3, **options, **options_of_call)
    assert [completions[index].tokens for index in range(6)] == expected
    assert "one by one" not in strategy.report.layout_reason
    assert strategy.report.accepted > 0


class TakesBackOne(PerCallProcessor):
    """An automaton of which only the last token can be taken back."""

    def for_call(self, input_ids: torch.Tensor, vocab_size: int) -> Automaton:
        return Automaton(vocab_size, input_ids.shape[1], max_rollback=1)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_what_can_be_taken_back_limits_its_own_row_alone(verification: str):
    """Else requests beside it would have other numbers of candidates, and with them other texts."""
    target = tiny()
    strategies: list[SpeculativeDecoding] = []

    def strategy() -> SpeculativeDecoding:
        strategies.append(SpeculativeDecoding(near(target, 0.3), num_draft_tokens=4, verification=verification))
        return strategies[-1]

    def asked() -> list[Request]:
        return [
            replace(one, logits_processor=None if number % 3 else [TakesBackOne()])
            for number, one in enumerate(requests(6))
        ]

    together = strategy()
    assert_alone(together, target, asked, by=strategy, batch_size=6, **SAMPLED)
    assert together.report.drafted == sum(one.report.drafted for one in strategies[1:]) > 0


@pytest.mark.parametrize("cases", [[None, "date", "words", None], ["date", None, None, "words"]], ids=["none", "date"])
@pytest.mark.parametrize("kind", ["model", "suffix"])
def test_a_request_without_a_grammar_drafts_as_alone_beside_others(kind: str, cases: list):
    """Whichever comes first: under "block" another number of candidates would be another text."""
    if not installed("xgrammar"):
        pytest.skip("xgrammar is not installed")
    texts = ["a b a b a b", "On a b", "The cat", "1, 2, 1, 2, 1, 2"]
    strategies: list[SpeculativeDecoding] = []

    def strategy() -> SpeculativeDecoding:
        draft = pair().draft if kind == "model" else SuffixDraft(min_match=1)
        strategies.append(SpeculativeDecoding(draft, num_draft_tokens=3, verification="block"))
        return strategies[-1]

    asked = partial(with_grammars, "xgrammar", {text: (20, case) for text, case in zip(texts, cases, strict=True)})
    options = SAMPLED | {"eos_token_id": pair().target.generation_config.eos_token_id}
    together = strategy()
    assert_alone(together, pair().target, asked, by=strategy, **options)
    assert together.report.drafted == sum(one.report.drafted for one in strategies[1:]) > 0
