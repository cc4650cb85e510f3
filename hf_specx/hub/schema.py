"""What a pair's `specx_config.json` may hold: it is data from elsewhere, so nothing in it is believed."""

import json
import math
import re
import unicodedata
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from types import GenericAlias, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hf_specx.common.errors import brief, is_int, one_of, require
from hf_specx.engine.check_options import check_choices
from hf_specx.models.choose import LAYOUTS


OF_PAIRS = ["subfolder", "output_loading_info", "ignore_mismatched_sizes", "state_dict", "config", "variant"]
OF_PAIRS += ["num_draft_tokens", "verification", "layout", "costs"]
ANEW, MEASURE = "save the pair anew", "measure it anew with specx tune"
MAX_CONFIG_BYTES = 2**22
MAX_RECOMMENDED = 64  # candidates a round that a config may recommend
MAX_LAYERS = 10_000  # more than any model has; whether the target has so many is checked in a call
MAX_INTEGER = 2**63  # what is beyond is no number of anything
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
AUTO_CLASS = re.compile(r"AutoModelFor[A-Za-z0-9]{1,40}", re.ASCII)
COMMIT_OR_NAME = re.compile(r"(?!.*\.\.)\w[\w./-]{0,254}")
SUBFOLDER = re.compile(r"(?=.{0,255}$)(\w[\w.+ -]*(/\w[\w.+ -]*)*)?")
NUMBER = re.compile(r"[1-9][0-9]{0,8}")
ROUNDS = {str(number) for number in range(MAX_RECOMMENDED + 1)}


def check_loading(given: Collection[str]) -> None:
    """Whether the arguments for loading a pair leave it what is its own."""
    for name in OF_PAIRS:
        told = f"{name}= has no place in loading a pair, which sets it itself; leave it out, or give it to a call."
        require(name not in given, told)


def check_place(name: str, revision: str | None) -> None:
    """Whether there can be something of this name, in this revision."""
    is_folder = Path(name).is_dir()
    known = is_folder or HUB_ID.fullmatch(name) is not None
    require(known, f"{name!r} is neither a folder nor an id on the Hub; name one of them.")
    told = f"revision={revision!r} is for repositories on the Hub, and {name!r} is a folder; leave it out."
    require(revision is None or not is_folder, told)


def read_text(text: bytes, known: int, where: str) -> dict[str, Any]:
    """The values in a config's text, which is JSON in UTF-8.

    Args:
        text: what is in the file.
        known: the newest schema that this version knows.
        where: names the file in errors.
    """
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
    """Check a value from JSON against an annotation, and convert it.

    Args:
        wanted: a type, a union of types, or a dataclass, whose fields are read likewise.
        value: as `json` gives it.
        where: names the value in errors.
    """
    options = get_args(wanted) if isinstance(wanted, UnionType) else (wanted,)
    made = next((option for option in options if hasattr(option, "__dataclass_fields__")), None)
    if made is not None and not (value is None and type(None) in options):
        return _read_object(made, value, where)
    _check_type(value, options, where)
    if get_origin(wanted) is list:
        return [read(get_args(wanted)[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    if get_origin(wanted) is dict:
        names = [read(str, name, where) for name in value]
        return {name: read(get_args(wanted)[1], value[name], f"{where}[{name!r}]") for name in names}
    return float(value) if float in options and value is not None else value


def _read_object(made: Any, value: Any, where: str) -> Any:
    """A dataclass with the fields that an object has."""
    require(isinstance(value, dict), f"{where} is {brief(value)}, not an object; {ANEW}.")
    hints = get_type_hints(made)
    unknown = min(value.keys() - {each.name for each in fields(made)}, default=None)
    require(unknown is None, f"{where} has a field {brief(unknown)} that its schema does not know; take it out.")
    needed = {each.name for each in fields(made) if each.default is each.default_factory}  # both are MISSING
    missing = min(needed - value.keys(), default=None)
    require(missing is None, f"{where} has no {missing!r}; {ANEW}.")
    return made(**{name: read(hints[name], item, f"{where}: {name}") for name, item in value.items()})


def _check_type(value: Any, options: tuple[Any, ...], where: str) -> None:
    """Whether a value is of one of these types, and any text is plain."""
    types = tuple(get_origin(option) or option for option in options)
    widened = (*types, int) if float in types else types
    is_bool = isinstance(value, bool) and bool not in types
    too_large = isinstance(value, int) and abs(value) >= MAX_INTEGER
    known = Any in options or (isinstance(value, widened) and not (is_bool or too_large))
    names = " or ".join(str(t) if isinstance(t, GenericAlias) else getattr(t, "__name__", str(t)) for t in options)
    require(known, f"{where} is {brief(value)}, not {names.replace('NoneType', 'null')}; {ANEW}.")
    text = value if isinstance(value, str) else ""
    control = next((c for c in text if unicodedata.category(c) == "Cc" and c not in "\n\r\t"), None)
    told = f"{where} has the control character {control!r}, which a terminal may obey; take it out."
    require(control is None, told)


def check_fields(config: Any, where: str) -> None:
    """Whether a `PairConfig` says what can be done, and names nothing outside the pair's folder and the Hub."""
    for role in ("target", "draft"):
        _check_source(getattr(config, role), f"{where}: {role}")
    weightless = config.suffix is not None or config.early_exit is not None
    if weightless:
        _check_weightless(config, where)
    target, draft = config.target, config.draft
    places = [(model.name, model.revision, model.subfolder) for model in (target, draft)]
    told = f"{where}: target and draft are both in {target.name or 'the folder of the pair'} under "
    told += f"{target.subfolder!r}; a draft needs a folder of its own."
    require(weightless or places[0] != places[1], told)
    number = config.num_draft_tokens
    check_choices(number, config.verification, f"{where}: ")
    one_of(f"{where}: layout", config.layout, LAYOUTS)
    told = f"{where}: num_draft_tokens={number} is above {MAX_RECOMMENDED}; give a smaller number, or 'auto'."
    require(number == "auto" or number <= MAX_RECOMMENDED, told)
    if config.draft_tokenizer is not None:
        _check_probability(config.draft_tokenizer.overlap, f"{where}: overlap of draft_tokenizer")
    if config.costs is not None:
        _check_costs(config.costs, f"{where}: costs has")
    for i, measurement in enumerate(config.measurements):
        for name, value in vars(measurement).items():
            if name == "alpha":
                _check_probability(value, f"{where}: alpha of measurements[{i}]")
            elif isinstance(value, int | float):
                told = f"{where}: {name} of measurements[{i}] is {value}, which nothing measures; see specx tune."
                require(math.isfinite(value) and value > 0, told)


def _check_source(source: Any, where: str) -> None:
    name, kind, revision, subfolder = source.name, source.auto_class, source.revision, source.subfolder
    told = f"{where}: name is {brief(name)}, no id on the Hub; a config may name repositories only, so pass the model "
    told += "yourself, as target= or draft=, or save the pair with it inside."
    require(name is None or HUB_ID.fullmatch(name) is not None, told)
    told = f"{where}: auto_class is {brief(kind)}, no Auto class of transformers; {ANEW}."
    require(kind is None or AUTO_CLASS.fullmatch(kind) is not None, told)
    told = f"{where}: revision is {brief(revision)}, no name of a commit, branch or tag; {ANEW}."
    require(revision is None or COMMIT_OR_NAME.fullmatch(revision) is not None, told)
    told = f"{where}: subfolder is {brief(subfolder)}, no plain name of a folder inside the pair's; save it anew."
    require(SUBFOLDER.fullmatch(subfolder) is not None, told)


def _check_weightless(config: Any, where: str) -> None:
    suffix, early_exit = config.suffix, config.early_exit
    told = f"{where} has both a suffix and an early_exit; take one of them out."
    require(suffix is None or early_exit is None, told)
    kind = "a suffix" if early_exit is None else "an early_exit"
    told = f"{where} has {kind} in place of a draft model, and says where this model is; take one of them out."
    require(not any(vars(config.draft).values()), told)
    if early_exit is not None:
        told = f"{where}: exit_layer of early_exit is {early_exit.exit_layer}; give an int from 1 to {MAX_LAYERS}."
        require(1 <= early_exit.exit_layer <= MAX_LAYERS, told)
        return
    for name, value in vars(suffix).items():
        told = f"{where}: {name} of suffix is {value}; give an int from 1 to {MAX_RECOMMENDED}."
        require(1 <= value <= MAX_RECOMMENDED, told)
    told = f"{where}: max_match of suffix is {suffix.max_match}, less than min_match={suffix.min_match}; {ANEW}."
    require(suffix.max_match >= suffix.min_match, told)


def _check_costs(costs: Any, what: str) -> None:
    row = "a row that is not {'target': {tokens: seconds}, 'draft': seconds} for 1 and at least one more number"
    rounds = "rounds that are not {batch size: {candidates: seconds}}"
    require(all(_is_row(*item) for item in costs.table.items()), f"{what} {row}; {MEASURE}.")
    require(all(_are_rounds(*item) for item in costs.rounds.items()), f"{what} {rounds}; {MEASURE}.")
    for name, alpha in costs.alpha.items():
        _check_probability(alpha, f"{what} an alpha of {name} that")


def _check_probability(alpha: float, what: str) -> None:
    require(0 <= alpha <= 1, f"{what} is {alpha}, no probability; {MEASURE}.")


def _is_row(batch: str, row: Any) -> bool:
    if not (NUMBER.fullmatch(batch) and isinstance(row, dict) and row.keys() == {"target", "draft"}):
        return False
    times = row["target"]
    if not isinstance(times, dict) or len(times) < 2 or "1" not in times or not all(map(NUMBER.fullmatch, times)):
        return False
    free = row["draft"] == 0.0  # of a draft that runs no forwards
    return all(map(_is_time, times.values())) and (free or _is_time(row["draft"]))


def _are_rounds(batch: str, row: Any) -> bool:
    known = NUMBER.fullmatch(batch) and isinstance(row, dict) and row.keys() <= ROUNDS
    return bool(known) and all(map(_is_time, row.values()))


def _is_time(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0
