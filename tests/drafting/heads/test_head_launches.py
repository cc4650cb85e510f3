"""What a round with a head costs on a device, in launches of a target of 32 layers, beside a plain step of it."""

from pathlib import Path
from typing import Any

import torch
from accelerator import emulated, on_device
from alignment import loaded
from head_files import random_head
from tiny import prompts, tiny

from hf_specx import SpeculativeDecoding


SHORT, LONG = 6, 12  # so that what a call takes once does not count
KINDS: dict[str, tuple[dict[str, Any], float]] = {  # and the most launches of a round, in plain steps
    "eagle3": ({"draft_vocab": 24, "layer_ids": (2, 16, 29)}, 1.35),
    "peagle": ({"draft_vocab": 24, "layer_ids": (2, 16, 29), "layers": 4}, 1.35),
    "dflash": ({"layer_ids": (2, 9, 16, 23, 30), "layers": 5, "block": 7}, 1.3),
    "dspark": ({"layer_ids": (2, 9, 16, 23, 30), "layers": 5, "block": 7}, 1.3),
}
SAMPLED = {"do_sample": True, "top_k": 20, "pad_token_id": 0}


def launches(model: Any, tokens: int, strategy: SpeculativeDecoding | None = None) -> tuple[int, int]:
    """Of a call, and how many rounds or steps it took."""
    with emulated():
        inputs = {name: x.to("cuda:0") for name, x in prompts(1).items()}
    with emulated() as device:
        torch.manual_seed(0)
        model.generate(**inputs, **SAMPLED, max_new_tokens=tokens, custom_generate=strategy)
    return device.launches, tokens if strategy is None else strategy.report.rounds + strategy.report.plain_steps


def of_a_round(model: Any, draft: Any = None) -> float:
    """Launches of a round with 4 candidates, or of a plain step."""
    made = [None if draft is None else SpeculativeDecoding(draft, num_draft_tokens=4) for _ in range(2)]
    short, long = (launches(model, *pair) for pair in zip((SHORT, LONG), made, strict=True))
    return (long[0] - short[0]) / (long[1] - short[1])


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
