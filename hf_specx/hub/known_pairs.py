"""The pair in the package, which is called "embedded"; `model_cards/README.md` has a table of other models."""

from pathlib import Path

from hf_specx.common.errors import require, similar


EMBEDDED = "embedded"
DRAFT_MODEL = "draft"  # the folder in it of a draft model, beside the head that drafts


def embedded_folder() -> Path:
    """The folder of the embedded pair."""
    return Path(__file__).parent / EMBEDDED


def check_without_owner(name: str) -> None:
    """Raise ValueError unless a name without an owner is that of the pair in the package."""
    suggestion = similar(name, (EMBEDDED,))
    require(
        name == EMBEDDED,
        f"{name!r} is no folder here and no id on the Hub, which has an owner (owner/{name}); {suggestion}the only "
        f"name without an owner is {EMBEDDED}.",
    )


def is_embedded(name: str) -> bool:
    """Whether a name means the pair in the package; it does not if a local folder has this name."""
    return name == EMBEDDED and not Path(name).is_dir()


def folder_of(name: str) -> str:
    """The folder that "embedded" means, or one in it, as in "embedded/head"; any other name as it is."""
    first, _, inside = name.partition("/")
    folder = embedded_folder() / inside
    return str(folder) if is_embedded(first) and folder.is_dir() else name
