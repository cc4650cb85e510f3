"""All commands where something is amiss, each with its exit code and its only line on stderr.

No network, a broken pair, a folder that cannot be written, Ctrl-C during imports and during work, a reader that has
gone. Commands that write leave nothing behind.
"""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from command import command
from huggingface_hub.errors import LocalEntryNotFoundError

from hf_specx.cli import console
from hf_specx.hub import fetch


COMMANDS = {  # with what each needs; PAIR is a pair or target, OUT a folder, PROMPTS a file
    "generate": "generate prompt --pair PAIR",
    "generate --out": "generate --prompts PROMPTS --pair PAIR --out OUT/done.jsonl",
    "bench": "bench PAIR --out OUT/results.json",
    "tune": "tune PAIR org/draft --repeats 0",
    "distill": "distill PAIR layers:1 --prompts PROMPTS --out OUT/pair",
    "check": "check PAIR --prompts PROMPTS --out OUT/report.html --out OUT/result.json",
    "card": "card PAIR --out OUT/README.md",
    "publish": "publish PAIR org/name",
    "publish --out": "publish PAIR --out OUT/repository",
    "export vllm": "export vllm PAIR",
}
# with what the same command goes on
UNFINISHED = {"generate --out": "done.jsonl", "distill": "pair.training", "check": "report.html.unfinished"}
WRITE = [line for line in COMMANDS.values() if "OUT/" in line] + ["tune PAIR exit:1 --repeats 0 --out OUT/pair"]
INTERRUPTS_ITSELF = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"


def words(line: str, pair: str, folder: Path, out: str = "") -> list[str]:
    """A command, with a file of prompts beside the folder OUT, which is made unless another one is meant."""
    (folder / "out").mkdir()
    (folder / "prompts.txt").write_text("the cat\n")
    meant = {"PAIR": pair, "PROMPTS": str(folder / "prompts.txt")}
    return [meant.get(word, word.replace("OUT", out or f"{folder}/out")) for word in line.split()]


def ends(result, code: int) -> str:
    """The only line on stderr, with nothing on stdout."""
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("is_broken", [False, True], ids=["nothing", "a broken pair"])
def test_what_cannot_be_loaded(monkeypatch, tmp_path: Path, name, is_broken):
    """A pair that is not on this machine, without a network, and one whose config is no JSON."""

    def without_network(*args: object, **options: object) -> None:
        raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder")

    monkeypatch.setattr(fetch, "snapshot_download", without_network)
    pair = str(tmp_path / "broken") if is_broken else "org/pair"
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "specx_config.json").write_text("{")
    line = ends(command(*words(COMMANDS[name], pair, tmp_path), input=""), 2)
    assert line.startswith("error: ")
    assert pair in line or "config.json" in line
    assert is_broken or "Hub" in line
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("line", WRITE)
def test_read_only_folder(monkeypatch, tmp_path: Path, line):
    """Before anything is loaded."""
    monkeypatch.setattr("hf_specx.cli.loading.load_pair", None)
    result = command(*words(line, "embedded", tmp_path, "/proc"), input="the cat")
    assert "nothing can be written in /proc" in ends(result, 2)


ENDS = [(KeyboardInterrupt(), 130), (ValueError("no"), 2), (OSError("no"), 2), (BrokenPipeError(), 141)]
CASES = [(name, *ENDS[0]) for name in COMMANDS] + [("generate", *end) for end in ENDS[1:]]


@pytest.mark.parametrize(("name", "error", "code"), CASES)
def test_whatever_ends_the_work(monkeypatch, tmp_path: Path, name, error, code):
    @contextmanager
    def work():
        raise error
        yield

    dropped = []
    monkeypatch.setattr(console, "drop_output", lambda: dropped.append(1))
    first = name.split()[0]
    module = "pairs" if first in ("card", "publish", "export") else first
    monkeypatch.setattr(f"hf_specx.cli.{module}.imports", work)
    result = command(*words(COMMANDS[name], "embedded", tmp_path), input="")
    assert len(dropped) == (code == 141)
    goes_on = ""
    if name in UNFINISHED:
        goes_on = f"interrupted; the same command goes on with {tmp_path / 'out' / UNFINISHED[name]}\n"
    errors = {130: goes_on, 2: "error: no\n", 141: ""}
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", errors[code])


@pytest.mark.parametrize(("module", "code"), [("torch", -2), ("rich", 130)])
def test_control_c_during_imports(tmp_path: Path, module: str, code: int):
    """Of torch, which takes seconds, where half-imported modules answer with errors of their own; a shell says 130."""
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").write_text(INTERRUPTS_ITSELF)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "hf_specx", "card", "embedded"]
    how = {"env": os.environ | {"PYTHONPATH": path}, "capture_output": True, "text": True, "input": ""}
    heard = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # `nohup ... &` has it ignored
    process = subprocess.run(command, **how, preexec_fn=heard)
    assert (process.returncode, process.stdout, process.stderr) == (code, "", "")


RICH = "import sys, hf_specx.cli.app as app, hf_specx.cli.console as console, hf_specx.cli.pairs as pairs\n"
RICH += "sys.argv, pairs.typer.echo = ['specx', 'card'], lambda text: console.Output().print(text)\napp.main()"


@pytest.mark.parametrize("how", [["-c", RICH], ["-m", "hf_specx", "card"]], ids=["rich", "typer"])
def test_a_reader_that_has_gone(how: list[str]):
    """By either of the two ways in which commands print; rich's own end is code 1, which means a failed check."""
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen([sys.executable, *how], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert process.communicate()[1] == ""
    assert process.returncode == 141
