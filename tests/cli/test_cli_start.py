"""Help and wrong usage import nothing that takes time; what is wrong is said before models are loaded."""

import json
import subprocess
import sys

import pytest
import typer

from hf_specx.cli.commands import app


NAMES = ("generate", "serve", "bench", "tune", "distill", "check", "card", "publish", "export", "export vllm")
HELP = ["--help", "--version", *(f"{name} --help" for name in NAMES)]
WRONG = [
    "generat",
    "--nope",
    "tune",
    "generate a --pair embeded",
    "generate --prompts /no/such/file",
    "generate a --max-new-tokens 0",
    "bench --method fast",
    "distill org/target layers:1 --out x --set loss=y",
    "check --verification magic",
    "publish embedded",
    "card embedded x",
]
ALONE = """
import contextlib, io, json, sys
from hf_specx.cli.commands import app

results = []
for line in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app(line.split())
        except SystemExit as end:
            code = end.code
    slow = [name for name in ("torch", "transformers", "evaluate", "datasets", "numpy") if name in sys.modules]
    results.append((code, bool(out.getvalue()), err.getvalue(), slow))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results() -> dict[str, list]:
    """Of each line, in one process: exit code, whether there is output, errors, slow modules so far."""
    lines = [*HELP, *WRONG]
    process = subprocess.run([sys.executable, "-c", ALONE, json.dumps(lines)], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    return dict(zip(lines, json.loads(process.stdout), strict=True))


@pytest.mark.parametrize("line", [*HELP, *WRONG])
def test_nothing_that_takes_time_is_imported(results, line):
    code, output, errors, slow = results[line]
    assert (code, output, slow) == ((0, True, []) if line in HELP else (2, False, []))
    assert errors == "" if line in HELP else errors.splitlines()[-1].lower().startswith("error: ")


def test_all_commands_are_looked_at():
    root = typer.main.get_command(app)
    exports = [f"export {name}" for name in root.commands["export"].commands]
    assert {*root.commands, *exports} == {*NAMES, "lm-eval"}  # whose help is that of lm-eval


def test_what_is_missing_says_how_to_get_it():
    code = "import sys; sys.modules['typer'] = None; sys.argv = ['specx']; from hf_specx.cli.app import main; main()"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (1, "")
    assert "pip install" in process.stderr
