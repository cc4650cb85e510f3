"""Modules for `evaluate`, each in its own folder. Each can be published alone, so none imports `hf_specx`."""

from pathlib import Path

from hf_specx.common.errors import refusal


NAMES = ("acceptance", "sequence_equality", "sampled_law", "two_samples", "text_quality")


@refusal
def metric_of_no_such_name(name: str) -> str | None:
    if name in NAMES:
        return None
    return f"no metric is called {name!r}; choose among {', '.join(NAMES)}."


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
    metric_of_no_such_name(name)
    return str(Path(__file__).resolve().parent / name)
