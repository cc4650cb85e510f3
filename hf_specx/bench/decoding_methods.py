"""The names of methods to generate, as `specx bench --method` takes them.

A name has up to four parts: a kind, how many candidates a round has, the nodes of its tree, and whether forwards are
compiled:

- `plain`, `plain-compiled`: `generate`, and the same with transformers' static cache and its compiled forward;
- `assisted`, `assisted-5`, `assisted:2`: transformers' assisted generation at its defaults, with 5 candidates in every
  round, and with the target's first 2 layers as the draft; `lookup-10`: its prompt lookup with 10 candidates;
- `block-auto`, `token-5`, `coupled-5-compiled`: ours with a draft model, by verification;
- `suffix-auto`, `several-auto`, `exit:2-auto`: ours without a draft model, with both, and with the first 2 layers;
- `coupled-4-tree-16`, `coupled-auto-tree-auto`: ours with trees of 16 nodes that go 4 deep, or of whatever pays.
"""

import itertools
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
    "chosen anew before each round; -tree-16: candidates branch, up to 16 a row"
)
OUR_KINDS = (*VERIFIERS, "suffix", "several", EXIT_NAME)
OURS_WITH = (*VERIFIERS, "suffix", "several", "exit:5")
NUMBERS, TREES, ENDS = ("5", "auto"), ("", "-tree-5", "-tree-auto"), ("", "-compiled")
SHAPES = {"".join(parts) for parts in itertools.product(OURS_WITH, ("-",), NUMBERS, TREES, ENDS)}
SHAPES |= {"plain", "plain-compiled", "lookup-5"}  # names, any number as 5
SHAPES |= {"assisted", "assisted-5", "assisted:5", "assisted:5-5"}


class DecodingMethod(NamedTuple):
    """A method to generate text, as its name says."""

    kind: str  # "plain", "assisted", "lookup", or one of `OUR_KINDS`
    num_draft_tokens: int | str | None = None  # candidates a round; "auto", or None for transformers' defaults
    compiled: bool = False  # whether forwards are
    exit_layer: int | None = None  # how many of the target's first layers draft; None where another draft does
    tree: int | str | bool = False  # nodes of a row, or "auto"; False where candidates are a chain


def parse_method(name: str) -> DecodingMethod:
    """The method that a name stands for; a ValueError for a name that stands for none."""
    require(
        re.sub("[1-9][0-9]*", "5", name) in SHAPES,
        f"method {name!r} is unknown; give plain, plain-compiled, assisted, assisted-5, assisted:2 (early exit), "
        "lookup-10, or ours: token, block, coupled, suffix, several or exit:2 with a number or auto, like block-auto, "
        "and after it -tree-16 or -tree-auto, and -compiled, like block-5-compiled or coupled-4-tree-16.",
    )
    chain, _, nodes = name.removesuffix("-compiled").partition("-tree-")
    drafts, _, number = chain.partition("-")
    kind, _, exit_layer = drafts.partition(":")
    return DecodingMethod(
        kind,
        number_or_word(number) or None,
        name.endswith("-compiled"),
        int(exit_layer) if exit_layer else None,
        number_or_word(nodes) or False,
    )


def number_or_word(text: str) -> int | str:
    """Digits as a number, and any other text as it is."""
    return int(text) if text.isdecimal() else text
