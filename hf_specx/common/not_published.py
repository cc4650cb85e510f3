"""Stand-ins for what a published pair never reaches; see `hf_specx/hub/flatten.py`."""

from typing import Any


class NotPublished(type):
    """The class of stand-ins: a call or an attribute of one raises ImportError, and nothing is an instance of it."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ImportError(cls._message())

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # such as those that `inspect` asks for
            raise AttributeError(name)
        raise ImportError(cls._message())

    def _message(cls) -> str:
        return f"{cls.__name__} is not in the code that was published with this pair; pip install hf_specx."


def not_published(name: str) -> Any:
    """A stand-in for the class or function of this name."""
    return NotPublished(name, (), {})
