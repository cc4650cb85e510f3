"""Modules for `evaluate`, each in its own folder. Each can be published alone, so none imports `hf_specx`."""

from pathlib import Path

from hf_specx.common.errors import require


NAMES = ("acceptance", "sequence_equality", "sampled_law", "text_quality")


def path(name: str) -> str:
    """The absolute path of a module's folder, for `evaluate.load` and `evaluate.combine`.

    Args:
        name: one of `NAMES`.

    Raises:
        ValueError: there is no module of that name.

    Example:
        >>> import evaluate
        >>> evaluate.load(path("acceptance")).compute(predictions=[[4, 1]], references=[[4, 4]])["alpha"]
        0.8333333333333334
    """
    require(name in NAMES, f"no metric is called {name!r}; choose among {', '.join(NAMES)}.")
    return str(Path(__file__).resolve().parent / name)
