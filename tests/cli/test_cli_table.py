"""All commands where something is amiss, each with its exit code and its only line: what a user sees is decided here.

No network, a folder that cannot be written, a file that is missing, a broken pair, Ctrl-C during imports and during
work, a reader that has gone. Commands that write leave nothing behind.
"""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest
from command import command
from huggingface_hub.errors import LocalEntryNotFoundError

from hf_specx.cli import console
from hf_specx.cli.commands import app, export
from hf_specx.pair_files import fetch


COMMANDS = {  # with what each needs; PAIR is the pair or target that is meant, OUT a folder, PROMPTS a file
    "generate": "generate prompt --pair PAIR",
    "generate --out": "generate --file PROMPTS --pair PAIR --out OUT/done.jsonl",
    "bench": "bench PAIR --out OUT/results.json",
    "tune": "tune PAIR org/draft --no-measure",
    "tune, several": "tune PAIR suffix exit:1 exits org/draft --file PROMPTS --out OUT/pair",
    "distill": "distill PAIR layers:1 --file PROMPTS --out OUT/pair",
    "check": "check PAIR --resume OUT/known.json --report OUT/report.html --out OUT/result.json",
    "card": "card PAIR",
    "card --out": "card PAIR --out OUT/README.md",
    "publish": "publish PAIR org/name",
    "publish --folder": "publish PAIR --folder OUT/repository",
    "export vllm": "export vllm PAIR",
}
OUTPUTS = {  # options that name what is written, by command
    "generate": ["--out"],
    "bench": ["--out"],
    "tune": ["--out"],
    "distill": ["--out", "--folder"],
    "check": ["--out", "--report", "--resume"],
    "card": ["--out", "--all"],
    "publish": ["--folder"],
}
READ = {  # options that name a file to be read
    "generate": ["--file", "--json-schema"],
    "bench": ["--file"],
    "tune": ["--file"],
    "distill": ["--file"],
    "check": ["--file"],
}
WORK = {  # where the work of a command begins, and what it goes on with after Ctrl-C
    "generate": ("hf_specx.cli.session.open_session", None),
    "generate --out": ("hf_specx.cli.session.open_session", "done.jsonl"),
    "bench": ("hf_specx.cli.loading.load_named", None),
    "tune": ("hf_specx.bench.tune.drafts_to_try", None),
    "tune, several": ("hf_specx.bench.tune.drafts_to_try", None),
    "distill": ("hf_specx.cli.distill.train", "pair.training"),
    "check": ("hf_specx.cli.loading.load_named", "known.json"),
    "card": ("hf_specx.cli.reading.card_of", None),
    "card --out": ("hf_specx.cli.reading.card_of", None),
    "publish": ("hf_specx.cli.loading.load_given_pair", None),
    "publish --folder": ("hf_specx.cli.loading.load_given_pair", None),
    "export vllm": ("hf_specx.cli.reading.config_of", None),
}
INTERRUPTS_ITSELF = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"


def words(name: str, pair: str, folder: Path) -> list[str]:
    """The command of a row of the table, with a file of prompts beside the folder OUT, which is made."""
    (folder / "out").mkdir()
    (folder / "prompts.txt").write_text("the cat\n")
    meant = {"PAIR": pair, "PROMPTS": str(folder / "prompts.txt")}
    return [meant.get(word, word.replace("OUT/", f"{folder}/out/")) for word in COMMANDS[name].split()]


def ends(result, code: int) -> str:
    """The only line on stderr, with nothing on stdout."""
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    (line,) = result.stderr.splitlines()
    return line


def nothing_is_left(folder: Path) -> bool:
    return not list((folder / "out").iterdir())


def test_all_commands_are_in_the_table():
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    names += [f"export {command.name or command.callback.__name__}" for command in export.registered_commands]
    assert {row.partition(" --")[0].partition(",")[0] for row in COMMANDS} == set(names)
    assert WORK.keys() == COMMANDS.keys()


def without_network(*args: object, **options: object) -> None:
    raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder")


@pytest.mark.parametrize("name", COMMANDS)
def test_no_network(monkeypatch, tmp_path: Path, name):
    monkeypatch.setattr(fetch, "snapshot_download", without_network)
    line = ends(command(*words(name, "org/pair", tmp_path), input=""), 2)
    assert line.startswith("error: 'org/pair' cannot be got from the Hub, and there is no folder of that name here")
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_broken_pair(tmp_path: Path, name):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "specx_config.json").write_text("{")
    line = ends(command(*words(name, str(broken), tmp_path), input=""), 2)
    assert line.startswith("error: ")
    assert str(broken) in line or "config.json" in line
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_missing_folder(tmp_path: Path, name):
    line = ends(command(*words(name, str(tmp_path / "none"), tmp_path), input=""), 2)
    assert line.startswith("error: ")
    assert str(tmp_path / "none") in line
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in READ for option in READ[name]])
def test_missing_file(tmp_path: Path, name, option):
    given = [
        word for word in words(name, "embedded", tmp_path) if word not in ("--file", str(tmp_path / "prompts.txt"))
    ]
    line = ends(command(*given, option, "/no/such/file"), 2)
    assert "ile '/no/such/file' does not exist. See " in line
    assert line.endswith(f" {name} --help.")


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in OUTPUTS for option in OUTPUTS[name]])
def test_read_only_folder(monkeypatch, tmp_path: Path, name, option):
    """Before anything is loaded."""
    monkeypatch.setattr("hf_specx.cli.loading.load_given_pair", None)
    given = words(name, "embedded", tmp_path)
    if option in ("--all", "--folder") and name != "distill":
        given = given[:1] if option == "--all" else given[:2]
    if option == "--out" and name == "tune":
        given = ["tune", "embedded", "exit:1", "--no-measure"]
    suffix = {"--report": ".html", "--resume": ".json"}.get(option, "")
    line = ends(command(*given, option, f"/proc/x{suffix}", input="the cat"), 2)
    assert "nothing can be written in /proc" in line


ENDS = [(KeyboardInterrupt(), 130), (ValueError("no"), 2), (OSError("no"), 2), (BrokenPipeError(), 141)]


@pytest.mark.parametrize(("error", "code"), ENDS, ids=lambda x: type(x).__name__ if isinstance(x, Exception) else "")
@pytest.mark.parametrize("name", COMMANDS)
def test_whatever_ends_the_work(monkeypatch, tmp_path: Path, name, error, code):
    def work(*given: object, **options: object) -> None:
        raise error

    dropped = []
    monkeypatch.setattr(console, "drop_output", lambda: dropped.append(1))
    place, kept = WORK[name]
    monkeypatch.setattr(place, work)
    result = command(*words(name, "embedded", tmp_path), input="")
    assert len(dropped) == (code == 141)
    goes_on = "" if kept is None else f"; the same command goes on with {tmp_path / 'out' / kept}"
    told = {130: f"interrupted{goes_on}\n", 2: "error: no\n", 141: ""}
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", told[code])


@pytest.mark.parametrize("name", COMMANDS)
def test_control_c_during_imports(tmp_path: Path, name):
    """Of torch, which takes seconds; half-imported modules answer an exception with errors of their own."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(INTERRUPTS_ITSELF)
    found = interrupted(words(name, "embedded", tmp_path), tmp_path)
    assert (found.returncode, found.stdout, found.stderr) == (-2, "", "")  # a shell calls it 130


def test_control_c_while_the_command_line_is_imported(tmp_path: Path):
    (tmp_path / "rich.py").write_text(INTERRUPTS_ITSELF)
    found = interrupted(["card", "embedded"], tmp_path)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "")


def interrupted(arguments: list[str], first: Path) -> subprocess.CompletedProcess:
    """What became of `specx` where modules of that folder come before all others."""
    path = os.pathsep.join([str(first), *filter(None, sys.path)])
    whole = [sys.executable, "-m", "hf_specx", *arguments]
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(whole, env=environment, capture_output=True, text=True, input="")


PIPED = """
import sys
from hf_specx.cli.app import main
from hf_specx.cli.console import Output
kind, sys.argv = sys.argv[1], ["specx", "card"]
if kind == "rich":
    import hf_specx.cli.pairs
    hf_specx.cli.pairs.typer.echo = lambda text: Output().print(text)
main()
"""


@pytest.mark.parametrize("kind", ["rich", "typer"])
def test_a_reader_that_has_gone(kind):
    """By either of the two ways in which commands print; rich's own end is code 1, which means a failed check."""
    read, write = os.pipe()
    os.close(read)
    whole = [sys.executable, "-c", PIPED, kind]
    process = subprocess.Popen(whole, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert process.communicate()[1] == ""
    assert process.returncode == 141


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ValueError"])
def test_nobody_reads_what_is_said_of_an_error(error):
    """The exit code still says it."""
    code = f"from hf_specx.cli.console import errors_in_one_line\nwith errors_in_one_line():\n    raise {error}\n"
    code = f"import sys, typer\ntry:\n{indent(code, '    ')}except typer.Exit as end:\n    sys.exit(end.exit_code)"
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run([sys.executable, "-c", code], stderr=write)
    os.close(write)
    assert process.returncode == {"KeyboardInterrupt": 130, "ValueError": 2}[error]
