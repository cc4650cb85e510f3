"""The command line with `--draft`: no draft model, or the better of a suffix draft and a model."""

import json
from pathlib import Path

import pytest
import torch
from command import command
from tiny import tiny
from tiny_tokenizer import TEXTS

from hf_specx import DraftTargetPair
from hf_specx.hub.pair_config import CONFIG_NAME, PairConfig


@pytest.fixture
def pair(loaded) -> DraftTargetPair:
    """Its target goes by the last token alone, so that its greedy text goes round."""
    target = tiny(vocab_size=280)
    for layer in target.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return loaded(target)[0]


KINDS = [("suffix", {"suffix"}), ("both", {"suffix", "model"}), ("exit:1", {"early exit"})]


@pytest.mark.parametrize(("kind", "sources"), KINDS)
def test_generate(pair: DraftTargetPair, kind: str, sources: set):
    options = ["--greedy", "--max-new-tokens", "60", "--json", "--num-draft-tokens", "4"]
    texts = []
    for draft in (["--draft", kind], []):
        result = command("generate", TEXTS[0], *options, *draft, *(["--compare", "--repeats", "1"] if draft else []))
        assert result.exit_code == 0, result.stderr
        run = json.loads(result.stdout)["runs"][0]
        texts.append(run["texts"])
        found = set(run["report"]["sources"])
        assert found <= (sources if draft else {"model"})
        assert found
    assert texts[0] == texts[1]
    assert pair.config.num_draft_tokens == 3  # its own is as it was


def test_publish(pair: DraftTargetPair, tmp_path: Path):
    result = command("publish", "org/pair", "--draft", "exit:1", "--folder", tmp_path / "made")
    assert result.exit_code == 0, result.stderr
    assert PairConfig.from_file(tmp_path / "made" / CONFIG_NAME).early_exit is not None
    assert not (tmp_path / "made" / "draft").exists()
