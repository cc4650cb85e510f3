"""Trees of heads: the text of plain `generate`, and each node what the reference of its head proposes there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from alignment import GREEDY, SAMPLED, NodesAligned, loaded, target_of
from all_pairs import each_value, once
from head_files import random_head
from many import alone, completed, requests
from plain import assert_plain
from rounds import Heard
from tiny import prompts

from hf_specx import SpeculativeDecoding
from hf_specx.drafting.heads import head_drafter, levels
from hf_specx.drafting.heads.layers import SlotMapping
from hf_specx.models.attention import TreeAttention


WINDOW = {"layers": 2, "layer_types": ["sliding_attention", "full_attention"], "window": 4}
COMBS: dict[str, dict[str, Any]] = {
    "dspark": {"draft_vocab": 24, "confidence": True},
    "dspark rnn": {"markov": "rnn"},
    "domino": {"layers": 2},
    "dflash2": {"layers": 2},
}
FULL: dict[str, dict[str, Any]] = {
    "medusa": {"layers": 2},
    "peagle": {"draft_vocab": 24, "layers": 2},
    "dflash": {"draft_vocab": 24, "layers": 2},
    "dflash causal": {"form": "z-lab", "layers": 2, "causal": True, "extra": {"is_causal": True}},
}
LEVELS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab": 24},
    "eagle3 of two layers with a window": WINDOW | {"norm_output": True},
}
KINDS = COMBS | FULL | LEVELS


def head_of(name: str, folder: Path) -> tuple[Any, Any, Any]:
    """The head with its fields, as it is loaded, and its target."""
    target, head = target_of(), random_head(name.split()[0], **KINDS[name])
    return head, loaded(head, folder / "head", target), target


def is_comb(tree: Any) -> bool:
    """Whether nothing follows what is not on the chain of first choices."""
    for row in tree.rows:
        others = set(range(len(row.ranks))) - set(row.first_choices)
        if any(row.node_children[candidate + 1] for candidate in others):
            return False
    return True


@pytest.mark.parametrize(("rows", "settings", "name"), each_value([1, 3], [GREEDY, SAMPLED], KINDS))
def test_the_text_of_plain(rows: int, settings: dict, name: str, tmp_path: Path):
    _, draft, target = head_of(name, tmp_path)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, tree=12)
    trees, branches = Heard(lambda done: done.tree), Heard(lambda done: done.accepted_ranks)
    strategy.listeners = (*strategy.listeners, trees, branches)
    assert_plain(target, strategy, prompts(rows), **settings | {"max_new_tokens": 40})
    assert any(any(branch) for of_round in branches for branch in of_round)
    made = [tree for tree in trees if tree is not None]
    assert max(len(row.ranks) for tree in made for row in tree.rows) == 12
    assert all(map(is_comb, made)) == (name in COMBS)


@pytest.mark.parametrize(("name", "rows"), once(KINDS, [1, 3]))
def test_each_node_is_that_of_the_reference(name: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    head, draft, target = head_of(name, tmp_path)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, tree=12)
    watch = NodesAligned(head, target, monkeypatch)
    strategy.listeners = (watch,)
    target.generate(**prompts(rows), **GREEDY, custom_generate=strategy)
    watch.check(100)


def seen_by_siblings(root_slots: torch.Tensor, node_depths: torch.Tensor, node_mask: torch.Tensor) -> TreeAttention:
    """Wrong: a node sees all that stand before it."""
    nodes = torch.arange(node_mask.shape[2])
    return TreeAttention(root_slots, node_depths, (nodes <= nodes[-node_mask.shape[1] :, None]).expand_as(node_mask))


def positions_by_slot(slots: torch.Tensor, positions: torch.Tensor, *others: Any, **named: Any) -> SlotMapping:
    """Wrong: a node has the position of its slot."""
    return SlotMapping(slots, positions[:, :1] + slots - slots[:, :1], *others, **named)


def behind_the_first(*shape: Any, right: Any = levels.levels_of) -> Any:
    """Wrong: a node goes on with the state of the first one of the level before."""
    of_shape, order = right(*shape)
    return [level._replace(fed_parents=level.fed_parents * 0) for level in of_shape], order


FAULTS = {
    "a node sees its sibling": (head_drafter, "TreeAttention", seen_by_siblings),
    "a position by slot": (head_drafter, "SlotMapping", positions_by_slot),
    "the state of another parent": (levels, "levels_of", behind_the_first),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_variants_are_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The text is that of plain `generate` all the same: what is judged is the target's."""
    head, draft, target = head_of("eagle3", tmp_path)
    monkeypatch.setattr(*FAULTS[fault])
    strategy = SpeculativeDecoding(draft, num_draft_tokens=4, tree=24)
    watch = NodesAligned(head, target, monkeypatch)
    strategy.listeners = (watch,)
    assert_plain(target, strategy, prompts(3), **GREEDY | {"max_new_tokens": 14})
    assert len(watch.wrong) > 10  # of the right one none is


PENALTIES = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 8, "eos_token_id": 7}


@pytest.mark.parametrize(("settings", "name"), each_value([GREEDY, SAMPLED], ["eagle3", "dflash"]))
def test_processors_see_the_prefix_of_each_node(settings: dict, name: str, tmp_path: Path):
    """Those of the draft as well; and a threshold, by which a row ends, has combs."""
    _, draft, target = head_of(name, tmp_path)
    for more in ({}, {"assistant_confidence_threshold": 0.05}):
        strategy = SpeculativeDecoding(draft, num_draft_tokens=3, tree=12)
        trees = Heard(lambda done: done.tree)
        strategy.listeners = (*strategy.listeners, trees)
        assert_plain(target, strategy, prompts(3), **settings | PENALTIES | more)
        made = [tree for tree in trees if tree is not None]
        assert all(map(is_comb, made)) == (name == "eagle3" and bool(more))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:compile=True compiles")
@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_compiled(traced: None, name: str, tmp_path: Path):
    _, draft, target = head_of(name, tmp_path)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, tree=12, compile=True)
    assert_plain(target, strategy, prompts(3), **SAMPLED)
    assert strategy.report.nodes > strategy.report.drafted


@pytest.mark.parametrize(("settings", "name"), each_value([GREEDY, SAMPLED], KINDS))
def test_rows_of_a_queue(settings: dict, name: str, tmp_path: Path):
    _, draft, target = head_of(name, tmp_path)
    asked = requests(7)
    options = settings | {"eos_token_id": [5, 6], "max_new_tokens": 16}
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, tree=10)
    found = completed(strategy, target, asked, batch_size=3, **options)
    assert [found[index].tokens for index in range(len(asked))] == [alone(target, ask, **options) for ask in asked]
    assert strategy.report.nodes > strategy.report.drafted
