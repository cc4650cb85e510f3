"""Lookups in a suffix index against a slow twin that compares a text with every position of every text."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specx.drafting.suffix_index import DEPTH, OFFSET_BITS, SAMPLE, FollowedRuns, SuffixIndex
from hf_specx.drafting.suffix_rows import Acceptance, Rows, _most_frequent


Texts = dict[int, array]
letters = st.integers(-1, 2)
few_texts = st.lists(st.lists(letters, max_size=80), min_size=1, max_size=4)


def as_texts(lists: list[list[int]]) -> Texts:
    return {3 * number: array("i", text) for number, text in enumerate(lists)}


def match(text: array, other: array, offset: int) -> int:
    """Tokens at the end of `text` that stand before an offset of another one, at most `DEPTH`."""
    length = 0
    while length < min(len(text), offset, DEPTH) and text[-1 - length] == other[offset - 1 - length]:
        length += 1
    return length


def twin(texts: Texts, text: array) -> dict[tuple[int, int], int]:
    """Text number and offset of the positions that follow the longest match, with its length."""
    matches = {(n, i): match(text, other, i) for n, other in texts.items() for i in range(1, len(other))}
    most = max(matches.values(), default=0)
    return {place: length for place, length in matches.items() if length == most}


def grown(texts: Texts) -> SuffixIndex:
    """An index whose texts grow token by token, in turns."""
    index = SuffixIndex({number: array("i") for number in texts}, indexed=False)
    for offset in range(max(map(len, texts.values()))):
        for number, text in texts.items():
            if offset < len(text):
                index.texts[number].append(text[offset])
                index.insert(number, offset)
    return index


@settings(max_examples=200, deadline=None, derandomize=True)
@given(few_texts, st.lists(letters, max_size=50), st.booleans())
def test_the_longest_match_and_its_positions_are_those_of_the_twin(lists: list, looked_for: list, online: bool):
    texts, text = as_texts(lists), array("i", looked_for)
    index = grown(texts) if online else SuffixIndex(texts)
    expected = twin(texts, text)
    length, at = index.longest(text[: -DEPTH - 1 : -1])
    assert length == max(expected.values(), default=0)
    if length:
        found = index.positions(text[: -DEPTH - 1 : -1], length, at)
        places = {(position >> OFFSET_BITS, position & (1 << OFFSET_BITS) - 1) for position in found}
        assert len(places) == len(found) == min(len(expected), SAMPLE)
        assert places <= expected.keys()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(few_texts, st.integers(0, 10))
def test_texts_that_leave_are_not_found(lists: list, least: int):
    texts = as_texts(lists)
    kept = SuffixIndex(texts).since(least)
    assert kept.texts == {number: text for number, text in texts.items() if number >= least}
    assert sorted(kept.order) == sorted(SuffixIndex(kept.texts).order)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=40), min_size=1, max_size=3), st.data())
def test_rows_find_what_followed_most_often(lists: list, data):
    """While rows grow, in turns; candidates are those of the twin's positions."""
    texts = {number: array("i", text[:2]) for number, text in enumerate(lists)}
    rows = Rows(texts, Acceptance())
    for offset in range(2, max(map(len, lists))):
        for number, text in enumerate(lists):
            rows.observe(number, text[offset : offset + 1])
    row = data.draw(st.sampled_from(sorted(texts)))
    expected = twin(texts, texts[row])
    found = rows.find(row, 1)
    length = max(expected.values(), default=0)
    assert found.length == (length if length >= 2 else 0)
    if found.length and len(expected) <= SAMPLE:
        counts = [texts[number][offset] for number, offset in expected]
        assert counts.count(found.tokens[0]) == max(map(counts.count, counts))


def test_a_text_that_runs_into_its_own_end_goes_round():
    rows = Rows({0: array("i", [1, 2, 3] * 5)}, Acceptance())
    assert rows.find(0, 7).tokens == [1, 2, 3, 1, 2, 3, 1]


def test_all_is_sorted_anew_when_much_is_new(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hf_specx.drafting.suffix_rows.FRESH", 10)
    rows = Rows({0: array("i", range(20)), 1: array("i", [50, 51])}, Acceptance())
    for token in range(60, 90):
        rows.observe(1, [token])
        assert len(rows.fresh.order) <= 10
    assert len(rows.sorted.order) + len(rows.fresh.order) == 19 + 31
    rows.observe(0, [70, 71, 72])
    assert rows.find(0, 3).tokens == [73, 74, 75]


def test_the_number_follows_length_and_acceptance():
    acceptance, followers = Acceptance(), [list(range(16))]
    fresh = [len(_most_frequent(followers, 16, acceptance.rate(length))[0]) for length in (2, 4, 8, 16)]
    assert fresh == sorted(fresh)
    assert fresh[0] < fresh[-1]
    for _ in range(40):
        acceptance.note(2, 0, 1)
        acceptance.note(8, 4, 4)
    assert not _most_frequent(followers, 16, acceptance.rate(3))[0]
    assert len(_most_frequent(followers, 16, acceptance.rate(9))[0]) == 16
    for _ in range(200):  # matches that are let go
        acceptance.note(2, 0, 0)
    assert _most_frequent(followers, 16, acceptance.rate(3))[0]


def test_of_several_continuations_the_most_frequent_one():
    tokens, chances = _most_frequent([[5, 6], [5, 7, 8], [4, 6], [5, 7]], 16, 1.0)
    assert (tokens, chances) == ([5, 7, 8], [0.75, 0.5, 0.25])
    assert _most_frequent([[5, -1, 5]], 16, 1.0) == ([5], [1.0])  # an id outside of the vocabulary


def test_no_more_tokens_are_compared_than_asked_for():
    """After the last 3 tokens stands 9; after the last one alone mostly 7."""
    rows = Rows({0: array("i", [1, 2, 3, 9, 3, 7, 3, 7, 3, 7, 1, 2, 3])}, Acceptance(), min_match=1)
    assert rows.find(0, 1).tokens == [9]
    assert rows.find(0, 1, max_match=1).tokens == [7]
    assert rows.find(0, 1, max_match=1).length == 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(few_texts, st.integers(1, 4), st.lists(st.integers(0, 3), max_size=6))
def test_what_is_followed_is_never_denied(lists: list, length: int, more: list):
    """Runs are found that were there from the start, and that were made by a text that grows."""
    texts = {0: array("i", [7, 8, 9]), **as_texts(lists)}
    followed = FollowedRuns(texts, length)
    for token in more:
        texts[0].append(token)
        followed.add(texts[0])
    for text in texts.values():
        assert all(followed.has(text[:end]) for end in range(length, len(text)))
        assert not followed.has(text[: length - 1])


def test_most_of_what_has_nothing_after_it_is_denied():
    followed = FollowedRuns({0: array("i", range(5000))}, 2)
    denied = [not followed.has(array("i", [first, first + 2])) for first in range(5000)]
    assert sum(denied) > 0.9 * len(denied)
