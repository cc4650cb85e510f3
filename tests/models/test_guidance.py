"""Classifier-free guidance: the scores of stock, with one unconditional forward a round, in every layout."""

import pytest
import torch
import zoo
from all_pairs import all_pairs
from enumerated import PROMPT, draw, exact_distribution, models, p_values
from plain import assert_plain, coupled
from tiny import Forwards, prompts, tiny
from transformers.generation.logits_process import LogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor

from hf_specx.models.guidance import NOT_BY_COLUMN


NEW_TOKENS = 20
NEGATIVE = torch.tensor([[3, 9, 4], [8, 8, 1], [2, 5, 5], [7, 1, 2]])
MASK = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 1], [0, 0, 1]])
PROMPTS = {
    "none": {},
    "negative": {"negative_prompt_ids": NEGATIVE},
    "padded": {"negative_prompt_ids": NEGATIVE * MASK, "negative_prompt_attention_mask": MASK},
}


GUIDED = {"max_new_tokens": NEW_TOKENS, "guidance_scale": 1.6}
MODELS = [(model_type, "auto") for model_type in ("llama", "mistral", "gpt2", "opt", "bloom")]
MODELS += [("llama", layout) for layout in ("ragged", "padded", "packed", "lockstep")]


@pytest.mark.parametrize(("model", "do_sample", "prompt"), all_pairs(MODELS, [False, True], PROMPTS))
def test_equals_stock(model: tuple[str, str], do_sample: bool, prompt: str):
    model_type, layout = model
    target = tiny(model_type, **({"word_embed_proj_dim": 32, "ffn_dim": 48} if model_type == "opt" else {}))
    settings = {"do_sample": do_sample, "eos_token_id": [5, 6, 7]} | ({"top_k": 0} if do_sample else {})
    for noise in (0.0, 0.05):
        strategy = coupled(target, noise, layout=layout)
        assert_plain(target, strategy, **GUIDED | settings | PROMPTS[prompt])
        assert layout in ("auto", strategy.report.layout)
        assert "once, in order" not in strategy.report.layout_reason or (model_type, prompt) == ("opt", "padded")


@pytest.mark.parametrize("model_type", [*NOT_BY_COLUMN, "biogpt"])
def test_types_that_number_tokens_otherwise(model_type: str):
    target = zoo.build("causal", model_type)
    strategy = coupled(target, 0.05)
    assert_plain(target, strategy, do_sample=False, **GUIDED | PROMPTS["padded"])
    assert "once, in order" in strategy.report.layout_reason


class Guided(LogitsProcessor):
    """Guidance by definition: the unconditional text begins with the last token of the prompt."""

    def __call__(self, input_ids, scores):
        alone = models()[0](input_ids[:, PROMPT.shape[1] - 1 :]).logits[:, -1].log_softmax(-1)
        return 1.6 * (scores.log_softmax(-1) - alone) + alone


@pytest.mark.parametrize("verification", ["token", "block"])
def test_law(verification: str):
    """Against enumeration; over all seeds the right law would fail with probability 1e-4. See test_law.py."""
    tokens = draw(verification, batches=40, rows=256, guidance_scale=1.6)
    assert min(p_values(tokens, exact_distribution([Guided()]))) > 1e-4 / 4
    assert max(p_values(tokens, exact_distribution([]))) < 1e-8


def test_one_unconditional_forward_a_round():
    target = tiny()
    strategy = coupled(target, 0.0)
    with Forwards(target) as forwards:
        target.generate(**prompts(4), **GUIDED, do_sample=False, custom_generate=strategy)
    prompt, unconditional, *rounds = forwards.lengths
    assert (prompt, unconditional) == (11, 1)
    assert rounds[::2] == rounds[1::2]
    assert len(rounds) / 2 < NEW_TOKENS - 1


def test_guidance_that_we_do_not_know_is_called_in_order():
    """On another model, or with a text of an earlier call in it, it is stock's own that is called."""
    target, other = tiny(), tiny(seed=8)

    def fresh() -> dict:
        return {"logits_processor": [UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, other)]}

    assert_plain(target, coupled(target, 0.05), fresh=fresh, do_sample=False, max_new_tokens=NEW_TOKENS)
