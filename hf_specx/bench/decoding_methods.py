"""The names of methods to generate, as `specx bench --method` takes them.

A name has up to three parts: a kind, how many candidates a round has, and whether forwards are compiled:

- `plain`, `plain-compiled`: `generate`, and the same with transformers' static cache and its compiled forward;
- `assisted`, `assisted-5`, `assisted:2`: transformers' assisted generation at its defaults, with 5 candidates in every
  round, and with the target's first 2 layers as the draft; `lookup-10`: its prompt lookup with 10 candidates;
- `block-auto`, `token-5`, `coupled-5-compiled`: ours with a draft model, by verification;
- `suffix-auto`, `several-auto`, `exit:2-auto`: ours without a draft model, with both, and with the first 2 layers.
"""

import re
from typing import NamedTuple

from hf_specx.common.errors import require


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
AFTER_KINDS = (
    "assisted:2 and exit:2: the target's first 2 layers draft; -5: 5 candidates in each round; -auto: the number is "
    "chosen anew before each round"
)
OUR_KINDS = (*VERIFIERS, "suffix", "several", EXIT_NAME)
OURS_WITH = (*VERIFIERS, "suffix", "several", "exit:5")
SHAPES = {f"{kind}-{number}{end}" for kind in OURS_WITH for number in ("5", "auto") for end in ("", "-compiled")}
SHAPES |= {"plain", "plain-compiled", "lookup-5"}  # names, any number as 5
SHAPES |= {"assisted", "assisted-5", "assisted:5", "assisted:5-5"}


class DecodingMethod(NamedTuple):
    """A method to generate text, as its name says."""

    kind: str  # "plain", "assisted", "lookup", or one of `OUR_KINDS`
    num_draft_tokens: int | str | None = None  # candidates a round; "auto", or None for transformers' defaults
    compiled: bool = False  # whether forwards are
    exit_layer: int | None = None  # how many of the target's first layers draft; None where another draft does


def parse_method(name: str) -> DecodingMethod:
    """The method that a name stands for; a ValueError for a name that stands for none."""
    require(
        re.sub("[1-9][0-9]*", "5", name) in SHAPES,
        f"method {name!r} is unknown; give plain, plain-compiled, assisted, assisted-5, assisted:2 (early exit), "
        "lookup-10, or ours: token, block, coupled, suffix, several or exit:2 with a number or auto, like block-auto, "
        "and -compiled after it, like block-5-compiled.",
    )
    drafts, _, number = name.removesuffix("-compiled").partition("-")
    kind, _, exit_layer = drafts.partition(":")
    num_draft_tokens = int(number) if number.isdecimal() else number or None
    return DecodingMethod(kind, num_draft_tokens, name.endswith("-compiled"), int(exit_layer) if exit_layer else None)
