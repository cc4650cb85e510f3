"""How far off a verifier may be in half precision: what a check rejects, how often, and what it says of itself."""

import argparse
import random
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from check_cases import keep_within, quick, tiny_pair
from scipy import stats

from hf_specx import CheckResult, DraftTargetPair, check


EXACT = ("greedy", "coupled")
SMALL = {"batch_sizes": (16,), "max_new_tokens": 32, "samples": 16, "verifications": EXACT, "top_k": 0}
SEEDS, FALSE_ALARMS = 20, 100


@cache
def embedded_pair() -> DraftTargetPair:
    return DraftTargetPair.embedded(dtype=torch.bfloat16)


def prompts_of(seed: int) -> list[str]:
    """Sixteen of three lines each, of Python's standard library, of which the pair in the package is."""
    lines = Path(argparse.__file__).read_text().splitlines(keepends=True)
    return ["".join(lines[first : first + 3]) for first in random.Random(seed).sample(range(len(lines) - 3), 60)
            if "".join(lines[first : first + 3]).strip()][:16]


def embedded_check(seed: int, **changes) -> CheckResult:
    """Of 512 greedy and 512 sampled tokens."""
    return check(embedded_pair(), prompts_of(seed), seed=seed, advance=lambda: None, **SMALL | changes)
