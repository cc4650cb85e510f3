"""Several continuations of one match as a tree, by their counts: what it holds, and the text of plain `generate`."""

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from all_pairs import all_pairs
from many import alone, completed
from plain import assert_plain
from repeating import few_tokens, repetitive
from rounds import Heard

from hf_specx import Request, SpeculativeDecoding, SuffixDraft, SuffixPool
from hf_specx.drafting.suffix import Match, _likeliest


GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "top_k": 3}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("number", [3, 12, 64])
def test_the_likeliest_nodes_of_the_trie(seed: int, number: int):
    """Beside all prefixes of the continuations, counted one by one."""
    drawn = random.Random(seed)
    continuations = [[drawn.randrange(-1, 3) for _ in range(drawn.randint(0, 5))] for _ in range(9)]
    tokens, chances, parents = _likeliest(continuations, 4, 0.9, number, 0.1)
    prefixes = Counter(tuple(ids[:end]) for ids in continuations for end in range(1, 1 + min(4, len(ids))))
    worth = {path: 0.9 ** len(path) * times / 9 for path, times in prefixes.items() if min(path) >= 0}
    expected = sorted((chance for chance in worth.values() if chance >= 0.1), reverse=True)[:number]
    assert len(chances) == len(expected)
    assert all(math.isclose(*pair) for pair in zip(chances, expected, strict=True))
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        assert parent < node
        paths[node] = (*paths[parent], token)
        assert math.isclose(worth[paths[node]], chances[node])
    assert len(set(paths.values())) == len(paths)


def test_how_far_a_text_goes_along():
    match = Match([5, 6, 7, 5], [0.5] * 4, [-1, -1, 1, 2], 3)
    assert match.followed_by([6, 7, 5, 1]) == (3, 3)
    assert match.followed_by([6, 7]) == (2, 2)
    assert match.followed_by([6, 5]) == (1, 2)
    assert match.followed_by([1]) == (0, 1)
    assert match.followed_by([]) == (0, 0)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("settings", [GREEDY | {"repetition_penalty": 1.05}, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_of_plain(rows: int, settings: dict):
    target, inputs = repetitive(), few_tokens(rows)
    settings = settings | {"max_new_tokens": 60, "pad_token_id": 0}
    # with a number "auto" has no times to go by, which differ from machine to machine
    strategy = SpeculativeDecoding(SuffixDraft(min_match=1), num_draft_tokens=8, tree=16)
    branches = Heard(lambda done: done.branches)
    strategy.listeners = (*strategy.listeners, branches)
    done = assert_plain(target, strategy, inputs, **settings)
    assert done.forwards < done.plain
    assert any(any(branch) for of_round in branches for branch in of_round)
    assert strategy.report.nodes > strategy.report.drafted


def test_more_is_kept_than_of_a_chain():
    """A pool in which texts go on in several ways."""
    target, inputs, forwards = repetitive(), few_tokens(1), {}
    settings = {"do_sample": True, "top_k": 3, "max_new_tokens": 60, "pad_token_id": 0}
    for tree in (False, 24):
        pool = SuffixPool()
        for seed in range(2, 8):
            torch.manual_seed(seed)
            pool.add(target.generate(**inputs, **settings)[0])
        strategy = SpeculativeDecoding(SuffixDraft(pool=pool), num_draft_tokens=8, tree=tree)
        forwards[tree] = assert_plain(target, strategy, inputs, **settings).forwards
    assert forwards[24] < forwards[False]


@pytest.mark.parametrize(("settings", "draft"), all_pairs([GREEDY, SAMPLED], ["suffix", "list"]))
def test_rows_of_a_queue(settings: dict, draft: str):
    target, inputs = repetitive(), few_tokens(3)
    texts = [ids[mask.bool()].tolist() for ids, mask in zip(*inputs.values(), strict=True)]
    asked = [Request(text, seed=seed) for seed, text in enumerate([*texts, *(text[:-2] for text in texts)])]
    options = settings | {"eos_token_id": [11], "pad_token_id": 0, "max_new_tokens": 24}
    drafts: Any = SuffixDraft(min_match=1) if draft == "suffix" else [SuffixDraft(min_match=1), target]
    strategy = SpeculativeDecoding(drafts, num_draft_tokens=4, tree=12)
    found = completed(strategy, target, asked, batch_size=3, **options)
    assert [found[index].tokens for index in range(len(asked))] == [alone(target, ask, **options) for ask in asked]
    assert strategy.report.nodes > strategy.report.drafted
