"""A published pair whose draft has another tokenizer."""

from pathlib import Path

import torch
from command import command
from other_tokens import pair_of, texts, tokenizer_of
from transformers import AutoModelForCausalLM

from hf_specx.hub.pair_config import CONFIG_NAME, PairConfig


KIND, OTHER = "byte-level", "byte-level, other merges"


def test_it_decodes_as_plain_by_its_own_code(tmp_path: Path):
    folder, out = tmp_path / "pair", tmp_path / "published"
    pair_of(KIND, OTHER).save_pretrained(folder)
    result = command("publish", folder, "--out", out)
    assert result.exit_code == 0, result.output
    noted = PairConfig.from_file(out / CONFIG_NAME).draft_tokenizer
    assert noted.tokens == len(tokenizer_of(OTHER))
    assert 0.9 < noted.overlap < 1
    model = AutoModelForCausalLM.from_pretrained(out)
    given = texts(KIND, 4) | {"do_sample": True, "top_k": 0, "max_new_tokens": 12, "pad_token_id": 1}
    torch.manual_seed(1)
    plain = model.generate(**given)
    torch.manual_seed(1)
    options = {"custom_generate": str(out), "trust_remote_code": True, "verification": "coupled"}
    ours = model.generate(**given, **options, return_dict_in_generate=True)
    assert torch.equal(ours.sequences, plain)
    assert ours.speculation_report.tokenizer_match["match"] == "tokens"
    assert ours.speculation_report.accepted > 0
