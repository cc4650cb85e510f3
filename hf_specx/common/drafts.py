"""Parses names of models and drafts, which are the same in Python and in every command. Nothing here imports torch.

A model is named by a folder, or by an id on the Hub, if need be with "@" and a revision. A draft is named like a
model, or as `HELP_DRAFT` says. A folder wins over a keyword of the same name.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from hf_specx.common.errors import require, similar


PAIR_CONFIG_NAME = "specx_config.json"  # the file in a folder or repository that makes it a pair
DRAFT_FOLDER = "draft"  # in a pair's folder, that of its draft where it is inside
FIXED_DRAFT_TOKENS = 5  # candidates of a round where "auto" has no costs to go by, or must not use them
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
SUFFIX, EXIT, LAYERS, OF_HEADS = "suffix", "exit:", "layers:", "head:"
SEVERAL_EXITS, NEW_HEADS = "exits", ("dspark", "eagle3")  # keywords of one command: of tune, of distill
HELP_DRAFT = (
    "suffix (what followed the same tokens before), exit:4 (the target's first 4 layers; layers:4 means the same), "
    "head:NAME, or the id (perhaps with @ and a revision) or folder of a model or head."
)
ELSEWHERE = {  # by keyword of one command: what to type in the others
    SEVERAL_EXITS: "it stands for several numbers of layers, which specx tune tries; give one, like exit:4",
    **dict.fromkeys(
        NEW_HEADS, "it is a new head, which specx distill trains; name the trained one, like FOLDER/draft"
    ),
}


class NamedDraft(NamedTuple):
    """A parsed name of a draft: one of the two, or neither for "suffix" and the keywords of `ELSEWHERE`."""

    layers: int | None = None  # of the target, its first ones
    model: str | None = None  # id, perhaps with a revision, or folder of a model or head


def read_draft(name: str, *words: str) -> NamedDraft:
    """Parse the name of a draft; `words` are the keywords of `ELSEWHERE` that this command has."""
    if name in words:
        return NamedDraft()
    if _is_folder(name):
        return NamedDraft(model=name)
    if name == SUFFIX:
        return NamedDraft()
    require(name not in ELSEWHERE, f"the draft {name} cannot be used here: {ELSEWHERE.get(name)}.")
    if name.startswith((EXIT, LAYERS)):
        kind, _, number = name.partition(":")
        is_number = re.fullmatch("[1-9][0-9]*", number) is not None
        require(is_number, f"the draft {name!r} names no number of layers; give one of 1 or more, like {kind}:4.")
        return NamedDraft(layers=int(number))
    model = name.removeprefix(OF_HEADS)
    suggestion = similar(name, (SUFFIX, *words))
    is_name = ":" not in model and not suggestion and re.fullmatch(r"(exit|layer)s?[\W_]?\d*", model) is None
    message = f"the draft {name!r} means nothing; {suggestion}give one of: {HELP_DRAFT}"
    require(bool(model) and (is_name or "/" in model or Path(model).is_dir()), message)
    return NamedDraft(model=model)


def check_head(name: str, model: Any) -> None:
    """Raise ValueError if a draft is named as a head, and what was loaded is none."""
    message = f"what follows {OF_HEADS} is a model and no head; leave {OF_HEADS} out."
    require(not name.startswith(OF_HEADS) or not model.can_generate(), message)


def split_revision(name: str) -> tuple[str, str | None]:
    """A name, and the commit, branch or tag behind its "@", as in org/model@v1; a folder with an "@" stays whole."""
    first, at, revision = name.rpartition("@")
    return (first, revision) if at and revision and not Path(name).is_dir() else (name, None)


def check_model_name(name: str, revision: str | None) -> None:
    """Raise ValueError unless this is a folder, or can be an id on the Hub; of a folder there is no revision."""
    is_folder = _is_folder(name)
    is_name = is_folder or HUB_ID.fullmatch(name) is not None
    require(is_name, f"{name!r} is neither a folder nor an id on the Hub; name one of them.")
    message = f"{name!r} is a folder, which has no revision {revision!r}; leave that out."
    require(revision is None or not is_folder, message)


def _is_folder(name: str) -> bool:
    return name != "" and Path(name).is_dir()  # the path of an empty text is that of the current folder
