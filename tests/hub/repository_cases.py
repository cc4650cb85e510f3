"""Broken and hostile `specx_config.json`: what is said of it, and what is wrong."""

import json

from repositories import after, cut, load, remove, said, write

from hf_specx.hub.pair_config import CONFIG_NAME


ROW = {"target": {"1": 1.0, "5": 2.0}, "draft": 0.5}
COSTS = {"hardware": "a clock", "dtype": "float32", "table": {}, "alpha": {}}
MEASURED = {
    "batch": 1, "dtype": "float32", "verification": "block", "num_draft_tokens": 4, "layout": "ragged", "alpha": 0.5,
    "cost_coefficient": 0.1, "tokens_per_round": 2.0, "expected_speedup": 1.5, "forward_limited_speedup": 1.4,
    "measured_speedup": 1.3, "hardware": "a clock", "versions": {}, "command": "specx tune",
}  # fmt: skip
DEEP = "[" * 100_000


def whole(content: str | bytes):
    """A case that has something else in place of its config."""
    return after(write(CONFIG_NAME, content))


def costs(**row: object):
    return said("costs", COSTS | {"table": {"2": ROW | row}})


def rounds(seen: object):
    return said("costs", COSTS | {"rounds": seen})


def measured(**changes: object):
    return said("measurements", [MEASURED | changes])


CASES = [
    ("has more than 4194304 bytes, .*get it again", whole(" " * (5 * 2**20))),
    ("notes has the control character '.x1b', wh", said("notes", "\x1b[2J")),
    ("subfolder has the control", said("draft.subfolder", "a\0b")),
    ("license has the control", said("license", "\x9b2J")),
    ("target: name is '/models/x', no id on the Hub; .*pass the", said("target.name", "/models/x")),
    ("draft: name is '../x', no id", said("draft.name", "../x")),
    ("name is 'https://host/x', no id", said("draft.name", "https://host/x")),
    ("name is 'org/draft/file.bin', no id", said("draft.name", "org/draft/file.bin")),
    ("draft: name is '.rg/draft', no id", said("draft.name", "\u043erg/draft")),
    ("target: auto_class is 'os.system', no Auto class", said("target.auto_class", "os.system")),
    ("draft: auto_class is 'a.AutoM", said("draft.auto_class", "a.AutoModelForCausalLM")),
    ("is 'AutoTokenizer', no Auto", said("draft.auto_class", "AutoTokenizer")),
    ("revision is '../main', no name of", said("draft.revision", "../main")),
    ("revision is '--all', no name", said("draft.revision", "--all")),
    (r"subfolder is '\.\./x', no plain name of a", said("draft.subfolder", "../x")),
    ("subfolder is 'a/../../x', no", said("draft.subfolder", "a/../../x")),
    ("subfolder is '/etc', no plain", said("draft.subfolder", "/etc")),
    (r"subfolder is '\.\.\\\\x', no", said("draft.subfolder", "..\\x")),
    ("subfolder is 'C:x', no plain", said("draft.subfolder", "C:x")),
    (r"subfolder is '\./', no plain", said("draft.subfolder", "./")),
    (r"subfolder is 'aaaa.*\.\.\., no", said("draft.subfolder", "a" * 5000)),
    ("has no specx_config.json, so it is no draft-target", after(remove(CONFIG_NAME))),
    ("has no specx_config.json", lambda folder: load(folder / "draft")),
    ("is not JSON .*may be cut off: get it again", after(cut(CONFIG_NAME, -20))),
    ("is not JSON .Expecting value", whole("")),
    ("is not JSON .maximum recursion", whole(DEEP)),
    ("is not JSON .'utf-8' codec", whole(b'{"schema": 1, "notes": "\xff"}')),
    ("is not JSON .*surrogates", whole('{"schema": 1, "notes": "\\ud800"}')),
    ("is not JSON .*4300 digits", whole('{"schema": 1' + "0" * 5000 + "}")),
    ("does not say its schema .it has None", said("schema", ...)),
    ("does not say its schema", whole("[1]")),
    ("does not say its schema .it has 0", said("schema", 0)),
    ("has schema 2 and this version reads up to 1; install a newer", said("schema", 2)),
    ("target is 'org/target', not an object; save", said("target", "org/target")),
    (r"measurements\[0\] is 3, not an object", said("measurements", [3])),
    ("has a field 'auto_map' that its schema does not", said("auto_map", "x.py")),
    ("has no 'draft'; save", said("draft", ...)),
    ("tokenizers has no 'tokens'; save", said("tokenizers.tokens", ...)),
    ("target: parameters is '9', not int or null", said("target.parameters", "9")),
    ("layout is None, not str; save", said("layout", None)),
    (r"prompts is \{\}, not list", said("prompts", {})),
    ("alpha is True, not float", measured(alpha=True)),
    (r"batch is 10{76}\.\.\., not int", measured(batch=10**400)),
    ("both in the folder of the pair under ''; a draft needs", said("draft.subfolder", "")),
    ("num_draft_tokens=1000000000 is above 64; give", said("num_draft_tokens", 10**9)),
    ("num_draft_tokens=-1 is below 1; give", said("num_draft_tokens", -1)),
    ("layout='os.system' is unknown; choose one of auto", said("layout", "os.system")),
    ("costs has a row that is not .*specx tune", costs(draft=-1.0)),
    ("costs has a row", costs(draft=float("nan"))),
    ("costs has a row", costs(target={"1": 1.0, "5": float("inf")})),
    ("costs has rounds that .*specx tune", rounds({"2": {"1": 0.0}})),
    ("costs has rounds that are not", rounds({"2": {"1000": 1.0}})),
    ("for 1 and at least one more", costs(target={"2": 1.0, "3": 2.0})),
    ("costs has a row", said("costs", COSTS | {"table": {"0": ROW}})),
    ("costs has a row", costs(target=json.loads("[" * 500 + "]" * 500))),
    ("alpha of measurements.0. is 1.5, no prob", measured(alpha=1.5)),
    ("is nan, no probability", measured(alpha=float("nan"))),
    (
        "alpha of block that is -0.5, no probability; measure it anew",
        said("costs", COSTS | {"alpha": {"block": -0.5}}),
    ),
    ("measured_speedup of .* is -1.0, which", measured(measured_speedup=-1.0)),
    ("per_round .* is nan", measured(tokens_per_round=float("nan"))),
]
