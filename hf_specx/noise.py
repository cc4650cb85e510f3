"""Where randomness comes from: independent streams for token and block, the stream of stock `generate` for coupled.

A rule chooses the candidates from the draft's scores and judges them by the target's; `verify` has the arithmetic.
"""

from collections import OrderedDict
from typing import NamedTuple, Protocol

import torch

from .sequences import Sequences
from .verify import Verdict, race, verify_block, verify_match, verify_token


class Draft(NamedTuple):
    """Candidates and the law they were drawn from.

    Attributes:
        tokens: [R, K] int64.
        probs: [R, K, V] float32, q; None where K is 0 or the candidates are no draw from a law.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None


Choice = tuple[torch.Tensor, torch.Tensor | None]


class Rule(Protocol):
    """How tokens are chosen and judged."""

    def choose(self, sequences: Sequences, scores: torch.Tensor, ahead: int) -> Choice:
        """The candidate [R] for the position `ahead` behind each row's end, by scores [R, V], and its law [R, V]."""

    def judge(self, sequences: Sequences, draft: Draft, scores: torch.Tensor) -> tuple[Verdict, torch.Tensor]:
        """The verdict on a draft, and sum_x min(p, q) at each candidate [R, K]; scores [R, K + 1, V]."""

    def finish(self, columns: int) -> None:
        """Leave the global generator where it belongs after `columns` emitted columns."""


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that `torch.manual_seed` seeds for the CPU or a CUDA device."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


class GreedyRule:
    """Both models take their argmax."""

    def choose(self, sequences: Sequences, scores: torch.Tensor, ahead: int) -> Choice:
        return scores.argmax(-1), None

    def judge(self, sequences: Sequences, draft: Draft, scores: torch.Tensor) -> tuple[Verdict, torch.Tensor]:
        choices = scores.argmax(-1)
        return verify_match(draft.tokens, choices), (draft.tokens == choices[:, :-1]).float()

    def finish(self, columns: int) -> None:
        pass


class RejectionRule:
    """Token or block verification: drafts, acceptance and residual each have a stream of their own.

    The three seeds are drawn from the default generator, so `torch.manual_seed` fixes all of them.
    """

    def __init__(self, block: bool, device: torch.device):
        self.verify = verify_block if block else verify_token
        seeds = torch.randint(2**62, (3,), device=device).tolist()
        self.drafts, self.uniforms, self.residuals = (torch.Generator(device).manual_seed(s) for s in seeds)

    def choose(self, sequences: Sequences, scores: torch.Tensor, ahead: int) -> Choice:
        probs = scores.softmax(-1)
        return race(probs, torch.empty_like(probs).exponential_(generator=self.drafts)), probs

    def judge(self, sequences: Sequences, draft: Draft, scores: torch.Tensor) -> tuple[Verdict, torch.Tensor]:
        probs = scores.softmax(-1)
        draft_probs = probs[:, :0] if draft.probs is None else draft.probs
        uniforms = torch.empty(draft.tokens.shape, dtype=torch.float64, device=probs.device)
        uniforms.uniform_(generator=self.uniforms)
        exponentials = torch.empty_like(probs[:, 0]).exponential_(generator=self.residuals)
        verdict = self.verify(draft.tokens, draft_probs, probs, uniforms, exponentials)
        return verdict, torch.minimum(probs[:, :-1], draft_probs).sum(-1)

    def finish(self, columns: int) -> None:
        pass


class CoupledRule:
    """Draft and target race with the same noise, and it is the noise that stock sampling would have drawn.

    Args:
        rows: B, the whole batch; stock draws for finished rows too.
        device: of `input_ids`, whose default generator stock draws from.
        window: positions whose noise is held; others are drawn again from their saved generator state.
    """

    def __init__(self, rows: int, device: torch.device, window: int):
        self.noise = StockNoise(rows, device, window)

    def choose(self, sequences: Sequences, scores: torch.Tensor, ahead: int) -> Choice:
        probs = scores.softmax(-1)
        return race(probs, self.noise.at(sequences, probs[:, None], ahead)[:, 0]), probs

    def judge(self, sequences: Sequences, draft: Draft, scores: torch.Tensor) -> tuple[Verdict, torch.Tensor]:
        probs = scores.softmax(-1)
        verdict = verify_match(draft.tokens, race(probs, self.noise.at(sequences, probs, 0)))
        if draft.probs is None:
            return verdict, probs[:, :-1].gather(-1, draft.tokens[..., None])[..., 0]
        return verdict, torch.minimum(probs[:, :-1], draft.probs).sum(-1)

    def finish(self, columns: int) -> None:
        self.noise.finish(columns)


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
