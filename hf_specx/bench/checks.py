"""Checks that several measurements and commands share: sizes, and how tokens are drawn."""

import math
from collections.abc import Sequence

from hf_specx.common.errors import require, require_option


MIN_TURNS = 8  # of one speed-up, at least: Student's t has very wide intervals for fewer
SECONDS = 60.0  # of turns of a draft at one batch size, unless it is clear before


def check_runs(batches: Sequence[int], repeats: int = 1, name: str = "batches") -> None:
    """Raise a ValueError unless there are batch sizes, an argument of this name, and timed runs of them."""
    require(
        bool(batches) and min(batches) >= 1 and len(set(batches)) == len(batches),
        f"{name}={list(batches)!r}: give batch sizes of 1 or more, each once, like 1 and 8.",
    )
    require_option(repeats >= 1, "repeats", repeats, "is no number of timed runs; give 1 or more.")


def check_sampling(temperature: float, top_p: float, top_k: int = 0) -> None:
    """Raise a ValueError unless tokens can be drawn in this way; greedy decoding has none of these."""
    problem = "is not above 0; give a positive number, or decode greedily."
    require_option(0 < temperature < math.inf, "temperature", temperature, problem)
    problem = "is not in (0, 1]; give a number above 0 and at most 1, which keeps all tokens."
    require_option(0 < top_p <= 1, "top_p", top_p, problem)
    require_option(top_k >= 0, "top_k", top_k, "is negative; give 0, which keeps all tokens, or more.")


def check_processing(min_p: float | None, repetition_penalty: float | None) -> None:
    """Raise a ValueError unless transformers has such processors; None is for none."""
    problem = "is not in [0, 1]; give a share, or 0, which keeps all tokens."
    require_option(min_p is None or 0 <= min_p <= 1, "min_p", min_p, problem)
    penalty, problem = repetition_penalty, "is not above 0; give a positive number, or 1, which changes nothing."
    require_option(penalty is None or 0 < penalty < math.inf, "repetition_penalty", penalty, problem)
