"""The pair in the package, "embedded"; other models that go together are in the table of `model_cards/README.md`."""

from pathlib import Path

from hf_specx.common.errors import require, similar


EMBEDDED = "embedded"
DRAFT_MODEL = "draft"  # the folder in it of a draft model, beside the head that drafts
SEQ2SEQ = "AutoModelForSeq2SeqLM"
NAMES = (EMBEDDED,)  # pairs that have a name without an owner, since they were measured and are in the package


def embedded_folder() -> Path:
    """The folder of the embedded pair."""
    return Path(__file__).parent / EMBEDDED


def check_known_name(name: str) -> None:
    """Raise ValueError unless a name without an owner is that of a pair in the package."""
    message = f"{name!r} is no folder here, no id on the Hub, which has an owner (owner/{name}), and no well-known "
    message += "pair"
    require(name in NAMES, f"{message}; {similar(name, NAMES)}known: {', '.join(NAMES)}.")


def is_known(name: str) -> bool:
    """Whether a name means a pair in the package; it does not if a local folder has this name."""
    return name in NAMES and not Path(name).is_dir()


def is_embedded(name: str) -> bool:
    """Whether a name means the embedded pair; it does not if a local folder has this name."""
    return name == EMBEDDED and is_known(name)


def folder_of(name: str) -> str:
    """The folder that "embedded" means, or one in it, as in "embedded/head"; any other name as it is."""
    first, _, inside = name.partition("/")
    folder = embedded_folder() / inside
    return str(folder) if is_embedded(first) and folder.is_dir() else name
