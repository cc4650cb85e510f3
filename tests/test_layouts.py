"""The ragged layout on every architecture that it claims, and what it refuses."""

import pytest
import torch
from tiny import Forwards, near, prompts, tiny
from transformers import AutoConfig, AutoModelForCausalLM

from hf_specx import SpeculativeDecoding
from hf_specx.layouts import RAGGED_MODEL_TYPES, choose_layout


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("model_type", sorted(RAGGED_MODEL_TYPES))
def test_every_claimed_architecture_equals_stock(model_type: str, do_sample: bool):
    target = tiny(model_type)
    inputs, settings = prompts(4), {"do_sample": do_sample, "top_k": 0, "max_new_tokens": 31}
    torch.manual_seed(3)
    expected = target.generate(**inputs, **settings)
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=4, verification="coupled")
    torch.manual_seed(3)
    with Forwards(target) as forwards:
        output = target.generate(**inputs, **settings, custom_generate=strategy)
    assert torch.equal(output, expected)
    assert 1 + 6 <= len(forwards.lengths) < 31
    assert max(forwards.lengths[1:]) == 5


def test_the_choice_and_its_reason_are_reported():
    assert choose_layout(tiny("llama")) == (
        "ragged",
        "chosen: llama takes positions and a 4D mask by position under sdpa",
    )
    assert choose_layout(tiny("llama"), "ragged")[1].startswith("asked for")


def test_unknown_architectures_and_attention_are_refused():
    bloom = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", vocab_size=48, hidden_size=32, n_layer=1))
    with pytest.raises(ValueError, match="model type 'bloom'"):
        choose_layout(bloom)
    llama = tiny("llama")
    llama.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation='flash_attention_2'"):
        choose_layout(llama)


def test_rows_do_not_see_each_other():
    """A row's text is the same whatever its batch mates are; float64 keeps the rounding out."""
    target = tiny("llama").double()
    draft = near(target, 0.05)
    inputs = prompts(4)
    settings = {"do_sample": False, "max_new_tokens": 31}
    together = target.generate(**inputs, **settings, custom_generate=SpeculativeDecoding(draft, num_draft_tokens=4))
    for row in range(4):
        length = int(inputs["attention_mask"][row].sum())
        alone = target.generate(
            inputs["input_ids"][row : row + 1, -length:],
            attention_mask=torch.ones(1, length, dtype=torch.int64),
            **settings,
            custom_generate=SpeculativeDecoding(draft, num_draft_tokens=4),
        )
        assert torch.equal(alone[0, length:], together[row, 11:])
