"""The settings of a check: what is generated, in how many rows, with which seeds, and the level of each test."""

import json
import math
import random
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

from hf_specx.bench.checks import check_runs, check_sampling
from hf_specx.common.drafts import FIXED_DRAFT_TOKENS
from hf_specx.common.errors import is_int, require, require_option


CHECKED = ("greedy", "coupled", "token", "block")
PACKAGES = ("evaluate", "datasets", "scipy")
SET_BY_CHECK = (
    "do_sample",
    "max_new_tokens",
    "custom_generate",
    "seeds",
    "return_dict_in_generate",
    "num_return_sequences",
)
IN_DISTRIBUTION = ("token", "block")  # of which the distribution is promised, not the tokens
MIN_SAMPLES, MIN_BATCHES = 16, 8
PLAIN_GREEDY, PLAIN_SAMPLED = "plain greedy", "plain sampled"
UNITS = 16.0  # by how much rounding may change the logit of a sampled token, in epsilons times the largest logit
POWER = 0.9  # with which faults are rejected that a result says would have been seen; SEEN_IN_WORDS says it


def check_packages() -> None:
    """Raise a ValueError if a package that a check needs is not installed."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    require(
        not missing,
        f"a check (of decoders only) needs {', '.join(missing)}: pip install {' '.join(missing)}, as the extra "
        "[quality] does.",
    )


@dataclass(frozen=True)
class Settings:
    """The settings of a check; a ValueError for settings with which nothing can be checked."""

    batch_sizes: tuple[int, ...] = (1, 8)  # rows of a batch, each size on its own
    max_new_tokens: int = 64  # of each row, at most
    temperature: float = 1.0  # of sampling
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off
    verifications: tuple[str, ...] = CHECKED
    # texts for each sampled verification and batch size. None: 8 batches of each size, at the largest size at least
    # 16 texts and one for each prompt. Greedy texts: one for each prompt, at smaller sizes at most `samples`
    samples: int | None = None
    num_draft_tokens: int = FIXED_DRAFT_TOKENS  # candidates a round; "auto" would depend on the clock
    seed: int = 0
    level: float = 0.001  # chance that a check of correct code fails, at most, over all its tests together
    options: dict[str, Any] = field(default_factory=dict)  # what `generate` is given besides, as JSON has it

    def __post_init__(self) -> None:
        check_runs(self.batch_sizes, name="batch_sizes")
        check_sampling(self.temperature, self.top_p, self.top_k)
        names = self.verifications
        require(
            bool(names) and set(names) <= set(CHECKED) and len(set(names)) == len(names),
            f"verifications={list(names)!r}: give some of {', '.join(CHECKED)}, each once.",
        )
        for name in ("max_new_tokens", "samples"):
            value = getattr(self, name)
            problem = "leaves nothing to compare; give 2 or more."
            require_option(value is None or value >= 2, name, value, problem)
        problem = "is not an int of 1 or more; give one ('auto' goes by the clock, a check must not)."
        is_count = is_int(self.num_draft_tokens) and self.num_draft_tokens >= 1
        require_option(is_count, "num_draft_tokens", self.num_draft_tokens, problem)
        require(
            0 < self.level < 1,
            f"level={self.level} is no chance of a false alarm; give a number between 0 and 1, like 0.001.",
        )
        for name in self.options:
            require(name not in SET_BY_CHECK, f"{name}= is set by the check itself; leave it out.")
        try:
            json.dumps(self.options)
        except (TypeError, ValueError) as error:
            option_names = ", ".join(self.options)
            message = f"{option_names}: give numbers, texts, lists or dicts of these, since results say what they are."
            raise ValueError(message) from error

    @property
    def in_distribution(self) -> list[str]:
        """The verifications whose distributions are compared, not their tokens."""
        return [name for name in IN_DISTRIBUTION if name in self.verifications]

    @property
    def measures_rounding(self) -> set[str]:
        """The plain methods with whose tokens a verification is compared, so that their rounding is measured."""
        return {plain_of(name) for name in self.verifications if name not in self.in_distribution}

    @property
    def comparisons(self) -> int:
        """Tests that share the level: of each verification at each batch size, and of the quality of sampled texts."""
        return len(self.verifications) * len(self.batch_sizes) + len(self.in_distribution)

    @property
    def level_per_test(self) -> float:
        """The level of each test, so that all of them together keep `level`, however they depend on each other."""
        return self.level / max(1, self.comparisons)

    @property
    def methods(self) -> list[str]:
        """The methods by which texts are generated: ours first, since these raise for what cannot be checked."""
        checked = [name for name in CHECKED if name in self.verifications]
        return list(dict.fromkeys([*checked, *map(plain_of, checked)]))

    def generate_options(self, method: str) -> dict[str, Any]:
        """The options of `generate`, also where the target's own generation config asks for other outputs."""
        options = {**self.options, "max_new_tokens": self.max_new_tokens, "do_sample": not is_greedy(method)}
        options |= {"return_dict_in_generate": False, "num_return_sequences": 1}
        if is_greedy(method):
            return options
        return options | {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}

    def batches(self, method: str, batch: int, prompts: int) -> list[list[int]]:
        """The indices of the prompts in each batch; after the last prompt the first one follows again."""
        largest = batch == max(self.batch_sizes)
        # at smaller sizes fewer texts, since a token takes longer there
        rows = MIN_BATCHES * batch
        if largest:
            rows = max(rows, MIN_SAMPLES, prompts)
        rows = self.samples or rows
        if is_greedy(method):
            rows = prompts if largest else min(prompts, rows)
        firsts = range(0, batch * math.ceil(rows / batch), batch)
        return [[index % prompts for index in range(first, first + batch)] for first in firsts]

    def batch_seed(self, method: str, batch: int, run: int) -> int:
        """The seed of one batch: coupled sampling has that of plain sampling, each other method its own."""
        stream = PLAIN_SAMPLED if method == "coupled" else method
        return random.Random(f"{self.seed} {stream} {batch} {run}").getrandbits(62)

    @property
    def steps(self) -> int:
        """The number of parts of a check: texts, tests of them, and the trace."""
        return len(self.batch_sizes) * (len(self.methods) + len(self.verifications)) + len(self.in_distribution) + 1

    def to_dict(self) -> dict[str, Any]:
        """All settings as JSON has them, with lists for tuples."""
        return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}


def is_greedy(method: str) -> bool:
    return method in (PLAIN_GREEDY, "greedy")


def plain_of(method: str) -> str:
    """The plain method whose texts those of a verification are compared with."""
    return PLAIN_GREEDY if is_greedy(method) else PLAIN_SAMPLED
