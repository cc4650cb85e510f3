"""What a round launches on a device, by the room that asks for it; `pytest -s` prints the table of bench's README."""

from typing import Any

import pytest
import torch
from accelerator import emulated, launched, on_device
from tiny import prompts, tiny
from unheard import unheard_of

from hf_specx import SpeculativeDecoding
from hf_specx.models.self_check import STEPS


NEW_TOKENS = 11
SAMPLED = {"do_sample": True, "top_k": 20}
KINDS: dict[str, dict[str, Any]] = {"greedy": {}, "token": SAMPLED, "block": SAMPLED, "coupled": SAMPLED}
MOST = 0.45  # launches of a round beside its forwards, in those of a step of plain `generate`


def test_little_is_launched_beside_the_forwards():
    target, draft = tiny(num_hidden_layers=32), tiny(num_hidden_layers=4, seed=1)
    with emulated():
        there = on_device(target), on_device(draft)
    with emulated() as device:
        there[0](torch.zeros(3, 1, dtype=torch.int64, device="cuda:0"))
    step = device.launches.total()
    for kind in KINDS:
        options = {} if kind == "greedy" else {"verification": kind}
        settings = {"do_sample": False, "pad_token_id": 0} | KINDS[kind]
        strategy = SpeculativeDecoding(there[1], num_draft_tokens=4, **options)
        launches = launched(there[0], prompts(3), strategy, max_new_tokens=NEW_TOKENS, **settings)
        print("|".join([f"| {kind} ", *(f" {name} {launches[name]:.0f} " for name in sorted(launches)), ""]))
        beside = sum(number for name, number in launches.items() if name != "forwards")
        assert 0 < beside < MOST * step, kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_self_check_takes_six_plain_steps_once(dtype: torch.dtype):
    """For a type that no table knows: what the first call launches more than one that is trusted, and later ones."""
    settings, totals, steps = {"do_sample": False, "pad_token_id": 0}, [], []
    with emulated():
        target, draft = on_device(tiny(num_hidden_layers=8).to(dtype)), on_device(tiny(seed=1).to(dtype))
        there = {name: x.to("cuda:0") for name, x in prompts(3).items()}
    for tokens in (2, NEW_TOKENS):
        with emulated() as device:
            target.generate(**there, **settings, max_new_tokens=tokens)
        steps.append(device.launches.total())
    step = (steps[1] - steps[0]) / (NEW_TOKENS - 2)
    settings["max_new_tokens"] = NEW_TOKENS
    for named in (lambda model: model, unheard_of):
        model = named(target)
        for _ in range(2):
            with emulated() as device:
                model.generate(**there, **settings, custom_generate=SpeculativeDecoding(draft, num_draft_tokens=4))
            totals.append(device.launches.total())
    _, trusted, first, later = totals
    once, again = (first - trusted) / step, (later - trusted) / step
    print(f"| self-check, {dtype} | {once:.1f} plain steps once, then {again:.1f} |")
    assert STEPS < once <= 6
    assert abs(again) < 0.01


@pytest.mark.parametrize("nodes", [16, 64])
def test_a_tree_launches_little_more_than_a_chain(nodes: int):
    """What rounds of a tree launch more than those of a chain, of which some rows leave that of first choices."""
    target, draft, totals = tiny(num_hidden_layers=32), tiny(num_hidden_layers=4, seed=1), []
    with emulated():
        there = on_device(target), on_device(draft)
    with emulated() as device:
        there[0](torch.zeros(3, 1, dtype=torch.int64, device="cuda:0"))
    step = device.launches.total()
    for tree in (False, nodes):
        strategy = SpeculativeDecoding(there[1], num_draft_tokens=4, verification="coupled", tree=tree)
        settings = {"pad_token_id": 0, "do_sample": True, "top_k": 20}
        launches = launched(there[0], prompts(3), strategy, max_new_tokens=NEW_TOKENS, **settings)
        totals.append(sum(launches.values()))
    more = (totals[1] - totals[0]) / step
    print(f"| {nodes} nodes | {more:.2f} plain steps more than a chain |")
    assert max(strategy.report.accepted_per_rank[1:]) > 0
    assert more <= 0.25
