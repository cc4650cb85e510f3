"""What a check is: a small function that says what is wrong and what to do about it, or nothing."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec


P = ParamSpec("P")
CHECKS: dict[str, Callable[..., str | None]] = {}  # by name, so that any one of them can be looked at or replaced


def refusal(check: Callable[P, str | None]) -> Callable[P, None]:
    """Register a check by its name. Called, it raises what it has to say as a ValueError.

    Args:
        check: returns a message that names the value and the remedy, or None.
    """
    name = check.__name__
    assert name not in CHECKS, f"two checks are called {name}"
    CHECKS[name] = check

    @wraps(check)
    def refuse(*args: P.args, **kwargs: P.kwargs) -> None:
        message = CHECKS[name](*args, **kwargs)
        if message is not None:
            raise ValueError(message)

    return refuse
