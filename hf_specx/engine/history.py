"""What each row did in each round, in numbers alone, so that a report may be kept."""

from typing import NamedTuple


class RoundRecord(NamedTuple):
    """One row's part in one round.

    Attributes:
        drafted: candidates of the row.
        accepted: candidates that the verifier kept, before any cut at a stop.
        emitted: tokens that entered the text, after such a cut.
        judged: candidates whose predecessors were all kept, as far as the round went.
        gained: tokens by which the row went on, before a cut at a stop; in lockstep all have that of the slowest row.
        longest: candidates of the row that had most of them.
        forced: positions of candidates that were the only token allowed.
        steps: steps of a draft model in the round; None if as many as candidates of that row.
    """

    drafted: int
    accepted: int
    emitted: int
    judged: int = 0
    gained: int = 0
    longest: int = 0
    forced: tuple[int, ...] = ()
    steps: int | None = None

    @property
    def draft_steps(self) -> int:
        """Steps of the draft in the round."""
        return self.width if self.steps is None else self.steps

    @property
    def width(self) -> int:
        """Candidates that the forwards of the round were made for."""
        return max(self.drafted, self.longest)
