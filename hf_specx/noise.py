"""The noise of stock sampling, reproduced: what `torch.multinomial` would draw, at any position, in any order."""

from collections import OrderedDict

import torch

from .sequences import Sequences


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that `torch.manual_seed` seeds for the CPU or a CUDA device."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


class StockNoise:
    """The Exp(1) vectors that `torch.multinomial(probs, 1)` would draw in stock sampling, one [B, V] a position.

    Drawn from a private copy of the default generator, in the order of positions. The state after each draw is kept,
    so that any of them can be drawn again, and so that the default generator can be left where stock leaves it.
    """

    def __init__(self, rows: int, device: torch.device, window: int):
        self.rows, self.device, self.window = rows, device, window
        self.generator = torch.Generator(device)
        self.states = [default_generator(device).get_state()]  # states[t] is the one before position t
        self.held: OrderedDict[int, torch.Tensor] = OrderedDict()

    def at(self, sequences: Sequences, probs: torch.Tensor, ahead: int) -> torch.Tensor:
        """The noise of P positions from `ahead` behind each decoding row's end, like probs [R, P, V]."""
        noise = torch.empty_like(probs)
        counts = [sequences.counts[row] + ahead for row in sequences.rows]
        for position in range(min(counts), max(counts) + probs.shape[1]):
            members = [place for place, count in enumerate(counts) if count <= position < count + probs.shape[1]]
            if len(members) == self.rows and len(set(counts)) == 1:
                noise[:, position - counts[0]] = self._draw(position, probs)
            elif members:
                offsets = [position - counts[place] for place in members]
                rows = [sequences.rows[place] for place in members]
                noise[members, offsets] = self._draw(position, probs)[rows]
        return noise

    def _draw(self, position: int, like: torch.Tensor) -> torch.Tensor:
        if position in self.held:
            self.held.move_to_end(position)
            return self.held[position]
        for t in range(min(position, len(self.states) - 1), position + 1):
            self.generator.set_state(self.states[t])
            drawn = like.new_empty(self.rows, like.shape[-1]).exponential_(generator=self.generator)
            if t + 1 == len(self.states):
                self.states.append(self.generator.get_state())
            self.held[t] = drawn
        while len(self.held) > self.window:
            self.held.popitem(last=False)
        return drawn

    def finish(self, columns: int) -> None:
        default_generator(self.device).set_state(self.states[columns])
