"""What the layers of every kind of head do in one round: tensors in, tensors out, so that torch can compile them."""

from typing import Any

import torch
from torch import nn

from .config import HeadConfig


Found = tuple[torch.Tensor, Any]
Scored = tuple[torch.Tensor, Any, torch.Tensor | None]


class Body(nn.Module):
    """The layers of a head, without the tables that it may share with the target.

    Attributes:
        most: candidates of a round at most; None for any number.
        chained: whether each candidate takes a step of its own, `next`.
        sees_ahead: whether all entries behind the last true one see each other.
    """

    most: int | None = None
    chained = False
    sees_ahead = False
    config: HeadConfig

    def extra(self, number: int) -> int:
        """How many entries it has behind the true ones when so many candidates are wanted."""
        return 0

    def inputs(self, drafter: Any, width: int, extra: int) -> torch.Tensor | None:
        """[R, q], the tokens whose embeddings it reads, of `width` true entries and the extra ones; perhaps none."""
        return None

    def read(self, entries: Any, embedded: torch.Tensor | None, states: torch.Tensor) -> None:
        """Take up entries with these states [r, m, W], of which nothing is drafted."""

    def begin(
        self, entries: Any, embedded: Any, states: torch.Tensor, newest: torch.Tensor | None, number: int
    ) -> Found:
        """Take up the new entries, and draft: normed states [R, n, H] of candidates, and [R, 1, H] for the next one.

        Args:
            entries: the new ones, with states [R, m, W], and behind them those that are extra.
            embedded: [R, q, H], what `inputs` are.
            newest: [R, 1], the last true entry of each row; None if it `sees_ahead`.
            number: candidates that are wanted.
        """
        raise NotImplementedError

    def next(self, entries: Any, embedded: Any, state: Any) -> Found:
        """As `begin`, for one entry behind a candidate, with the state [R, 1, H] that was kept for it."""
        raise NotImplementedError

    def scored(self, scores: Any, states: torch.Tensor, tokens: torch.Tensor, memory: Any, asked: bool) -> Scored:
        """Scores [R, V_d] of one place with what the token [R, 1] before it adds, and what the next place needs of it.

        If it is `asked` and can say so, also [R, 1], how likely the candidate is kept.
        """
        return scores, memory, None
