"""What a round launches on a device, by the room that asks for it; `pytest -s` prints the table of bench's README."""

from typing import Any

import torch
from accelerator import emulated, launched, on_device
from tiny import prompts, tiny

from hf_specx import SpeculativeDecoding


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
        found = launched(there[0], prompts(3), strategy, max_new_tokens=NEW_TOKENS, **settings)
        print("|".join([f"| {kind} ", *(f" {name} {found[name]:.0f} " for name in sorted(found)), ""]))
        beside = sum(number for name, number in found.items() if name != "forwards")
        assert 0 < beside < MOST * step, kind
