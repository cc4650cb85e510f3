"""The joint law of sampled tokens, through `generate`, against exact enumeration; and wrong variants, which must fail.

Each p-value is that of a chi-square test of goodness of fit. The seeds are fixed; over all choices of them, some test
of the right law would fail with probability 1e-4.
"""

from importlib import import_module

import pytest
import torch
from enumerated import END, PAD, VOCAB_SIZE, draw, exact_distribution, p_values
from transformers.generation import logits_process as host

from hf_specx.sampling.rules import RejectionRule
from hf_specx.sampling.verify import Verdict, pick, verify_block, verify_token


SETTINGS = {
    "temperature": ({"temperature": 0.6}, [host.TemperatureLogitsWarper(0.6)]),
    "top-k": ({"top_k": 3}, [host.TopKLogitsWarper(3)]),
    "top-p": ({"top_p": 0.8}, [host.TopPLogitsWarper(0.8)]),
    "min-p": ({"min_p": 0.2}, [host.MinPLogitsWarper(0.2)]),
    "repetition penalty": ({"repetition_penalty": 1.8}, [host.RepetitionPenaltyLogitsProcessor(1.8)]),
    "no-repeat n-gram": ({"no_repeat_ngram_size": 2}, [host.NoRepeatNGramLogitsProcessor(2)]),
}
LARGE = {"batches": 40, "rows": 1024}
NUM_TESTS = 2 * 2 * (len(SETTINGS) + 4)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("verification", ["token", "block"])
def test_law(verification: str, settings: str):
    options, processors = SETTINGS[settings]
    tokens = draw(verification, **LARGE, **options)
    law = exact_distribution(processors)
    assert min(p_values(tokens, law)) > 1e-4 / NUM_TESTS
    assert max(p_values(tokens, exact_distribution([]))) < 1e-8  # so a setting that went unnoticed would be seen


@pytest.mark.parametrize("end", [None, END])
@pytest.mark.parametrize("verification", ["token", "block"])
def test_law_without_processors(verification: str, end: int | None):
    """With more draws than the wrong variants below need; and a row may end inside an accepted run."""
    tokens = draw(verification, **LARGE, eos_token_id=end, pad_token_id=PAD)
    assert min(p_values(tokens, exact_distribution([], end))) > 1e-4 / NUM_TESTS


@pytest.mark.parametrize("draft_vocab_size", [VOCAB_SIZE - 1, VOCAB_SIZE + 2])
@pytest.mark.parametrize("verification", ["token", "block"])
def test_law_with_a_draft_of_another_vocabulary_size(verification: str, draft_vocab_size: int):
    tokens = draw(verification, **LARGE, draft_vocab_size=draft_vocab_size)
    assert min(p_values(tokens, exact_distribution([]))) > 1e-4 / NUM_TESTS


class SharedNoise(RejectionRule):
    """The recovered token is drawn by the number that its rejected candidate was drawn by."""

    def choose(self, sequences, scores, ahead):
        state = self.drafts.generators[0].get_state()
        token, probs = super().choose(sequences, scores, ahead)
        again = torch.Generator().set_state(state)
        drawn = torch.rand(len(probs), generator=again, dtype=torch.float64)
        self.drawn = [*(self.drawn if ahead else []), drawn]
        return token, probs

    def judge(self, sequences, draft, scores):
        right = self.verify

        def wrong(candidates, q, p, uniforms, choice):
            accepted = right(candidates, q, p, uniforms, choice).accepted
            if candidates.shape[1]:
                drawn = torch.stack([*self.drawn, choice], 1)  # [R, K + 1]
                choice = drawn[torch.arange(len(accepted)), accepted]
            return right(candidates, q, p, uniforms, choice)

        self.verify = wrong
        result = super().judge(sequences, draft, scores)
        self.verify = right
        return result


class GreedyDraft(RejectionRule):
    """Candidates are the draft's argmax, and are judged as if drawn from its law."""

    def choose(self, sequences, scores, ahead):
        return scores.argmax(-1), scores.softmax(-1)


def block_to_first_failure(candidates, q, p, uniforms, choice) -> Verdict:
    """Block verification with `break` where the paper goes on to the later indices."""
    index = torch.arange(candidates.shape[1])
    if not len(index):
        return verify_block(candidates, q, p, uniforms, choice)
    alone = [uniforms.where(index == i, 1.0) for i in index]  # no index but i can pass
    passed = [verify_block(candidates, q, p, u, choice).accepted > 0 for u in alone]
    run = torch.stack(passed, 1).cumprod(1).sum(1, keepdim=True)
    return verify_block(candidates, q, p, torch.where(index + 1 == run, 0.0, 1.0).double(), choice)


def token_without_unlikely(candidates, q, p, uniforms, choice) -> Verdict:
    """Token verification that takes an unlikely candidate, and those after it, as not drafted."""
    accepted, next_token, survival = verify_token(candidates, q, p, uniforms, choice)
    likely = q.gather(-1, candidates[..., None])[..., 0] > 0.15
    drafted = likely.cumprod(1).sum(1)
    cut = (drafted <= accepted) & (drafted < candidates.shape[1])
    bonus = pick(p[torch.arange(len(p)), drafted], choice)
    return Verdict(torch.minimum(accepted, drafted), torch.where(cut, bonus, next_token), survival)


CONTROLS: dict[str, tuple[str, str, str, object]] = {
    "residual by the draft's noise": ("token", "engine.prefill", "RejectionRule", SharedNoise),
    "residual replaced by the target": ("token", "sampling.verify", "_draw", lambda _, p, choice: pick(p, choice)),
    "greedy draft, soft q": ("token", "engine.prefill", "RejectionRule", GreedyDraft),
    "block up to the first failure": ("block", "sampling.rules", "verify_block", block_to_first_failure),
    "unlikely candidates dropped": ("token", "sampling.rules", "verify_token", token_without_unlikely),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_wrong_variants_are_seen(monkeypatch: pytest.MonkeyPatch, control: str):
    verification, module, name, wrong = CONTROLS[control]
    monkeypatch.setattr(import_module(f"hf_specx.{module}"), name, wrong)
    assert min(p_values(draw(verification, batches=10, rows=1024), exact_distribution([]))) < 1e-8
