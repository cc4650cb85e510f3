"""How many nodes "auto" takes: by what nodes are worth and what forwards cost."""

from typing import Any

import pytest
import torch
from plain import assert_plain
from rounds import Heard
from tiny import near, prompts, tiny

from hf_specx import Costs, SpeculativeDecoding
from hf_specx.common.round import Draft
from hf_specx.common.tree import Tree
from hf_specx.drafting.round_timer import RoundTimer
from hf_specx.drafting.trees import PRIOR, RankEstimate, TreeShapes


def costs(step: float, slope: float, rows: int = 1) -> Costs:
    """A draft step, and each further token of a forward, in plain steps."""
    return Costs({rows: {"target": {1: 1.0, 9: 1.0 + 8 * slope}, "draft": step}}, clock=lambda: 0.0)


def nodes(step: float, slope: float, depth: int = 4, kind: str = "comb", ranks: RankEstimate | None = None) -> int:
    trees = TreeShapes("auto", RoundTimer(costs(step, slope), online=True), ranks)
    assert trees.begin_round([depth], kind) == [depth]
    return trees.num_nodes


def test_a_tree_is_as_large_as_forwards_are_cheap():
    numbers = [nodes(0.1, slope) for slope in (0.5, 0.05, 0.02, 0.005, 0.0)]
    assert numbers == sorted(numbers)
    assert numbers[0] == 4  # the chain
    assert 4 < numbers[2] < 20
    assert numbers[-1] > 60
    assert nodes(0.1, 0.0, kind="full") == 64


def best_by_hand(slope: float) -> float:
    """Tokens a second of the best comb of depth 4, by trying all numbers of leaves."""
    chances = RankEstimate().chances
    leaves = sorted((chances[0] ** depth * chance for depth in range(4) for chance in chances[1:]), reverse=True)
    chain = 1 + sum(chances[0] ** (place + 1) for place in range(4))
    return max((chain + sum(leaves[:n])) / (1 + slope * (4 + n) + 0.4) for n in range(1, 60))


@pytest.mark.parametrize("slope", [0.005, 0.01, 0.02])
def test_the_number_is_the_one_with_the_most_tokens_a_second(slope: float):
    chances, number = RankEstimate().chances, nodes(0.1, slope)
    leaves = sorted((chances[0] ** depth * chance for depth in range(4) for chance in chances[1:]), reverse=True)
    chain = 1 + sum(chances[0] ** (place + 1) for place in range(4))
    rate = (chain + sum(leaves[: number - 4])) / (1 + slope * number + 0.4)
    assert rate == pytest.approx(best_by_hand(slope))


def test_a_tree_may_be_less_deep_where_nobody_has_said_how_deep():
    """Where steps of the draft cost much, leaves are worth more than the last of these."""
    for chooses, depth in ((False, 8), (True, 5)):
        trees = TreeShapes("auto", RoundTimer(costs(0.3, 0.01), online=True), chooses_depth=chooses)
        lengths = trees.begin_round([8, 3])
        assert lengths[0] <= depth
        assert lengths == [lengths[0], min(3, lengths[0])]
        assert trees.num_nodes > lengths[0]


def round_of(branches: list[list[int]], width: int) -> Any:
    """A round of combs of a chain of two, with `width` choices at each place, in which rows took these branches."""
    parents = (-1, 0, *[-1] * (width - 1), *[0] * (width - 1))
    tree = Tree([parents] * len(branches), len(parents), torch.device("cpu"))
    of_ranks = [[0, *range(2, 1 + width)], [1, *range(1 + width, 2 * width)]]
    paths = [[of_ranks[place][rank] for place, rank in enumerate(branch)] for branch in branches]

    class Done:
        draft = Draft(torch.zeros(len(branches), 2), [2] * len(branches))

    done: Any = Done()
    done.tree, done.accepted_candidates, done.accepted_ranks = tree, paths, branches
    return done


def test_ranks_are_learned():
    ranks = RankEstimate()
    assert ranks.chances[:4] == pytest.approx(PRIOR)
    for _ in range(300):
        ranks.observe(round_of([[0, 1], [1], []], width=3))
    # of four nodes that were come to, the first choice was right at one, and the second at two
    assert ranks.chances[0] == pytest.approx(1 / 4, abs=0.03)
    assert ranks.chances[1] == pytest.approx(1 / 4, abs=0.03)  # no more than the rank before
    assert ranks.chances[2] < 0.01
    assert nodes(0.0, 0.02, ranks=ranks) > 4


def test_what_is_not_tried_is_not_forgotten():
    """Chains say how often the first choice is right, and nothing of the others."""
    ranks = RankEstimate()
    for _ in range(100):
        ranks.observe(round_of([[0, 1], [1], []], width=3))
    misses = ranks.hits[1] / ranks.tries[1]
    for _ in range(1000):
        chain = round_of([[0, 0], [0]], width=3)
        chain.tree, chain.accepted_candidates = None, [[0, 1], [0]]
        ranks.observe(chain)
    first = ranks.chances[0]
    assert first == pytest.approx(3 / 4, abs=0.02)
    assert ranks.hits[1] / ranks.tries[1] == misses == pytest.approx(2 / 3, abs=0.01)
    assert ranks.chances[1] == pytest.approx((1 - first) * 2 / 3, abs=0.02)


@pytest.mark.parametrize("chooses_number", [False, True])
def test_auto_knows_what_forwards_cost_with_a_number_too(chooses_number: bool):
    """Where they were assumed, no tree would ever pay."""
    target = tiny()
    numbers = {} if chooses_number else {"num_draft_tokens": 4}
    strategy = SpeculativeDecoding(near(target, 0.1), tree="auto", **numbers)
    target.generate(**prompts(2), max_new_tokens=8, pad_token_id=0, do_sample=False, custom_generate=strategy)
    assert strategy.costs.forward_times.keys() == {2}


def test_rounds_with_trees_are_timed_by_their_size():
    """The overhead of 8 nodes says more of 9 than that of 60 does; later calls go by it, for a while."""
    seconds = 0.0
    costs_of_calls = costs(0.1, 0.0)
    costs_of_calls.clock = lambda: seconds
    for call in range(3):
        timer = RoundTimer(costs_of_calls, online=True)
        timer.considers_trees = True
        times = timer.tree_times(1, 4, 64)
        if not call:
            assert times == pytest.approx([1.4] * 65)
            for observe, sizes, taken in (
                (timer.observe, (4,), 2.8),  # twice what the forwards take, as that of every round
                (timer.observe_tree, (4, 8), 5.6),
                (timer.observe_tree, (4, 60), 2.8),
            ):
                for _ in range(6):
                    observe(1, *sizes)
                    seconds += taken
            timer.considers_trees = True
        times = timer.tree_times(1, 4, 64)
        assert times[9] == pytest.approx(5.6, rel=0.03 + 0.04 * call)
        assert times[40] == pytest.approx(2.8, rel=0.03)
        timer.end()
    assert 1.8 < costs_of_calls.tree_overheads[1][8] < 1.97


def test_a_row_has_no_more_nodes_than_were_asked_for():
    assert TreeShapes(3).begin_round([5, 2]) == [3, 2]


@pytest.mark.parametrize("do_sample", [False, True])
def test_auto_gives_the_text_of_plain(do_sample: bool, draft_pays: None):
    """Trees where forwards of more tokens cost nothing, and chains where they cost much."""
    target, settings = tiny(), {"do_sample": do_sample, "top_k": 0, "max_new_tokens": 40, "pad_token_id": 0}
    for slope, branches in ((0.001, True), (3.0, False)):
        strategy = SpeculativeDecoding(
            near(target, 0.1), num_draft_tokens=4, tree="auto", costs=costs(0.05, slope, rows=4)
        )
        numbers = Heard(lambda done: max(done.num_candidates))
        strategy.listeners = (numbers,)
        assert_plain(target, strategy, **settings)
        assert (max(numbers) > 4) == branches
