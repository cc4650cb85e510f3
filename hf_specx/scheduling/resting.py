"""Rows that draft nothing for a while."""

from hf_specx.common.round import Round


RESTING_MEMORY = 0.8  # weight of a row's earlier rounds compared with the last one
WORTHLESS = 0.1  # a row that keeps fewer candidates in a round rests


class Resting:
    """Rows whose candidates are nearly all rejected: they rest for 8 rounds, then 16, until a probe helps."""

    def __init__(self) -> None:
        self.kept: dict[int, float] = {}  # candidates that a round of the row was expected to keep, a moving mean
        self.waits: dict[int, int] = {}
        self.left: dict[int, int] = {}  # rounds that it still rests

    def rests(self, row: int) -> bool:
        return self.left.get(row, 0) > 0

    def admit(self, row: int) -> None:
        """A new prompt has the place of a row."""
        for known in (self.kept, self.waits, self.left):
            known.pop(row, None)

    def observe(self, done: Round) -> None:
        """Count a round."""
        for row, chances in zip(done.rows, done.chances, strict=True):
            if not chances:
                self.left[row] = max(0, self.left.get(row, 0) - 1)
                continue
            self.kept[row] = self.kept.get(row, 1.0) * RESTING_MEMORY + sum(chances) * (1 - RESTING_MEMORY)
            if self.kept[row] >= WORTHLESS:
                self.waits.pop(row, None)
            else:
                self.waits[row] = 2 * self.waits.get(row, 4)
                self.left[row] = self.waits[row]
