"""Checks of a pair's `specx_config.json`: it is data from elsewhere, so that nothing in it is believed."""

import json
import math
import re
import unicodedata
from collections.abc import Collection
from pathlib import Path
from types import GenericAlias
from typing import Any, get_origin

from hf_specx.common.errors import refusal
from hf_specx.drafting.draft_length import MAX_DRAFT_TOKENS
from hf_specx.layouts.choose import LAYOUTS
from hf_specx.validation.options import VERIFICATIONS


OF_PAIRS = ["subfolder", "output_loading_info", "ignore_mismatched_sizes", "state_dict", "config", "variant"]
OF_PAIRS += ["num_draft_tokens", "verification", "layout", "costs"]
MAX_CONFIG_BYTES = 2**22
MAX_RECOMMENDED = 64  # candidates a round that a config may recommend
MAX_INTEGER = 2**63  # what is beyond is no number of anything
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
AUTO_CLASS = re.compile(r"AutoModelFor[A-Za-z0-9]{1,40}", re.ASCII)
COMMIT_OR_NAME = re.compile(r"\w[\w./-]{0,254}")
SUBFOLDER = re.compile(r"(?=.{0,255}$)\w[\w.+ -]*(/\w[\w.+ -]*)*")
NUMBER = re.compile(r"[1-9][0-9]{0,8}")
ROUNDS = {str(number) for number in range(MAX_DRAFT_TOKENS + 1)}


@refusal
def argument_that_a_pair_sets(given: Collection[str]) -> str | None:
    for name in OF_PAIRS:
        if name in given:
            return f"{name}= has no place in loading a pair, which sets it itself; leave it out, or give it to a call."
    return None


@refusal
def folder_that_is_not_there(name: str) -> str | None:
    if Path(name).is_dir() or HUB_ID.fullmatch(name):
        return None
    return f"{name!r} is neither a folder nor an id on the Hub; name one of them."


@refusal
def revision_of_a_folder(name: str, revision: str | None) -> str | None:
    if revision is None or not Path(name).is_dir():
        return None
    return f"revision={revision!r} is for repositories on the Hub, and {name!r} is a folder; leave it out."


@refusal
def config_too_large(text: bytes, where: str) -> str | None:
    if len(text) <= MAX_CONFIG_BYTES:
        return None
    return f"{where} has more than {MAX_CONFIG_BYTES} bytes, which no pair needs; get it again, or save the pair anew."


@refusal
def config_that_is_no_json(where: str, error: Exception) -> str | None:
    return f"{where} is not JSON ({error}); it may be cut off: get it again, or save the pair anew."


@refusal
def config_without_schema(values: Any, where: str) -> str | None:
    schema = values.get("schema") if isinstance(values, dict) else None
    if isinstance(schema, int) and not isinstance(schema, bool) and schema >= 1:
        return None
    return f"{where} does not say its schema (it has {schema!r}), so it is no config of a pair; save the pair anew."


@refusal
def config_of_newer_schema(values: dict[str, Any], known: int, where: str) -> str | None:
    if values["schema"] <= known:
        return None
    return f"{where} has schema {values['schema']} and this version reads up to {known}; install a newer hf_specx."


@refusal
def config_part_that_is_no_object(value: Any, where: str) -> str | None:
    if isinstance(value, dict):
        return None
    return f"{where} is {_brief(value)}, not an object; save the pair anew."


@refusal
def config_with_unknown_field(given: Collection[str], known: Collection[str], where: str) -> str | None:
    unknown = sorted(set(given) - set(known))
    if not unknown:
        return None
    return f"{where} has a field {_brief(unknown[0])} that its schema does not know; take it out."


@refusal
def config_without_field(given: Collection[str], needed: Collection[str], where: str) -> str | None:
    missing = sorted(set(needed) - set(given))
    if not missing:
        return None
    return f"{where} has no {missing[0]!r}; save the pair anew."


@refusal
def config_value_of_another_type(value: Any, options: tuple[Any, ...], where: str) -> str | None:
    types = tuple(get_origin(option) or option for option in options)
    widened = (*types, int) if float in types else types
    too_large = isinstance(value, int) and abs(value) >= MAX_INTEGER
    if Any in options or (isinstance(value, widened) and not isinstance(value, bool) and not too_large):
        return None
    names = " or ".join(str(t) if isinstance(t, GenericAlias) else getattr(t, "__name__", str(t)) for t in options)
    return f"{where} is {_brief(value)}, not {names.replace('NoneType', 'null')}; save the pair anew."


@refusal
def config_text_with_control_characters(value: Any, where: str) -> str | None:
    text = value if isinstance(value, str) else ""
    found = [c for c in text if unicodedata.category(c) == "Cc" and c not in "\n\r\t"]
    if not found:
        return None
    return f"{where} has the control character {found[0]!r}, which a terminal may obey; take it out."


@refusal
def model_by_path(name: str | None, where: str) -> str | None:
    if name is None or HUB_ID.fullmatch(name):
        return None
    return (
        f"{where}: name is {_brief(name)}, no id on the Hub; a config may name repositories only, so pass the model "
        "yourself, as target= or draft=, or save the pair with it inside."
    )


@refusal
def model_of_no_auto_class(auto_class: str | None, where: str) -> str | None:
    if auto_class is None or AUTO_CLASS.fullmatch(auto_class):
        return None
    return f"{where}: auto_class is {_brief(auto_class)}, no Auto class of transformers; save the pair anew."


@refusal
def model_of_strange_revision(revision: str | None, where: str) -> str | None:
    if revision is None or (COMMIT_OR_NAME.fullmatch(revision) and ".." not in revision):
        return None
    return f"{where}: revision is {_brief(revision)}, no name of a commit, branch or tag; save the pair anew."


@refusal
def model_outside_the_folder(subfolder: str, where: str) -> str | None:
    if subfolder == "" or SUBFOLDER.fullmatch(subfolder):
        return None
    return f"{where}: subfolder is {_brief(subfolder)}, no plain name of a folder inside the pair's; save it anew."


@refusal
def models_in_one_place(target: Any, draft: Any, where: str) -> str | None:
    if (target.name, target.revision, target.subfolder) != (draft.name, draft.revision, draft.subfolder):
        return None
    place = target.name or "the pair's folder"
    return f"{where}: target and draft are both in {place} under {target.subfolder!r}; a draft needs its own place."


@refusal
def recommended_number_of_drafts(number: str | int, where: str) -> str | None:
    if number == "auto" or (isinstance(number, int) and 1 <= number <= MAX_RECOMMENDED):
        return None
    return f"{where}: num_draft_tokens is {_brief(number)}; give 'auto' or a number from 1 to {MAX_RECOMMENDED}."


@refusal
def recommended_verification(verification: str | None, where: str) -> str | None:
    if verification is None or verification in VERIFICATIONS:
        return None
    return f"{where}: verification is {_brief(verification)}; give null or one of {', '.join(VERIFICATIONS)}."


@refusal
def recommended_layout(layout: str, where: str) -> str | None:
    if layout in LAYOUTS:
        return None
    return f"{where}: layout is {_brief(layout)}; give one of {', '.join(LAYOUTS)}."


@refusal
def costs_that_are_no_times(costs: Any, where: str) -> str | None:
    what = "rounds that are not {batch size: {candidates: seconds}}"
    if costs is not None and not all(_is_row(batch, row) for batch, row in costs.table.items()):
        what = "a row that is not {'target': {tokens: seconds}, 'draft': seconds} for 1 and at least one more number"
    elif costs is None or all(_are_rounds(batch, row) for batch, row in costs.rounds.items()):
        return None
    return f"{where}: costs has {what}; measure it anew with specx tune."


@refusal
def acceptance_that_is_no_probability(config: Any, where: str) -> str | None:
    saved = {} if config.costs is None else config.costs.alpha
    measured = {f"measurements[{i}]": m.alpha for i, m in enumerate(config.measurements)}
    for name, alpha in {**saved, **measured}.items():
        if not 0 <= alpha <= 1:
            return f"{where}: alpha of {name} is {alpha}, no probability; measure it anew with specx tune."
    return None


@refusal
def measurement_that_is_no_measurement(measurements: Collection[Any], where: str) -> str | None:
    for place, measurement in enumerate(measurements):
        for name, value in vars(measurement).items():
            if name != "alpha" and isinstance(value, int | float) and not (math.isfinite(value) and value > 0):
                return f"{where}: {name} of measurements[{place}] is {value}, which nothing measures; see specx tune."
    return None


def check_loading(given: Collection[str]) -> None:
    """Whether the arguments for loading a pair leave it what is its own."""
    argument_that_a_pair_sets(given)


def check_place(name: str, revision: str | None) -> None:
    """Whether there can be something of this name."""
    folder_that_is_not_there(name)
    revision_of_a_folder(name, revision)


def check_text(text: bytes, where: str) -> Any:
    """The values in a config's text."""
    config_too_large(text, where)
    try:
        values = json.loads(text.decode("utf-8"))
        json.dumps(values, ensure_ascii=False).encode("utf-8")  # half a character may be escaped in it
        return values
    except (ValueError, RecursionError) as error:
        config_that_is_no_json(where, error)


def check_schema(values: Any, known: int, where: str) -> None:
    """Whether this version knows what the fields of a config mean."""
    config_without_schema(values, where)
    config_of_newer_schema(values, known, where)


def check_object(value: Any, where: str) -> None:
    """Whether a part of a config has fields."""
    config_part_that_is_no_object(value, where)


def check_no_other(given: Collection[str], known: Collection[str], needed: Collection[str], where: str) -> None:
    """Whether a part of a config has the fields of its schema."""
    config_with_unknown_field(given, known, where)
    config_without_field(given, needed, where)


def check_type(value: Any, options: tuple[Any, ...], where: str) -> None:
    """Whether a value of a config is of one of these types."""
    config_value_of_another_type(value, options, where)
    config_text_with_control_characters(value, where)


def check_known_values(config: Any, where: str) -> None:
    """Whether a config says what can be done, and names nothing outside the pair's folder and the Hub."""
    for role in ("target", "draft"):
        source, place = getattr(config, role), f"{where}: {role}"
        model_by_path(source.name, place)
        model_of_no_auto_class(source.auto_class, place)
        model_of_strange_revision(source.revision, place)
        model_outside_the_folder(source.subfolder, place)
    models_in_one_place(config.target, config.draft, where)
    recommended_number_of_drafts(config.num_draft_tokens, where)
    recommended_verification(config.verification, where)
    recommended_layout(config.layout, where)
    costs_that_are_no_times(config.costs, where)
    acceptance_that_is_no_probability(config, where)
    measurement_that_is_no_measurement(config.measurements, where)


def _is_row(batch: str, row: Any) -> bool:
    if not (NUMBER.fullmatch(batch) and isinstance(row, dict) and row.keys() == {"target", "draft"}):
        return False
    times = row["target"]
    if not isinstance(times, dict) or len(times) < 2 or "1" not in times or not all(map(NUMBER.fullmatch, times)):
        return False
    return all(map(_is_time, (*times.values(), row["draft"])))


def _are_rounds(batch: str, row: Any) -> bool:
    known = NUMBER.fullmatch(batch) and isinstance(row, dict) and row.keys() <= ROUNDS
    return bool(known) and all(map(_is_time, row.values()))


def _is_time(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0


def _brief(value: Any) -> str:
    """A value as errors show it."""
    try:
        text = repr(value)
    except RecursionError:
        return "many levels deep"
    return text if len(text) <= 80 else f"{text[:77]}..."
