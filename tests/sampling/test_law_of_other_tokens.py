"""The joint distribution of sampled tokens where the draft has another tokenizer: by chi-square, with wrong variants.

As in `test_law`: fixed seeds, and over all choices of them some test of the right distribution would fail with
probability 1e-4.
"""

import copy
from functools import cache

import pytest
import torch
from all_pairs import once
from enumerated import DEPTH, NEW_TOKENS, NUM_DRAFT_TOKENS, PROMPT, exact_distribution, first_tokens, models, p_values
from tiny import tiny
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast
from transformers.generation.candidate_generator import UniversalSpeculativeDecodingGenerator
from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

from hf_specx import SpeculativeDecoding, generate
from hf_specx.bench.contenders import stock_settings
from hf_specx.drafting.vocabulary_map import VocabularyMap
from hf_specx.sampling import rules, verify
from hf_specx.sampling.rules import RejectionRule


NUM_TESTS = 2 * (2 * 3 + 2 + 1)
OF_TARGET = ("a", "b", "c", "d", "e")
OF_DRAFT = ("q", "<0x61>", "b", "a", "d", "z", "c")  # two of them mean "a", none "e"
LARGE = {"batches": 12, "rows": 1024}
CALLS = 250  # of one row, as transformers' own path takes no more
TOP_P = 0.8


@cache
def tokenizer(tokens: tuple[str, ...]) -> PreTrainedTokenizerFast:
    vocab = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made)


@cache
def draft():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 1, "initializer_range": 0.25, "max_position_embeddings": 32}
    return tiny("llama", seed=12, vocab_size=len(OF_DRAFT), **sizes)


def draw(verification: str, batches: int, rows: int, **settings) -> torch.Tensor:
    """The first tokens of rows that all have the same prompt: [batches * rows, DEPTH]."""
    both = {"tokenizer": tokenizer(OF_TARGET), "draft_tokenizer": tokenizer(OF_DRAFT)}
    strategy = SpeculativeDecoding(draft(), num_draft_tokens=NUM_DRAFT_TOKENS, verification=verification, **both)
    tokens = first_tokens(strategy, batches, rows, **settings)
    assert 0 < strategy.report.acceptance_rate < 1
    return tokens


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
def test_the_distribution_is_that_of_the_target(verification: str):
    tokens = draw(verification, **LARGE)
    assert min(p_values(tokens, exact_distribution([]))) > 1e-4 / NUM_TESTS


@pytest.mark.parametrize("verification", [pytest.param("token", marks=pytest.mark.slow), "block"])
def test_the_distribution_with_warpers(verification: str):
    tokens = draw(verification, **LARGE, temperature=0.7, top_p=TOP_P)
    law = exact_distribution([TemperatureLogitsWarper(0.7), TopPLogitsWarper(TOP_P)])
    assert min(p_values(tokens, law)) > 1e-4 / NUM_TESTS


def one_by_one(call, tokenizers: tuple[PreTrainedTokenizerFast, ...], draft_model) -> torch.Tensor:
    """The first tokens of calls of one row with the arguments of transformers: [CALLS, DEPTH]."""
    both = {"tokenizer": tokenizers[0], "assistant_tokenizer": tokenizers[1], "assistant_model": draft_model}
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS, "attention_mask": torch.ones_like(PROMPT)}
    torch.manual_seed(0)
    texts = torch.cat([call(PROMPT, **options, **both) for _ in range(CALLS)])
    return texts[:, PROMPT.shape[1] :][:, :DEPTH]


def test_the_arguments_of_transformers_one_row_at_a_time():
    target = models()[0]

    def ours(ids: torch.Tensor, **options):
        return generate(ids, model=target, num_draft_tokens=NUM_DRAFT_TOKENS, verification="token", **options)

    tokens = one_by_one(ours, (tokenizer(OF_TARGET), tokenizer(OF_DRAFT)), draft())
    assert min(p_values(tokens, exact_distribution([]))) > 1e-4 / NUM_TESTS


def test_the_path_of_transformers_is_seen(monkeypatch: pytest.MonkeyPatch):
    """The same calls by `generate` itself: it gives the probability of each common token to another one.

    It takes the tokens of a vocabulary in the order in which they are listed, and is right only if that is the order
    of their ids. The tokenizers library lists them at random; here they come in the order of the alphabet.
    It leaves its own head and embeddings in the draft and keeps them by the tokenizers, so that it gets copies of all.
    """
    vocab = PreTrainedTokenizerFast.get_vocab
    monkeypatch.setattr(PreTrainedTokenizerFast, "get_vocab", lambda of: dict(sorted(vocab(of).items())))
    target, tokenizers, draft_model = copy.deepcopy(
        (models()[0], (tokenizer(OF_TARGET), tokenizer(OF_DRAFT)), draft())
    )
    proposed = []
    get_candidates = UniversalSpeculativeDecodingGenerator.get_candidates

    def counted(generator, input_ids, **options):
        found = get_candidates(generator, input_ids, **options)
        proposed.append(found[0].shape[1] - input_ids.shape[1])
        return found

    monkeypatch.setattr(UniversalSpeculativeDecodingGenerator, "get_candidates", counted)
    with stock_settings(draft_model, NUM_DRAFT_TOKENS):
        tokens = one_by_one(target.generate, tokenizers, draft_model)
    assert sum(proposed) > CALLS
    assert min(p_values(tokens, exact_distribution([]))) < 1e-8


class Misjudging(RejectionRule):
    """Candidates are drawn as ever, and judged by another distribution, which is made of the draft's raw logits."""

    raw: torch.Tensor  # [R, V of the draft], of the last step

    def choose(self, batch, scores, ahead, lengths):
        token, _ = super().choose(batch, scores, ahead, lengths)
        return token, self.told(self.raw, scores)

    def told(self, raw: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class NotRenormalised(Misjudging):
    """Wrong: q is the draft's share of each common token among all of its own tokens."""

    def told(self, raw, scores):
        probs = raw.softmax(-1)
        return torch.stack([probs[:, 1] + probs[:, 3], *probs[:, [2, 6, 4]].unbind(1), probs[:, 1] * 0], 1)


class Overwritten(Misjudging):
    """Wrong: of two draft tokens that mean the same the last one counts."""

    def told(self, raw, scores):
        scores = scores.clone()
        scores[:, 0] = raw[:, 3]
        return scores.softmax(-1)


class RestrictedLate(Misjudging):
    """Wrong: the common tokens are picked from what top-p has left of all the draft's tokens."""

    def told(self, raw, scores):
        probs = TopPLogitsWarper(0.5)(torch.zeros(len(raw), 1, dtype=torch.int64), raw).softmax(-1)
        found = torch.stack([probs[:, 1] + probs[:, 3], *probs[:, [2, 6, 4]].unbind(1), probs[:, 1] * 0], 1)
        return found / found.sum(-1, keepdim=True).clamp(min=1e-9)


def from_common_tokens(residual: torch.Tensor, target: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """Wrong: a recovered token is one of the common tokens."""
    kept = residual.clone()
    kept[..., OF_TARGET.index("e")] = 0
    return verify.pick(torch.where(kept.sum(-1, keepdim=True) > 0, kept, target), choice)


CONTROLS: dict[str, tuple[object, str, object]] = {
    "not renormalised": (rules, "RejectionRule", NotRenormalised),
    "overwritten": (rules, "RejectionRule", Overwritten),
    "restricted after top-p": (rules, "RejectionRule", RestrictedLate),
    "residual over common tokens": (verify, "_draw", from_common_tokens),
}


@pytest.mark.parametrize(("verification", "control"), once(["token", "block"], CONTROLS))
def test_wrong_variants_are_seen(monkeypatch: pytest.MonkeyPatch, verification: str, control: str):
    logits = VocabularyMap.logits

    def noted(vocabularies, raw):
        Misjudging.raw = raw[:, -1].float()
        return logits(vocabularies, raw)

    monkeypatch.setattr(VocabularyMap, "logits", noted)
    monkeypatch.setattr(*CONTROLS[control])
    assert min(p_values(draw(verification, **LARGE), exact_distribution([]))) < 1e-8
