"""The noise that plain `generate` samples with, at any position of any row, for coupled verification."""

import sys
from collections import deque
from itertools import islice

import torch

from hf_specx.common.batch import Batch


MOST_HELD = 2**30  # bytes of noise that are kept for rows behind others; it is drawn again beyond
LATEST_STATES = 256  # columns whose generator state is kept, of about 5 kB; before them only those of
STATE_EVERY = 32  # one column in so many: 6 MB for a text of 32k tokens


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that `torch.manual_seed` seeds for the CPU or a CUDA device."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


class StockNoise:
    """The Exp(1) vectors that `torch.multinomial(probs, 1)` would draw in `generate`, [B, V] for each emitted column.

    They are drawn from a copy that is made of the default generator here, in the order of columns. Its states between
    draws are kept, of early ones only some, so that any draw can be repeated, and the default generator left as
    `generate` leaves it. A draw is kept for rows that need it within `window` columns, or fewer if that is more than
    `MOST_HELD`. `dtype` is that of the probabilities that `generate` draws by; None is that of the first asked for.
    """

    def __init__(self, rows: int, device: torch.device, window: int):
        self.rows, self.device, self.window = rows, device, window
        self.generator = torch.Generator(device)
        # states of `generator`, by the emitted column that it draws next
        self.states: dict[int, torch.Tensor] = {0: default_generator(device).get_state()}
        self.coming = -1  # the column that it would draw now; -1 if it is in no such state
        self.held: list[dict[int, torch.Tensor]] = [{} for _ in range(rows)]  # of each row [V], by emitted column
        self.dtype: torch.dtype | None = None

    def at(self, batch: Batch, probs: torch.Tensor, ahead: int) -> torch.Tensor:
        """The noise of P positions from `ahead` after each decoding row's end on, like probs [R, P, V]."""
        if len(batch.counts) == 1 and ahead + probs.shape[1] == 1 and not any(self.held):
            return self._draw(batch.counts[0], probs)[:, None]  # no row needs it again
        end, column_bytes = ahead + probs.shape[1], self.rows * probs.shape[-1] * probs.element_size()
        window = max(min(self.window, MOST_HELD // column_bytes), end)
        wanted = [(row, batch.counts[row] + i) for row in batch.rows for i in range(ahead, end)]
        for column in sorted({column for row, column in wanted if column not in self.held[row]}):
            drawn = self._draw(column, probs)
            for row in batch.rows:
                if 0 <= column - batch.counts[row] < window:
                    self.held[row][column] = drawn[row].clone()  # a view would keep the noise of all rows
        noise = torch.stack([self.held[row][column] for row, column in wanted]).view_as(probs)
        for row, held in enumerate(self.held):
            first = batch.counts[row] if row in batch.rows else sys.maxsize  # a row that has left needs none
            for column in [column for column in held if column < first]:
                del held[column]
        return noise

    def _draw(self, column: int, like: torch.Tensor) -> torch.Tensor:
        self.like = like.new_empty(0, like.shape[-1])
        start = next(t for t in range(column, -1, -1) if t in self.states)
        if not start <= self.coming <= column:
            self.generator.set_state(self.states[start])
            self.coming = start
        while self.coming <= column:
            drawn = like.new_empty(self.rows, like.shape[-1], dtype=self.dtype)
            drawn.exponential_(generator=self.generator)
            self.coming += 1
            if self.coming > next(reversed(self.states)):
                self.states[self.coming] = self.generator.get_state()
                if (old := self.coming - LATEST_STATES) % STATE_EVERY:
                    self.states.pop(old, None)
        return drawn

    def finish(self, columns: int) -> None:
        """Leave the default generator as `generate` does after so many emitted columns."""
        if columns not in self.states:  # rows without an end may be far ahead of the column where all have stopped
            self._draw(columns - 1, self.like)
            self.states[columns] = self.generator.get_state()
        default_generator(self.device).set_state(self.states[columns])


class SeededNoise:
    """The Exp(1) vectors that `generate` would draw for each row alone, under `torch.manual_seed` of the row's seed.

    Each row has a generator of its own, and draws in the order of its tokens; the default generator is left alone. A
    row's noise is kept from its end on, since nothing before that is asked for again. `dtype` is as in `StockNoise`.
    """

    def __init__(self, seeds: list[int], device: torch.device):
        self.generators = [torch.Generator(device).manual_seed(int(seed)) for seed in seeds]
        self.held: list[deque[torch.Tensor]] = [deque() for _ in seeds]  # of each row [1, V] for its coming tokens
        self.first = [0] * len(seeds)  # how many tokens of a row come before its first held vector
        self.dtype: torch.dtype | None = None

    def admit(self, row: int, seed: int) -> None:
        """A new prompt with a seed of its own has the place of a row."""
        self.generators[row].manual_seed(seed)
        self.held[row], self.first[row] = deque(), 0

    def at(self, batch: Batch, probs: torch.Tensor, ahead: int) -> torch.Tensor:
        """As `StockNoise.at`."""
        end = ahead + probs.shape[1]
        noise = [torch.cat(list(islice(self._from_end(batch, row, end, probs), ahead, end))) for row in batch.rows]
        return torch.stack(noise)

    def _from_end(self, batch: Batch, row: int, number: int, like: torch.Tensor) -> deque[torch.Tensor]:
        """The noise of at least `number` tokens from a row's end on."""
        held = self.held[row]
        count = max(self.first[row], batch.counts[row])  # a text that was cut back is finished: any noise will do
        for _ in range(self.first[row] + len(held), count + number):
            drawn = like.new_empty(1, like.shape[-1], dtype=self.dtype)
            held.append(drawn.exponential_(generator=self.generators[row]))
        for _ in range(self.first[row], count):
            held.popleft()
        self.first[row] = count
        return held
