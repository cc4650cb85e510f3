"""The command line with `--draft`: no draft model, or the better of a suffix draft and a model."""

import json
from pathlib import Path

import pytest
from command import command
from head_files import random_head, write
from tiny import near, tiny, without_layers
from tiny_tokenizer import SIZES, TEXTS, saved, tiny_tokenizer

from hf_specx import DraftTargetPair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its target goes by the last token alone, so that its greedy text goes round."""
    folder, target = tmp_path_factory.mktemp("pairs") / "pair", without_layers(tiny(vocab_size=280))
    DraftTargetPair(target, near(target, 0.1), tiny_tokenizer()).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("kind", "source"), [("suffix", "suffix"), ("exit:1", "early exit")])
def test_generate(pair: Path, kind: str, source: str):
    options = ["--pair", pair, "--no-do-sample", "--max-new-tokens", "60", "--json", "--num-draft-tokens", "4"]
    texts = []
    for draft in (kind, None):
        named = ["--draft", kind, "--repeats", "1"] if draft else []
        result = command("generate", TEXTS[0], *options, *named)
        assert result.exit_code == 0, result.stderr
        run = json.loads(result.stdout)["runs"][0]
        texts.append(run["texts"])
        assert set(run["report"]["sources"]) == {source if draft else "model"}
    assert texts[0] == texts[1]


@pytest.mark.parametrize("form", ["medusa safetensors", "medusa"])
def test_heads(tmp_path: Path, form: str):
    """A head by its folder, whatever its file is called; in a pickle it is refused with what to do."""
    target, head = saved(tmp_path / "target", tiny(**SIZES, num_hidden_layers=8), tiny_tokenizer()), tmp_path / "head"
    write(random_head("medusa", vocab=280), head, form)
    (tmp_path / "prompts").write_text("\n".join(TEXTS))
    few = ["--max-new-tokens", 6, "--repeats", 1, "--batch-size", 1]
    named = ["--target", target, "--draft", f"head:{head}", "--max-new-tokens", 6]
    generated = command("generate", TEXTS[0], *named, "--json")
    tuned = command("tune", target, head, "--prompts", tmp_path / "prompts", "--json", *few)
    for result in (generated, tuned):
        if form == "medusa":
            assert result.exit_code == 2
            assert "safetensors" in result.output
        else:
            assert result.exit_code == 0, result.stderr
