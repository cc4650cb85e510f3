"""Broken and hostile `specx_config.json`: what is said of it, and what is wrong."""

import json
import os
from dataclasses import asdict

import card_cases
from repositories import after, cut, put, remove, said, write

from hf_specx.hub.pair_config import CONFIG_NAME


ROW = {"target": {"1": 1.0, "5": 2.0}, "draft": 0.5}
COSTS = {"hardware": "a clock", "dtype": "float32", "table": {}, "alpha": {}}
EXIT, SHORT = {"exit_layer": 1}, {"min_match": 3, "max_match": 2}
TIMES = r"costs: table\['2'\]: target"


def whole(content: str | bytes):
    """A case that has something else in place of its config."""
    return after(write(CONFIG_NAME, content))


def costs(**row: object):
    return said("costs", COSTS | {"table": {"2": ROW | row}})


def rounds(seen: object):
    return said("costs", COSTS | {"rounds": seen})


def measured(**changes: object):
    return said("measurements", [asdict(card_cases.measured(**changes))])


CASES = [
    ("has more than 4194304 bytes, .*get it again", after(lambda folder: os.truncate(folder / CONFIG_NAME, 2**40))),
    ("notes has the control character '.x1b', wh", said("notes", "\x1b[2J")),
    ("subfolder has the control", said("draft.subfolder", "a\0b")),
    ("license has the control", said("license", "\x9b2J")),
    ("target: name is '/models/x', no id on the Hub; .*pass the", said("target.name", "/models/x")),
    ("draft: name is '../x', no id", said("draft.name", "../x")),
    ("name is 'https://host/x', no id", said("draft.name", "https://host/x")),
    ("draft: name is '.rg/draft', no id", said("draft.name", "\u043erg/draft")),
    ("revision is '../main', no name of", said("draft.revision", "../main")),
    ("revision is '--all', no name", said("draft.revision", "--all")),
    (r"subfolder is '\.\./x', no plain name of a", said("draft.subfolder", "../x")),
    ("subfolder is 'a/../../x', no", said("draft.subfolder", "a/../../x")),
    ("subfolder is '/etc', no plain", said("draft.subfolder", "/etc")),
    (r"subfolder is '\.\.\\\\x', no", said("draft.subfolder", "..\\x")),
    ("subfolder is 'C:x', no plain", said("draft.subfolder", "C:x")),
    (r"subfolder is 'aaaa.*\.\.\., no", said("draft.subfolder", "a" * 5000)),
    ("has no specx_config.json, so it is no draft-target", after(remove(CONFIG_NAME))),
    ("is not JSON .*may be cut off: get it again", after(cut(CONFIG_NAME, -20))),
    ("is not JSON .maximum recursion", whole("[" * 100_000)),
    ("is not JSON .'utf-8' codec", whole(b'{"schema": 1, "notes": "\xff"}')),
    ("is not JSON .*surrogates", whole('{"schema": 1, "notes": "\\ud800"}')),
    ("is not JSON .*4300 digits", whole('{"schema": 1' + "0" * 5000 + "}")),
    ("does not say its schema .it has None", said("schema", ...)),
    ("has schema 2 and this version reads up to 1; install a newer", said("schema", 2)),
    ("target is 'org/target', not an object; save", said("target", "org/target")),
    ("has a field 'auto_map' that its schema does not", said("auto_map", "x.py")),
    ("has no 'draft'; save", said("draft", ...)),
    ("target: parameters is '9', not int or null", said("target.parameters", "9")),
    ("alpha is True, not float", measured(alpha=True)),
    (r"batch is 10{76}\.\.\., not int", measured(batch=10**400)),
    ("both in the folder of the pair under ''; a draft needs", said("draft.subfolder", "")),
    ("num_draft_tokens is 1000000000, neither 'auto' nor an int from 0 to 64", said("num_draft_tokens", 10**9)),
    ("layout is 'os.system', none of auto", said("layout", "os.system")),
    (r"table\['2'\]: draft is -1.0, no time; measure it anew with specx tune", costs(draft=-1.0)),
    (rf"{TIMES}\['5'\] is inf, which nothing measures", costs(target={"1": 1.0, "5": float("inf")})),
    (f"{TIMES} is .*, not for 1 and at least one more number", costs(target={"2": 1.0, "3": 2.0})),
    (rf"{TIMES} is \[\[.*, not dict", costs(target=json.loads("[" * 500 + "]" * 500))),
    (r"rounds\['2'\]\['1'\] is 0.0, which nothing measures", rounds({"2": {"1": 0.0}})),
    ("rounds.* is '1000', no number of candidates", rounds({"2": {"1000": 1.0}})),
    ("alpha is nan, no probability", measured(alpha=float("nan"))),
    (r"alpha\['block'\] is -0.5, no probability", said("costs", COSTS | {"alpha": {"block": -0.5}})),
    ("measured_speedup is -1.0, which nothing measures", measured(measured_speedup=-1.0)),
    ("early_exit: exit_layer is 0, no int from 1 to", said("early_exit", {"exit_layer": 0})),
    ("early_exit has no 'exit_layer'", said("early_exit", {})),
    ("has both a suffix and an early_exit; take one of them out", after(put("suffix", {}), put("early_exit", EXIT))),
    ("has a draft without weights, and says where a draft model is; take", said("early_exit", EXIT)),
    ("suffix: max_candidates is 65, no int from 1 to 64", said("suffix", {"max_candidates": 65})),
    ("max_match of suffix is 2, less than min_match=3", after(put("draft", {}), put("suffix", SHORT))),
]
