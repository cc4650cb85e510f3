"""Where randomness comes from: the noise of stock sampling, reproduced at any position, and streams of our own."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice

import torch

from hf_specx.common.batch import Batch


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that `torch.manual_seed` seeds for the CPU or a CUDA device."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


class StockNoise:
    """The Exp(1) vectors that `torch.multinomial(probs, 1)` would draw in stock sampling, one [B, V] a position.

    Drawn from a private copy of the default generator, in the order of positions. The state after each draw is kept,
    so that any of them can be drawn again, and so that the default generator can be left where stock leaves it.

    Attributes:
        window: so many positions from its end on, a row's noise is held; a row further behind has it drawn again.
    """

    def __init__(self, rows: int, device: torch.device, window: int):
        self.rows, self.device, self.window = rows, device, window
        self.generator = torch.Generator(device)
        self.states: list[torch.Tensor] = []  # states[t] is the one before position t
        self.held: list[dict[int, torch.Tensor]] = [{} for _ in range(rows)]  # of each row [V], by position

    def begin(self) -> None:
        """Start from the default generator as it is now."""
        self.states.append(default_generator(self.device).get_state())

    def at(self, batch: Batch, probs: torch.Tensor, ahead: int) -> torch.Tensor:
        """The noise of P positions from `ahead` behind each decoding row's end, like probs [R, P, V]."""
        wanted = [(row, batch.counts[row] + ahead + i) for row in batch.rows for i in range(probs.shape[1])]
        for position in sorted({position for row, position in wanted if position not in self.held[row]}):
            drawn = self._draw(position, probs)
            for row in batch.rows:
                if 0 <= position - batch.counts[row] < max(self.window, ahead + probs.shape[1]):
                    self.held[row][position] = drawn[row].clone()  # without those that are ahead
        noise = torch.stack([self.held[row][position] for row, position in wanted]).view_as(probs)
        for row in batch.rows:
            for position in [position for position in self.held[row] if position < batch.counts[row]]:
                del self.held[row][position]
        return noise

    def _draw(self, position: int, like: torch.Tensor) -> torch.Tensor:
        for t in range(min(position, len(self.states) - 1), position + 1):
            self.generator.set_state(self.states[t])
            drawn = like.new_empty(self.rows, like.shape[-1]).exponential_(generator=self.generator)
            if t + 1 == len(self.states):
                self.states.append(self.generator.get_state())
        return drawn

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nothing inside may draw from the default generator.

        Raises:
            RuntimeError: where something does; it would get the noise that tokens are drawn with.
        """
        before = default_generator(self.device).get_state()
        yield
        if not torch.equal(default_generator(self.device).get_state(), before):
            raise RuntimeError(
                "a logits processor or stopping criterion draws from torch's default generator, whose noise "
                "verification='coupled' has to redraw; use verification='token', or give it a generator of its own."
            )

    def finish(self, columns: int) -> None:
        default_generator(self.device).set_state(self.states[columns])


class SeededNoise:
    """The Exp(1) vectors that stock would draw for each row alone, under `torch.manual_seed` of the row's seed.

    Each row has a generator of its own, read in the order of its positions; the default one is not read or moved. A
    row's noise is kept from its end on, since no position before that is asked for again.
    """

    def __init__(self, seeds: list[int], device: torch.device):
        self.generators = _seeded(seeds, device)
        self.held: list[deque[torch.Tensor]] = [deque() for _ in seeds]  # [1, V] each
        self.first = [0] * len(seeds)  # the position of a row's first held vector

    def begin(self) -> None:
        """Nothing to do: seeds are known."""

    def at(self, batch: Batch, probs: torch.Tensor, ahead: int) -> torch.Tensor:
        """As `StockNoise.at`."""
        end = ahead + probs.shape[1]
        noise = [torch.cat(list(islice(self._from_end(batch, row, end, probs), ahead, end))) for row in batch.rows]
        return torch.stack(noise)

    def _from_end(self, batch: Batch, row: int, number: int, like: torch.Tensor) -> deque[torch.Tensor]:
        """The noise of at least `number` positions from a row's end."""
        held = self.held[row]
        count = max(self.first[row], batch.counts[row])  # a text that was cut back is finished: any noise will do
        for _ in range(self.first[row] + len(held), count + number):
            held.append(like.new_empty(1, like.shape[-1]).exponential_(generator=self.generators[row]))
        for _ in range(self.first[row], count):
            held.popleft()
        self.first[row] = count
        return held

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self, columns: int) -> None:
        pass


class NoiseStream:
    """Noise that nothing else draws from, by one generator for all rows, or by one for each.

    In the latter case what a row gets depends on how often the row was served, and on nothing else.
    """

    def __init__(self, generators: list[torch.Generator]):
        self.generators = generators

    def uniforms(self, batch: Batch, most: int, wanted: list[int]) -> torch.Tensor:
        """Numbers from [0, 1) for the decoding rows: [R, most] float64.

        Args:
            batch: says which rows these are.
            most: columns.
            wanted: [R], how many of them each row needs; where each row has a generator it draws no more.
        """
        noise = torch.empty(len(batch.rows), most, dtype=torch.float64, device=batch.index.device)
        if len(self.generators) == 1:
            return noise.uniform_(generator=self.generators[0])
        for row_noise, row, number in zip(noise, batch.rows, wanted, strict=True):
            row_noise[:number].uniform_(generator=self.generators[row])
            row_noise[number:] = 0
        return noise


def independent_streams(number: int, device: torch.device, seeds: list[int] | None = None) -> list[NoiseStream]:
    """Streams whose own seeds are drawn from the default generator, or for each row from one with the row's seed."""
    sources = [None] if seeds is None else _seeded(seeds, device)
    drawn = [torch.randint(2**62, (number,), generator=source, device=device).tolist() for source in sources]
    return [NoiseStream(_seeded(column, device)) for column in zip(*drawn, strict=True)]


def _seeded(seeds: Iterable[int], device: torch.device) -> list[torch.Generator]:
    return [torch.Generator(device).manual_seed(int(seed)) for seed in seeds]
