"""The joint law of sampled tokens, through `generate`, against exact enumeration; and wrong variants, which must fail.

Each p-value is that of a chi-square test of goodness of fit. The seeds are fixed; over all choices of them, some test
of the right law would fail with probability 1e-4.
"""

from functools import cache
from importlib import import_module

import pytest
import torch
from tiny import tiny
from transformers import PreTrainedModel
from transformers.generation import logits_process as host
from transformers.generation.logits_process import LogitsProcessorList

from hf_specx import SpeculativeDecoding
from hf_specx.sampling.rules import RejectionRule
from hf_specx.sampling.verify import Verdict, pick, verify_block, verify_token


VOCAB_SIZE = 5
PROMPT = torch.tensor([[1, 2, 1]])
END, PAD = 3, 4
DEPTH = 4  # tokens enumerated: the first comes from the prompt's forward, the others from rounds
NEW_TOKENS = 5  # so that the first round has all its three candidates, and a second one begins in each row
NUM_DRAFT_TOKENS = 3
SETTINGS = {
    "temperature": ({"temperature": 0.6}, [host.TemperatureLogitsWarper(0.6)]),
    "top-k": ({"top_k": 3}, [host.TopKLogitsWarper(3)]),
    "top-p": ({"top_p": 0.8}, [host.TopPLogitsWarper(0.8)]),
    "min-p": ({"min_p": 0.2}, [host.MinPLogitsWarper(0.2)]),
    "repetition penalty": ({"repetition_penalty": 1.8}, [host.RepetitionPenaltyLogitsProcessor(1.8)]),
    "no-repeat n-gram": ({"no_repeat_ngram_size": 2}, [host.NoRepeatNGramLogitsProcessor(2)]),
}
LARGE = {"batches": 40, "rows": 1024}
NUM_TESTS = 2 * 2 * (len(SETTINGS) + 5)


class Tokenizer:
    """Of both models, where the draft's vocabulary is padded or lacks tokens."""

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "b": 1}


@cache
def models(draft_vocab_size: int = VOCAB_SIZE) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target and a draft of one layer; a round accepts 1.16 candidates of 3 by token and 1.34 by block."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 1, "initializer_range": 0.25, "max_position_embeddings": 16}
    target = tiny("llama", seed=0, vocab_size=VOCAB_SIZE, **sizes)
    return target, tiny("llama", seed=12, vocab_size=draft_vocab_size, **sizes)


def draw(
    verification: str | None, batches: int, rows: int, draft_vocab_size: int = VOCAB_SIZE, **settings
) -> torch.Tensor:
    """The first tokens of rows that all have the same prompt: [batches * rows, DEPTH]."""
    target, draft = models(draft_vocab_size)
    both = {"tokenizer": Tokenizer(), "draft_tokenizer": Tokenizer()}
    strategy = SpeculativeDecoding(draft, num_draft_tokens=NUM_DRAFT_TOKENS, verification=verification, **both)
    prompt = PROMPT.to(target.device).expand(rows, -1)
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS, "custom_generate": strategy} | settings
    torch.manual_seed(0)
    texts = [target.generate(**inputs, **options) for _ in range(batches)]
    width = PROMPT.shape[1]
    padded = [torch.nn.functional.pad(t, (0, width + NEW_TOKENS - t.shape[1]), value=PAD) for t in texts]
    return torch.cat(padded)[:, width : width + DEPTH].cpu()


@torch.no_grad()
def exact_law(processors: list, end: int | None = None) -> torch.Tensor:
    """The law of DEPTH tokens in stock sampling, by plain forwards on every text there is: [V, ..., V] float64."""
    texts = torch.cartesian_prod(*[torch.arange(VOCAB_SIZE)] * DEPTH)  # [V^DEPTH, DEPTH]
    ids = torch.cat([PROMPT.expand(len(texts), -1), texts], 1)
    logits = models()[0](ids).logits
    law = torch.ones(len(texts), dtype=torch.float64)
    for i, token in enumerate(texts.unbind(1)):
        seen = PROMPT.shape[1] + i
        scores = LogitsProcessorList(processors)(ids[:, :seen], logits[:, seen - 1])
        chance = scores.softmax(-1).double().gather(1, token[:, None])[:, 0]
        ended = (texts[:, :i] == end).any(1) if end is not None else torch.zeros(len(texts), dtype=torch.bool)
        law *= torch.where(ended, (token == PAD).double(), chance)
    return law.view([VOCAB_SIZE] * DEPTH)


def p_value(tokens: torch.Tensor, law: torch.Tensor) -> float:
    """Of tokens [N, n] under law [V, ..., V]; bins of expected < 5 are merged, an impossible text gives 0."""
    powers = VOCAB_SIZE ** torch.arange(tokens.shape[1] - 1, -1, -1)
    seen = (tokens * powers).sum(1).bincount(minlength=law.numel()).double()
    expected, order = (law.flatten() / law.sum() * len(tokens)).sort()
    seen = seen[order]
    if seen[expected == 0].any():
        return 0.0
    few = max(int((expected < 5).sum()), int((expected.cumsum(0) < 5).sum()) + 1)
    seen, expected = (torch.cat([bins[:few].sum(0, keepdim=True), bins[few:]]) for bins in (seen, expected))
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, ((seen - expected) ** 2 / expected).sum() / 2).item()


def p_values(tokens: torch.Tensor, law: torch.Tensor) -> tuple[float, float]:
    """Of the first three tokens, and of the three after the first one, which no draft took part in."""
    return p_value(tokens[:, :3], law.sum(-1)), p_value(tokens[:, 1:], law.sum(0))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("verification", ["token", "block"])
def test_law(verification: str, settings: str):
    options, processors = SETTINGS[settings]
    tokens = draw(verification, **LARGE, **options)
    law = exact_law(processors)
    assert min(p_values(tokens, law)) > 1e-4 / NUM_TESTS
    assert max(p_values(tokens, exact_law([]))) < 1e-8  # so a setting that went unnoticed would be seen


@pytest.mark.parametrize("end", [None, END])
@pytest.mark.parametrize("verification", ["token", "block"])
def test_law_without_processors(verification: str, end: int | None):
    """With as many draws as the wrong variants below; and a row may end inside an accepted run."""
    tokens = draw(verification, **LARGE, eos_token_id=end, pad_token_id=PAD)
    assert min(p_values(tokens, exact_law([], end))) > 1e-4 / NUM_TESTS


@pytest.mark.parametrize("draft_vocab_size", [VOCAB_SIZE - 1, VOCAB_SIZE + 2])
@pytest.mark.parametrize("verification", ["token", "block"])
def test_law_with_a_draft_of_another_vocabulary_size(verification: str, draft_vocab_size: int):
    tokens = draw(verification, **LARGE, draft_vocab_size=draft_vocab_size)
    assert min(p_values(tokens, exact_law([]))) > 1e-4 / NUM_TESTS


@pytest.mark.parametrize("verification", ["token", "block"])
def test_law_where_each_row_drafts_its_own_number(verification: str):
    """Up to its first unlikely candidate; "unlikely candidates dropped" below is what must not be."""
    tokens = draw(verification, **LARGE, assistant_confidence_threshold=0.3)
    assert min(p_values(tokens, exact_law([]))) > 1e-4 / NUM_TESTS


class SharedNoise(RejectionRule):
    """The recovered token is drawn by the number that its rejected candidate was drawn by."""

    def choose(self, batch, scores, ahead, lengths):
        state = self.drafts.generators[0].get_state()
        token, probs = super().choose(batch, scores, ahead, lengths)
        again = torch.Generator().set_state(state)
        drawn = torch.rand(len(probs), generator=again, dtype=torch.float64)
        self.drawn = [*(self.drawn if ahead else []), drawn]
        return token, probs

    def judge(self, batch, draft, scores):
        right = self.verify

        def wrong(candidates, q, p, uniforms, choice, proposed):
            accepted = right(candidates, q, p, uniforms, choice, proposed).accepted
            if candidates.shape[1]:
                drawn = torch.stack([*self.drawn, choice], 1)  # [R, K + 1]
                choice = drawn[torch.arange(len(accepted)), accepted]
            return right(candidates, q, p, uniforms, choice, proposed)

        self.verify = wrong
        result = super().judge(batch, draft, scores)
        self.verify = right
        return result


class GreedyDraft(RejectionRule):
    """Candidates are the draft's argmax, and are judged as if drawn from its distribution."""

    def choose(self, batch, scores, ahead, lengths):
        return scores.argmax(-1), scores.softmax(-1)


def block_to_first_failure(candidates, q, p, uniforms, choice, proposed) -> Verdict:
    """Block verification with `break` where the paper goes on to the later indices."""
    index = torch.arange(candidates.shape[1])
    if not len(index):
        return verify_block(candidates, q, p, uniforms, choice, proposed)
    alone = [uniforms.where(index == i, 1.0) for i in index]  # no index but i can pass
    passed = [verify_block(candidates, q, p, u, choice, proposed).accepted > 0 for u in alone]
    run = torch.stack(passed, 1).cumprod(1).sum(1, keepdim=True)
    return verify_block(candidates, q, p, torch.where(index + 1 == run, 0.0, 1.0).double(), choice, proposed)


def token_without_unlikely(candidates, q, p, uniforms, choice, proposed) -> Verdict:
    """Token verification that takes an unlikely candidate, and those after it, as not drafted."""
    likely = q.gather(-1, candidates[..., None])[..., 0] > 0.15
    drafted = likely.cumprod(1).bool()
    return verify_token(candidates, q, p, uniforms, choice, drafted if proposed is None else drafted & proposed)


CONTROLS: dict[str, tuple[str, str, str, object]] = {
    "residual by the draft's noise": ("token", "sampling.rules", "RejectionRule", SharedNoise),
    "residual replaced by the target": ("token", "sampling.verify", "_draw", lambda _, p, choice: pick(p, choice)),
    "greedy draft, soft q": ("token", "sampling.rules", "RejectionRule", GreedyDraft),
    "block up to the first failure": ("block", "sampling.rules", "verify_block", block_to_first_failure),
    "unlikely candidates dropped": ("token", "sampling.rules", "verify_token", token_without_unlikely),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_wrong_variants_are_seen(monkeypatch: pytest.MonkeyPatch, control: str):
    verification, module, name, wrong = CONTROLS[control]
    monkeypatch.setattr(import_module(f"hf_specx.{module}"), name, wrong)
    assert min(p_values(draw(verification, **LARGE), exact_law([]))) < 1e-8
