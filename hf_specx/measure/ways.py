"""Names of contenders, and what they say.

"plain" is `generate`; "plain-compiled" the same with transformers' static cache and its compiled forward; "stock" is
transformers' assisted decoding at its defaults, and "stock-5" with 5 candidates in every round; "lookup-10" is its
prompt lookup with 10; "block-5", "token-auto" and the like are ours, and "block-5-compiled" is ours with
`compile=True`; "suffix-auto" is ours without a draft model, and "several-auto" with both a suffix draft and a model.
"""

from typing import NamedTuple

from hf_specx.common.errors import require


PLAIN_NAME, STOCK_NAME, COMPILED_SUFFIX = "plain", "stock", "compiled"
LOOKUP_NAME = "lookup"
VERIFIERS = ("token", "block", "coupled")
SUFFIXES = ("suffix", "several")


class Way(NamedTuple):
    """How a contender generates.

    Attributes:
        kind: "plain", "stock", "lookup", or one of `VERIFIERS` or `SUFFIXES`.
        number: candidates a round; "auto", or None for transformers' defaults.
        compiled: whether forwards are compiled.
    """

    kind: str
    number: int | str | None = None
    compiled: bool = False


def way(name: str) -> Way:
    """What a contender's name says.

    Raises:
        ValueError: for a name that means nothing.
    """
    kind, *rest = name.split("-")
    compiled = rest[-1:] == [COMPILED_SUFFIX]
    numbers = rest[:-1] if compiled else rest
    counted = len(numbers) == 1 and numbers[0].isdecimal() and int(numbers[0]) > 0
    known = {
        PLAIN_NAME: not numbers,
        STOCK_NAME: (counted or not numbers) and not compiled,
        LOOKUP_NAME: counted and not compiled,
        **dict.fromkeys((*VERIFIERS, *SUFFIXES), counted or numbers == ["auto"]),
    }
    require(
        known.get(kind, False),
        f"contender {name!r} is unknown; give plain, plain-compiled, stock, stock-5, lookup-10, or ours: token, "
        "block, coupled, suffix or several with a number or auto, like block-auto, and -compiled after it, like "
        "block-5-compiled.",
    )
    return Way(kind, int(numbers[0]) if counted else next(iter(numbers), None), compiled)
