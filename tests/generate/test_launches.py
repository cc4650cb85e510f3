"""What a round launches on a device, by the room that asks for it; `pytest -s` prints the table of bench's README."""

from collections import Counter
from typing import Any

import torch
from accelerator import emulated, on_device
from tiny import prompts, tiny

from hf_specx import SpeculativeDecoding


SHORT, LONG = 6, 14  # new tokens of two calls, so that what a call launches once does not count
SAMPLED = {"do_sample": True, "top_k": 20}
KINDS: dict[str, dict[str, Any]] = {"greedy": {}, "token": SAMPLED, "block": SAMPLED, "coupled": SAMPLED}
MOST = 0.45  # launches of a round beside its forwards, in those of a step of plain `generate`


def launches(target: Any, draft: Any, kind: str, tokens: int) -> tuple[Counter[str], int]:
    """Of a call, and its number of rounds."""
    options = {} if kind == "greedy" else {"verification": kind}
    strategy = SpeculativeDecoding(draft, num_draft_tokens=4, **options)
    settings = {"do_sample": False} | KINDS[kind] | {"max_new_tokens": tokens, "pad_token_id": 0}
    with emulated():
        inputs = {name: x.to("cuda:0") for name, x in prompts(3).items()}
    with emulated() as device:
        torch.manual_seed(0)
        target.generate(**inputs, **settings, custom_generate=strategy)
    return device.launches, strategy.report.rounds + strategy.report.plain_steps


def test_little_is_launched_beside_the_forwards():
    target, draft = tiny(num_hidden_layers=32), tiny(num_hidden_layers=4, seed=1)
    with emulated():
        there = on_device(target), on_device(draft)
    with emulated() as device:
        there[0](torch.zeros(3, 1, dtype=torch.int64, device="cuda:0"))
    step = device.launches.total()
    for kind in KINDS:
        (short, fewer), (long, more) = (launches(*there, kind, tokens) for tokens in (SHORT, LONG))
        found = {name: (long[name] - short[name]) / (more - fewer) for name in long}
        print("|".join([f"| {kind} ", *(f" {name} {found[name]:.0f} " for name in sorted(found)), ""]))
        beside = sum(number for name, number in found.items() if name != "forwards")
        assert 0 < beside < MOST * step, kind
