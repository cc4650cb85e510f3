"""Prompts whose continuation repeats them, from what every machine has: the standard library's source and its docs.

What a target makes of them is its own affair; a small one that was trained on code copies them well.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_specx.common.errors import require


if TYPE_CHECKING:  # the kinds are known before torch is imported
    import torch
    from transformers import PreTrainedTokenizerBase


MODULES = ("textwrap", "heapq", "shlex", "fnmatch", "copy", "queue", "string", "bisect")  # one for each row
BEGUN = 5  # one part in so many of a prompt is the beginning of what is to be repeated
QUESTION = "\n\n# What does the text above say? It says:\n"
ONCE_MORE = "\n\n# The same once more:\n"


def rewriting(source: list[int], asked: list[int], size: int) -> list[int]:
    """A part of a file, and its beginning once more."""
    begun = size // BEGUN
    return source[: size - begun] + source[:begun]


def answering(source: list[int], asked: list[int], size: int) -> list[int]:
    """A document, a question, and the beginning of an answer from the middle of the document."""
    begun = size // BEGUN
    document = source[: size - begun - len(asked)]
    middle = len(document) // 4
    return document + asked + document[middle : middle + begun]


def second_turn(source: list[int], asked: list[int], size: int) -> list[int]:
    """A request with its answer, and the same request again with the beginning of the same answer."""
    begun = size // BEGUN
    first = source[: size - begun - len(asked)]
    return first + asked + first[:begun]


Make = Callable[[list[int], list[int], int], list[int]]
KINDS: dict[str, tuple[Make, str]] = {
    "rewrite": (rewriting, ""),
    "answer": (answering, QUESTION),
    "second turn": (second_turn, ONCE_MORE),
}


def copying_prompts(kind: str, tokenizer: "PreTrainedTokenizerBase | None", rows: int, size: int) -> "torch.Tensor":
    """Prompts of a kind, [rows, size] int64, each from another module.

    Raises:
        ValueError: there is no tokenizer, or the kind is unknown, or a text has fewer tokens.
    """
    import torch

    if tokenizer is None:
        raise ValueError("prompts that are copied are texts, and this pair has no tokenizer; give one that has.")
    require(kind in KINDS, f"prompts of kind {kind!r} are unknown; give one of {', '.join(KINDS)}.")
    make, asked = KINDS[kind]
    made = []
    for row in range(rows):
        module = importlib.import_module(MODULES[row % len(MODULES)])
        text = inspect.getsource(module)
        if kind == "answer":
            text = "\n\n".join(filter(None, [module.__doc__, *map(inspect.getdoc, vars(module).values())]))
        ids = make(tokenizer(text)["input_ids"], tokenizer(asked)["input_ids"] if asked else [], size)
        require(len(ids) == size, f"the text of {module.__name__} is too short for {size} tokens; ask for fewer.")
        made.append(ids)
    return torch.tensor(made)
