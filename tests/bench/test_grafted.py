"""Grafted pairs: weights in memory once, and an acceptance that one number sets."""

from dataclasses import replace

import pytest
import torch

from hf_specx import SpeculativeDecoding
from hf_specx.bench import grafted
from hf_specx.bench.grafted import graft
from hf_specx.bench.recipes import RECIPES, Recipe


TINY = Recipe(64, 96, 6, 2, heads=4, kv_heads=1, vocab=256, epsilon=0.1, positions=256)


def storages(model):
    return {weight.untyped_storage().data_ptr() for weight in model.parameters()}


def test_the_draft_is_the_targets_first_layers():
    made = graft(TINY)
    assert storages(made.draft) < storages(made.target)
    assert (len(made.target.model.layers), len(made.draft.model.layers)) == (6, 2)
    assert (made.target.config.num_hidden_layers, made.draft.config.num_hidden_layers) == (6, 2)
    ids = torch.arange(1, 9)[None]
    of_two = made.target(ids, output_hidden_states=True).hidden_states[2]
    assert torch.equal(
        made.draft(ids, output_hidden_states=True).hidden_states[1],
        made.target.model.layers[0](
            made.target.model.embed_tokens(ids),
            position_embeddings=made.target.model.rotary_emb(of_two, torch.arange(8)[None]),
        ),
    )


def test_untied_weights_are_shared_as_well():
    made = graft(replace(TINY, tied=False))
    assert made.draft.lm_head.weight is made.target.lm_head.weight
    assert made.draft.lm_head.weight is not made.draft.model.embed_tokens.weight


def test_acceptance_falls_with_epsilon():
    found = [graft(replace(TINY, epsilon=epsilon)).alpha for epsilon in (0.0, 0.02, 0.1, 0.5, 1.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(1, abs=1e-5)
    assert found[-1] < 0.6


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_epsilon_is_found(alpha):
    made = graft(replace(TINY, epsilon=None, alpha=alpha))
    assert made.alpha == pytest.approx(alpha, abs=grafted.TOLERANCE)
    again = graft(replace(TINY, epsilon=made.epsilon))
    assert again.alpha == pytest.approx(made.alpha, abs=1e-3)  # the same weights


def test_a_call_accepts_as_often_as_the_recipe_says():
    """Over more than 500 judged positions the standard error of α is about 0.01."""
    made = graft(RECIPES["30M"])  # much smaller ones get stuck in loops, where both agree
    strategy = SpeculativeDecoding(made.draft, num_draft_tokens=4)
    torch.manual_seed(0)
    ids = torch.randint(1, 8192, (8, 16))
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 80, "custom_generate": strategy}
    made.target.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert strategy.report.judged > 500
    assert strategy.report.alpha == pytest.approx(made.alpha, abs=0.05)


def test_unrelated_drafts_are_of_little_use():
    made = graft(replace(TINY, unrelated=True))
    assert not storages(made.draft) & storages(made.target)
    assert made.epsilon is None
    assert made.alpha < 0.2


def test_seeds():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = graft(TINY).target, graft(TINY).target, graft(replace(TINY, seed=1)).target
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_precision_and_groups():
    made = graft(TINY, torch.bfloat16)
    assert made.target.dtype == made.draft.dtype == torch.bfloat16
    for model in (made.target, made.draft):
        assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (4, 1)


@pytest.mark.parametrize("name", ["30M", "30M-gqa", "30M-low", "30M-deep"])
def test_small_presets_have_the_acceptance_that_they_name(name):
    made = graft(RECIPES[name])
    assert made.alpha == pytest.approx(RECIPES[name].alpha, abs=0.02)


def test_presets_have_the_sizes_that_they_name():
    sizes = {"30M": (29.7, 6.7), "163M": (162.0, 20.5), "1B": (1235.8, 384.3), "7B": (7248.0, 704.7)}
    for name, expected in sizes.items():
        recipe = RECIPES[name]
        with torch.device("meta"):
            found = [
                grafted.AutoModelForCausalLM.from_config(grafted._config(recipe, layers)).num_parameters() / 1e6
                for layers in (recipe.layers, recipe.draft_layers)
            ]
        assert found == pytest.approx(expected, rel=0.01), name
