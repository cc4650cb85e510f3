"""What `specx bench` measures: a cell is a batch of one pair on which contenders take turns; their names.

A contender's name is a kind, then how many candidates a round, then whether forwards are compiled:

- `plain`, `plain-compiled`: `generate`, and the same with transformers' static cache and its compiled forward;
- `assisted`, `assisted-5`, `assisted:2`: transformers' assisted generation at its defaults, with 5 candidates in every
  round, and with the target's first 2 layers as the draft; `lookup-10`: its prompt lookup with 10 candidates;
- `block-auto`, `token-5`, `coupled-5-compiled`: ours with a draft model, by verification;
- `suffix-auto`, `several-auto`, `exit:2-auto`: ours without a draft model, with both, and with the first 2 layers.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_specx.common.errors import require, require_option

from .checks import check_runs, check_sampling


PLAIN_NAME, ASSISTED_NAME, LOOKUP_NAME, EXIT_NAME = "plain", "assisted", "lookup", "exit"
VERIFIERS = ("token", "block", "coupled")
KINDS = {
    PLAIN_NAME: "generate without a draft",
    ASSISTED_NAME: "transformers' assisted generation",
    LOOKUP_NAME: "transformers' prompt lookup",
    **{kind: f"ours with {kind} verification" for kind in VERIFIERS},
    "suffix": "ours without a draft model, by what followed the same tokens before",
    "several": "ours with the better of that and the draft model",
    EXIT_NAME: "ours with the target's first layers as the draft",
}
AFTER_KINDS = "assisted:2, exit:2: the target's first 2 layers draft; -5: 5 candidates a round; -auto: as it goes"
OUR_KINDS = (*VERIFIERS, "suffix", "several", EXIT_NAME)
OURS_WITH = (*VERIFIERS, "suffix", "several", "exit:5")
SHAPES = {f"{kind}-{number}{end}" for kind in OURS_WITH for number in ("5", "auto") for end in ("", "-compiled")}
SHAPES |= {"plain", "plain-compiled", "lookup-5"}  # names, any number as 5
SHAPES |= {"assisted", "assisted-5", "assisted:5", "assisted:5-5"}


@dataclass(frozen=True)
class Cell:
    """One measurement; raises a ValueError if there would be nothing to time."""

    pair: str  # its name
    contenders: tuple[str, ...] = ()  # as `way` reads them; () stands for `turns.usual_contenders`
    batch: int = 1
    prompt_tokens: int = 64  # of each row; 0: prompts are as they are
    max_new_tokens: int = 64
    do_sample: bool = True
    temperature: float = 1.0
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off
    repeats: int = 3  # timed runs of each contender, after one that warms up
    dtype: str = "auto"  # of the models; "auto" is as saved
    seed: int = 0  # turn i of every contender starts from `torch.manual_seed(seed + i)`

    def __post_init__(self) -> None:
        check_runs((self.batch,), self.repeats)
        check_sampling(self.temperature, self.top_p, self.top_k)
        twice = next((name for name in self.contenders if self.contenders.count(name) > 1), None)
        require(twice is None, f"contender {twice!r} is given twice; give each once.")
        rest = "is below 0; give more, or 0 for whole ones."
        require_option(self.prompt_tokens >= 0, "prompt_tokens", self.prompt_tokens, rest)
        rest = "leaves no round to time; give 2 or more."
        require_option(self.max_new_tokens >= 2, "max_new_tokens", self.max_new_tokens, rest)

    @property
    def options(self) -> dict[str, Any]:
        drawn = ("temperature", "top_p", "top_k") if self.do_sample else ()
        return {name: getattr(self, name) for name in ("do_sample", "max_new_tokens", *drawn)}

    def __str__(self) -> str:
        precision = "as saved" if self.dtype == "auto" else f"in {self.dtype}"
        how = "greedily"
        if self.do_sample:
            how = f"sampled at temperature {self.temperature:g}, top-p {self.top_p:g}, top-k {self.top_k}"
        prompts = f"{self.prompt_tokens} prompt" if self.prompt_tokens else "whole prompts"
        sizes = f"batch {self.batch}, {prompts} and {self.max_new_tokens} new tokens"
        return f"{self.pair} {precision}, {sizes}, {how}"


class Way(NamedTuple):
    """How a contender generates."""

    kind: str  # "plain", "assisted", "lookup", or one of `OUR_KINDS`
    number: int | str | None = None  # candidates a round; "auto", or None for transformers' defaults
    compiled: bool = False  # whether forwards are
    layer: int | None = None  # how many of the target's first layers draft; None where another draft does


def way(name: str) -> Way:
    """What a contender's name says; raises a ValueError for one that means nothing."""
    require(
        re.sub("[1-9][0-9]*", "5", name) in SHAPES,
        f"contender {name!r} is unknown; give plain, plain-compiled, assisted, assisted-5, assisted:2 (early exit), "
        "lookup-10, or ours: token, block, coupled, suffix, several or exit:2 with a number or auto, like block-auto, "
        "and -compiled after it, like block-5-compiled.",
    )
    drafts, _, number = name.removesuffix("-compiled").partition("-")
    kind, _, layer = drafts.partition(":")
    candidates = int(number) if number.isdecimal() else number or None
    return Way(kind, candidates, name.endswith("-compiled"), int(layer) if layer else None)
