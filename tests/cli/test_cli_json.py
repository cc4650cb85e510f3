"""--json puts one document on standard output and nothing else; progress is lines on standard error, now and then.

A command that is given --json and is not here fails the first test.
"""

import json
import re
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from command import command, saved_models
from tiny import near, tiny
from tiny_tokenizer import TEXTS, tiny_tokenizer

from hf_specx import DraftTargetPair
from hf_specx.cli import console
from hf_specx.cli.commands import app, export


SIZES = {"vocab_size": 280, "eos_token_id": None, "pad_token_id": 1, "num_hidden_layers": 3}
PROMPTS = "\n".join(f"{text} {number}" for text in TEXTS for number in range(10))
DISTILL = "--phases 1 --texts 4 --passes 1 --max-new-tokens 8 --no-measure"
DOCUMENTS = {  # a key of each, and what is said of the progress where there is any
    "generate PAIR-OPTION --max-new-tokens 4 --compare --repeats 1": ("runs", "generating, batch 30"),
    "generate PAIR-OPTION --max-new-tokens 4 --out OUT": ("out", "loading "),
    "generate PAIR-OPTION --max-new-tokens 4 --demo --repeats 1": ("runs", "batch 1, all ways in turns: [0-9]+ of 6"),
    "tune TARGET DRAFT --max-new-tokens 4 --repeats 1 --out OUT": ("drafts", "drafts, each in turns .* of [0-9]+"),
    f"distill TARGET layers:1 --out OUT {DISTILL}": ("alphas", "phase 1, training: [0-9]+ of"),
    "publish PAIR --folder OUT": ("folder", "publishing "),
    "vllm PAIR": ("command", None),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    names = saved_models(root, SIZES, 0.1)
    target = tiny(**SIZES)
    pair = DraftTargetPair(target, near(target, 0.1), tiny_tokenizer())
    pair.config.prompts = list(TEXTS)
    pair.save_pretrained(root / "pair")
    return {"TARGET": names["target"], "DRAFT": names["draft"], "PAIR": str(root / "pair")}


@pytest.fixture
def restless(monkeypatch):
    """Lines of progress as often as can be."""
    monkeypatch.setattr(console, "SECONDS", 0.002)


def written(line: str, folders: dict[str, str], out: Path, *more: str):
    known = folders | {"OUT": str(out)}
    words = line.replace("vllm ", "export vllm ").replace("PAIR-OPTION", "--pair PAIR").split()
    given = "" if "--demo" in words else PROMPTS
    result = command(*(known.get(word, word) for word in words), *more, input=given)
    assert result.exit_code == 0, result.stderr
    return result


def test_all_commands_that_have_it_are_here():
    registered = [*app.registered_commands, *export.registered_commands]
    names = {each.callback.__name__ for each in registered if "as_json" in each.callback.__annotations__}
    assert names == {line.split()[0] for line in DOCUMENTS}


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("line", DOCUMENTS)
def test_one_document_and_progress_beside_it(folders, tmp_path, line):
    result = written(line, folders, tmp_path / "out", "--json")
    key, progress = DOCUMENTS[line]
    assert key in json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    if progress is not None:
        assert re.search(f"^{progress}.*, [0-9]+ s$", result.stderr, re.MULTILINE), result.stderr[-2000:]


@pytest.mark.usefixtures("restless")
def test_lines_end_with_the_work(monkeypatch):
    """Also where it fails; not before, where nobody reads them, which ends no work."""
    threads, printed = threading.active_count(), threading.Event()

    def closed(*given: object, **options: object) -> None:
        printed.set()
        raise BrokenPipeError

    monkeypatch.setattr(console.Output, "text", closed)
    with suppress(RuntimeError), console.progress("working") as tell:
        for _ in range(2):
            assert printed.wait(60)
            printed.clear()
        tell("news", 0, 0)
        raise RuntimeError
    assert threading.active_count() == threads
