"""Texts of earlier calls: how many are kept, in which order they leave, files, threads, vocabularies; and lookups in
them, against a slow twin that compares a text with every position of every text.
"""

from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from repositories import Payload, ran
from tiny_tokenizer import TEXTS, tiny_tokenizer

from hf_specx import SuffixPool
from hf_specx.drafting.suffix import MatchAcceptance, _most_frequent
from hf_specx.drafting.suffix_pool import DEPTH, MAX_CONTINUATIONS, MAX_PLACES, NGrams


def text(seed: int, length: int = 30, vocab_size: int = 50) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def as_lists(pool: SuffixPool) -> list[list[int]]:
    return [list(one) for one in pool.texts]


def is_consistent(pool: SuffixPool) -> bool:
    """Whether texts are found exactly where a pool that is made anew finds them."""
    again = SuffixPool(pool.max_tokens)
    again.add(*pool.texts)
    ends = [one[:end] for one in pool.texts for end in (2, 5, len(one))]
    return all(pool.find(end, 2, 8, 3) == again.find(end, 2, 8, 3) for end in ends)


def test_the_oldest_texts_leave_first():
    pool = SuffixPool(max_tokens=400)
    for number in range(60):
        pool.find(array("i", text(number)), 2, 8, 1)  # from now on new texts are indexed one by one
        pool.add(text(number))
        texts = as_lists(pool)
        assert len(pool) == sum(map(len, texts)) <= 400
        assert texts == [text(n) for n in range(number + 1 - len(texts), number + 1)]
        assert len(pool) == min(30 * (number + 1), 390)
    assert is_consistent(pool)
    pool.add(range(1000))
    assert as_lists(pool) == [list(range(600, 1000))]  # of a text that is too long the end stays


def test_save_and_load(tmp_path: Path):
    pool = SuffixPool(max_tokens=500, vocab_size=50)
    pool.add(*(text(n) for n in range(5)))
    pool.save(tmp_path / "pool")
    again = SuffixPool.load(tmp_path / "pool")
    assert as_lists(again) == as_lists(pool)
    assert (again.max_tokens, again.vocab_size) == (500, 50)
    assert [path.name for path in tmp_path.iterdir()] == ["pool"]
    SuffixPool().save(tmp_path / "empty")
    assert not len(SuffixPool.load(tmp_path / "empty"))


def test_files_that_are_none_are_refused_and_nothing_in_them_is_run(tmp_path: Path):
    valid = {"format": "hf_specx.SuffixPool 1", "max_tokens": 10, "vocab_size": 2}
    damaged = [
        {"format": "other"},
        {"max_tokens": -1},
        {"tokens": torch.tensor([1, 1]), "lengths": torch.tensor([3])},
        {"tokens": torch.tensor([1, 2]), "lengths": torch.tensor([2])},  # one is outside of the vocabulary
        {"tokens": torch.tensor([0.5]), "lengths": torch.tensor([1])},
        {"tokens": Payload(tmp_path)},
    ]
    for content in (b"text", [1], valid, *(valid | change for change in damaged)):
        if isinstance(content, bytes):
            (tmp_path / "pool").write_bytes(content)
        else:
            torch.save(content, tmp_path / "pool")
        with pytest.raises(ValueError, match=r"pool was not written by SuffixPool\.save"):
            SuffixPool.load(tmp_path / "pool")
    assert not ran(tmp_path)
    with pytest.raises(FileNotFoundError):
        SuffixPool.load(tmp_path / "none")


def test_texts_of_another_vocabulary_are_refused():
    pool = SuffixPool()
    pool.add([1, 2, 60])
    with pytest.raises(ValueError, match="of 61 tokens"):
        pool.check(50)
    pool.check(64)
    pool.check(64)
    with pytest.raises(ValueError, match="of 64 tokens"):
        pool.check(65)
    for wrong in ([3, 64], [-1, 3]):
        with pytest.raises(ValueError, match="vocabulary, 0 to 63"):
            pool.add([1], wrong)
    assert as_lists(pool) == [[1, 2, 60]]


def test_texts_of_another_tokenizer_are_refused(tmp_path):
    """Also of one with as many tokens: where it is known, the first one that is met is remembered, and saved."""
    one, other = tiny_tokenizer(), tiny_tokenizer([word[::-1] for word in TEXTS])
    vocab_size = max(len(one), len(other))
    learned, declared = SuffixPool(), SuffixPool(tokenizer=one)
    learned.add([1, 2, 3])
    learned.check(vocab_size)
    learned.check(vocab_size, one)
    learned.check(vocab_size)
    learned.save(tmp_path / "pool")
    for pool in (learned, declared, SuffixPool.load(tmp_path / "pool")):
        pool.check(vocab_size, tiny_tokenizer())
        with pytest.raises(ValueError, match="another tokenizer"):
            pool.check(vocab_size, other)


def test_what_is_no_number_or_no_text_is_refused():
    with pytest.raises(ValueError, match="max_tokens=0"):
        SuffixPool(max_tokens=0)
    for wrong in ([1.5], ["a"], 7, [2**31], torch.ones(2, 2).long()):
        with pytest.raises(ValueError, match="list of token ids"):
            SuffixPool().add(wrong)


def test_threads_add_and_read_at_once():
    pool = SuffixPool(max_tokens=2000)

    def work(thread: int) -> None:
        for number in range(30):
            pool.add(text(100 * thread + number))
            for least in (2, 3):
                length, _ = pool.find(array("i", text(100 * thread + number)[:-1]), least, 8, 2)
                assert length in (0, *range(least, 9))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))  # which raises what was raised there
    assert len(pool) <= 2000
    assert is_consistent(pool)


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
    if sum(matched >= least for matched in lengths) <= MAX_PLACES:
        assert length == (longest if longest >= least else 0)
    if length:
        expected = [
            text[at : at + 3] for (text, at), matched in zip(places, lengths, strict=True) if matched == length
        ]
        assert all(follower in expected for follower in followers)
        assert len(followers) == min(MAX_CONTINUATIONS, len(expected)) or len(expected) > MAX_PLACES


def test_a_text_that_runs_into_its_own_end_goes_round():
    grams = grown([[1, 2, 3] * 5], 2)
    assert grams.find(grams.texts[0], DEPTH, 7)[1][0] == [1, 2, 3, 1, 2, 3, 1]
    assert grams.find(array("i", [1, 2, 3] * 5), DEPTH, 7)[1][0] == [1, 2, 3]


def test_the_number_follows_length_and_acceptance():
    acceptance, followers = MatchAcceptance(), [list(range(16))]
    fresh = [len(_most_frequent(followers, 16, acceptance.rate(length))[0]) for length in (2, 4, 8, 16)]
    assert fresh == sorted(fresh)
    assert fresh[0] < fresh[-1]
    for _ in range(40):
        acceptance.update(2, 0, 1)
        acceptance.update(8, 4, 4)
    assert not _most_frequent(followers, 16, acceptance.rate(3))[0]
    assert len(_most_frequent(followers, 16, acceptance.rate(9))[0]) == 16
    for _ in range(200):  # matches that are let go
        acceptance.update(2, 0, 0)
    assert _most_frequent(followers, 16, acceptance.rate(3))[0]


def test_of_several_continuations_the_most_frequent_one():
    tokens, chances, parents = _most_frequent([[5, 6], [5, 7, 8], [4, 6], [5, 7]], 16, 1.0)
    assert (tokens, chances, parents) == ([5, 7, 8], [0.75, 0.5, 0.25], [-1, 0, 1])
    assert _most_frequent([[5, -1, 5]], 16, 1.0) == ([5], [1.0], [-1])  # an id outside of the vocabulary
