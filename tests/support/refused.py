"""What tables of misuse share: a case is told what it should be told, by a check that goes by the case's name."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from hf_specx.common.errors import CHECKS


OF_PAIRS = {"checks_pairs", "checks_files", "checks_weights", "checks_saving"}
OF_TOOLS = {"cards", "checks_bench", "checks_check", "checks_tune", "export", "metrics", "placement", "shares"}
Case = tuple[str, Callable[..., object]]


def check_of(case: str) -> str:
    return case.split(",")[0]


def module_of(check: str) -> str:
    return CHECKS[check].__module__.removeprefix("hf_specx.")


def checks_in(modules: Iterable[str]) -> set[str]:
    return {check for check in CHECKS if module_of(check) in modules}


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
