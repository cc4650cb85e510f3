"""`generate_many` over requests that come while others are decoded: pieces, free places, cancelling."""

import threading
from collections.abc import Iterator

import pytest
import torch
from all_pairs import each_value
from criteria import Counting
from many import DRAFTS, GREEDY, SAMPLED, alone, requests
from plain import coupled
from tiny import Forwards, near, tiny
from vision import inputs, seeing

from hf_specx import Piece, Request, SpeculativeDecoding
from hf_specx.engine import queue


class Arriving:
    """Requests of which some come in each round, and then perhaps none for some time; `asked` counts the questions."""

    def __init__(self, asked: list[Request], groups: list[int]):
        self.waiting, self.groups, self.asked = list(asked), list(groups), 0

    def __iter__(self) -> Iterator[Request | None]:
        for number in self.groups:
            for _ in range(number):
                yield self.waiting.pop(0)
            self.asked += 1
            yield None
        yield from self.waiting


class Rows:
    """How many rows each round has."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def observe(self, done) -> None:
        self.numbers.append(len(done.rows))


def pieces_by_request(pieces: list[Piece]) -> dict[int, list[int]]:
    """The tokens of each request, put together; its last piece has all of them."""
    texts: dict[int, list[int]] = {}
    over: set[int] = set()
    for piece in pieces:
        assert piece.index not in over
        texts.setdefault(piece.index, []).extend(piece.tokens)
        if piece.finished is not None:
            over.add(piece.index)
            assert piece.finished.index == piece.index
            assert piece.finished.tokens == texts[piece.index]
    assert over == set(texts)
    return texts


GROUPS = {
    "one by one": [1, 0, 1, 0, 0, 1, 0, 2],
    "after a pause": [2] + [0] * 40 + [3, 0, 4],
    "all at once": [9],
    "wider": [1] * 12,
}


@pytest.mark.parametrize(
    ("kind", "options", "groups", "model_type"),
    each_value(DRAFTS, {"greedy": GREEDY, "sampled": SAMPLED}, GROUPS, ("llama", "gpt2", "mistral")),
)
def test_requests_that_come_later_get_the_text_of_generate(kind: str, options: str, groups: str, model_type: str):
    """In places that were free from the first, became free, or that others have just left."""
    target, asked = tiny(model_type), requests(14)
    given = GREEDY if options == "greedy" else SAMPLED
    expected = {index: alone(target, request, **given) for index, request in enumerate(asked)}
    rows = Rows()
    strategy = SpeculativeDecoding(DRAFTS[kind](target), num_draft_tokens=4, verification="coupled")
    strategy.listeners = (rows,)
    pieces = strategy.generate_many(target, Arriving(asked, GROUPS[groups]), batch_size=5, stream=True, **given)
    assert pieces_by_request(list(pieces)) == expected
    assert max(rows.numbers) > 1
    if groups in ("one by one", "wider"):
        assert rows.numbers[0] == 1 < max(rows.numbers)
    assert strategy.report.emitted == sum(map(len, expected.values()))


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_candidates_of_rows_that_come_later_branch(options: dict):
    """Greedy requests beside ones that sample too, whose race has no noise."""
    target, asked = tiny(), requests(10)
    if options is SAMPLED:
        asked += [Request([3, 4, 5], 12, generate_kwargs={"do_sample": False})]
    expected = {index: alone(target, each, **options | each.generate_kwargs) for index, each in enumerate(asked)}
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=3, verification="coupled", tree=8)
    pieces = strategy.generate_many(target, Arriving(asked, [1, 0, 2, 0, 1]), batch_size=4, stream=True, **options)
    assert pieces_by_request(list(pieces)) == expected
    assert strategy.report.nodes > strategy.report.drafted


@pytest.mark.parametrize("verification", ["token", "block"])
def test_rows_that_come_later_are_independent_of_others(verification: str):
    target, asked = tiny(), requests(8)
    by = SpeculativeDecoding(near(target, 0.2), verification=verification, num_draft_tokens=3)
    expected = {index: alone(target, request, by, **SAMPLED) for index, request in enumerate(asked)}
    strategy = SpeculativeDecoding(near(target, 0.2), verification=verification, num_draft_tokens=3)
    pieces = strategy.generate_many(target, Arriving(asked, [1, 0, 2, 0, 1]), batch_size=4, stream=True, **SAMPLED)
    assert pieces_by_request(list(pieces)) == expected


@pytest.mark.filterwarnings("ignore:compile=True compiles")
def test_compiled_forwards_have_places_for_more_rows(untraced: None):
    target, asked = tiny(num_hidden_layers=1), requests(8)
    expected = {index: alone(target, request, **GREEDY) for index, request in enumerate(asked)}
    strategy = coupled(target, 0.2, num_draft_tokens=2, compile=True)
    pieces = strategy.generate_many(target, Arriving(asked, [1, 0, 1, 0, 2]), batch_size=4, stream=True, **GREEDY)
    assert pieces_by_request(list(pieces)) == expected


def test_tokens_come_round_by_round_and_the_next_request_is_taken_meanwhile():
    """The second request is given only once the first has some tokens, and both go on together."""
    target, asked, seen = tiny(), [Request([3, 4, 5], 20), Request([6, 7], 20)], []
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def giving() -> Iterator[Request | None]:
        yield asked[0]
        while sum(piece.index == 0 for piece in seen) < 3:
            yield None
        yield asked[1]

    strategy, rows = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=2), Rows()
    strategy.listeners = (rows,)
    for piece in strategy.generate_many(target, giving(), batch_size=2, stream=True, **options):
        seen.append(piece)
    assert pieces_by_request(seen) == {n: alone(target, request, **options) for n, request in enumerate(asked)}
    assert rows.numbers[:3] == [1, 1, 1]
    assert 2 in rows.numbers


def test_a_short_request_after_a_prompt_that_was_much_longer(monkeypatch: pytest.MonkeyPatch):
    """All rows end in one round, and the next batch is another: its columns are no wider than its own prompts."""
    monkeypatch.setattr(queue, "MAX_UNUSED_COLUMNS", 8)
    target = tiny()
    asked = [Request([*range(1, 25)], 1, seed=1), Request([1, 2, 3], 6, seed=2), Request([4, 5], 6, seed=3)]
    expected = {index: alone(target, request, **GREEDY) for index, request in enumerate(asked)}
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=3)
    pieces = strategy.generate_many(target, Arriving(asked, [1, 1, 0]), batch_size=3, stream=True, **GREEDY)
    assert pieces_by_request(list(pieces)) == expected


def test_an_iterable_is_asked_again_where_nothing_goes_on():
    """And ends there, or brings more, after any number of times that it had nothing."""
    target, asked = tiny(), requests(3)
    late = Arriving(asked, [0, 0, 0, 1, *[0] * 60, 0, 1])
    done = SpeculativeDecoding(near(target, 0.2)).generate_many(target, late, batch_size=2, ordered=True, **GREEDY)
    assert [each.tokens for each in done] == [alone(target, request, **GREEDY) for request in asked]
    assert late.asked == len(late.groups)
    assert list(SpeculativeDecoding(near(target, 0.2)).generate_many(target, iter([None, None]), **GREEDY)) == []


@pytest.mark.parametrize("layout", ["ragged", "padded"], ids=["refilled", "whole batches"])
def test_a_request_that_is_cancelled_ends_as_it_is(layout: str):
    """The others have their texts, one that waits takes its place; one that never began has no tokens."""
    target, events = tiny(), [threading.Event() for _ in range(4)]
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 24}
    asked = [Request([3 + n, 4, 5], cancelled=event.is_set) for n, event in enumerate(events)]
    expected = [alone(target, request, **options) for request in asked]
    events[3].set()
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=2, layout=layout)
    pieces = []
    for piece in strategy.generate_many(target, asked, batch_size=2, stream=True, **options):
        pieces.append(piece)
        if piece.index == 0:
            events[0].set()
    texts = pieces_by_request(pieces)
    reasons = {piece.index: piece.finished.finish_reason for piece in pieces if piece.finished}
    assert [texts[1], texts[2]] == expected[1:3]
    assert 0 < len(texts[0]) < 24
    assert texts[0] == expected[0][: len(texts[0])]
    assert texts[3] == []
    assert reasons == {0: "cancelled", 1: "length", 2: "length", 3: "cancelled"}


def test_a_request_that_is_cancelled_while_it_waits_for_a_batch_of_its_own():
    target, event = tiny(), threading.Event()
    asked = [Request([3, 4, 5], 2), Request([6, 7], 20)]
    asked += [Request([8, 9], 20, logits_processor=[Counting()], cancelled=event.is_set)]
    reasons = {}
    for done in SpeculativeDecoding(near(target, 0.2)).generate_many(target, asked, batch_size=2, **GREEDY):
        reasons[done.index] = done.finish_reason, len(done.tokens)
        event.set()
    assert reasons[2] == ("cancelled", 0)


def test_a_request_that_is_decoded_alone_can_be_cancelled():
    target, calls = tiny(), []
    cancelled = lambda: calls.append(0) or len(calls) > 6  # noqa: E731
    options = {"do_sample": False, "pad_token_id": 0}
    request = Request([3, 4, 5], 30, logits_processor=[Counting()], cancelled=cancelled)
    (piece,) = SpeculativeDecoding(near(target, 0.2)).generate_many(target, [request], stream=True, **options)
    assert piece.finished.finish_reason == "cancelled"
    expected = alone(target, Request([3, 4, 5], 30, logits_processor=[Counting()]), **options)
    assert piece.tokens == expected[: len(piece.tokens)]
    assert 0 < len(piece.tokens) < 8


OWN = [
    {"do_sample": False},
    {"top_k": 3},
    {"repetition_penalty": 1.4, "top_k": 0},
    {"sequence_bias": {(7,): 4.0}, "temperature": 0.6},
    {"do_sample": False, "repetition_penalty": 1.3},
    {"min_p": 0.2, "eos_token_id": [9]},
]


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_each_request_has_settings_of_its_own(layout: str):
    """Greedy rows beside rows that sample, both speculated; ends of their own too."""
    target = tiny()
    asked = [Request([3 + n, 4, 5], 16, seed=n, generate_kwargs=OWN[n % len(OWN)]) for n in range(12)]
    expected = [alone(target, request, **SAMPLED | request.generate_kwargs) for request in asked]
    strategy = SpeculativeDecoding(near(target, 0.1), num_draft_tokens=3, verification="coupled", layout=layout)
    with Forwards(target) as forwards:
        done = list(strategy.generate_many(target, asked, batch_size=4, ordered=True, **SAMPLED))
    assert [each.tokens for each in done] == expected
    assert strategy.report.accepted > 0
    assert len(forwards.ids) < sum(map(len, expected)) / 2


def test_a_generation_config_of_a_request_counts_in_place_of_the_call():
    target = tiny()
    config = target.generation_config.__class__(do_sample=False, max_new_tokens=9, pad_token_id=0)
    own = Request([3, 4, 5], generate_kwargs={"generation_config": config})
    strategy = SpeculativeDecoding(near(target, 0.1), verification="coupled")
    done = list(strategy.generate_many(target, [own, Request([3, 4, 5], seed=1)], ordered=True, **SAMPLED))
    ids = torch.tensor([[3, 4, 5]])
    plain = target.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    assert done[0].tokens == plain[0, 3:].tolist()
    assert done[1].tokens == alone(target, Request([3, 4, 5], seed=1), **SAMPLED)


def test_a_request_that_samples_where_the_call_does_not():
    target = tiny()
    own = Request([3, 4, 5], 12, seed=4, generate_kwargs={"do_sample": True, "top_k": 5})
    strategy = SpeculativeDecoding(near(target, 0.1), verification="coupled")
    done = list(strategy.generate_many(target, [Request([7, 8]), own], ordered=True, **GREEDY))
    assert done[1].tokens == alone(target, own, **GREEDY | own.generate_kwargs)


def test_what_no_request_can_have():
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.1))
    with pytest.raises(ValueError, match="ordered=True is of whole completions"):
        strategy.generate_many(target, [[1]], stream=True, ordered=True, **GREEDY)
    asked = [
        Request([1], 3, generate_kwargs={"num_beams": 2}),
        Request([1], 3, generate_kwargs={"max_new_tokens": 3}),
        Request([1], 3, generate_kwargs={"no_such_option": 3}),
    ]
    done = list(strategy.generate_many(target, asked, ordered=True, **GREEDY))
    assert [each.finish_reason for each in done] == ["refused"] * 3
    assert "num_beams" in done[0].error
    assert "leave one of them out" in done[1].error
    assert "no_such_option" in done[2].error


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl"])
def test_requests_with_images(model_type: str):
    """Beside one of text alone; they are speculated, in batches of their own."""
    target = seeing(model_type)
    asked, expected = [Request([1, 2, 3], 8)], [alone(target, Request([1, 2, 3], 8), **GREEDY)]
    for number in range(2):
        given = inputs(target, (1,))
        given["pixel_values"] = given["pixel_values"] * (1 - 3 * number)
        ids, mask = given.pop("input_ids"), given.pop("attention_mask")
        text = target.generate(input_ids=ids, attention_mask=mask, **given, **GREEDY | {"max_new_tokens": 10})
        expected.append(text[0, ids.shape[1] :].tolist())
        asked.append(Request(ids[0], 10, generate_kwargs=given))
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=3)
    done = list(strategy.generate_many(target, asked, batch_size=2, ordered=True, **GREEDY))
    assert [each.tokens for each in done] == expected
    assert strategy.report.accepted > 0
