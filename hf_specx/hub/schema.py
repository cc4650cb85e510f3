"""Reads JSON from elsewhere into dataclasses, whose fields `strict` of huggingface_hub checks.

It checks the type of each field, and the validators that its annotation names. What it does not do is done here: an
object in an object is made, and may have neither unknown fields nor lack one; the items of a dict have validators; a
whole number may stand for a float; no text has control characters, and no int is endless.
"""

import json
import unicodedata
from collections.abc import Callable
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassFieldValidationError

from hf_specx.common.errors import brief, is_int, require


SAVE_ANEW = "save the pair anew"
MAX_CONFIG_BYTES = 2**22
MAX_INTEGER = 2**63  # larger ones are refused
Validator = Callable[..., None]  # of a value, and perhaps of where it is in its field, such as "['2']"


def validator(fits: Callable[[Any], object], remedy: str) -> Validator:
    """A function that raises ValueError for a value that does not fit; None always fits, where the type allows it."""

    def check(value: Any, where: str = "") -> None:
        require(value is None or bool(fits(value)), f"{where} is {brief(value)}, {remedy}")

    return check


def of_items(keys: Validator | None = None, values: Validator | None = None) -> Validator:
    """A function that raises ValueError for a dict with a key or a value that does not fit."""

    def check(items: dict[str, Any], where: str = "") -> None:
        for key, value in items.items():
            if keys is not None:
                keys(key, f"{where}: a key")
            if values is not None:
                values(value, f"{where}[{brief(key)}]")

    return check


def read_text(text: bytes, newest: int, where: str) -> dict[str, Any]:
    """The values in the text of a file `where`, which is JSON in UTF-8 with a schema up to `newest`."""
    require(
        len(text) <= MAX_CONFIG_BYTES,
        f"{where} has more than {MAX_CONFIG_BYTES} bytes, which no pair needs; get it again, or {SAVE_ANEW}.",
    )
    try:
        values = json.loads(text.decode("utf-8"))
        json.dumps(values, ensure_ascii=False).encode("utf-8")  # half a character may be escaped in it
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}); it may be cut off: get it again, or {SAVE_ANEW}.") from error
    schema: Any = values.get("schema") if isinstance(values, dict) else None
    require(
        is_int(schema) and schema >= 1,
        f"{where} does not say its schema (it has {brief(schema)}), so it is no config of a pair; {SAVE_ANEW}.",
    )
    require(
        schema <= newest,
        f"{where} has schema {schema} and this version reads up to {newest}; install a newer hf_specx.",
    )
    return values


def read(cls: Any, values: Any, where: str) -> Any:
    """Make a dataclass of an object from JSON, which `where` names; a ValueError names the field and the remedy."""
    require(isinstance(values, dict), f"{where} is {brief(values)}, not an object; {SAVE_ANEW}.")
    hints = get_type_hints(cls)
    unknown = min(values.keys() - hints.keys(), default=None)
    require(unknown is None, f"{where} has a field {brief(unknown)} that its schema does not know; take it out.")
    required = {item.name for item in fields(cls) if item.default is MISSING and item.default_factory is MISSING}
    missing = min(required - values.keys(), default=None)
    require(missing is None, f"{where} has no {missing!r}; {SAVE_ANEW}.")
    checked = object.__new__(_strict_class(cls))
    converted: dict[str, Any] = {}
    for name, value in values.items():
        converted[name] = _converted(hints[name], value, f"{where}: {name}")
        try:
            setattr(checked, name, converted[name])  # which `strict` checks
        except (StrictDataclassFieldValidationError, RecursionError) as error:
            problem = (
                f" is {brief(value)}, not {_in_words(hints[name], cls)}; {SAVE_ANEW}."  # or too deep to be looked at
            )
            if isinstance(error.__cause__, ValueError):  # of a validator
                problem = f"{str(error.__cause__).removesuffix('.')}."
            raise ValueError(f"{where}: {name}{problem}") from error
    return cls(**converted)


@cache
def _strict_class(cls: Any) -> Any:
    """A class with the same fields that checks what they are set to; a config that was made here is not checked."""
    strict_fields: list[tuple[str, Any, Any]] = []
    for name, hint in get_type_hints(cls, include_extras=True).items():
        value_type, *validators = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        strict_fields.append((name, value_type, field(metadata={"validator": validators})))
    return strict(make_dataclass(cls.__name__, strict_fields))


def _converted(hint: Any, value: Any, where: str) -> Any:
    """A value from JSON with its objects made, and floats where whole numbers stand for them; as it is if it has
    another type than the hint says, which `strict` refuses."""
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    inner_class = next((option for option in options if is_dataclass(option)), None)
    if inner_class is not None and not (value is None and NoneType in options):
        return read(inner_class, value, where)
    if isinstance(value, list) and get_origin(hint) is list:
        (item_hint,) = get_args(hint)
        return [_converted(item_hint, item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict) and get_origin(hint) is dict:
        _, item_hint = get_args(hint)
        for key in value:
            _check_plain(key, f"a key in {where}")
        return {key: _converted(item_hint, item, f"{where}[{brief(key)}]") for key, item in value.items()}
    _check_plain(value, where)
    if float in options and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _check_plain(value: Any, where: str) -> None:
    """Raise ValueError for a text with control characters, and for an int that is too large for anything."""
    too_large = isinstance(value, int) and abs(value) >= MAX_INTEGER
    require(not too_large, f"{where} is {brief(value)}, not int of less than 64 bits; {SAVE_ANEW}.")
    text = value if isinstance(value, str) else ""
    control = next((c for c in text if unicodedata.category(c) == "Cc" and c not in "\n\r\t"), None)
    require(control is None, f"{where} has the control character {control!r}, which a terminal may obey; take it out.")


def _in_words(hint: Any, cls: Any) -> str:
    """A type as messages say it, such as "int or null"; `cls` is the class that has it."""
    if isinstance(hint, type) and get_origin(hint) is None:
        return hint.__name__
    return str(hint).replace(f"{cls.__module__}.", "").replace("None", "null").replace(" | ", " or ")
