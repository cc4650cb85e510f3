"""What `specx bench` times: one pair at one batch size, by several methods to generate."""

from dataclasses import dataclass
from typing import Any

from hf_specx.common.errors import require, require_option

from .checks import check_processing, check_runs, check_sampling


@dataclass(frozen=True)
class BenchSettings:
    """The settings of one table of `specx bench`; a ValueError for settings with which there is nothing to time."""

    pair: str  # its name
    methods: tuple[str, ...] = ()  # names that `parse_method` reads; () stands for `usual_methods`
    batch: int = 1
    prompt_tokens: int = 64  # of each row; 0: prompts are as they are
    max_new_tokens: int = 64
    do_sample: bool = True
    temperature: float = 1.0
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off
    repeats: int = 3  # timed runs of each method, after one that warms up
    dtype: str = "auto"  # of the models; "auto" is as saved
    quantize: str | None = None  # "4bit": so many bits of each weight of the target
    min_p: float | None = None  # None is off
    repetition_penalty: float | None = None  # None is off
    ignore_eos: bool = False  # whether every text has `max_new_tokens`, whatever end tokens are in it
    seed: int = 0  # run i of every method starts from `torch.manual_seed(seed + i)`

    def __post_init__(self) -> None:
        check_runs((self.batch,), self.repeats)
        check_sampling(self.temperature, self.top_p, self.top_k)
        check_processing(self.min_p, self.repetition_penalty)
        twice = next((name for name in self.methods if self.methods.count(name) > 1), None)
        require(twice is None, f"method {twice!r} is given twice; give each once.")
        problem = "is below 0; give more, or 0 for whole ones."
        require_option(self.prompt_tokens >= 0, "prompt_tokens", self.prompt_tokens, problem)
        problem = "leaves no round to time; give 2 or more."
        require_option(self.max_new_tokens >= 2, "max_new_tokens", self.max_new_tokens, problem)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `generate`."""
        names = ["do_sample", "max_new_tokens"]
        if self.do_sample:
            names += ["temperature", "top_p", "top_k", "min_p"]
        names.append("repetition_penalty")
        options = {name: getattr(self, name) for name in names}
        options = {name: value for name, value in options.items() if value is not None}
        return options | ({"eos_token_id": None} if self.ignore_eos else {})

    def __str__(self) -> str:
        precision = "as saved" if self.dtype == "auto" else f"in {self.dtype}"
        precision += "" if self.quantize is None else f", the target in {self.quantize}"
        how = "greedily"
        if self.do_sample:
            how = f"sampled at temperature {self.temperature:g}, top-p {self.top_p:g}, top-k {self.top_k}"
            how += "" if self.min_p is None else f", min-p {self.min_p:g}"
        if self.repetition_penalty is not None:
            how += f", repetition penalty {self.repetition_penalty:g}"
        prompts = f"{self.prompt_tokens} prompt" if self.prompt_tokens else "whole prompts"
        most = f"{self.max_new_tokens} new tokens" + (" in each text" if self.ignore_eos else " at most")
        sizes = f"batch {self.batch}, {prompts} and {most}"
        return f"{self.pair} {precision}, {sizes}, {how}"
