"""What a round with a head costs on a device: launches beside those of a plain step, and transfers between two."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerator import CPU, emulated, launched, on_device
from alignment import GREEDY, loaded, target_of, watched
from all_pairs import each_value
from head_files import random_head
from tiny import prompts, tiny
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding


NEW_TOKENS = 11
KINDS: dict[str, tuple[dict[str, Any], float]] = {  # and the most launches of a round, in plain steps
    "eagle3": ({"draft_vocab": 24, "layer_ids": (2, 16, 29)}, 1.35),
    "peagle": ({"draft_vocab": 24, "layer_ids": (2, 16, 29), "layers": 4}, 1.35),
    "dflash": ({"layer_ids": (2, 9, 16, 23, 30), "layers": 5, "block": 7}, 1.3),
    "dspark": ({"layer_ids": (2, 9, 16, 23, 30), "layers": 5, "block": 7}, 1.3),
    "domino": ({"layer_ids": (2, 9, 16, 23, 30), "layers": 5, "block": 7}, 1.4),
    "dflash2": ({"layer_ids": (2, 9, 16, 23, 30), "layers": 5, "block": 8}, 1.4),
}
SAMPLED = {"do_sample": True, "top_k": 20, "pad_token_id": 0}


def of_a_round(model: Any, draft: Any = None) -> float:
    """Launches of a round with 4 candidates, or of a plain step."""
    strategy = None if draft is None else SpeculativeDecoding(draft, num_draft_tokens=4)
    return sum(launched(model, prompts(1), strategy, max_new_tokens=NEW_TOKENS, **SAMPLED).values())


def test_a_round_costs_little_more_than_a_step(tmp_path: Path):
    """And a draft model much more; `-s` prints the table of scripts/results/cpu.md."""
    target, costs = tiny(num_hidden_layers=32), {}
    drafts = {kind: loaded(random_head(kind, **KINDS[kind][0]), tmp_path / kind, target) for kind in KINDS}
    drafts["a draft model of 24 layers"] = tiny(num_hidden_layers=24, seed=1)
    with emulated():
        moved = on_device(target)
    step = of_a_round(moved)
    for name, draft in drafts.items():
        with emulated():
            there = on_device(draft)
        costs[name] = of_a_round(moved, there) / step
        print(f"| {name} | {costs[name]:.2f} |")
    assert all(costs[kind] < most for kind, (_, most) in KINDS.items())
    assert costs["a draft model of 24 layers"] > 3


TREES = {"eagle3": 0.2, "dflash": 0.1}  # the most launches that a tree takes more than a chain, in plain steps


@pytest.mark.parametrize(("kind", "nodes"), each_value(TREES, [16, 64]))
def test_what_a_tree_takes_more_than_a_chain(kind: str, nodes: int, tmp_path: Path):
    target = tiny(num_hidden_layers=32)
    draft = loaded(random_head(kind, **KINDS[kind][0]), tmp_path, target)
    with emulated():
        moved, there = on_device(target), on_device(draft)
    step, totals = of_a_round(moved), []
    for tree in (False, nodes):
        strategy = SpeculativeDecoding(there, num_draft_tokens=4, verification="coupled", tree=tree)
        totals.append(sum(launched(moved, prompts(1), strategy, max_new_tokens=NEW_TOKENS, **SAMPLED).values()))
    more = (totals[1] - totals[0]) / step
    print(f"| {kind}, {nodes} nodes | {more:.2f} plain steps more than a chain |")
    assert more < TREES[kind]


def spread(target: PreTrainedModel, first: int) -> PreTrainedModel:
    """A copy whose layers from `first` on, norm and head lie on the accelerator, under the hooks of accelerate."""
    moved = copy.deepcopy(target)
    for number in range(first, len(moved.model.layers)):
        moved.model.layers[number] = on_device(moved.model.layers[number])
    moved.model.norm, moved.lm_head = on_device(moved.model.norm), on_device(moved.lm_head)
    for part in (moved.model.embed_tokens, *moved.model.layers, moved.model.norm, moved.lm_head):
        device = next(part.parameters()).device
        add_hook_to_module(part, AlignDevicesHook(device, io_same_device=False, skip_keys=["cache"]))
    add_hook_to_module(moved, AlignDevicesHook(CPU, io_same_device=False, skip_keys=["cache"]))
    return moved


@pytest.mark.parametrize("first", [3, 6])
def test_layers_on_two_devices(first: int, tmp_path: Path):
    """Of seven states four or one come from the other device: on the way to the head none of them is waited for."""
    target = target_of()
    head = random_head(layer_ids=(0, 1, 2, 3, 4, 5, 7))
    expected = target.generate(**prompts(2), **GREEDY)
    draft = loaded(head, tmp_path, target)
    with emulated() as device:
        strategy = SpeculativeDecoding(on_device(draft), num_draft_tokens=2)
        watch = watched(strategy, head, target)
        output = spread(target, first).generate(**prompts(2), **GREEDY, custom_generate=strategy)
    assert torch.equal(output, expected)
    watch.check(20)
    rounds = strategy.report.rounds

    def counted(seen: dict[str, int], *files: str) -> int:
        return sum(number for line, number in seen.items() if line.startswith(files))

    assert counted(device.sends, "models/runner.py", "heads/head_drafter.py") <= 4  # of the prompts
    # for the logits, which rows on the CPU are judged by, and for those that each of two candidates is drawn by
    assert counted(device.waits, "models/runner.py") <= rounds + 2
    assert counted(device.waits, "heads/head_drafter.py") <= 2 * rounds
