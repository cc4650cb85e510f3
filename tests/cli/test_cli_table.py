"""All commands where something is amiss: exit code and last line of each. Help and wrong usage import no torch."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from command import command
from huggingface_hub.errors import LocalEntryNotFoundError

from hf_specx.cli import console
from hf_specx.pair_files import fetch


COMMANDS = {  # with what each needs; PAIR is the pair that is meant
    "generate": ["generate", "the cat", "--pair", "PAIR"],
    "bench": ["bench", "PAIR"],
    "tune": ["tune", "PAIR", "org/draft", "--no-measure"],
    "check": ["check", "PAIR"],
    "card": ["card", "PAIR"],
    "publish": ["publish", "PAIR", "org/name"],
    "vllm": ["export", "vllm", "PAIR"],
}
OUTPUTS = {
    "bench": ["--out", "/proc/x.json"],
    "tune": ["--out", "/proc/x"],
    "check": ["--out", "/proc/x.json"],
    "card": ["--out", "/proc/x.md"],
}
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
    ["check", "--verification", "magic"],
    ["check", "--report", "/proc/x.html"],
    ["publish", "embedded"],
    ["card", "embedded", "--title", "x"],
    ["export"],
]
ALONE = """
import sys
from hf_specx.cli.commands import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    print(end.code, [name for name in ("torch", "transformers", "matplotlib", "numpy") if name in sys.modules])
"""


def arguments(name: str, pair: str) -> list[str]:
    return [pair if word == "PAIR" else word for word in COMMANDS[name]]


def ends(result, code: int) -> str:
    """The only line on stderr, with nothing on stdout."""
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    (line,) = result.stderr.splitlines()
    return line


def without_network(*args: object, **options: object) -> None:
    raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder")


@pytest.mark.parametrize("name", COMMANDS)
def test_no_network(monkeypatch, name):
    monkeypatch.setattr(fetch, "snapshot_download", without_network)
    line = ends(command(*arguments(name, "org/pair"), input=""), 2)
    assert line.startswith("error: 'org/pair' cannot be got from the Hub, and there is no folder of that name here")


@pytest.mark.parametrize("name", COMMANDS)
def test_broken_pair(tmp_path: Path, name):
    (tmp_path / "specx_config.json").write_text("{")
    line = ends(command(*arguments(name, str(tmp_path)), input=""), 2)
    assert str(tmp_path) in line or "config.json" in line


@pytest.mark.parametrize("name", COMMANDS)
def test_missing_folder(tmp_path: Path, name):
    line = ends(command(*arguments(name, str(tmp_path / "none")), input=""), 2)
    assert str(tmp_path / "none") in line


@pytest.mark.parametrize("name", OUTPUTS)
def test_read_only_folder(name):
    """Before anything is loaded."""
    line = ends(command(*arguments(name, "embedded"), *OUTPUTS[name], input=""), 2)
    assert "nothing can be written in /proc" in line


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (ValueError("no"), 2), (OSError("no"), 2)])
def test_whatever_ends_the_work(monkeypatch, error, code):
    def work(*given: object) -> None:
        raise error

    monkeypatch.setattr("hf_specx.cli.reading.config_of", work)
    assert ends(command("export", "vllm", "org/pair"), code) in ("interrupted", "error: no")


def test_a_reader_that_has_gone(monkeypatch):
    closed = []
    monkeypatch.setattr(os, "dup2", lambda *files: closed.append(files))
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    with pytest.raises(typer.Exit) as end, console.errors_in_one_line():
        raise BrokenPipeError
    assert (end.value.exit_code, len(closed)) == (141, 1)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in [*COMMANDS][:-1])])
def test_help_imports_nothing_that_takes_time(arguments):
    found = subprocess.run([sys.executable, "-c", ALONE, *arguments], capture_output=True, text=True, check=True)
    assert found.stdout.endswith("0 []\n"), found.stderr
    assert found.stderr == ""


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_usage_imports_nothing_that_takes_time(arguments):
    found = subprocess.run([sys.executable, "-c", ALONE, *arguments], capture_output=True, text=True, check=True)
    assert found.stdout == "2 []\n"
    assert re.fullmatch("error: .+\n", found.stderr)


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


def test_control_c_during_imports():
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_specx", "generate", "the cat"], stderr=subprocess.PIPE, text=True
    )
    maps = Path(f"/proc/{process.pid}/maps")
    while "libtorch" not in maps.read_text() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode in (130, -signal.SIGINT)  # a shell calls both 130
    assert "Traceback" not in said
