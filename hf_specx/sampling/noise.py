"""The noise that plain `generate` samples with, at any position of any row, for coupled verification."""

import sys

import torch


MOST_HELD = 2**30  # bytes of noise that are kept for rows behind others; it is drawn again beyond
LATEST_STATES = 256  # columns whose generator state is kept, of about 5 kB; before them only those of
LATEST_OF_ROW = 16  # the same of a row with a seed, whose stream is its own
STATE_EVERY = 32  # one column in so many: 6 MB for a text of 32k tokens


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that `torch.manual_seed` seeds for the CPU or a CUDA device."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


class ReplayedNoise:
    """The Exp(1) vectors that `torch.multinomial(probs, 1)` would draw in `generate`, [B, V] for each emitted column.

    They are drawn from a copy that is made of the default generator here, or under a seed, in the order of columns.
    Its states between draws are kept, of early ones only some, so that any draw can be repeated, and the default
    generator left as `generate` leaves it. A draw is kept for rows that need it within `window` columns, or fewer if
    that is more than `MOST_HELD`.
    """

    def __init__(self, rows: int, device: torch.device, window: int, seed: int | None = None):
        self.rows, self.device, self.window = rows, device, window
        self.latest = LATEST_STATES if seed is None else min(LATEST_STATES, LATEST_OF_ROW)
        self.generator = torch.Generator(device)
        source = default_generator(device) if seed is None else self.generator.manual_seed(int(seed))
        # states of `generator`, by the emitted column that it draws next
        self.states: dict[int, torch.Tensor] = {0: source.get_state()}
        self.coming = -1  # the column that it would draw now; -1 if it is in no such state
        self.held: list[dict[int, torch.Tensor]] = [{} for _ in range(rows)]  # of each row [V], by emitted column

    def at(
        self, rows: list[int], counts: list[int], probs: torch.Tensor, ahead: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The noise of P positions from `ahead` on after the ends of decoding `rows` [R], as for probs [R, P, V].

        `counts` [B] are the tokens that rows have emitted. `generate` draws by probabilities of a `dtype`, by default
        that of these.
        """
        self.like = probs.new_empty(0, probs.shape[-1], dtype=dtype)
        if self.rows == 1 and ahead + probs.shape[1] == 1 and not any(self.held):
            return self._draw(counts[0])[:, None]  # no row needs it again
        end, column_bytes = ahead + probs.shape[1], self.rows * probs.shape[-1] * probs.element_size()
        window = max(min(self.window, MOST_HELD // column_bytes), end)
        wanted = [(row, counts[row] + i) for row in rows for i in range(ahead, end)]
        for column in sorted({column for row, column in wanted if column not in self.held[row]}):
            drawn = self._draw(column)
            for row in rows:
                if 0 <= column - counts[row] < window:
                    self.held[row][column] = drawn[row].clone()  # a view would keep the noise of all rows
        noise = torch.stack([self.held[row][column] for row, column in wanted]).view_as(probs)
        for row, held in enumerate(self.held):
            first = counts[row] if row in rows else sys.maxsize  # a row that has left needs none
            for column in [column for column in held if column < first]:
                del held[column]
        return noise

    def _draw(self, column: int) -> torch.Tensor:
        start = next(t for t in range(column, -1, -1) if t in self.states)
        if not start <= self.coming <= column:
            self.generator.set_state(self.states[start])
            self.coming = start
        while self.coming <= column:
            drawn = self.like.new_empty(self.rows, self.like.shape[-1])
            drawn.exponential_(generator=self.generator)
            self.coming += 1
            if self.coming > next(reversed(self.states)):
                self.states[self.coming] = self.generator.get_state()
                if (old := self.coming - self.latest) % STATE_EVERY:
                    self.states.pop(old, None)
        return drawn

    def finish(self, columns: int) -> None:
        """Leave the default generator as `generate` does after so many emitted columns."""
        if columns not in self.states:  # rows without an end may be far ahead of the column where all have stopped
            self._draw(columns - 1)
            self.states[columns] = self.generator.get_state()
        default_generator(self.device).set_state(self.states[columns])
