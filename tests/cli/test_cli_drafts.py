"""The command line with `--draft`: no draft model, or the better of a suffix draft and a model."""

import json
from pathlib import Path

import pytest
import torch
from command import command
from head_files import random_head, write
from safetensors.torch import save_file
from tiny import tiny
from tiny_tokenizer import TEXTS, tiny_tokenizer

from hf_specx import DraftTargetPair


@pytest.fixture
def pair(loaded) -> DraftTargetPair:
    """Its target goes by the last token alone, so that its greedy text goes round."""
    target = tiny(vocab_size=280)
    for layer in target.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return loaded(target)[0]


KINDS = [("suffix", {"suffix"}), ("exit:1", {"early exit"}), ("layers:1", {"early exit"})]


@pytest.mark.parametrize(("kind", "sources"), KINDS)
def test_generate(pair: DraftTargetPair, kind: str, sources: set):
    options = ["--no-do-sample", "--max-new-tokens", "60", "--json", "--num-draft-tokens", "4"]
    texts = []
    for draft in (kind, None):
        named = ["--pair", "embedded", "--draft", kind, "--repeats", "1"] if draft else []
        result = command("generate", TEXTS[0], *options, *named)
        assert result.exit_code == 0, result.stderr
        run = json.loads(result.stdout)["runs"][0]
        texts.append(run["texts"])
        found = set(run["report"]["sources"])
        assert found <= (sources if draft else {"model"})
        assert found
    assert texts[0] == texts[1]
    assert pair.config.num_draft_tokens == 3  # its own is as it was


def test_an_acceptance_of_no_candidates_is_not_a_number(pair: DraftTargetPair):
    named = ["--pair", "embedded", "--draft", "suffix", "--max-new-tokens", 2, "--repeats", 1]
    said = command("generate", TEXTS[0], *named).stderr
    assert "alpha -, acceptance rate -, " in said
    assert "alpha -, 1.00 tokens a row and round" in said


HEADS = {  # forms, of which that of SafeAILab says 40 layers for one
    "speculators": {},
    "safeailab": {"theta": 10000.0},
    "medusa safetensors": {"kind": "medusa"},
    "medusa": {"kind": "medusa"},
}


@pytest.mark.parametrize("form", HEADS)
def test_heads(tmp_path: Path, form: str):
    """A head by its folder, whatever its file is called; in a pickle it is refused with what to do."""
    target, head = tmp_path / "target", tmp_path / "head"
    tokenizer = tiny_tokenizer()
    tiny(vocab_size=len(tokenizer), num_hidden_layers=8).save_pretrained(target)
    tokenizer.save_pretrained(target)
    write(random_head(vocab=len(tokenizer), **HEADS[form]), head, form)
    pickled = list(head.glob("*.bin")) + list(head.glob("*.pt"))
    if form == "safeailab":
        save_file(torch.load(pickled[0], weights_only=True), head / "model.safetensors")
    (tmp_path / "prompts").write_text("\n".join(TEXTS))
    few = ["--max-new-tokens", 6, "--repeats", 1, "--batch-size", 1]
    named = ["--target", target, "--draft", f"head:{head}", "--max-new-tokens", 6]
    generated = command("generate", TEXTS[0], *named, "--json")
    tuned = command("tune", target, head, "--prompts", tmp_path / "prompts", "--json", *few)
    for result in (generated, tuned):
        if form == "medusa":
            assert result.exit_code == 2
            assert "save_pretrained() writes safetensors" in " ".join(result.stderr.split())
        else:
            assert result.exit_code == 0, result.stderr
