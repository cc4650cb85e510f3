"""Several continuations of one match as a tree, by their counts: what it holds, and the text of plain `generate`."""

import copy
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

from hf_specx import Costs, Request, SpeculativeDecoding, SuffixDraft, SuffixPool
from hf_specx.drafting.round_timer import RoundTimer
from hf_specx.drafting.suffix import Match, _likeliest
from hf_specx.drafting.trees import TreeShapes


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


def draft_of(slope: float, nodes: int | str = "auto", numbers: Any = range(1, 65)) -> SuffixDraft:
    """A draft in a call where each further token of a forward costs so much of a plain step."""
    draft = SuffixDraft()
    table: Any = {1: {"target": {1: 1.0, 9: 1.0 + 8 * slope}, "draft": 0.0}}
    draft.round_timer = RoundTimer(Costs(table), online=True)
    draft.tree_shapes = TreeShapes(nodes, draft.round_timer, numbers=numbers)
    return draft


WIDE = Match([*range(20)], [0.5, 0.3, *[0.05] * 18], [-1] * 20, 3)  # many ways to go on, of which none goes far
DEEP = Match([5, 6, 7, 8, 9], [0.9, 0.8, 0.7, 0.6, 0.02], [-1, 0, 1, 2, -1], 9)


@pytest.mark.parametrize(("slope", "match", "is_tree"), [(0.0, WIDE, True), (0.4, WIDE, False), (0.1, DEEP, False)])
def test_auto_takes_trees_where_they_promise_more_tokens_a_second(slope: float, match: Match, is_tree: bool):
    draft = draft_of(slope)
    taken = draft._best_kind([match])
    assert taken == ([match] if is_tree else [match.first_choices()])
    draft.round_timer.tree_times = lambda rows, steps, most: [10.0] * (most + 1)  # as rounds with trees have shown
    assert draft._best_kind([match]) == [match.first_choices()]


def test_compiled_calls_have_trees_of_few_sizes():
    for numbers, sizes in ((range(1, 65), range(2, 21)), ((7, 15), (7, 15, 20))):
        chosen = {draft_of(slope, 64, numbers)._best([WIDE.chances]) for slope in (0.1, 0.07, 0.05, 0.03, 0.0)}
        assert chosen <= {0, *sizes}
        assert len(chosen) > 1


@pytest.fixture(params=["by their costs", "at no cost"])
def number(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How many candidates are taken: by the assumed costs of a call with a number, or all that were found."""
    if request.param == "at no cost":
        monkeypatch.setattr(SuffixDraft, "_best", lambda self, chances: max(map(len, chances)))
    return request.param


@pytest.mark.parametrize(("rows", "settings"), all_pairs([1, 3], [GREEDY | {"repetition_penalty": 1.05}, SAMPLED]))
def test_the_text_of_plain(rows: int, settings: dict, number: str):
    target, inputs = repetitive(), few_tokens(rows)
    settings = settings | {"max_new_tokens": 60, "pad_token_id": 0}
    strategy = SpeculativeDecoding(SuffixDraft(min_match=1), num_draft_tokens=8, tree=16)
    branches, nodes = Heard(lambda done: done.accepted_ranks), Heard(lambda done: done.num_candidates)
    strategy.listeners = (*strategy.listeners, branches, nodes)
    done = assert_plain(target, strategy, inputs, **settings)
    assert done.forwards < done.plain
    assert max(map(max, nodes)) <= 16
    if number == "at no cost":
        assert any(any(branch) for of_round in branches for branch in of_round)
        assert strategy.report.nodes > strategy.report.drafted


def test_less_forwards_than_with_a_chain(monkeypatch: pytest.MonkeyPatch):
    """A pool in which texts go on in several ways."""
    monkeypatch.setattr(SuffixDraft, "_best", lambda self, chances: max(map(len, chances)))
    target, inputs, forwards, pool = repetitive(), few_tokens(1), {}, SuffixPool()
    settings = {"do_sample": True, "top_k": 3, "max_new_tokens": 40, "pad_token_id": 0}
    for seed in range(2, 8):
        torch.manual_seed(seed)
        pool.add(target.generate(**inputs, **settings)[0])
    for tree in (False, 24):
        strategy = SpeculativeDecoding(SuffixDraft(pool=copy.copy(pool)), num_draft_tokens=8, tree=tree)
        forwards[tree] = assert_plain(target, strategy, inputs, **settings).forwards
    assert forwards[24] < forwards[False]


@pytest.mark.parametrize(("settings", "draft"), all_pairs([GREEDY, SAMPLED], ["suffix", "list"]))
def test_rows_of_a_queue(settings: dict, draft: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SuffixDraft, "_best", lambda self, chances: max(map(len, chances)))
    target, inputs = repetitive(), few_tokens(3)
    texts = [ids[mask.bool()].tolist() for ids, mask in zip(*inputs.values(), strict=True)]
    asked = [Request([*text, *text], seed=seed) for seed, text in enumerate([*texts, *(text[2:] for text in texts)])]
    options = settings | {"eos_token_id": [11], "pad_token_id": 0, "max_new_tokens": 24}
    drafts: Any = SuffixDraft(min_match=1) if draft == "suffix" else [SuffixDraft(min_match=1), target]
    strategy = SpeculativeDecoding(drafts, num_draft_tokens=4, tree=12)
    found = completed(strategy, target, asked, batch_size=3, **options)
    assert [found[index].tokens for index in range(len(asked))] == [alone(target, ask, **options) for ask in asked]
    assert strategy.report.nodes > strategy.report.drafted
