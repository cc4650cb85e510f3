"""Rows with no token to choose: `generate` raises an error, and so does this once such a row is part of the text."""

from operator import itemgetter

from hf_specx.common.round import Round
from hf_specx.sampling.processors import Processors
from hf_specx.sampling.stopping import Stopping


class DeadEnds:
    """Looks for them in the rounds of one call.

    A candidate that is rejected may follow such a position, and without an end token a row may run ahead of the text;
    neither is an error.

    Args:
        processors: the target's; they know after which prefixes `prefix_allowed_tokens_fn` allows nothing.
        stopping: says how many tokens of each row will surely be in the text.
    """

    def __init__(self, processors: Processors, stopping: Stopping):
        self.processors, self.stopping = processors, stopping
        self.found: dict[int, tuple[int, Exception]] = {}  # by row: tokens emitted before, and the error

    def observe(self, done: Round) -> None:
        """Raise the error of a row in which the text now has a token where there was none to choose."""
        self.found = self._look(done.rows, done.before, done.emitted, done.undefined) | self.found
        if self.found:
            settled = self.stopping.settled(done.batch)
            for row, (count, error) in self.found.items():
                if count < settled[row]:
                    raise error

    def admit(self, row: int) -> None:
        """A new prompt has the place of a row."""
        self.found.pop(row, None)

    def _look(
        self, rows: list[int], before: list[int], emitted: list[int], undefined: list[int]
    ) -> dict[int, tuple[int, Exception]]:
        """The dead ends among the tokens that rows emit now.

        Args:
            rows: [R].
            before: [R], tokens that they had emitted before.
            emitted: [R], tokens that they emit now.
            undefined: [R], the first of the round's positions without a distribution.
        """
        found: dict[int, tuple[int, Exception]] = {}
        barred = self.processors.barred
        for row, first, number, position in zip(rows, before, emitted, undefined, strict=True):
            ends = [(count, barred[row, count]) for count in range(first, first + number) if (row, count) in barred]
            if position < number:
                why = "the target's logits are not finite (check its dtype and weights), or the logits processors "
                why += "exclude every token (leave one of them out)"
                error = RuntimeError(f"row {row} has no next token after {first + position} new ones: {why}.")
                ends.append((first + position, error))
            if ends:
                found[row] = min(ends, key=itemgetter(0))
        return found
