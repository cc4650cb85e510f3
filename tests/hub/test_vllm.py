"""Handing over to vLLM: the fields and the command."""

import json
import shlex
from pathlib import Path

import pytest
from card_cases import measured

from hf_specx.hub.pair_config import ModelSource, PairConfig
from hf_specx.hub.vllm import vllm


SAMPLED = {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"}


def by_reference(**changes) -> PairConfig:
    target = ModelSource("org/target", "aaa", vocab_size=48)
    draft = ModelSource("org/draft", "bbb", vocab_size=48)
    return PairConfig(**{"target": target, "draft": draft} | changes)


def words(command: str) -> tuple[list[str], dict]:
    """The command as a shell reads it, and the JSON at its end."""
    *arguments, option, config = shlex.split(command)
    assert option == "--speculative-config"
    return arguments, json.loads(config)


def test_models_by_reference_at_their_commits():
    export = vllm(by_reference(num_draft_tokens=4), "org/pair")
    expected = {"method": "draft_model", "model": "org/draft", "revision": "bbb", "num_speculative_tokens": 4}
    assert words(export.command) == (["vllm", "serve", "org/target", "--revision", "aaa"], expected | SAMPLED)
    inside = by_reference(target=ModelSource(vocab_size=48))  # the repository itself
    arguments, speculative = words(vllm(inside, "org/pair", revision="ccc").command)
    assert (arguments[2:], speculative["revision"]) == (["org/pair", "--revision", "ccc"], "bbb")


def test_a_downloaded_folder_gives_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever a folder is called, the shell reads one word; it has no revision, and comes before a known name."""
    folder = tmp_path / 'it\'s a $(pair) "here"'
    (folder / "embedded").mkdir(parents=True)
    inside = by_reference(target=ModelSource(vocab_size=48), draft=ModelSource(subfolder="draft", vocab_size=48))
    arguments, speculative = words(vllm(inside, str(folder), revision="ccc").command)
    assert arguments == ["vllm", "serve", str(folder)]
    assert speculative["model"] == str(folder / "draft")
    assert "revision" not in speculative
    packaged = words(vllm(inside, "embedded").command)[0][2]
    assert (Path(packaged) / "specx_config.json").is_file()
    monkeypatch.chdir(folder)
    assert words(vllm(inside, "embedded").command)[0][2] == str(folder / "embedded")


def test_how_many_to_draft():
    runs = [measured(measured_speedup=1.2, num_draft_tokens=2), measured(measured_speedup=1.6, num_draft_tokens=6)]
    for recommended, expected in (("auto", 6), (3, 3)):
        config = by_reference(measurements=runs, num_draft_tokens=recommended)
        assert vllm(config, "org/pair").speculative_config["num_speculative_tokens"] == expected


@pytest.mark.parametrize(("verification", "method"), [(None, "block"), ("token", "standard"), ("coupled", "standard")])
def test_how_candidates_are_judged(verification: str | None, method: str):
    """vLLM refuses to map vocabularies and to be told how to judge, together."""
    export = vllm(by_reference(verification=verification), "org/pair")
    assert export.speculative_config["rejection_sample_method"] == method
    mapped = vllm(by_reference(draft=ModelSource("org/draft", vocab_size=40)), "org/pair").speculative_config
    assert mapped["use_heterogeneous_vocab"] is True
    assert not SAMPLED.keys() & mapped.keys()
