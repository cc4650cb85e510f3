"""Recipes: the distributions that text is drawn from, what is refused."""

from pathlib import Path

import pytest
import torch
from tiny import tiny

from hf_specx.training.distributions import losses_of, overlap, token_probs
from hf_specx.training.held_out import logits_where_written
from hf_specx.training.reading import collate
from hf_specx.training.recipe import TrainingRecipe
from hf_specx.training.texts import Text
from hf_specx.training.trainer import training_arguments


SAMPLED = ({}, {"temperature": 0.6}, {"top_p": 0.7}, {"top_k": 5}, {"temperature": 1.4, "top_p": 0.8, "top_k": 12})


@pytest.mark.parametrize("options", SAMPLED, ids=str)
def test_the_target_has_the_distribution_that_generate_draws_from(options):
    model = tiny()
    recipe = TrainingRecipe(max_new_tokens=4, **options)
    ids = torch.tensor([[3, 9, 27, 1]])
    torch.manual_seed(0)
    out = model.generate(ids, **recipe.generate_options, return_dict_in_generate=True, output_scores=True)
    with torch.no_grad():
        logits = model(out.sequences).logits[0, 3:-1]
    torch.testing.assert_close(token_probs(recipe, logits), torch.cat(out.scores).softmax(-1))


def test_greedy_text_has_one_token_each():
    logits = torch.tensor([[0.1, 2.0, 1.0], [4.0, 0.0, 1.0]])
    recipe = TrainingRecipe(do_sample=False)
    assert token_probs(recipe, logits).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert overlap(recipe, logits, logits[[1, 0]]).tolist() == [0, 0]
    assert overlap(recipe, logits, 3 * logits).tolist() == [1, 1]


def test_overlap_is_of_both_distributions_after_the_warpers():
    """Candidates are drawn after top-k too; here both models then have one token left, and the same one."""
    target, draft = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[1.0, 0.9, 0.9]])
    assert overlap(TrainingRecipe(top_k=1), target, draft).tolist() == [1.0]
    assert overlap(TrainingRecipe(), target, draft).item() < 0.8


@pytest.mark.parametrize("wider", ["target", "draft"])
def test_padded_vocabularies(wider: str):
    """Logits beyond the width of the other model count as tokens that it never has."""
    generator = torch.Generator().manual_seed(0)
    target, draft = (torch.randn(3, 6, generator=generator) for _ in range(2))
    padding = torch.full((3, 2), -30.0)
    padded = {"target": (torch.cat([target, padding], -1), draft), "draft": (target, torch.cat([draft, padding], -1))}
    recipe = TrainingRecipe(loss="total_variation")
    torch.testing.assert_close(overlap(recipe, *padded[wider]), overlap(recipe, target, draft))
    torch.testing.assert_close(losses_of(recipe, *padded[wider]), losses_of(recipe, target, draft))


def test_losses_are_at_the_temperature_of_later():
    target, draft = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(0))
    hot = losses_of(TrainingRecipe(loss="forward_kl", temperature=2.0), target, draft)
    torch.testing.assert_close(hot, losses_of(TrainingRecipe(loss="forward_kl"), target / 2, draft / 2))


@pytest.mark.parametrize("keeps", [True, False], ids=["a head that can read less", "one that cannot"])
def test_only_what_the_target_wrote_counts(keeps: bool):
    model, widths = tiny(), []
    if not keeps:
        whole = model.forward
        model.forward = lambda input_ids, attention_mask=None, use_cache=False: whole(input_ids, attention_mask)
    model.lm_head.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    batch = collate([Text([5, 6], [7, 8, 9]), Text([1, 2, 3, 4], [5])])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]]
    assert batch["labels"].tolist() == [[-100, -100, 7, 8, 9], [-100, -100, -100, -100, 5]]
    with torch.no_grad():
        found = logits_where_written(model, torch.device("cpu"), batch)
        assert widths == [4 if keeps else 5]  # not the first prompt's first token, which has no label next
        alone = [model(torch.tensor([row])).logits[0] for row in ([5, 6, 7, 8, 9], [1, 2, 3, 4, 5])]
    torch.testing.assert_close(found, torch.cat([alone[0][1:4], alone[1][3:4]]))


def test_a_draft_on_the_cpu_is_trained_there(tmp_path, monkeypatch):
    """Also where there is an accelerator; and in its own precision."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    args = training_arguments(TrainingRecipe(), tmp_path, 1e-3, 1, torch.device("cpu"))
    assert (args.device.type, args.bf16) == ("cpu", False)


WRONG = {
    "loss='kl' is unknown; choose one of forward_kl, reverse_kl": {"loss": "kl"},
    "temperature=0 is not above 0": {"temperature": 0},
    "do_sample=False draws nothing": {"do_sample": False, "top_p": 0.9},
    "phases=0 is not an int of 1 or more": {"phases": 0},
    "batch_size=2.5 is not an int": {"batch_size": 2.5},
    "seed=4294967296 is not an int of 0 or more, and below 2": {"seed": 2**32},
    "'eval_on_start'.*is set by distill": {"training": {"eval_on_start": True}},
    "learn_from_prompts='yes' is neither True nor False": {"learn_from_prompts": "yes"},
    "seed=-1 is not an int of 0 or more": {"seed": -1},
    "lora=0 is no rank": {"lora": 0},
    "learning_rate=0.0 is no number above 0": {"learning_rate": 0.0},
    "learning_rate='1e-3' is no number above 0": {"learning_rate": "1e-3"},
    "'save_only_model'.*is set by distill": {"training": {"save_only_model": True}},
    "'logging_dir'.* cannot be written as JSON": {"training": {"logging_dir": Path("x")}},
    "loss='reverse_kl' is infinite where": {"loss": "reverse_kl", "top_p": 0.9},
    "'max_steps'.*is set by distill": {"training": {"max_steps": 5}},
    "'fsdp'.*the draft is whole on each device, since every process writes texts": {
        "training": {"fsdp": "full_shard"}
    },
    "phasez= is no option of distill; did you mean 'phases'": {"phasez": 3},
}


@pytest.mark.parametrize("told", WRONG)
def test_what_cannot_be_trained_is_refused(told: str):
    with pytest.raises(ValueError, match=told):
        TrainingRecipe.of(WRONG[told])
