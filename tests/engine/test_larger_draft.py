"""Target and draft swapped: the text is right, and is that of the smaller model, which is said once."""

import copy
import warnings

import pytest
import torch
from accelerate import cpu_offload
from head_files import random_head, write
from other_tokens import pair_of
from tiny import prompts, tiny
from transformers import PreTrainedModel

import hf_specx
from hf_specx import DraftHead, DraftTargetPair, EarlyExitDraft, SpeculativeDecoding, SuffixDraft
from hf_specx.common.wrappers import logical_parameters


SWAPPED = "the draft .* parameters, and the target .*: the text is that of the smaller model"


def warned(call, *args, **options) -> list[str]:
    """What is said of sizes in a call."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call(*args, **options)
    return [str(each.message) for each in said if "parameters" in str(each.message)]


def decoded(target: PreTrainedModel, draft) -> list[str]:
    strategy = SpeculativeDecoding(draft, num_draft_tokens=2)
    return warned(target.generate, **prompts(2), max_new_tokens=4, custom_generate=strategy)


def test_the_larger_model_as_the_draft_is_said_once():
    small, large = tiny(), tiny(num_hidden_layers=5)
    assert decoded(large, small) == []
    (said,) = decoded(small, large)
    assert (
        f"has {large.num_parameters():,} parameters, and the target LlamaForCausalLM has {small.num_parameters():,}"
        in said
    )
    assert decoded(small, large) == []


def attached(small: PreTrainedModel, large: PreTrainedModel, **options) -> None:
    with SpeculativeDecoding(large).attached(small):
        small.generate(**options)


FORMS = {
    "function": lambda small, large, **options: hf_specx.generate(**options, model=small, assistant_model=large),
    "pair": lambda small, large, **options: DraftTargetPair(small, large).generate(**options),
    "many": lambda small, large, **options: list(
        SpeculativeDecoding(large).generate_many(small, [[1, 2]], max_new_tokens=4)
    ),
    "attached": attached,
}


@pytest.mark.parametrize("form", FORMS)
def test_in_every_form_of_a_call(form: str):
    with pytest.warns(UserWarning, match=SWAPPED):
        FORMS[form](tiny(), tiny(num_hidden_layers=5), **prompts(2), max_new_tokens=4)


def test_drafts_that_are_no_models_or_as_large(tmp_path):
    """A head may have tables of its own, and more numbers than a target of a test."""
    target = tiny(num_hidden_layers=8)
    head = DraftHead.from_pretrained(write(random_head(), tmp_path / "head"), target=target)
    for draft in (tiny(seed=1, num_hidden_layers=8), SuffixDraft(), EarlyExitDraft(2), head, [SuffixDraft(), tiny()]):
        assert decoded(target, draft) == []


def test_a_larger_draft_with_another_tokenizer():
    pair = pair_of("byte-level", "byte-level, other merges")
    larger = tiny(vocab_size=pair.draft.config.vocab_size, num_hidden_layers=9)
    other = DraftTargetPair(pair.target, larger, pair.tokenizer, draft_tokenizer=pair.draft_tokenizer)
    with pytest.warns(UserWarning, match=SWAPPED):
        other.complete(["the cat"], max_new_tokens=4)


class Packed(torch.nn.Linear):
    """A layer that holds two numbers in a byte."""

    def __init__(self, linear: torch.nn.Linear, as_buffer: bool):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        packed = torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8)
        del self.weight
        if as_buffer:
            self.register_buffer("qweight", packed)
        else:
            self.weight = torch.nn.Parameter(packed, requires_grad=False)


@pytest.mark.parametrize("tied", [True, False])
def test_numbers_count_as_what_they_stand_for(tied: bool):
    """Packed, in buffers or offloaded; tied ones once."""
    model = tiny(tie_word_embeddings=tied)
    number = model.num_parameters()
    assert logical_parameters(model) == number
    assert logical_parameters(cpu_offload(copy.deepcopy(model), torch.device("cpu"))) == number
    for as_buffer in (True, False):
        packed = copy.deepcopy(model)
        for layer in packed.model.layers:
            layer.mlp.up_proj = Packed(layer.mlp.up_proj, as_buffer)
        assert sum(weight.numel() for weight in packed.parameters()) < number
        assert logical_parameters(packed) == number


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft reads it
def test_adapters_count_beside_what_they_adapt():
    peft = pytest.importorskip("peft")
    model = tiny()
    wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["q_proj"], r=2))
    added = sum(weight.numel() for name, weight in wrapped.named_parameters() if "lora" in name)
    assert logical_parameters(wrapped.get_base_model()) == model.num_parameters() + added
