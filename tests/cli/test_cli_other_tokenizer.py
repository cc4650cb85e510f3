"""Commands that save a pair whose draft has another tokenizer."""

from pathlib import Path

import torch
from command import command
from other_tokens import draft_of, pair_of, target_of, tokenizer_of
from other_tokens import texts as texts_of
from transformers import AutoModelForCausalLM

from hf_specx import DraftTargetPair


KIND, OTHER = "byte-level", "byte-level, other merges"


def output(*arguments: object) -> str:
    result = command(*arguments, COLUMNS="200")
    assert result.exit_code == 0, result.stdout + result.stderr
    return result.stdout


def test_tune_saves_both_tokenizers(texts: str, tmp_path: Path):
    for name, model, kind in (("target", target_of(KIND), KIND), ("other", draft_of(KIND, OTHER), OTHER)):
        model.save_pretrained(tmp_path / name)
        tokenizer_of(kind).save_pretrained(tmp_path / name)
    quick = ["--batch-size", "1", "--max-new-tokens", "6", "--repeats", "1", "--prompts", texts]
    output("tune", tmp_path / "target", tmp_path / "other", *quick, "--out", tmp_path / "tuned")
    pair = DraftTargetPair.from_pretrained(tmp_path / "tuned")
    assert pair.draft_tokenizer.get_vocab() == tokenizer_of(OTHER).get_vocab()
    assert 0.9 < pair.config.draft_tokenizer.overlap < 1


def test_card_export_and_publish(tmp_path: Path):
    folder, out = tmp_path / "pair", tmp_path / "published"
    pair_of(KIND, OTHER).save_pretrained(folder)
    assert '"use_heterogeneous_vocab": true' in output("export", "vllm", folder)
    assert f"the draft has a tokenizer of its own with {len(tokenizer_of(OTHER))}" in output("card", folder)
    output("publish", folder, "--out", out)
    model = AutoModelForCausalLM.from_pretrained(out)
    given = texts_of(KIND, 4) | {"do_sample": True, "top_k": 0, "max_new_tokens": 12, "pad_token_id": 1}
    torch.manual_seed(1)
    plain = model.generate(**given)
    torch.manual_seed(1)
    options = {"custom_generate": str(out), "trust_remote_code": True, "verification": "coupled"}
    ours = model.generate(**given, **options, return_dict_in_generate=True)
    assert torch.equal(ours.sequences, plain)
    assert ours.speculation_report.tokenizer_match["match"] == "tokens"
    assert ours.speculation_report.accepted > 0
