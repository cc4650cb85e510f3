"""How a check is made: what is generated, in how many rows, by which seeds, and at which level each test is made."""

import math
import random
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_specx.drafting.draft_length import FIXED_DRAFT_TOKENS, MAX_DRAFT_TOKENS

from .checks_check import check_settings


VERIFICATIONS = ("greedy", "coupled", "token", "block")
LAWFUL = ("token", "block")  # of which nothing but the law is promised
LEAST_SAMPLES, RUNS = 16, 8
PLAIN_GREEDY, PLAIN_SAMPLED = "plain greedy", "plain sampled"
TIMED = tuple(range(MAX_DRAFT_TOKENS + 1))  # candidates a round of what is timed for a report; 0 is plain
REPEATS = 3  # timed runs of each, after one that warms up
TIMED_RUNS = len(TIMED) * (1 + REPEATS)


@dataclass(frozen=True)
class Settings:
    """What is checked, and how closely.

    Attributes:
        batch_sizes: rows of a batch, each size on its own.
        new_tokens: of each row, at most.
        temperature, top_p, top_k: of sampling; 1, 1 and 0 are off.
        verifications: some of `VERIFICATIONS`.
        samples: texts for each sampled verification and batch size; None is 8 batches, at the largest size at least 16
            texts and one for each prompt. Greedy texts are one for each prompt, at smaller sizes as many as these.
        num_draft_tokens: candidates a round. A fixed number, since "auto" goes by the clock.
        seed: of all random numbers.
        level: chance that a check of correct code fails, at most, over all its tests together.
        options: what else `generate` is given, plain and speculative alike; plain values.

    Raises:
        ValueError: for settings with which nothing can be checked.
    """

    batch_sizes: tuple[int, ...] = (1, 8)
    new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    verifications: tuple[str, ...] = VERIFICATIONS
    samples: int | None = None
    num_draft_tokens: int = FIXED_DRAFT_TOKENS
    seed: int = 0
    level: float = 0.001
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(asdict(self), VERIFICATIONS)

    @property
    def lawful(self) -> list[str]:
        """The verifications that are compared by their laws."""
        return [name for name in LAWFUL if name in self.verifications]

    @property
    def comparisons(self) -> int:
        """Tests that share the level: for each lawful verification two of its law a batch size, texts and quality."""
        return len(self.lawful) * (2 * len(self.batch_sizes) + 2)

    @property
    def share(self) -> float:
        """The level of each of them, so that all of them together keep `level`, however they depend on each other."""
        return self.level / max(1, self.comparisons)

    @property
    def ways(self) -> list[str]:
        """All ways in which texts are generated, those without a draft before those that are compared with them."""
        sampled = [name for name in VERIFICATIONS[1:] if name in self.verifications]
        greedy = [PLAIN_GREEDY, "greedy"] if "greedy" in self.verifications else []
        return greedy + ([PLAIN_SAMPLED, *sampled] if sampled else [])

    def generation(self, sampled: bool) -> dict[str, Any]:
        """What `generate` is told."""
        told = {**self.options, "max_new_tokens": self.new_tokens, "do_sample": sampled}
        if sampled:
            told |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return told

    def batches(self, way: str, batch: int, prompts: int) -> list[list[int]]:
        """The places of the prompts in each batch: all in order, again and again, as far as they are wanted."""
        rows = self._rows(batch, prompts)
        if way in (PLAIN_GREEDY, "greedy"):
            rows = prompts if batch == max(self.batch_sizes) else min(prompts, rows)
        firsts = range(0, batch * math.ceil(rows / batch), batch)
        return [[place % prompts for place in range(first, first + batch)] for first in firsts]

    def _rows(self, batch: int, prompts: int) -> int:
        """Sampled texts at a batch size; at smaller ones fewer, since a token takes longer there."""
        least = max(LEAST_SAMPLES, prompts) if batch == max(self.batch_sizes) else 0
        return self.samples or max(RUNS * batch, least)

    def run_seed(self, way: str, batch: int, run: int) -> int:
        """Of one batch; coupled sampling has the seeds of plain sampling, all others have their own."""
        stream = PLAIN_SAMPLED if way == "coupled" else way
        return random.Random(f"{self.seed} {stream} {batch} {run}").getrandbits(62)

    def steps(self, prompts: int, timed: bool = False) -> int:
        """How often a check of so many prompts says that it has advanced; `timed` with speed, for a report."""
        runs = sum(len(self.batches(way, batch, prompts)) for way in self.ways for batch in self.batch_sizes)
        judged = (len(self.verifications) + len(self.lawful)) * len(self.batch_sizes) + 2 * len(self.lawful)
        timing = TIMED_RUNS if timed else 0
        return runs + judged + timing + 1  # the last is the trace

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with lists for tuples."""
        known = asdict(self)
        return known | {"batch_sizes": list(self.batch_sizes), "verifications": list(self.verifications)}
