"""Names of contenders and of drafts without weights, and what they say.

A contender's name is a kind, then how many candidates a round, then whether forwards are compiled:

- `plain`, `plain-compiled`: `generate`, and the same with transformers' static cache and its compiled forward;
- `stock`, `stock-5`, `stock:2`: transformers' assisted decoding at its defaults, with 5 candidates in every round, and
  with the target's first 2 layers as the draft; `lookup-10`: its prompt lookup with 10 candidates;
- `block-auto`, `token-5`, `coupled-5-compiled`: ours with a draft model, by verification;
- `suffix-auto`, `several-auto`, `exit:2-auto`: ours without a draft model, with both, and with the first 2 layers.
"""

from typing import NamedTuple

from hf_specx.common.errors import require


PLAIN_NAME, STOCK_NAME, LOOKUP_NAME, EXIT_NAME = "plain", "stock", "lookup", "exit"
VERIFIERS = ("token", "block", "coupled")
OUR_KINDS = (*VERIFIERS, "suffix", "several", EXIT_NAME)
SUFFIX, EXIT, SEVERAL_EXITS = "suffix", "exit:", "exits"  # drafts; the last stands for several numbers of layers


class Way(NamedTuple):
    """How a contender generates.

    Attributes:
        kind: "plain", "stock", "lookup", or one of `OUR_KINDS`.
        number: candidates a round; "auto", or None for transformers' defaults.
        compiled: whether forwards are compiled.
        layer: how many of the target's first layers draft; None where another draft does.
    """

    kind: str
    number: int | str | None = None
    compiled: bool = False
    layer: int | None = None


def way(name: str) -> Way:
    """What a contender's name says.

    Raises:
        ValueError: for a name that means nothing.
    """
    first, *rest = name.split("-")
    kind, exits, layer = first.partition(":")
    compiled = rest[-1:] == ["compiled"]
    numbers = rest[:-1] if compiled else rest
    counted = len(numbers) == 1 and numbers[0].isdecimal() and int(numbers[0]) > 0
    known = {
        PLAIN_NAME: not numbers,
        STOCK_NAME: (counted or not numbers) and not compiled,
        LOOKUP_NAME: counted and not compiled,
        **dict.fromkeys(OUR_KINDS, counted or numbers == ["auto"]),
    }
    layered = layer.isdecimal() and int(layer) > 0 and kind in (EXIT_NAME, STOCK_NAME)
    require(
        known.get(kind, False) and (layered if exits else kind != EXIT_NAME),
        f"contender {name!r} is unknown; give plain, plain-compiled, stock, stock-5, stock:2 (its early exit), "
        "lookup-10, or ours: token, block, coupled, suffix, several or exit:2 with a number or auto, like block-auto, "
        "and -compiled after it, like block-5-compiled.",
    )
    number = int(numbers[0]) if counted else next(iter(numbers), None)
    return Way(kind, number, compiled, int(layer) if exits else None)


def in_words(name: str) -> str:
    """What a contender does."""
    kind, number, compiled, layer = way(name)
    layers = f"the target's first {layer} layers as the draft"
    own = "chosen as it goes" if number == "auto" else f"{number} in each round"
    said = {
        PLAIN_NAME: "generate without a draft",
        STOCK_NAME: f"transformers' assisted decoding{'' if layer is None else f', with {layers}'}",
        LOOKUP_NAME: "transformers' prompt lookup",
        "suffix": "ours without a draft model, by what followed the same tokens before",
        "several": "ours with the better of that and the draft model",
        EXIT_NAME: f"ours with {layers}",
    }.get(kind, f"ours with {kind} verification")
    said += "" if kind == PLAIN_NAME else f", candidates: {'by its defaults' if number is None else own}"
    return f"{said}; forwards compiled" if compiled else said


def exit_layer_of(name: str) -> int | None:
    """4 for "exit:4"; None for any other name.

    Raises:
        ValueError: there is no number of layers after "exit:".
    """
    if not name.startswith(EXIT):
        return None
    number = name.removeprefix(EXIT)
    known = number.isascii() and number.isdecimal() and int(number) >= 1
    require(known, f"{name!r} names no number of layers; give one of 1 or more, like {EXIT}4.")
    return int(number)
