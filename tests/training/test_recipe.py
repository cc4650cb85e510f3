"""Recipes: what is refused, and what transformers is told."""

import pytest
import torch
from tiny import tiny
from transformers import TrainingArguments

from hf_specx.training.draft import ModelDraft
from hf_specx.training.recipe import TrainingRecipe
from hf_specx.training.trainer import training_arguments, with_plain_arguments


def test_a_draft_on_the_cpu_is_trained_there(tmp_path, monkeypatch):
    """Also where there is an accelerator; and in its own precision."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    args = training_arguments(ModelDraft(tiny(), tiny(), TrainingRecipe()), tmp_path, 1)
    assert (args.device.type, args.bf16) == ("cpu", False)


def test_what_is_set_in_training_arguments_is_taken():
    """As from a dict; but for their folder, which `folder` replaces."""
    given = {"bf16": True, "gradient_accumulation_steps": 4, "use_cpu": True, "lr_scheduler_type": "cosine"}
    found = with_plain_arguments({"phases": 2, "training": TrainingArguments(**given, output_dir="x")})
    assert found["phases"] == 2
    assert given.items() <= TrainingRecipe(**found).training.items()


WRONG = {
    "loss='kl' is unknown; choose one of jsd, total_variation": {"loss": "kl"},
    "temperature=0 is not above 0": {"temperature": 0},
    "do_sample=False draws nothing": {"do_sample": False, "top_p": 0.9},
    "batch_size=2.5 is not an int": {"batch_size": 2.5},
    "seed=4294967296 is not an int of 0 or more, and below 2": {"seed": 2**32},
    "learn_from_prompts='yes' is neither True nor False": {"learn_from_prompts": "yes"},
    "lora=0 is no rank": {"lora": 0},
    "learning_rate='1e-3' is no number above 0": {"learning_rate": "1e-3"},
    "training=3 is neither a TrainingArguments nor a dict": {"training": 3},
    "'max_steps'.*is set by distill": {"training": TrainingArguments(max_steps=5)},
    "'fsdp'.*the draft is whole on each device": {"training": {"fsdp": "full_shard"}},
    "no argument 'phasez'; did you mean 'phases'": {"phasez": 3},
}


@pytest.mark.parametrize("told", WRONG)
def test_what_cannot_be_trained_is_refused(told: str):
    with pytest.raises((ValueError, TypeError), match=told):
        TrainingRecipe.of(with_plain_arguments(WRONG[told]))
