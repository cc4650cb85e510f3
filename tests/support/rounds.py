"""Rounds as a test writes them by hand."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from hf_specx.common.round import Draft, Round


class Heard(list):
    """Listens: what `of` says of each round, in order."""

    def __init__(self, of: Callable[[Round], Any]):
        super().__init__()
        self.of = of

    def observe(self, done: Round) -> None:
        self.append(self.of(done))


def numbers() -> Heard:
    """The most candidates of a row in each round."""
    return Heard(lambda done: max(done.draft.lengths))


def made_round(
    lengths: list[int],
    accepted: list[int],
    emitted: list[int] | None = None,
    rows: list[int] | None = None,
    **more: Any,
) -> Round:
    """What was drafted and kept, of rows that had one token before; all else follows, or is said in `more`.

    Args:
        lengths: [R], candidates of each row.
        accepted: [R], how many of them were kept.
        emitted: [R], by default what was kept and the token after it.
        rows: [R], by default 0, 1, ...
        **more: other fields of `Round`. By default a candidate's chance to be kept and its overlap are 1 or 0.
    """
    gained = [1 + number for number in accepted]
    kept = [[float(i < a) for i in range(k)] for k, a in zip(lengths, accepted, strict=True)]
    fields = {
        "batch": SimpleNamespace(row_states=()),
        "rows": list(range(len(lengths))) if rows is None else rows,
        "draft": Draft(torch.zeros(len(lengths), max(lengths), dtype=torch.int64), lengths),
        "emitted_before": [1] * len(lengths),
        "emitted": gained if emitted is None else emitted,
        "tokens": [[0] * number for number in (gained if emitted is None else emitted)],
        "accepted": accepted,
        "num_new_tokens": gained,
        "prefix_acceptance": kept,
        "overlap": kept,
        "undefined": [max(lengths) + 1] * len(lengths),
    }
    return Round(**fields | more)
