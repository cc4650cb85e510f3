"""The commands with a pair whose draft has another tokenizer, and with its models by name."""

from pathlib import Path

import pytest
import torch
from command import command
from other_tokens import PROMPTS, draft_of, pair_of, target_of, texts, tokenizer_of
from transformers import AutoModelForCausalLM

from hf_specx import DraftTargetPair
from hf_specx.hub.pair_config import PairConfig


KIND, OTHER = "byte-level", "byte-level, other merges"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pairs") / "my-pair"
    pair_of(KIND, OTHER).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of the target, and of a draft with another tokenizer."""
    root = tmp_path_factory.mktemp("models")
    parts = {"target": (target_of(KIND), KIND), "other": (draft_of(KIND, OTHER), OTHER)}
    for name, (model, kind) in parts.items():
        model.save_pretrained(root / name)
        tokenizer_of(kind).save_pretrained(root / name)
    return {name: str(root / name) for name in parts}


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(text for text in PROMPTS if "\n" not in text))
    return str(file)


def output(*arguments: object) -> str:
    result = command(*arguments, COLUMNS="200")
    assert result.exit_code == 0, result.stdout + result.stderr
    return result.stdout


def test_tune_saves_both_tokenizers(models: dict[str, str], prompts: str, tmp_path: Path):
    quick = ["--batch", "1", "--max-new-tokens", "6", "--repeats", "1", "--file", prompts]
    output("tune", models["target"], models["other"], *quick, "--out", tmp_path / "tuned")
    pair = DraftTargetPair.from_pretrained(tmp_path / "tuned")
    assert pair.draft_tokenizer.get_vocab() == tokenizer_of(OTHER).get_vocab()
    assert 0.9 < pair.config.draft_tokenizer.overlap < 1


def test_card_export_and_publish(folder: str, tmp_path: Path):
    assert '"use_heterogeneous_vocab": true' in output("export", "vllm", folder)
    told = output("card", folder)
    own = PairConfig.from_file(f"{folder}/specx_config.json").draft_tokenizer
    size = len(tokenizer_of(OTHER))
    assert f"the draft has a tokenizer of its own with {size}, among them {own.overlap:.0%} of the target's" in told
    assert "serves other targets with any tokenizer" in told
    out = tmp_path / "published"
    output("publish", folder, "--folder", out)
    assert (out / "draft" / "tokenizer.json").is_file()
    model, settings = AutoModelForCausalLM.from_pretrained(out), {"do_sample": True, "top_k": 0, "max_new_tokens": 12}
    given = texts(KIND, 4) | settings | {"pad_token_id": 1}
    found = []
    for options in ({}, {"custom_generate": str(out), "trust_remote_code": True, "verification": "coupled"}):
        torch.manual_seed(1)
        found.append(model.generate(**given, **options, **({"return_dict_in_generate": True} if options else {})))
    plain, ours = found
    assert torch.equal(ours.sequences, plain)
    assert ours.speculation_report.tokenizer_match["match"] == "tokens"
    assert ours.speculation_report.accepted > 0
