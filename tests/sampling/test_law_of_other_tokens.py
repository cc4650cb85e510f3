"""The joint distribution of sampled tokens where the draft has another tokenizer: by chi-square, with wrong variants.

As in `test_law`: fixed seeds, and over all choices of them some test of the right distribution would fail with
probability 1e-4.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from all_pairs import once
from enumerated import ENOUGH, NUM_DRAFT_TOKENS, exact_distribution, first_tokens, model, p_values
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast
from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

from hf_specx import SpeculativeDecoding
from hf_specx.drafting.vocabulary_map import VocabularyMap
from hf_specx.sampling import verifiers, verify
from hf_specx.sampling.verifiers import RejectionVerifier


NUM_TESTS = 2 * (3 + 2)
OF_TARGET = ("a", "b", "c", "d", "e")
OF_DRAFT = ("q", "<0x61>", "b", "a", "d", "z", "c")  # two of them mean "a", none "e"
TOP_P = 0.8


@cache
def tokenizer(tokens: tuple[str, ...]) -> PreTrainedTokenizerFast:
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def draw(verification: str, **settings) -> torch.Tensor:
    draft = model(12, len(OF_DRAFT))
    tokenizers = {"tokenizer": tokenizer(OF_TARGET), "draft_tokenizer": tokenizer(OF_DRAFT)}
    strategy = SpeculativeDecoding(draft, num_draft_tokens=NUM_DRAFT_TOKENS, verification=verification, **tokenizers)
    tokens = first_tokens(strategy, **ENOUGH, **settings)
    assert 0 < strategy.report.acceptance_rate < 1
    return tokens


WARPED = {"temperature": 0.7, "top_p": TOP_P}, [TemperatureLogitsWarper(0.7), TopPLogitsWarper(TOP_P)]


CASES = [*((verification, ({}, [])) for verification in ("token", "block", "coupled")), ("block", WARPED)]


@pytest.mark.parametrize(("verification", "settings"), [*CASES, pytest.param("token", WARPED, marks=pytest.mark.slow)])
def test_the_distribution_is_that_of_the_target(verification: str, settings: tuple[dict, list]):
    options, processors = settings
    assert min(p_values(draw(verification, **options), exact_distribution(processors))) > 1e-4 / NUM_TESTS


class Misjudging(RejectionVerifier):
    """Candidates are drawn as ever, and judged by another distribution, which is made of the draft's raw logits."""

    raw: torch.Tensor  # [R, V of the draft], of the last step
    judged_by: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def draw_candidates(self, batch, scores, ahead, lengths):
        token, _ = super().draw_candidates(batch, scores, ahead, lengths)
        return token, Misjudging.judged_by(self.raw, scores)


def of_common_tokens(probs: torch.Tensor) -> torch.Tensor:
    return torch.stack([probs[:, 1] + probs[:, 3], *probs[:, [2, 6, 4]].unbind(1), probs[:, 1] * 0], 1)


def not_renormalised(raw: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Wrong: q is the draft's share of each common token among all of its own tokens."""
    return of_common_tokens(raw.softmax(-1))


def overwritten(raw: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Wrong: of two draft tokens that mean the same the last one counts."""
    return torch.cat([raw[:, 3:4], scores[:, 1:]], 1).softmax(-1)


def restricted_late(raw: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Wrong: the common tokens are picked from what top-p has left of all the draft's tokens."""
    probs = of_common_tokens(TopPLogitsWarper(0.5)(torch.zeros(len(raw), 1, dtype=torch.int64), raw).softmax(-1))
    return probs / probs.sum(-1, keepdim=True).clamp(min=1e-9)


def from_common_tokens(residual: torch.Tensor, target: torch.Tensor, next_uniform: torch.Tensor) -> torch.Tensor:
    """Wrong: a recovered token is one of the common tokens."""
    without_others = residual.clone()
    without_others[..., OF_TARGET.index("e")] = 0
    return verify.sample_inverse_cdf(
        torch.where(without_others.sum(-1, keepdim=True) > 0, without_others, target), next_uniform
    )


JUDGED = {"not renormalised": not_renormalised, "overwritten": overwritten, "restricted after top-p": restricted_late}


@pytest.mark.parametrize(
    ("verification", "control"), once(["token", "block"], [*JUDGED, "residual over common tokens"])
)
def test_wrong_variants_are_seen(monkeypatch: pytest.MonkeyPatch, verification: str, control: str):
    logits = VocabularyMap.logits

    def noted(vocabularies, raw):
        Misjudging.raw = raw[:, -1].float()
        return logits(vocabularies, raw)

    if control in JUDGED:
        monkeypatch.setattr(VocabularyMap, "logits", noted)
        monkeypatch.setattr(Misjudging, "judged_by", JUDGED[control], raising=False)
        monkeypatch.setattr(verifiers, "RejectionVerifier", Misjudging)
    else:
        monkeypatch.setattr(verify, "_draw", from_common_tokens)
    assert min(p_values(draw(verification), exact_distribution([]))) < 1e-8
