"""A draft that is the target's first layers: exact, over the target's own cache, which the last layers fill alone."""

from functools import cache
from typing import Any

import exit_cases
import pytest
import torch
from all_pairs import each_value
from enumerated import ENOUGH, VOCAB_SIZE, exact_distribution, first_tokens, p_values
from exit_cases import Fed, early_exit, run
from exit_cases import target as fresh
from tiny import prompts, tiny
from transformers import PreTrainedModel
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper
from vision import seeing

from hf_specx import EarlyExitDraft, SpeculativeDecoding
from hf_specx.common.batch import Batch
from hf_specx.drafting.early_exit import EarlyExitDrafter, find_layers
from hf_specx.models.runner import ModelRunner
from hf_specx.sampling.verifiers import RejectionVerifier


MODEL_TYPES = ("llama", "qwen3", "mistral", "gpt2", "gpt_neox")
GREEDY = {"do_sample": False, "repetition_penalty": 1.05}
SAMPLED = {"do_sample": True, "top_k": 6, "temperature": 0.7}
EXIT, CANDIDATES, LONGEST = 2, 3, exit_cases.NEW_TOKENS
NUM_TESTS = 2 * 2 * 2
target = cache(fresh)


@pytest.mark.parametrize(("model_type", "rows", "settings"), each_value(MODEL_TYPES, [1, 4, 8], [GREEDY, SAMPLED]))
def test_equals_plain_and_reads_the_prompt_once(model_type: str, rows: int, settings: dict):
    model, inputs, strategy = target(model_type), prompts(rows), early_exit()
    with Fed(model) as fed:
        output = run(model, inputs, strategy, **settings)
    assert torch.equal(output, run(model, inputs, **settings))
    report = strategy.report
    assert report.layout == "ragged"
    assert 0.3 < report.acceptance_rate < 1
    assert len(fed.last) < LONGEST
    assert fed.first[0] == fed.last[0] == inputs["input_ids"].shape[1]  # the prompt, in the target's own forward
    steps = [1] * (len(fed.first) - len(fed.last))
    assert steps
    assert sorted(fed.first) == sorted(fed.last + steps)  # all that the draft feeds is one token a candidate


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
def test_the_cache_of_the_target_serves_as_one_of_its_own(verification: str):
    """The same candidates are drafted and kept by the same layers as a draft model, which reads for itself."""
    inputs, shared = prompts(4), early_exit(verification=verification)
    layers = EarlyExitDraft(EXIT).first_layers(target())
    with_own_cache = SpeculativeDecoding(layers, num_draft_tokens=CANDIDATES, verification=verification)
    texts = [run(target(), inputs, strategy, **SAMPLED) for strategy in (shared, with_own_cache)]
    assert torch.equal(*texts)
    assert shared.report.history == with_own_cache.report.history


def test_a_step_in_a_wrong_slot_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Wrong: it writes over the token before, which the target's forward does not write again."""
    ready = EarlyExitDrafter._ready

    def shifted(drafter: EarlyExitDrafter, batch: Batch) -> ModelRunner:
        runner = ready(drafter, batch)
        runner.width -= 1
        return runner

    monkeypatch.setattr(EarlyExitDrafter, "_ready", shifted)
    assert not torch.equal(run(target(), prompts(4), early_exit(), **GREEDY), run(target(), prompts(4), **GREEDY))


@cache
def enumerable() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "max_position_embeddings": 16}
    return tiny("llama", vocab_size=VOCAB_SIZE, num_hidden_layers=2, initializer_range=0.25, **sizes)


def draw(verification: str, **settings: Any) -> torch.Tensor:
    strategy = SpeculativeDecoding(EarlyExitDraft(1), num_draft_tokens=CANDIDATES, verification=verification)
    tokens = first_tokens(strategy, **ENOUGH, target=enumerable(), **settings)
    assert 0.2 < strategy.report.acceptance_rate < 0.95
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["token", "block"])
def test_the_distribution_is_that_of_the_target(monkeypatch: pytest.MonkeyPatch, verification: str):
    """By chi-square; over all choices of seeds a right distribution fails with probability 1e-4.

    One is seen that judges candidates as if they were drawn from a flat distribution.
    """
    exact, judge = exact_distribution([], target=enumerable()), RejectionVerifier.verify
    assert min(p_values(draw(verification), exact)) > 1e-4 / NUM_TESTS
    warpers = [TemperatureLogitsWarper(0.6), TopKLogitsWarper(3)]
    warped = exact_distribution(warpers, target=enumerable())
    assert min(p_values(draw(verification, temperature=0.6, top_k=3), warped)) > 1e-4 / NUM_TESTS

    def as_flat(verifier, batch, draft, scores):
        return judge(verifier, batch, draft._replace(probs=torch.full_like(scores[:, :-1], 1 / VOCAB_SIZE)), scores)

    monkeypatch.setattr(RejectionVerifier, "verify", as_flat)
    assert min(p_values(draw(verification), exact)) < 1e-8


def test_of_the_text_where_the_eye_has_as_many_layers():
    model = seeing("llava")
    assert len(model.model.vision_tower.encoder.layers) == len(model.model.language_model.layers) == 2
    path, layers = find_layers(model)
    assert path == ["model", "language_model", "layers"]
    assert layers is model.model.language_model.layers
    with Fed(model) as fed:
        output = run(model, prompts(2), early_exit(EarlyExitDraft(1)), do_sample=False)
    assert torch.equal(output, run(model, prompts(2), do_sample=False))
    assert len(fed.first) > len(fed.last)
