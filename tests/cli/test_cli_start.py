"""Help and wrong usage: they import nothing that takes time, and say what they have to in one line."""

import json
import re
import subprocess
import sys

import pytest
from command import command


NAMES = ("generate", "bench", "tune", "distill", "check", "card", "publish", "export")
HELP = [["--help"], ["--version"], *([name, "--help"] for name in NAMES)]
WRONG = [
    ["nope"],
    ["generat"],
    ["--nope"],
    ["tune"],
    ["generate", "a", "--top-p", "2"],
    ["generate", "a", "--pair", "embeded"],
    ["generate", "a", "--target", "org/t"],
    ["generate", "a", "--pair", "p/q", "--target", "org/t"],
    ["generate", "--file", "/no/such/file"],
    ["bench", "--only", "nothing"],
    ["bench", "--contender", "fast"],
    ["distill", "org/target", "layers:1"],
    ["distill", "org/target", "layers:1", "--out", "x", "--loss", "y"],
    ["check", "--verification", "magic"],
    ["check", "--report", "/proc/x.html"],
    ["publish", "embedded"],
    ["card", "embedded", "--title", "x"],
    ["export"],
]
ALONE = """
import contextlib, io, json, sys
from hf_specx.cli.commands import app

found = []
for arguments in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app(arguments)
        except SystemExit as end:
            code = end.code
    slow = [name for name in ("torch", "transformers", "matplotlib", "numpy") if name in sys.modules]
    found.append((code, bool(out.getvalue()), err.getvalue(), slow))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def told() -> dict[tuple[str, ...], list]:
    """Of each list of arguments, in one process: exit code, whether there is output, errors, slow modules so far."""
    lists = [*HELP, *WRONG]
    command = [sys.executable, "-c", ALONE, json.dumps(lists)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stderr == ""
    return dict(zip(map(tuple, lists), json.loads(found.stdout), strict=True))


@pytest.mark.parametrize("arguments", HELP, ids=" ".join)
def test_help_imports_nothing_that_takes_time(told, arguments):
    assert told[tuple(arguments)] == [0, True, "", []]


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_usage_imports_nothing_that_takes_time(told, arguments):
    code, output, errors, slow = told[tuple(arguments)]
    assert (code, output, slow) == (2, False, [])
    assert re.fullmatch("error: .+\n", errors)


@pytest.mark.parametrize("name", ["", *NAMES, "export vllm"])
def test_flags_have_no_type_in_the_help(name):
    told = command(*name.split(), "--help").stdout
    assert "--help " in told
    assert "bool" not in told
    assert (re.search("--[a-z-]+ +<", told) is not None) == (name not in ("", "export"))  # other options have one


def test_the_package_is_lazy_and_complete():
    code = """
import sys, hf_specx
assert "torch" not in sys.modules
assert set(hf_specx.__all__) <= set(dir(hf_specx))
import hf_specx.strategy, hf_specx.generate
assert callable(hf_specx.generate) and hf_specx.generate.__module__ == "hf_specx.generate"
for name in hf_specx.__all__:
    assert getattr(hf_specx, name).__module__.startswith("hf_specx."), name
assert not hasattr(hf_specx, "nothing")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
