"""Names of contenders and of drafts without weights, and what they say.

A contender's name is a kind, then how many candidates a round, then whether forwards are compiled:

- `plain`, `plain-compiled`: `generate`, and the same with transformers' static cache and its compiled forward;
- `stock`, `stock-5`, `stock:2`: transformers' assisted decoding at its defaults, with 5 candidates in every round, and
  with the target's first 2 layers as the draft; `lookup-10`: its prompt lookup with 10 candidates;
- `block-auto`, `token-5`, `coupled-5-compiled`: ours with a draft model, by verification;
- `suffix-auto`, `several-auto`, `exit:2-auto`: ours without a draft model, with both, and with the first 2 layers.
"""

import re
from typing import NamedTuple

from hf_specx.common.errors import require


PLAIN_NAME, STOCK_NAME, LOOKUP_NAME, EXIT_NAME = "plain", "stock", "lookup", "exit"
VERIFIERS = ("token", "block", "coupled")
OUR_KINDS = (*VERIFIERS, "suffix", "several", EXIT_NAME)
SUFFIX, EXIT, SEVERAL_EXITS = "suffix", "exit:", "exits"  # drafts; the last stands for several numbers of layers
OURS_WITH = (*VERIFIERS, "suffix", "several", "exit:5")
SHAPES = {f"{kind}-{number}{end}" for kind in OURS_WITH for number in ("5", "auto") for end in ("", "-compiled")}
SHAPES |= {"plain", "plain-compiled", "stock", "stock-5", "stock:5", "stock:5-5", "lookup-5"}  # names, any number as 5


class Way(NamedTuple):
    """How a contender generates."""

    kind: str  # "plain", "stock", "lookup", or one of `OUR_KINDS`
    number: int | str | None = None  # candidates a round; "auto", or None for transformers' defaults
    compiled: bool = False  # whether forwards are
    layer: int | None = None  # how many of the target's first layers draft; None where another draft does


def way(name: str) -> Way:
    """What a contender's name says; raises a ValueError for one that means nothing."""
    require(
        re.sub("[1-9][0-9]*", "5", name) in SHAPES,
        f"contender {name!r} is unknown; give plain, plain-compiled, stock, stock-5, stock:2 (its early exit), "
        "lookup-10, or ours: token, block, coupled, suffix, several or exit:2 with a number or auto, like block-auto, "
        "and -compiled after it, like block-5-compiled.",
    )
    drafts, _, number = name.removesuffix("-compiled").partition("-")
    kind, _, layer = drafts.partition(":")
    candidates = int(number) if number.isdecimal() else number or None
    return Way(kind, candidates, name.endswith("-compiled"), int(layer) if layer else None)


def in_words(name: str) -> str:
    """What a contender does."""
    kind, number, compiled, layer = way(name)
    layers = f"the target's first {layer} layers as the draft"
    said = {
        PLAIN_NAME: "generate without a draft",
        STOCK_NAME: f"transformers' assisted decoding{'' if layer is None else f', with {layers}'}",
        LOOKUP_NAME: "transformers' prompt lookup",
        "suffix": "ours without a draft model, by what followed the same tokens before",
        "several": "ours with the better of that and the draft model",
        EXIT_NAME: f"ours with {layers}",
    }.get(kind, f"ours with {kind} verification")
    named = {"None": "by its defaults", "auto": "chosen as it goes"}
    numbers = named.get(str(number), f"{number} in each round")
    said += "" if kind == PLAIN_NAME else f", candidates: {numbers}"
    return f"{said}; forwards compiled" if compiled else said


def exit_layer_of(name: str) -> int | None:
    """4 for "exit:4"; None for names of other kinds. Raises a ValueError for "exit:" without a number of layers."""
    if not name.startswith(EXIT):
        return None
    known = re.fullmatch(f"{EXIT}[1-9][0-9]*", name)
    require(known is not None, f"{name!r} names no number of layers; give one of 1 or more, like {EXIT}4.")
    return int(name.removeprefix(EXIT))
