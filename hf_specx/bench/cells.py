"""What `specx bench` measures: a cell is a batch of one pair on which contenders take turns."""

from dataclasses import dataclass
from typing import Any

from hf_specx.common.errors import require

from .checks import check_runs, check_sampling


@dataclass(frozen=True)
class Cell:
    """One measurement; raises a ValueError if there would be nothing to time."""

    pair: str  # its name
    contenders: tuple[str, ...] = ()  # as `ways.way` reads them; () stands for `turns.usual_contenders`
    batch: int = 1
    prompt_tokens: int = 64  # of each row
    new_tokens: int = 64
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # 1 is off
    repeats: int = 3  # timed runs of each contender, after one that warms up
    dtype: str = "auto"  # of the models; "auto" is as saved
    seed: int = 0  # turn i of every contender starts from `torch.manual_seed(seed + i)`

    def __post_init__(self) -> None:
        check_runs((self.batch,), self.repeats)
        check_sampling(self.temperature or 1.0, self.top_p)
        told = f"prompt_tokens={self.prompt_tokens} and new_tokens={self.new_tokens} leave no round to time; give 1 "
        require(self.prompt_tokens >= 1 and self.new_tokens >= 2, f"{told}or more, and 2 or more.")

    @property
    def options(self) -> dict[str, Any]:
        """The options of `generate`."""
        if self.temperature == 0:
            return {"do_sample": False, "max_new_tokens": self.new_tokens}
        drawn = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        return drawn | {"max_new_tokens": self.new_tokens}

    @property
    def runs(self) -> int:
        """Calls of each contender."""
        return 1 + self.repeats

    def __str__(self) -> str:
        warped = "" if (self.temperature, self.top_p) == (1, 1) else f", T={self.temperature:g}"
        warped += "" if self.top_p == 1 else f", top-p {self.top_p:g}"
        precision = "as saved" if self.dtype == "auto" else f"in {self.dtype}"
        sizes = f"batch {self.batch}, {self.prompt_tokens} prompt and {self.new_tokens} new tokens"
        return f"{self.pair} {precision}, {sizes}{warped}"
