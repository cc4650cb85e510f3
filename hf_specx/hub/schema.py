"""Reads JSON from elsewhere into dataclasses: each value must have its type, and fit the rule that comes with it."""

import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from hf_specx.common.errors import brief, is_int, require


ANEW = "save the pair anew"
MAX_CONFIG_BYTES = 2**22
MAX_INTEGER = 2**63  # what is beyond is no number of anything
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


class FieldRule(NamedTuple):
    """What a value must fit, unless it is None; `told` says what one that does not fit is, and what to do."""

    fits: Callable[[Any], object]
    told: str


def check_place(name: str, revision: str | None) -> None:
    """Whether there can be something of this name, in this revision."""
    is_folder = name != "" and Path(name).is_dir()
    known = is_folder or HUB_ID.fullmatch(name) is not None
    require(known, f"{name!r} is neither a folder nor an id on the Hub; name one of them.")
    told = f"{name!r} is a folder, which has no revision {revision!r}; leave that out."
    require(revision is None or not is_folder, told)


def read_text(text: bytes, known: int, where: str) -> dict[str, Any]:
    """The values in the text of a file `where`, which is JSON in UTF-8 with a schema up to `known`."""
    told = f"{where} has more than {MAX_CONFIG_BYTES} bytes, which no pair needs; get it again, or {ANEW}."
    require(len(text) <= MAX_CONFIG_BYTES, told)
    try:
        values = json.loads(text.decode("utf-8"))
        json.dumps(values, ensure_ascii=False).encode("utf-8")  # half a character may be escaped in it
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}); it may be cut off: get it again, or {ANEW}.") from error
    schema: Any = values.get("schema") if isinstance(values, dict) else None
    told = f"{where} does not say its schema (it has {brief(schema)}), so it is no config of a pair; {ANEW}."
    require(is_int(schema) and schema >= 1, told)
    told = f"{where} has schema {schema} and this version reads up to {known}; install a newer hf_specx."
    require(schema <= known, told)
    return values


def read(wanted: Any, value: Any, where: str) -> Any:
    """Check a value from JSON, which `where` names, against an annotation, and convert it: a type, a union of types,
    one of these `Annotated` with a `FieldRule`, or a dataclass or `TypedDict`, which is made."""
    if get_origin(wanted) is Annotated:
        wanted, rule = get_args(wanted)
        found = read(wanted, value, where)
        require(found is None or bool(rule.fits(found)), f"{where} is {brief(found)}, {rule.told}.")
        return found
    options = get_args(wanted) if isinstance(wanted, UnionType) else (wanted,)
    made = next((option for option in options if hasattr(option, "__annotations__")), None)
    if made is not None and not (value is None and type(None) in options):
        return _read_object(made, value, where)
    _check_type(value, options, where)
    if get_origin(wanted) is list:
        return [read(get_args(wanted)[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    if get_origin(wanted) is dict:
        of_names, of_items = get_args(wanted)
        names = [read(of_names, name, f"a name in {where}") for name in value]
        return {name: read(of_items, value[name], f"{where}[{name!r}]") for name in names}
    return float(value) if float in options and value is not None else value


def _read_object(made: Any, value: Any, where: str) -> Any:
    """A dataclass or `TypedDict` with the fields that an object has."""
    require(isinstance(value, dict), f"{where} is {brief(value)}, not an object; {ANEW}.")
    hints = get_type_hints(made, include_extras=True)
    unknown = min(value.keys() - hints.keys(), default=None)
    require(unknown is None, f"{where} has a field {brief(unknown)} that its schema does not know; take it out.")
    defaults = getattr(made, "__dataclass_fields__", {})
    optional = {name for name, each in defaults.items() if each.default is not each.default_factory}  # both MISSING
    missing = min(hints.keys() - optional - value.keys(), default=None)
    require(missing is None, f"{where} has no {missing!r}; {ANEW}.")
    return made(**{name: read(hints[name], item, f"{where}: {name}") for name, item in value.items()})


def _check_type(value: Any, options: tuple[Any, ...], where: str) -> None:
    """Whether a value is of one of these types, and any text is plain."""
    types = tuple(get_origin(option) or option for option in options)
    widened = (*types, int) if float in types else types
    is_bool = isinstance(value, bool) and bool not in types
    too_large = isinstance(value, int) and abs(value) >= MAX_INTEGER
    known = Any in options or (isinstance(value, widened) and not (is_bool or too_large))
    names = " or ".join(getattr(each, "__name__", "anything") for each in types).replace("NoneType", "null")
    require(known, f"{where} is {brief(value)}, not {names}; {ANEW}.")
    text = value if isinstance(value, str) else ""
    control = next((c for c in text if unicodedata.category(c) == "Cc" and c not in "\n\r\t"), None)
    told = f"{where} has the control character {control!r}, which a terminal may obey; take it out."
    require(control is None, told)
