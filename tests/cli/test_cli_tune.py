"""`specx tune`: what is shown, saved and refused."""

import json
import sys
from dataclasses import fields

import pytest
from command import command, saved_models
from tiny_tokenizer import TEXTS

from hf_specx import DraftTargetPair
from hf_specx.bench.study import DraftTrial
from hf_specx.cli import tune as cli_tune
from hf_specx.cli.console import Output
from hf_specx.hub.pair_config import Measurement, ModelSource, PairConfig


SIZES = {"vocab_size": 280, "eos_token_id": None, "pad_token_id": 1}
QUICK = ["--batch", "1", "--batch", "2", "--max-new-tokens", "4", "--repeats", "1"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, a draft for it and one with other tokens."""
    return saved_models(tmp_path_factory.mktemp("models"), SIZES, 0.1)


def specx(*arguments: str, input: str = "\n".join(TEXTS)):
    return command("tune", *arguments, input=input, COLUMNS="200")


def test_tables_and_json(folders, texts, tmp_path):
    out, told = tmp_path / "pair", []  # to people, and as JSON; prompts from a file, and from standard input
    saved = ["--out", str(out), "--save-prompts"]
    for more in (["--file", texts, *saved], ["--json"]):
        result = specx(folders["target"], folders["draft"], folders["stranger"], *QUICK, *more)
        assert (result.exit_code, result.stderr) == (0, "")
        told.append(result.stdout)
    shown, found = told[0], json.loads(told[1])
    assert f"saved in {out}: target inside, draft inside" in shown
    pair = DraftTargetPair.from_pretrained(out)
    assert pair.prompts == list(TEXTS)
    assert [m.batch for m in pair.config.measurements] == [1, 2]
    assert found["target"] == folders["target"]
    by_name = {draft["draft"]: draft for draft in found["drafts"]}
    assert by_name.keys() == {folders["draft"], folders["stranger"]}
    for draft in by_name.values():  # one has a tokenizer of its own, whose tokens are mapped
        assert [m["batch"] for m in draft["config"]["measurements"]] == [1, 2]
        assert draft["error"] is None
        assert all(finding["follows"][:30] in shown for finding in draft["findings"])


@pytest.mark.parametrize(("speed", "says"), [(2.0, "best: d, "), (0.5, "none is faster than plain generate here")])
def test_a_slow_draft_is_called_slow(capsys, speed, says):
    figures = dict.fromkeys(field.name for field in fields(Measurement)) | {"measured_speedup": speed}
    config = PairConfig(ModelSource(), ModelSource(), measurements=[Measurement(**figures)])
    cli_tune.show_drafts("t", [DraftTrial("d", config=config)], Output())
    assert says in capsys.readouterr().out


def test_options_reach_the_study(folders, monkeypatch):
    seen = []

    def tune(target, drafts, study, revision, draft_revisions, advance):
        seen.append((target, drafts, study, revision, draft_revisions))
        return [DraftTrial("d", error="no")]

    monkeypatch.setattr("hf_specx.bench.tune.tune", tune)
    measuring = "--batch 3 --repeats 4 --greedy --verification token --seed 5 --dtype float32"
    loading = "--token t --revision v1 --draft-revision v2 --draft-revision v3 --trust-remote-code"
    options = f"{measuring} {loading} --save-prompts".split(" ")
    monkeypatch.setattr(sys, "argv", ["/bin/specx", "tune", "T", *options])
    specx("T", "D", "E", *options)
    specx("T", "D")
    target, drafts, study, *revisions = seen[0]
    assert (target, drafts, revisions) == ("T", ["D", "E"], ["v1", ["v2", "v3"]])
    assert (study.prompts, study.batches, study.repeats, study.seed) == (list(TEXTS), [3], 4, 5)
    assert (study.options, study.verification) == ({"do_sample": False, "max_new_tokens": 128}, "token")
    assert (study.dtype, study.hub) == ("float32", {"token": "t"})
    assert study.trust_remote_code is study.keep_prompts is True
    assert study.command == f"specx tune T {measuring} {loading} --save-prompts".replace("--token t ", "")
    target, drafts, study, *revisions = seen[1]
    assert (revisions, study.batches, study.verification) == ([None, []], [1, 8], None)
    assert study.options == {"do_sample": True, "temperature": 1, "top_p": 1, "top_k": 0, "max_new_tokens": 128}
    assert (study.dtype, study.hub) == ("auto", {})
    assert study.trust_remote_code is study.keep_prompts is False


def test_a_pair_is_replaced_if_that_is_asked_for(folders, tmp_path):
    """Checks alone need no prompts; what cannot be saved is told all the same."""
    out = tmp_path / "pair"
    arguments = [folders["target"], folders["draft"], "--no-measure", "--out", str(out), "--json"]
    for more in ([], ["--overwrite"]):
        result = specx(*arguments, *more, input="")
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["target"] == folders["target"]
        assert result.stderr == f"saved in {out}: target inside, draft inside\n"
    assert specx(*arguments, input="").exit_code == 2
    config = PairConfig.from_file(out / "specx_config.json")
    assert (config.measurements, config.tokenizers.method) == ([], "content")


def test_what_was_measured_is_told_before_it_is_saved(folders, monkeypatch, tmp_path):
    def save(pair, folder, **options):
        raise OSError("no space left")

    monkeypatch.setattr(DraftTargetPair, "save_pretrained", save)
    result = specx(folders["target"], folders["draft"], "--no-measure", "--out", str(tmp_path / "pair"), "--json")
    assert (result.exit_code, result.stderr) == (2, "error: no space left\n")
    assert json.loads(result.stdout)["drafts"][0]["config"] is not None


def test_no_draft_fits(folders, tmp_path):
    out = tmp_path / "pair"
    result = specx(folders["target"], str(tmp_path), *QUICK, "--json", "--out", str(out))
    assert result.exit_code == 2
    assert "no draft can be used" in result.stderr
    assert json.loads(result.stdout)["drafts"][0]["config"] is None
    assert not out.exists()
