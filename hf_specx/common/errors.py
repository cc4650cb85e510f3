"""How bad input is refused: by a ValueError that names the value and the remedy, or a TypeError as Python's own."""

import difflib
import numbers
from collections.abc import Iterable
from typing import Any


OUR_NAMES = {  # of arguments, by what transformers calls them
    "assistant_model": "draft_model",
    "assistant_tokenizer": "draft_tokenizer",
    "num_assistant_tokens": "num_draft_tokens",
}


def require(ok: bool, message: str) -> None:
    """Raise a ValueError with this message, which names the value and the remedy, unless `ok`."""
    if not ok:
        raise ValueError(message)


class OptionError(ValueError):
    """An error about the value of an option, in parts, so that a command can name the option as it is typed there.

    The message is "option=value rest".

    Attributes:
        option, value: as in Python.
        rest: what is wrong with the value, and the remedy.
    """

    def __init__(self, option: str, value: Any, rest: str):
        super().__init__(f"{option}={brief(value)} {rest}")
        self.option, self.value, self.rest = option, value, rest


def require_option(ok: bool, option: str, value: Any, rest: str) -> None:
    """Raise an OptionError unless `ok`."""
    if not ok:
        raise OptionError(option, value, rest)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that there was not enough memory; on a CPU torch says so in the message alone."""
    names = {cls.__name__ for cls in type(error).mro()}
    in_words = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return in_words or bool(names & {"MemoryError", "OutOfMemoryError"})


def is_int(value: Any) -> bool:
    """Whether a value is an int, also one of NumPy's; a bool is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def brief(value: Any) -> str:
    """A value as messages show it, whatever it is and however large."""
    try:
        text = repr(value)
    except RecursionError:
        return "many levels deep"
    return shortened(text)


def shortened(text: str) -> str:
    """A text of 80 characters at most."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def kind(value: Any) -> str:
    """The type of a value with its article, as messages say it: "an int", "a str"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def similar(name: str, names: Iterable[str]) -> str:
    """The text "did you mean ...? " with the closest of these names; "" if none is close."""
    matches = difflib.get_close_matches(name, list(names), 1, 0.75)
    return f"did you mean {matches[0]!r}? " if matches else ""


def check_names(where: str, names: Iterable[str], parameters: Iterable[str], more: str = "") -> None:
    """Raise a TypeError, as Python does, if one of the `names` is none of the parameters of the function `where`."""
    parameters = list(parameters)
    unknown = min(set(names) - set(parameters), default=None)
    if unknown is not None:
        suggestion = similar(OUR_NAMES.get(unknown, unknown), parameters)
        raise TypeError(f"{where} has no argument {unknown!r}; {suggestion}{more}".rstrip())


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise an OptionError unless a value is one of the choices."""
    require_option(value in choices, name, value, f"is unknown; choose one of {', '.join(choices)}.")
