"""Lookups by runs of tokens against a slow twin that compares a text with every position of every text."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specx.drafting.suffix import Acceptance, _most_frequent
from hf_specx.drafting.suffix_pool import DEPTH, SAMPLE, TRIED, NGrams


letters = st.integers(-1, 2)
few_texts = st.lists(st.lists(letters, max_size=60), min_size=1, max_size=4)


def grown(lists: list[list[int]], length: int) -> NGrams:
    """Texts that grow token by token, in turns."""
    grams = NGrams(length)
    for offset in range(max(map(len, lists), default=0)):
        for number, text in enumerate(lists):
            grams.extend(number, text[offset : offset + 1])
    return grams


def match(text: list[int], other: list[int], offset: int) -> int:
    """Tokens at the end of `text` that stand before an offset of another one, at most `DEPTH`."""
    length = 0
    while length < min(len(text), offset, DEPTH) and text[-1 - length] == other[offset - 1 - length]:
        length += 1
    return length


@settings(max_examples=200, deadline=None, derandomize=True)
@given(few_texts, st.lists(letters, max_size=40), st.integers(1, 4))
def test_the_longest_match_is_that_of_the_twin(lists: list, looked_for: list, least: int):
    """Where no more places follow the run than are compared; what follows is what followed there."""
    places = [(text, offset) for text in lists for offset in range(1, len(text))]
    lengths = [match(looked_for, text, offset) for text, offset in places]
    longest = max(lengths, default=0)
    length, followers = grown(lists, least).find(array("i", looked_for), DEPTH, 3)
    if sum(found >= least for found in lengths) <= TRIED:
        assert length == (longest if longest >= least else 0)
    if length:
        expected = [text[at : at + 3] for (text, at), found in zip(places, lengths, strict=True) if found == length]
        assert all(follower in expected for follower in followers)
        assert len(followers) == min(SAMPLE, len(expected)) or len(expected) > TRIED


def test_a_text_that_runs_into_its_own_end_goes_round():
    grams = grown([[1, 2, 3] * 5], 2)
    assert grams.find(grams.texts[0], DEPTH, 7)[1][0] == [1, 2, 3, 1, 2, 3, 1]
    assert grams.find(array("i", [1, 2, 3] * 5), DEPTH, 7)[1][0] == [1, 2, 3]


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
