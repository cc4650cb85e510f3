"""The walk through a tree: against a slow twin, and the law of what `generate` samples, against exact enumeration.

The p-values are as in test_law.py: over all choices of the seeds, some test here would fail with probability 1e-4.
"""

import random
from typing import Any

import pytest
import torch
from enumerated import VOCAB_SIZE, exact_distribution, first_tokens, models, p_values
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper

from hf_specx import SpeculativeDecoding
from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft, Verdict
from hf_specx.common.tree import Tree, at_nodes, row_tree_of
from hf_specx.drafting.drafter import Drafter
from hf_specx.drafting.trees import comb_shape, full_shape
from hf_specx.sampling import verifiers
from hf_specx.sampling.verify import verify_tree


NUM_TESTS = 2 * 4


def random_parents(numbers: random.Random, most: int) -> tuple[int, ...]:
    return tuple(numbers.randrange(-1, number) for number in range(numbers.randint(0, most)))


def walk(candidates: list[int], target_tokens: list[int], parents: tuple[int, ...]) -> list[int]:
    """The numbers of the candidates that a row accepts; of siblings with one token any may be taken."""
    node, path = -1, []
    while True:
        children = [
            i for i, parent in enumerate(parents) if parent == node and candidates[i] == target_tokens[node + 1]
        ]
        if not children:
            return path
        node = children[0]
        path.append(node)


def test_the_walk_is_that_of_each_row_alone():
    numbers, rows, most = random.Random(0), 64, 9
    for _ in range(20):
        parents = [random_parents(numbers, most) for _ in range(rows)]
        width = max(map(len, parents))
        tree = Tree(parents, width, torch.device("cpu"))
        candidates = torch.tensor([[numbers.randrange(3) for _ in range(width)] for _ in range(rows)])
        for row, of_row in enumerate(parents):  # siblings have tokens of their own
            ranks = row_tree_of(of_row).ranks
            candidates[row, : len(of_row)] = (candidates[row, : len(of_row)] + torch.tensor(ranks).long()) % 12
        target_tokens = torch.tensor([[numbers.randrange(3) for _ in range(width + 1)] for _ in range(rows)])
        is_candidate = torch.tensor([[i < len(of_row) for i in range(width)] for of_row in parents])
        verdict = verify_tree(candidates, target_tokens, tree, is_candidate)
        assert verdict.path_nodes is not None
        for row, of_row in enumerate(parents):
            path = walk(candidates[row].tolist(), target_tokens[row].tolist(), of_row)
            ended_at = path[-1] + 1 if path else 0
            twins = {(of_row[i], int(candidates[row, i])) for i in range(len(of_row))}
            if len(twins) == len(of_row):
                assert verdict.path_nodes[row, 1 : 1 + len(path)].tolist() == [number + 1 for number in path]
                assert verdict.accepted[row] == len(path)
                assert verdict.next_token[row] == target_tokens[row, ended_at]
            first = row_tree_of(of_row).first_choices
            leading = [i for i, number in enumerate(first) if path[: i + 1] == list(first[: i + 1])]
            assert len(twins) < len(of_row) or verdict.prefix_acceptance[row, : len(first)].sum() == len(leading)


def test_parents_stand_before_their_children():
    with pytest.raises(ValueError, match="candidate 1 has the parent 1; parents stand before"):
        row_tree_of((-1, 1))


def test_shapes_hold_what_is_worth_most():
    chances = (0.7, 0.2, 0.05)
    comb = comb_shape(chances, 3, 6)
    assert comb.parents == (-1, 0, 1, -1, 0, 1)
    assert comb.ranks == (0, 0, 0, 1, 1, 1)
    full = full_shape(chances, 3, 7)
    values = {}
    for number, (parent, rank) in enumerate(zip(full.parents, full.ranks, strict=True)):
        values[number] = values.get(parent, 1.0) * chances[rank]
    assert full.ranks[:3] == (0, 0, 0)
    assert sorted(values.values(), reverse=True)[:4] == pytest.approx([0.7, 0.49, 0.343, 0.2])
    assert min(values.values()) >= 0.2 * 0.49 - 1e-9
    assert row_tree_of(full.parents).ranks == full.ranks
    assert comb_shape(chances, 0, 5).parents == ()


class FromLastToken(Drafter):
    """Trees that follow from the last token."""

    proposes_trees = True

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        last = batch.last(1)[:, 0].tolist()
        tokens = torch.tensor([[(token + step) % VOCAB_SIZE for step in (0, 1, 2, 0, 3, 1)] for token in last])
        shapes = [(-1, -1, 0, 0, 2, 1), (-1, 0, 0, -1), (-1, 0, 1), ()]
        parents = [shapes[token % 4] if most else () for token, most in zip(last, lengths, strict=True)]
        return Draft(tokens, list(map(len, parents)), None, "given", parents=parents)


DRAFTS = {"given": lambda: FromLastToken(), "combs": lambda: models()[1]}


def drawn(draft: str, **settings: Any) -> torch.Tensor:
    strategy = SpeculativeDecoding(DRAFTS[draft](), num_draft_tokens=3, tree=8)
    tokens = first_tokens(strategy, batches=4, rows=1024, **settings)
    assert strategy.report.nodes > strategy.report.drafted
    return tokens


@pytest.mark.parametrize("draft", DRAFTS)
def test_law(draft: str):
    assert min(p_values(drawn(draft), exact_distribution([]))) > 1e-4 / NUM_TESTS


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_law_with_warpers(draft: str):
    law = exact_distribution([TemperatureLogitsWarper(0.6), TopKLogitsWarper(3)])
    assert min(p_values(drawn(draft, temperature=0.6, top_k=3), law)) > 1e-4 / NUM_TESTS


def any_child(candidates: Any, target_tokens: Any, tree: Tree, is_candidate: Any = None) -> Verdict:
    """Wrong: a child is taken if any sibling of it holds the target's choice."""
    verdict = verify_tree(candidates, target_tokens, tree, is_candidate)
    hits = candidates == target_tokens.gather(1, tree.parent_nodes)
    of_parent = tree.parent_nodes[:, :, None] == tree.parent_nodes[:, None]
    passed = (
        (of_parent & hits[:, None] & is_candidate[:, None]).any(-1) & (tree.node_depths[:, 1:] == 1) & is_candidate
    )
    first = passed.long().argmax(-1)
    accepted = passed.any(-1).long()
    path_nodes = torch.stack([torch.zeros_like(first), *[first + 1] * tree.depth], 1)
    after = at_nodes(target_tokens, (accepted * (first + 1))[:, None])[:, 0]
    return verdict._replace(accepted=accepted, next_token=after, path_nodes=path_nodes)


def after_the_parent(candidates: Any, target_tokens: Any, tree: Tree, is_candidate: Any = None) -> Verdict:
    """Wrong: the token after a branch is what the target chooses before its end."""
    verdict = verify_tree(candidates, target_tokens, tree, is_candidate)
    before = verdict.path_nodes.gather(1, (verdict.accepted - 1).clamp(min=0)[:, None])
    return verdict._replace(next_token=target_tokens.gather(1, before)[:, 0])


@pytest.mark.parametrize("wrong", [any_child, after_the_parent])
def test_wrong_variants_are_seen(monkeypatch: pytest.MonkeyPatch, wrong: Any):
    monkeypatch.setattr(verifiers, "verify_tree", wrong)
    assert min(p_values(drawn("given"), exact_distribution([]))) < 1e-8
