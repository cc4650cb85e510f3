"""Secrets, such as the token of an account, taken out of what is saved, printed or published."""

import re
from typing import Any


HIDDEN = "<hidden>"
SPECIAL_TOKENS = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")  # as in eos_token, which is no secret
NAME = rf"{''.join(f'(?<!{kind}_)' for kind in SPECIAL_TOKENS)}token|secret|passw(?:or)?d|api[_-]?key|credentials?"
IS_SECRET = re.compile(f"(?:{NAME})$", re.IGNORECASE)
# a name as a command, Python or JSON has it, and its value up to the same quote, or up to where the next thing begins
BEFORE = rf"""(?:--[\w-]*(?:{NAME})\s+|[\w-]*(?:{NAME})["']?\s*[:=]\s*)(?!(?:None|null|true|false)\b|--)"""
VALUE = r"""(?:(["'])(?:\\.|(?!\2).)*\2|[^\s"',;)}\]]+)"""
NAMED = re.compile(f"({BEFORE}){VALUE}", re.IGNORECASE)
TOKENS = re.compile(r"\bhf_[A-Za-z0-9]{30,}\b")


def without_secrets(value: Any) -> Any:
    """Settings or a text with every secret hidden, whatever dicts and lists it is in."""
    if isinstance(value, dict):
        return {name: HIDDEN if _is_secret(name, item) else without_secrets(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    if isinstance(value, str):
        return TOKENS.sub(HIDDEN, NAMED.sub(rf"\g<1>\g<2>{HIDDEN}\g<2>", value))
    return value


def _is_secret(name: Any, value: Any) -> bool:
    return isinstance(name, str) and IS_SECRET.search(name) is not None and value not in (None, True, False)
