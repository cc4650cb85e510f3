"""The draft that training starts from: the target's first layers as a model of its own, and LoRA."""

import copy

import pytest
import torch
from tiny import tiny
from training_cases import QUICK, models, same, silent, some_prompts, weights
from transformers import LlamaForCausalLM

from hf_specx import DraftTargetPair, EarlyExitDraft
from hf_specx.training.distill import distill
from hf_specx.training.draft import ModelDraft, draft_of_first_layers
from hf_specx.training.recipe import TrainingRecipe


TYPES: dict[str, dict] = {"llama": {}, "gpt2": {}, "gemma2": {}, "smollm3": {}, "qwen2": {"max_window_layers": 28}}
IDS = torch.tensor([[3, 9, 27, 1, 8, 5]])


@pytest.mark.parametrize("model_type", TYPES)
def test_first_layers_as_a_model_of_its_own(model_type: str, tmp_path):
    target = tiny(model_type, **TYPES[model_type])
    before, config = weights(target), copy.deepcopy(target.config.to_dict())
    draft = draft_of_first_layers(target, 1)
    assert draft.config.num_hidden_layers == 1
    wanted = EarlyExitDraft(1).first_layers(target)(IDS).logits
    torch.testing.assert_close(draft(IDS).logits, wanted)
    DraftTargetPair(copy.deepcopy(target), draft).save_pretrained(tmp_path / "pair")
    torch.testing.assert_close(DraftTargetPair.from_pretrained(tmp_path / "pair").draft(IDS).logits, wanted)
    with torch.no_grad():
        next(draft.parameters()).add_(1)
    assert same(weights(target), before)
    assert target.config.to_dict() == config


@pytest.mark.parametrize("moved", [True, False], ids=["moved", "loaded"])
def test_first_layers_in_bfloat16(tmp_path, moved: bool):
    """A model that is loaded in bfloat16 keeps its rotary frequencies in float32, one that is moved does not."""
    tiny(initializer_range=0.3).save_pretrained(tmp_path)
    target = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32 if moved else torch.bfloat16)
    target = target.to(torch.bfloat16) if moved else target
    ids = torch.arange(1, 48)[None].repeat(1, 2)
    draft = draft_of_first_layers(target, 1)
    wanted = EarlyExitDraft(1).first_layers(target)(ids).logits
    torch.testing.assert_close(draft(ids).logits, wanted, atol=0, rtol=0)
    learner = ModelDraft(target, draft, TrainingRecipe())
    back = learner.finished(learner.trained)
    torch.testing.assert_close(back(ids).logits, wanted, atol=0, rtol=0)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft reads it
def test_lora_trains_adapters_and_leaves_a_plain_model(tmp_path):
    pytest.importorskip("peft")
    target, draft = models()
    learner = ModelDraft(target, draft, TrainingRecipe(lora=4))
    names = [name for name, weight in learner.trained.named_parameters() if weight.requires_grad]
    assert names
    assert all("lora_" in name for name in names)
    result = distill(target, draft, some_prompts(), lora=4, progress=silent, **QUICK | {"learning_rate": 2e-2})
    assert result.after.value > result.before.value
    assert type(result.pair.draft) is type(draft)
    assert weights(result.pair.draft).keys() == weights(draft).keys()
    changed = [name for name, x in weights(draft).items() if not torch.equal(x, result.pair.draft.state_dict()[name])]
    assert changed
    assert not [name for name in changed if "norm" in name or "embed" in name]
    result.pair.save_pretrained(tmp_path / "pair")
    loaded = DraftTargetPair.from_pretrained(tmp_path / "pair")
    torch.testing.assert_close(loaded.draft(IDS).logits, result.pair.draft(IDS).logits)
