"""`specx check`: what is shown, written and refused, and the exit status."""

import html
import json

import pytest
from check_cases import PROMPTS, SIZES, inject
from command import command
from tiny import near, tiny
from tiny_tokenizer import tiny_tokenizer

from hf_specx import DraftTargetPair
from hf_specx.metrics.settings import Settings


SMALL = ["--batch", "16", "--new-tokens", "8", "--samples", "32", "--num-draft-tokens", "3", "--temperature", "0.7"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "my-pair"
    target = tiny(**SIZES)
    DraftTargetPair(target, near(target, 0.3), tiny_tokenizer()).save_pretrained(path)
    return str(path)


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    return str(file)


def specx(*arguments: str):
    return command("check", *arguments, COLUMNS="200")


def test_a_check_that_passes(folder, texts, tmp_path):
    out = tmp_path / "result.json"
    result = specx(folder, *SMALL, "--file", texts, "--out", str(out))
    assert result.exit_code == 0, result.stdout + result.stderr
    found = json.loads(out.read_text())
    assert found["passed"] is True
    assert found["prompts"] == PROMPTS
    assert "_timestamp" in found
    assert [line["what"] for line in found["lines"]][:2] == [
        f"{way}, batch 16: the same tokens as plain generate" for way in ("greedy", "coupled")
    ]
    for line in found["lines"]:
        assert line["what"].split(":")[0] in result.stdout
        assert line["verdict"] == "passed"
    assert "passed: no difference to plain generate was found" in result.stdout
    assert f"wrote {out}" in result.stdout
    assert "deviation that the test finds with probability 0.9" in " ".join(result.stdout.split())


def test_a_check_that_fails(monkeypatch, folder, texts, tmp_path):
    inject(monkeypatch, "one candidate too many")
    out = tmp_path / "result.json"
    result = specx(folder, *SMALL, "--file", texts, "--verification", "greedy", "--out", str(out))
    assert result.exit_code == 1
    assert "failed: greedy, batch 16: the same tokens as plain generate" in result.stdout
    assert "not by rounding; row" in " ".join(result.stdout.split())
    assert json.loads(out.read_text())["passed"] is False


def test_options_reach_the_check(monkeypatch, folder, texts, tmp_path):
    seen = []

    def run_check(subject, advance, path, timed):
        assert not timed
        seen.append((subject.settings, subject.prompts, subject.target.dtype, path))
        raise ValueError("seen")

    monkeypatch.setattr("hf_specx.metrics.check.run_check", run_check)
    options = "--batch 2 --batch 3 --new-tokens 9 --temperature 0.5 --top-p 0.9 --top-k 7 --verification token"
    more = f"--samples 6 --num-draft-tokens 2 --level 0.01 --seed 4 --dtype bfloat16 --resume {tmp_path}/known.json"
    specx(folder, *options.split(), *more.split(), "--file", texts)
    (settings, prompts, dtype, path), *_ = seen
    assert settings.to_dict() == {
        "batch_sizes": [2, 3],
        "new_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "verifications": ["token"],
        "samples": 6,
        "num_draft_tokens": 2,
        "seed": 4,
        "level": 0.01,
        "options": {},
    }
    assert (prompts, str(dtype), path) == (PROMPTS, "torch.bfloat16", tmp_path / "known.json")
    specx()
    settings, prompts, dtype, path = seen[1]
    assert (settings, len(prompts), path) == (Settings(), 16, None)  # the embedded pair has 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "batch_sizes=[0]"),
        (["--new-tokens", "1"], "new_tokens=1 and samples=None leave nothing to compare"),
        (["--temperature", "0"], "--temperature 0.0 is not above 0"),
        (["--verification", "magic"], "give some of greedy, coupled, token, block"),
        (["--level", "2"], "level=2.0 is no chance of a false alarm"),
        (["--dtype", "int8"], "--dtype int8 is unknown"),
        (["--out", "no/such/folder.json"], "there is no folder"),
        (["--resume", "no/such/folder.json"], "there is no folder"),
        (["--report", "no/such/report.html"], "there is no folder"),
        (["--report", "FOLDER"], "is a folder; name a file in it"),
        ([], "give a list of texts; the pair has none of its own"),
        (["--file", "FILE", "--new-tokens", "1000"], "more than the 128 positions"),
    ],
)
def test_errors_are_one_line(folder, texts, tmp_path, arguments, message):
    (tmp_path / "folder.html").mkdir()
    names = {"FILE": texts, "FOLDER": tmp_path / "folder.html"}
    given = [] if not arguments or "--file" in arguments else ["--file", texts]
    result = specx(folder, *given, *(names.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_a_report(folder, texts, tmp_path):
    out, report = tmp_path / "result.json", tmp_path / "report.html"
    small = [*SMALL, "--file", texts, "--verification", "greedy", "--out", str(out)]
    result = specx(folder, *small, "--report", str(report))
    assert result.exit_code == 0, result.stderr
    assert f"wrote {report}" in result.stdout
    page, found = report.read_text(encoding="utf-8"), json.loads(out.read_text())
    for line in found["lines"]:
        assert line["what"] in page
    assert found["speed"]["times_plain"] > 0
    assert found["command"] in html.unescape(page)
    assert found["pair"] in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chat"], "--chat is for prompts of --file"),
        (["--report", "report.pdf"], "does not end in .html"),
        (["org/pair", "--resume", "FILE"], "is no interrupted check of this version"),
    ],
)
def test_refused_before_anything_is_loaded(monkeypatch, texts, arguments, message):
    monkeypatch.setattr("hf_specx.cli.loading.load_named", None)
    result = specx(*(texts if argument == "FILE" else argument for argument in arguments))
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert message in result.stderr
