"""What tables of misuse share: a case is told what it should be told, by a check that goes by the case's name."""

import re
from collections.abc import Callable
from typing import Any

from hf_specx.common.errors import CHECKS


ROOMS_OF_CALLS = {"drafting", "validation", "layouts"}
Case = tuple[str, Callable[..., object]]


def check_of(case: str) -> str:
    return case.split(",")[0]


def checks_in(rooms: set[str]) -> set[str]:
    return {name for name, check in CHECKS.items() if check.__module__.split(".")[1] in rooms}


def is_refused(case: Case, *args: Any) -> bool:
    """Whether a case is told what it should be told, and nothing else happens to it."""
    message, misuse = case
    try:
        misuse(*args)
    except ValueError as error:
        return re.search(message, str(error)) is not None
    except Exception:
        return False
    return False
