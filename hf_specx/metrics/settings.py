"""How a check is made: what is generated, in how many rows, from which seeds, and the level of each test."""

import json
import math
import random
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

from hf_specx.bench.checks import check_runs, check_sampling
from hf_specx.common.errors import is_int, require, require_option
from hf_specx.drafting.auto import FIXED_DRAFT_TOKENS


CHECKED = ("greedy", "coupled", "token", "block")
PACKAGES = ("evaluate", "datasets", "scipy")
OWN = ("do_sample", "max_new_tokens", "custom_generate", "seeds", "return_dict_in_generate", "num_return_sequences")
IN_DISTRIBUTION = ("token", "block")  # of which the distribution is promised, not the tokens
LEAST_SAMPLES, RUNS = 16, 8
PLAIN_GREEDY, PLAIN_SAMPLED = "plain greedy", "plain sampled"
UNITS = 16.0  # logits that may be off by rounding, of tokens that are drawn, in the epsilon times the largest logit
POWER = 0.9  # with which faults are rejected that a result says would have been seen; SEEN_IN_WORDS says it


def check_packages() -> None:
    lacking = [name for name in PACKAGES if find_spec(name) is None]
    told = f"a check needs {', '.join(lacking)}: pip install {' '.join(lacking)}, as the extra [quality] does."
    require(not lacking, told)


@dataclass(frozen=True)
class Settings:
    """What is checked, and how closely; raises a ValueError for settings with which nothing can be checked."""

    batch_sizes: tuple[int, ...] = (1, 8)  # rows of a batch, each size on its own
    max_new_tokens: int = 64  # of each row, at most
    temperature: float = 1.0  # of sampling
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off
    verifications: tuple[str, ...] = CHECKED
    # texts for each sampled verification and batch size; None is 8 batches of each size, and at the largest size no
    # fewer than 16 texts or than prompts. Greedy texts are one for each prompt, at smaller sizes as many as these
    samples: int | None = None
    num_draft_tokens: int = FIXED_DRAFT_TOKENS  # candidates a round; "auto" would depend on the clock
    seed: int = 0
    level: float = 0.001  # chance that a check of correct code fails, at most, over all its tests together
    options: dict[str, Any] = field(default_factory=dict)  # plain values that `generate` is given besides

    def __post_init__(self) -> None:
        check_runs(self.batch_sizes, name="batch_sizes")
        check_sampling(self.temperature, self.top_p, self.top_k)
        names, number = self.verifications, self.num_draft_tokens
        known = names and set(names) <= set(CHECKED) and len(set(names)) == len(names)
        require(bool(known), f"verifications={list(names)!r}: give some of {', '.join(CHECKED)}, each once.")
        for name in ("max_new_tokens", "samples"):
            value = getattr(self, name)
            rest = "leaves nothing to compare; give 2 or more."
            require_option(value is None or value >= 2, name, value, rest)
        rest = "is not an int of 1 or more; give one ('auto' goes by the clock, a check must not)."
        require_option(is_int(number) and number >= 1, "num_draft_tokens", number, rest)
        told = f"level={self.level} is no chance of a false alarm; give a number between 0 and 1, like 0.001."
        require(0 < self.level < 1, told)
        own = next((name for name in self.options if name in OWN), None)
        require(own is None, f"{own}= is set by the check itself; leave it out.")
        try:
            json.dumps(self.options)
        except (TypeError, ValueError) as error:
            told = "give plain values (numbers, texts, lists), since results say what they are"
            raise ValueError(f"{', '.join(self.options)}: {told}.") from error

    @property
    def in_distribution(self) -> list[str]:
        """The verifications whose distributions are compared, not their tokens."""
        return [name for name in IN_DISTRIBUTION if name in self.verifications]

    @property
    def measured(self) -> set[str]:
        """The plain ways whose tokens are those of a verification, so that their rounding is measured."""
        return {plain_of(way) for way in self.verifications if way not in self.in_distribution}

    @property
    def comparisons(self) -> int:
        """Tests that share the level: one for each verification and batch size, and one of each way's quality."""
        return len(self.verifications) * len(self.batch_sizes) + len(self.in_distribution)

    @property
    def share(self) -> float:
        """The level of each of them, so that all of them together keep `level`, however they depend on each other."""
        return self.level / max(1, self.comparisons)

    @property
    def ways(self) -> list[str]:
        """All ways in which texts are generated: ours, which refuse what cannot be checked, and then plain ones."""
        checked = [name for name in CHECKED if name in self.verifications]
        return list(dict.fromkeys([*checked, *map(plain_of, checked)]))

    def generation(self, way: str) -> dict[str, Any]:
        """The options of `generate`, also where the target's own generation config asks for other outputs."""
        options = {**self.options, "max_new_tokens": self.max_new_tokens, "do_sample": not is_greedy(way)}
        options |= {"return_dict_in_generate": False, "num_return_sequences": 1}
        drawn = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return options if is_greedy(way) else options | drawn

    def batches(self, way: str, batch: int, prompts: int) -> list[list[int]]:
        """The indices of the prompts in each batch: all in order, again and again, as far as they are needed."""
        largest = batch == max(self.batch_sizes)
        # at smaller sizes fewer texts, since a token takes longer there
        rows = self.samples or max(RUNS * batch, max(LEAST_SAMPLES, prompts) if largest else 0)
        if is_greedy(way):
            rows = prompts if largest else min(prompts, rows)
        firsts = range(0, batch * math.ceil(rows / batch), batch)
        return [[index % prompts for index in range(first, first + batch)] for first in firsts]

    def run_seed(self, way: str, batch: int, run: int) -> int:
        """The seed of one batch; coupled sampling has those of plain sampling, all others have their own."""
        stream = PLAIN_SAMPLED if way == "coupled" else way
        return random.Random(f"{self.seed} {stream} {batch} {run}").getrandbits(62)

    @property
    def steps(self) -> int:
        """How many parts a check has: texts, what is made of them, and the trace."""
        return len(self.batch_sizes) * (len(self.ways) + len(self.verifications)) + len(self.in_distribution) + 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with lists for tuples."""
        return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}


def is_greedy(way: str) -> bool:
    return way in (PLAIN_GREEDY, "greedy")


def plain_of(way: str) -> str:
    """The plain way whose texts those of a verification are compared with."""
    return PLAIN_GREEDY if is_greedy(way) else PLAIN_SAMPLED
