"""What a round moves outside attention: new keys and values are put in their slots, and no others are copied."""

import contextlib
from unittest import mock

import pytest
import torch
from tiny import VOCAB_SIZE, near, tiny
from transformers.integrations import sdpa_attention
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import hf_specx.models.ragged
from hf_specx import SpeculativeDecoding
from hf_specx.models import layers
from hf_specx.models.runner import ModelRunner


GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}


@pytest.mark.parametrize(("heads", "remedy"), [(GROUPED, True), ({"num_key_value_heads": 4}, True), (GROUPED, False)])
def test_ragged_rows_move_the_new_tokens_alone(heads: dict, remedy: bool, monkeypatch: pytest.MonkeyPatch):
    """No cache is made anew in a round, but where it grows; keys are repeated for a group without our attention."""
    target: LlamaForCausalLM = tiny("llama", **heads)
    feed = ModelRunner.decode_tokens
    tensors = dict[int, torch.Tensor]()  # alive, so that no address is given to another
    repeats = mock.Mock(side_effect=sdpa_attention.repeat_kv)

    def counted(self: ModelRunner, *args, **options) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(sdpa_attention, "repeat_kv", repeats)
            logits = feed(self, *args, **options)
        tensors.update((x.data_ptr(), x) for layer in self.cache.layers for x in (layer.keys, layer.values))
        return logits

    monkeypatch.setattr(ModelRunner, "decode_tokens", counted)
    monkeypatch.setattr(layers, "MAX_COPIED_BYTES", 0)  # short texts of even rows are copied on a CPU
    if not remedy:
        monkeypatch.setattr(hf_specx.models.ragged, "grouped_queries", contextlib.nullcontext)
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=4, layout="ragged")
    input_ids = torch.randint(1, VOCAB_SIZE, (4, 40), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(40) >= torch.tensor([0, 17, 5, 33])[:, None]).long()
    call = {"input_ids": input_ids * mask, "attention_mask": mask, "do_sample": False, "max_new_tokens": 31}
    assert torch.equal(target.generate(**call, custom_generate=strategy), target.generate(**call))
    assert strategy.report.rounds > 6
    assert len(tensors) <= 4 * 8  # keys and values of two layers of two models, in up to four sizes
    assert any(call.args[1] > 1 for call in repeats.call_args_list) == (not remedy)
