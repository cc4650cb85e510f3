"""What the layers of every kind of head do in one round: tensors in, tensors out, so that torch can compile them."""

from typing import Any

import torch
from torch import nn

from .config import HeadConfig


Found = tuple[torch.Tensor, Any]  # normed states [R, n, H] of places, and what the next entry begins with
Scored = tuple[torch.Tensor, Any, torch.Tensor | None]


class Body(nn.Module):
    """The layers of a head, without the tables that it may share with the target.

    What comes in are entries: true ones with the target's states [R, m, W], and behind them such as the head has of
    its own. Most kinds are given embedded tokens [R, q, H] of entries beside these.
    """

    most: int | None = None  # candidates of a round at most; None for any number
    chained = False  # whether each candidate takes a step of its own, `next`, with an embedded candidate [R, 1, H]
    sees_ahead = False  # whether all entries behind the last true one see each other
    corrects = False  # whether `scored` changes scores
    embeds_tokens = False  # whether `scored` is given the token before embedded, [R, 1, H]
    has_keys = True  # whether it attends to earlier entries
    config: HeadConfig

    def extra(self, number: int) -> int:
        """How many entries there are behind the true ones, if so many candidates are wanted."""
        return 0

    def read(self, entries: Any, embedded: Any, states: torch.Tensor) -> None:
        """Take up true entries, of which nothing is drafted."""

    def begin(self, entries: Any, embedded: Any, states: torch.Tensor, newest: Any, number: int) -> Found:
        """Take up entries, of which `newest` [R, 1] are the last true ones (None if it sees ahead), and draft."""
        raise NotImplementedError

    def next(self, entries: Any, embedded: Any, state: Any) -> Found:
        raise NotImplementedError

    def scored(self, scores: Any, states: torch.Tensor, tokens: torch.Tensor, memory: Any, asked: bool) -> Scored:
        """Scores [R, V_d] of a place, with what the token [R, 1] before it adds; what the next place needs of it.

        And if it is `asked` and can say so, how likely the candidate is kept, [R, 1].
        """
        return scores, memory, None
