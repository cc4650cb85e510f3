"""Checks of options that are plain values; nothing is imported for them that takes time."""

from typing import Any

from hf_specx.common.errors import brief, is_int, one_of, require


VERIFICATIONS = ("token", "block", "coupled")


def check_choices(num_draft_tokens: Any, verification: Any, where: str = "") -> None:
    """The options that a config may recommend, and that a command takes.

    Args:
        num_draft_tokens, verification: as `SpeculativeDecoding` takes them.
        where: what a message begins with.

    Raises:
        ValueError: one of them is none of these.
    """
    number = num_draft_tokens
    automatic, given = number == "auto", f"{where}num_draft_tokens={brief(number)}"
    require(automatic or is_int(number), f"{given} is not a number; give an int of 1 or more, or 'auto'.")
    require(automatic or number >= 1, f"{given} is below 1; give 1 or more, or 'auto'.")
    if verification is not None:
        one_of(f"{where}verification", verification, VERIFICATIONS)
