"""What each row did in each round, in numbers alone, so that a report may be kept; and sums of these numbers."""

from collections import Counter
from collections.abc import Callable
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


class RoundCounts:
    """Sums over the rounds of a report.

    Attributes:
        history, older, opened, keeps, num_draft_tokens: of `SpeculationReport`.
    """

    history: list[list[RoundRecord]]
    older: list[Counter[RoundRecord]]
    opened: Counter[RoundRecord]
    keeps: int | None
    num_draft_tokens: int

    def _let_go(self, row: int) -> None:
        """Of a long history keep numbers of rounds alone, but the first and the last ones."""
        records = self.history[row]
        if self.keeps is not None and len(records) > 2 * self.keeps:
            self.older[row].update(records[1 : -self.keeps])
            del records[1 : -self.keeps]

    def _of_row(self, row: int) -> Counter[RoundRecord]:
        """The rounds of a row by what they did."""
        return self.older[row] + Counter(self.history[row])

    def _per_row(self, value: Callable[[RoundRecord], int]) -> list[int]:
        """The sum of a value over the rounds of each row."""
        return [sum(value(r) * n for r, n in self._of_row(row).items()) for row in range(len(self.history))]

    @property
    def _first_steps(self) -> Counter[RoundRecord]:
        """Those that read the prompts of the first call."""
        return Counter(row[0] for row in self.history if row and not row[0].drafted)

    @property
    def _judged_rounds(self) -> Counter[RoundRecord]:
        """Of all rows, those that had candidates."""
        every = sum((self._of_row(row) for row in range(len(self.history))), Counter[RoundRecord]())
        return Counter({record: n for record, n in every.items() if record.drafted})

    @property
    def _steps(self) -> Counter[RoundRecord]:
        """Rounds and plain steps, but not those that read the prompts."""
        found = sum((self._of_row(row) for row in range(len(self.history))), Counter[RoundRecord]())
        return found - self._first_steps - self.opened

    def _total(self, value: Callable[[RoundRecord], int]) -> int:
        """The sum of a value over all rounds with candidates."""
        return sum(value(r) * n for r, n in self._judged_rounds.items())

    @property
    def mean_draft_tokens(self) -> float:
        """Candidates of a row in a round, over the rounds that had any."""
        rounds = self._judged_rounds.total()
        return self.drafted / rounds if rounds else 0.0

    @property
    def rounds_per_row(self) -> list[int]:
        """Rounds in which each row took part."""
        return self._per_row(lambda r: r.drafted > 0)

    @property
    def drafted(self) -> int:
        """Candidates, over all rows."""
        return self._total(lambda r: r.drafted)

    @property
    def forced(self) -> int:
        """Candidates that were the only token allowed, over all rows."""
        return self._total(lambda r: len(r.forced))

    @property
    def accepted(self) -> int:
        """Candidates kept, over all rows."""
        return self._total(lambda r: r.accepted)

    @property
    def judged(self) -> int:
        """Candidates whose predecessors were all kept."""
        return self._total(lambda r: r.judged)

    @property
    def drafted_per_row(self) -> list[int]:
        """Candidates of each row."""
        return self._per_row(lambda r: r.drafted)

    @property
    def accepted_per_row(self) -> list[int]:
        """Candidates kept of each row."""
        return self._per_row(lambda r: r.accepted)

    @property
    def drafted_per_position(self) -> list[int]:
        """Candidates at each position of a round."""
        return [self._total(lambda r, i=i: r.drafted > i) for i in range(self.num_draft_tokens)]  # type: ignore[misc]

    @property
    def judged_per_position(self) -> list[int]:
        """Candidates at each position whose predecessors were all kept."""
        return [self._total(lambda r, i=i: r.judged > i) for i in range(self.num_draft_tokens)]  # type: ignore[misc]

    @property
    def emitted(self) -> int:
        """Tokens that entered the text, over all rows."""
        return sum(self.emitted_per_row)

    @property
    def emitted_per_row(self) -> list[int]:
        return self._per_row(lambda r: r.emitted)

    @property
    def accepted_per_position(self) -> list[int]:
        """For each position how often its candidate and all before it were kept."""
        return [self._total(lambda r, i=i: r.accepted > i) for i in range(self.num_draft_tokens)]  # type: ignore[misc]
