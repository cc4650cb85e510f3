"""Prompts from a dataset, and the fields of a prompt's line that come back with its text."""

import json
from pathlib import Path

import pytest
from command import command
from tiny_tokenizer import TEXTS

from hf_specx import DraftTargetPair


datasets = pytest.importorskip("datasets")
GREEDY = ["--no-do-sample", "--max-new-tokens", "6"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a file of rows for each of two splits."""
    folder = tmp_path / "data"
    folder.mkdir()
    for split, texts in {"train": TEXTS[:1], "test": TEXTS}.items():
        rows = [{"question": text, "id": f"{split}-{n}", "prompt": "not this"} for n, text in enumerate(texts)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def lines_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("kind", ["files", "saved"])
def test_prompts_of_a_split(pair: DraftTargetPair, folder: Path, tmp_path: Path, monkeypatch, kind: str):
    """Of a folder of files, as the Hub has them, or of one that `save_to_disk` wrote; other columns come back."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    split = ["--split", "test[:2]"]
    if kind == "saved":
        rows = datasets.load_dataset(str(folder), split="test[:2]")
        datasets.DatasetDict({"two": rows}).save_to_disk(tmp_path / "saved")
        folder, split = tmp_path / "saved", ["--split", "two"]
    out = tmp_path / "done.jsonl"
    result = command("generate", "--dataset", folder, *split, "--column", "question", "--out", out, *GREEDY)
    assert result.exit_code == 0, result.stderr
    texts = pair.complete(list(TEXTS[:2]), do_sample=False, max_new_tokens=6)
    assert [(line["text"], line["id"]) for line in lines_of(out)] == [(texts[0], "test-0"), (texts[1], "test-1")]
    assert all(line["input_prompt"] == "not this" for line in lines_of(out))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--column", "question", "--split", "no"], "--split"),
        (["--column", "answer"], "--column"),
        (["--prompts", __file__], "both"),
    ],
)
def test_what_is_refused_of_a_dataset(folder: Path, tmp_path: Path, monkeypatch, options: list, words: str):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    result = command("generate", "--pair", "no/pair", "--dataset", folder, *options, "--out", tmp_path / "x")
    assert (result.exit_code, words in result.stderr.splitlines()[-1]) == (2, True), result.stderr


def test_fields_of_lines_come_back(pair: DraftTargetPair, tmp_path: Path):
    """As they were; what results have of their own gets another name, also when they are prompts once more."""
    lines = [
        {"prompt": TEXTS[0], "id": 7, "tags": ["a", {"b": None}], "index": 3},
        {"text": TEXTS[1], "id": "é"},
    ]
    file, out, again = tmp_path / "prompts.jsonl", tmp_path / "done.jsonl", tmp_path / "again.jsonl"
    file.write_text("\n".join([*map(json.dumps, lines), json.dumps(TEXTS[2])]))
    for source, goal in ((file, out), (out, again)):
        result = command("generate", "--prompts", source, "--out", goal, *GREEDY)
        assert result.exit_code == 0, result.stderr
    first, second, third = lines_of(out)
    texts = pair.complete(list(TEXTS), do_sample=False, max_new_tokens=6)
    assert [line["text"] for line in (first, second, third)] == texts
    assert (first["id"], first["tags"], first["input_index"], first["index"]) == (7, ["a", {"b": None}], 3, 0)
    assert (second["id"], third.keys()) == ("é", {"index", "prompt_hash", "text", "finish_reason"})
    twice = lines_of(again)[0]
    assert (twice["id"], twice["input_index"], twice["input_input_index"]) == (7, 0, 3)
    assert pair.complete([{"prompt": TEXTS[0], "id": 1}], do_sample=False, max_new_tokens=6) == texts[:1]


def test_a_run_ends_with_acceptance_and_speed(pair: DraftTargetPair, texts: str, tmp_path: Path):
    """Of what it did itself: a run that finds all done says nothing of it."""
    first, second = (command("generate", "--prompts", texts, "--out", tmp_path / "a", *GREEDY) for _ in range(2))
    assert first.exit_code == 0, first.stderr
    assert f"{6 * len(TEXTS)} tokens in " in first.stderr
    assert " tokens/s, α " in first.stderr
    assert "tokens/s" not in second.stderr
    documents = [
        json.loads(command("generate", "--prompts", texts, "--out", tmp_path / "b", *GREEDY, "--json").stdout)
        for _ in range(2)
    ]
    assert documents[0]["report"]["emitted"] == 6 * len(TEXTS)
    assert documents[1]["report"] is None
