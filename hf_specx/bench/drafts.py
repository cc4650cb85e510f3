"""How models and drafts are named, in Python and in every command alike. Nothing here imports torch."""

import re
from pathlib import Path
from typing import NamedTuple

from hf_specx.common.errors import require


SUFFIX, EXIT, LAYERS, OF_HEADS = "suffix", "exit:", "layers:", "head:"
SEVERAL_EXITS, HEAD = "exits", "eagle3"  # words of one command
HELP_DRAFT = (
    "suffix (what followed the same tokens before), exit:4 or layers:4 (the target's first 4 layers), "
    "head:NAME, or the id or folder of a model or head."
)
ELSEWHERE = {  # words of one command, with what to type in the others
    SEVERAL_EXITS: "it stands for several numbers of layers, which specx tune tries; give one, like exit:4",
    HEAD: "it is a new head, which specx distill trains; name the trained one, like head:FOLDER",
}


class NamedDraft(NamedTuple):
    """What the name of a draft says; one of the first two is given, or neither for a word of `ELSEWHERE`."""

    layers: int | None = None  # of the target, its first ones
    model: str | None = None  # id or folder of a model or head
    revision: str | None = None  # of it on the Hub
    is_head: bool = False  # whether it was called a head

    @property
    def weightless(self) -> bool:
        """Whether it needs no weights of its own."""
        return self.model is None


def read_draft(name: str, word: str = "") -> NamedDraft:
    """Read the name of a draft; `word` is the one of `ELSEWHERE` that this command has.

    Raises:
        ValueError: for a name that is none, or that of another command.
    """
    if name in (SUFFIX, word):
        return NamedDraft()
    require(name not in ELSEWHERE, f"the draft {name} cannot be used here: {ELSEWHERE.get(name)}.")
    if name.startswith((EXIT, LAYERS)):
        kind, _, number = name.partition(":")
        known = re.fullmatch("[1-9][0-9]*", number) is not None
        require(known, f"the draft {name} names no number of layers; give one of 1 or more, like {kind}:4.")
        return NamedDraft(layers=int(number))
    model, revision = split_revision(name.removeprefix(OF_HEADS))
    told = f"the draft {name!r} means nothing; give one of: {HELP_DRAFT}"
    require(bool(model) and (":" not in model or Path(model).is_dir()), told)
    return NamedDraft(model=model, revision=revision, is_head=name.startswith(OF_HEADS))


def split_revision(name: str) -> tuple[str, str | None]:
    """A name, and the commit, branch or tag behind its "@", as in org/model@v1; a folder with an "@" stays whole."""
    first, at, revision = name.rpartition("@")
    return (first, revision) if at and revision and not Path(name).is_dir() else (name, None)
