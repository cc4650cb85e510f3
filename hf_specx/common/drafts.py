"""How models and drafts are named, in Python and in every command alike. Nothing here imports torch."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from hf_specx.common.errors import require, similar


SUFFIX, EXIT, LAYERS, OF_HEADS = "suffix", "exit:", "layers:", "head:"
SEVERAL_EXITS, NEW_HEADS = "exits", ("dspark", "eagle3")  # words of one command
HELP_DRAFT = (
    "suffix (what followed the same tokens before), exit:4 (the target's first 4 layers; layers:4 means the same), "
    "head:NAME, or the id (perhaps with @ and a revision) or folder of a model or head."
)
ELSEWHERE = {  # words of one command, with what to type in the others
    SEVERAL_EXITS: "it stands for several numbers of layers, which specx tune tries; give one, like exit:4",
    **dict.fromkeys(
        NEW_HEADS, "it is a new head, which specx distill trains; name the trained one, like FOLDER/draft"
    ),
}


class NamedDraft(NamedTuple):
    """What the name of a draft says: one of the two, or neither for "suffix" and the words of `ELSEWHERE`."""

    layers: int | None = None  # of the target, its first ones
    model: str | None = None  # id, perhaps with a revision, or folder of a model or head


def read_draft(name: str, *words: str) -> NamedDraft:
    """Read the name of a draft; `words` are those of `ELSEWHERE` that this command has."""
    if name in (SUFFIX, *words):
        return NamedDraft()
    require(name not in ELSEWHERE, f"the draft {name} cannot be used here: {ELSEWHERE.get(name)}.")
    if name.startswith((EXIT, LAYERS)):
        kind, _, number = name.partition(":")
        known = re.fullmatch("[1-9][0-9]*", number) is not None
        require(known, f"the draft {name!r} names no number of layers; give one of 1 or more, like {kind}:4.")
        return NamedDraft(layers=int(number))
    model = name.removeprefix(OF_HEADS)
    meant = similar(name, (SUFFIX, *words))
    is_name = ":" not in model and not meant and re.fullmatch(r"(exit|layer)s?[\W_]?\d*", model) is None
    told = f"the draft {name!r} means nothing; {meant}give one of: {HELP_DRAFT}"
    require(bool(model) and (is_name or "/" in model or Path(model).is_dir()), told)
    return NamedDraft(model=model)


def check_head(name: str, model: Any) -> None:
    """Whether a loaded draft is a head, where its name says so."""
    told = f"what follows {OF_HEADS} is a model and no head; leave {OF_HEADS} out."
    require(not name.startswith(OF_HEADS) or not model.can_generate(), told)


def split_revision(name: str) -> tuple[str, str | None]:
    """A name, and the commit, branch or tag behind its "@", as in org/model@v1; a folder with an "@" stays whole."""
    first, at, revision = name.rpartition("@")
    return (first, revision) if at and revision and not Path(name).is_dir() else (name, None)
