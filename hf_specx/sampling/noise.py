"""The noise that plain `generate` samples with, at any position of any row, for coupled verification."""

import sys

import torch


MAX_NOISE_BYTES = 2**30  # of noise that is kept for rows behind others; more is drawn again when it is needed
LATEST_STATES = 256  # generator states of so many of the last columns are kept, of about 5 kB each
LATEST_STATES_OF_ROW = 16  # the same for the noise of one row with a seed
STATE_EVERY = 32  # of earlier columns, the state of one in so many is kept: 6 MB for a text of 32k tokens


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that `torch.manual_seed` seeds for the CPU or a CUDA device."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


class ReplayedNoise:
    """The Exp(1) vectors that `torch.multinomial(probs, 1)` would draw in `generate`, [B, V] for each emitted column.

    They are drawn in the order of columns from a copy of the default generator, or under a seed. States of the
    generator are kept, so that any draw can be repeated, and so that the default generator can be left as `generate`
    leaves it. A draw is kept for rows that will need it within `window` columns, or fewer if that would take more than
    `MAX_NOISE_BYTES`.

    Attributes:
        generator_states: of the `generator`, by the emitted column that it draws next; `newest_state` is the last one.
        next_column: the column that the generator would draw now; -1 if that is not known.
        drawn: of each row noise [V] that is kept, by emitted column.
        like: an empty tensor with V columns and the dtype and device of the latest noise.
    """

    def __init__(self, rows: int, device: torch.device, window: int, seed: int | None = None):
        self.rows, self.device, self.window = rows, device, window
        self.latest = LATEST_STATES if seed is None else min(LATEST_STATES, LATEST_STATES_OF_ROW)
        self.generator = torch.Generator(device)
        source = default_generator(device) if seed is None else self.generator.manual_seed(int(seed))
        self.generator_states: dict[int, torch.Tensor] = {0: source.get_state()}
        self.newest_state = 0
        self.next_column = -1
        self.drawn: list[dict[int, torch.Tensor]] = [{} for _ in range(rows)]

    def vectors_at(
        self, rows: list[int], counts: list[int], probs: torch.Tensor, ahead: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The noise [R, P, V] for decoding `rows` [R] at P positions, the first `ahead` tokens after each row's end.

        Args:
            counts: [B], how many tokens each row has emitted.
            probs: [R, P, V], for the shape and device.
            dtype: of the probabilities in `generate`, which is that of the noise; by default the dtype of `probs`.
        """
        self.like = probs.new_empty(0, probs.shape[-1], dtype=dtype)
        end = ahead + probs.shape[1]
        if self.rows == 1 and end == 1 and not any(self.drawn):
            return self._draw(counts[0])[:, None]  # no row needs it again
        wanted = [(row, counts[row] + i) for row in rows for i in range(ahead, end)]  # in the order of [R, P]
        self._draw_missing({column for row, column in wanted if column not in self.drawn[row]}, rows, counts, end)
        noise = torch.stack([self.drawn[row][column] for row, column in wanted]).view_as(probs)
        self._forget_emitted(rows, counts)
        return noise

    def _draw_missing(self, columns: set[int], rows: list[int], counts: list[int], end: int) -> None:
        """Draw columns, and keep each for the rows that need it soon: at least within `end` columns of their ends."""
        column_bytes = self.rows * self.like.shape[1] * self.like.element_size()
        window = max(min(self.window, MAX_NOISE_BYTES // column_bytes), end)
        for column in sorted(columns):
            vectors = self._draw(column)
            for row in rows:
                if 0 <= column - counts[row] < window:
                    self.drawn[row][column] = vectors[row].clone()  # a view would keep the noise of all rows

    def _forget_emitted(self, rows: list[int], counts: list[int]) -> None:
        """Drop the noise of tokens that were emitted, and all that of rows that are not among the decoding ones."""
        for row, vectors_of_row in enumerate(self.drawn):
            first = counts[row] if row in rows else sys.maxsize
            for column in [column for column in vectors_of_row if column < first]:
                del vectors_of_row[column]

    def _draw(self, column: int) -> torch.Tensor:
        """The noise [B, V] of an emitted column, drawn from the nearest state before it that was kept."""
        start = next(earlier for earlier in range(column, -1, -1) if earlier in self.generator_states)
        if not start <= self.next_column <= column:
            self.generator.set_state(self.generator_states[start])
            self.next_column = start
        while self.next_column <= column:
            vectors = self.like.new_empty(self.rows, self.like.shape[-1])
            vectors.exponential_(generator=self.generator)
            self.next_column += 1
            if self.next_column > self.newest_state:
                self.newest_state = self.next_column
                self.generator_states[self.next_column] = self.generator.get_state()
                old = self.next_column - self.latest
                if old % STATE_EVERY:
                    self.generator_states.pop(old, None)
        return vectors

    def finish(self, columns: int) -> None:
        """Leave the default generator as `generate` does after so many emitted columns."""
        # rows without an end may be far ahead of the column where all have stopped
        if columns not in self.generator_states:
            self._draw(columns - 1)
            self.generator_states[columns] = self.generator.get_state()
        default_generator(self.device).set_state(self.generator_states[columns])
