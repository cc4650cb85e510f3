"""`specx tune`: what is shown, saved and refused."""

import json
import re
import shutil
import sys

import pytest
from card_cases import measured
from command import command
from tiny_tokenizer import TEXTS, saved_models

from hf_specx import DraftTargetPair
from hf_specx.bench import tune
from hf_specx.bench.tune_settings import DraftTrial, TuneSettings
from hf_specx.cli.console import Output
from hf_specx.cli.tune import show_drafts
from hf_specx.hub.pair_config import ModelSource, PairConfig


QUICK = ["--batch-size", "1", "--batch-size", "2", "--max-new-tokens", "4", "--repeats", "3", "--seconds", "0"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return saved_models(tmp_path_factory.mktemp("models"), 0.1, eos_token_id=None)


def specx(*arguments: str, input: str = "\n".join(TEXTS)):
    return command("tune", *arguments, input=input, COLUMNS="200")


def test_tables_and_json(folders, texts, tmp_path):
    out, results = tmp_path / "pair", []  # for people, and as JSON; prompts from a file, and from standard input
    for more in (["--prompts", texts, "--out", str(out)], ["--json"]):
        result = specx(folders["target"], folders["draft"], folders["stranger"], *QUICK, *more)
        assert (result.exit_code, "do_sample=False, max_new_tokens=4\n" in result.stderr) == (0, True)
        results.append(result)
    shown, document = results[0].stdout, json.loads(results[1].stdout)
    assert f"saved in {out}: target inside, draft inside" in results[0].stderr
    pair = DraftTargetPair.from_pretrained(out)
    assert [m.batch for m in pair.config.measurements] == [1, 2]
    assert document["target"] == folders["target"]
    by_name = {draft["draft"]: draft for draft in document["drafts"]}
    assert by_name.keys() == {folders["draft"], folders["stranger"]}
    for draft in by_name.values():  # one has a tokenizer of its own, whose tokens are mapped
        assert [m["batch"] for m in draft["config"]["measurements"]] == [1, 2]
        assert draft["error"] is None
        assert all(finding["follows"][:30] in shown for finding in draft["findings"])


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ((1.2, 1.4), "best: d"),
        ((0.9, 1.7), "not clear"),
        ((0.7, 0.9), "none is"),
    ],
)
def test_the_last_lines_say_what_follows(ends, first):
    """And each measurement says its interval and its turns, in one line."""
    measurement = measured(batch=1, num_draft_tokens=5, measured_speedup=1.3, turns=24, plain_tokens_per_second=50.0)
    measurement.interval_low, measurement.interval_high = ends
    config = PairConfig(ModelSource(), ModelSource(), measurements=[measurement])
    console = Output(record=True, width=200, quiet=False)
    show_drafts("t", [DraftTrial("d", config=config)], console)
    text = console.export_text()
    legend = text.rstrip().split("\n\n")[-1]
    assert f"({ends[0]:.2f} to {ends[1]:.2f}, 24 turns, plain 50.0 tokens/s)" in text
    last = text.rstrip().splitlines()[-2 if first == "none is" else -1]
    assert last.startswith(first)
    assert ("num_draft_tokens='auto'" in text) == (first == "none is")
    for heading in ("speed-up", "limit", "Theorem 3.8", "interval"):
        assert f"{heading}: " in legend
    assert not re.search("predicted|times plain", text)


@pytest.mark.parametrize(("ends", "alike"), [((1.25, 1.6), True), ((1.01, 1.29), False), ((0.9, 1.6), False)])
def test_drafts_that_are_as_fast_are_named_beside_the_best(ends, alike):
    """So that another run, in which noise puts one of them first, says the same."""
    trials = []
    for name, interval in {"d": (1.3, 1.5), "e": ends}.items():
        measurement = measured(batch=1, num_draft_tokens=5, measured_speedup=1.4, turns=24)
        measurement.interval_low, measurement.interval_high = interval
        trials.append(DraftTrial(name, config=PairConfig(ModelSource(), ModelSource(), measurements=[measurement])))
    console = Output(record=True, width=200, quiet=False)
    show_drafts("t", trials, console)
    assert ("as fast, so far as these turns tell: e (1.40)" in console.export_text()) == alike


def test_options_reach_the_study(folders, monkeypatch):
    seen = []

    def tune(target, drafts, settings, advance):
        seen.append((target, drafts, settings))
        return [DraftTrial("d", error="no")]

    monkeypatch.setattr("hf_specx.bench.tune.tune", tune)
    options = "--batch-size 3 --repeats 4 --seconds 7 --no-do-sample --dtype float32 --trust-remote-code"
    monkeypatch.setattr(sys, "argv", ["/bin/specx", "tune", "T", *options.split()])
    specx("T@v1", "D@v2", "suffix", "layers:2", "E@v3", *options.split())
    specx("T", "D")
    target, drafts, settings = seen[0]
    assert (target, drafts) == ("T@v1", ["D@v2", "suffix", "layers:2", "E@v3"])
    assert (settings.prompts, settings.batches, settings.repeats, settings.seconds) == (list(TEXTS), [3], 4, 7.0)
    assert (settings.options, settings.dtype) == ({"do_sample": False}, "float32")
    assert settings.trust_remote_code is True
    assert settings.command == f"specx tune T {options}"
    target, drafts, settings = seen[1]
    assert (settings.batches, settings.options, settings.dtype) == ([1, 8], {}, "auto")
    assert settings.trust_remote_code is False


def test_chats(folders, texts, tmp_path, monkeypatch):
    """Messages and texts, by the target's template."""
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    chatty = tmp_path / "chatty"
    shutil.copytree(folders["target"], chatty)
    (chatty / "chat_template.jinja").write_text(template)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"the cat"\n{"messages": [{"role": "user", "content": "a dog"}]}\n')
    seen, read = [], tune.read_prompts
    monkeypatch.setattr(tune, "read_prompts", lambda *args: seen.append(args[2].prompts) or read(*args))
    result = specx(str(chatty), "suffix", "--prompts", str(prompts), "--chat", *QUICK)
    assert (result.exit_code, seen) == (0, [["<the cat>", "<a dog>"]])
    result = specx(folders["target"], "suffix", "--prompts", texts, "--chat", *QUICK)
    assert (result.exit_code, "--chat" in result.stderr) == (2, True)


def test_a_pair_is_replaced_if_that_is_asked_for(folders, tmp_path):
    """Checks alone need no prompts."""
    out, methods = tmp_path / "pair", []
    options = ["--repeats", "0", "--out", str(out), "--json"]
    for draft, more in (("stranger", []), ("draft", ["--overwrite"])):  # the first has a tokenizer of its own
        result = specx(folders["target"], folders[draft], *options, *more, input="")
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["target"] == folders["target"]
        assert result.stderr == f"saved in {out}: target inside, draft inside\n"
        config = PairConfig.from_file(out / "specx_config.json")
        assert not config.measurements
        methods.append(config.tokenizers.method)
    assert methods == ["own", "content"]
    assert specx(folders["target"], folders["draft"], *options, input="").exit_code == 2


def test_what_was_measured_is_printed_before_it_is_saved(folders, monkeypatch, tmp_path):
    def save(pair, folder, **options):
        raise OSError("no space left")

    monkeypatch.setattr(DraftTargetPair, "save_pretrained", save)
    result = specx(folders["target"], folders["draft"], "--repeats", "0", "--out", str(tmp_path / "pair"), "--json")
    assert (result.exit_code, result.stderr) == (2, "error: no space left\n")
    assert json.loads(result.stdout)["drafts"][0]["config"] is not None


def test_no_draft_fits(folders, tmp_path):
    out = tmp_path / "pair"
    result = specx(folders["target"], str(tmp_path), *QUICK, "--json", "--out", str(out))
    assert result.exit_code == 2
    assert "no draft" in result.stderr
    assert result.stderr.count(str(tmp_path)) == 0
    assert json.loads(result.stdout)["drafts"][0]["config"] is None
    assert not out.exists()


def test_the_pair_in_the_package_by_its_name(tmp_path, monkeypatch):
    """As a target, and its parts as drafts; a folder of that name wins."""
    monkeypatch.chdir(tmp_path)
    drafts = ("embedded/head", "embedded/draft", "exit:2")
    result = specx("embedded", *drafts, "--repeats", "0", "--json", input="")
    assert result.exit_code == 0, result.stderr
    assert {draft["draft"]: draft["error"] for draft in json.loads(result.stdout)["drafts"]} == dict.fromkeys(drafts)
    result = specx("embedded", "embedded", "--repeats", "0", input="")
    assert "embedded/draft" in result.stdout
    assert tune.drafts_to_try("embedded", [], TuneSettings()) == ["suffix", *(f"exit:{n}" for n in (1, 2, 3, 4, 5, 8))]
    (tmp_path / "embedded").mkdir()
    assert "config.json" in specx("embedded", "exit:2", "--repeats", "0", input="").stderr
