"""The joint distribution of the first tokens: drawn through `generate`, enumerated exactly, and compared."""

import copy
from collections.abc import Callable
from functools import cache

import torch
from tiny import tiny
from transformers import PreTrainedModel
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessorList

from hf_specx import SpeculativeDecoding


VOCAB_SIZE = 5
PROMPT = torch.tensor([[1, 2, 1]])
END, PAD = 3, 4
DEPTH = 4  # tokens enumerated: the first comes from the prompt's forward, the others from rounds
NEW_TOKENS = 5  # so that the first round has all its three candidates, and a second one begins in each row
NUM_DRAFT_TOKENS = 3
LARGE = {"batches": 40, "rows": 1024}
ENOUGH = {"batches": 12, "rows": 1024}  # for wrong variants to be rejected at 1e-8
SETTINGS = {
    "temperature": ({"temperature": 0.6}, [logits_process.TemperatureLogitsWarper(0.6)]),
    "top-k": ({"top_k": 3}, [logits_process.TopKLogitsWarper(3)]),
    "top-p": ({"top_p": 0.8}, [logits_process.TopPLogitsWarper(0.8)]),
    "min-p": ({"min_p": 0.2}, [logits_process.MinPLogitsWarper(0.2)]),
    "repetition penalty": ({"repetition_penalty": 1.8}, [logits_process.RepetitionPenaltyLogitsProcessor(1.8)]),
    "no-repeat n-gram": ({"no_repeat_ngram_size": 2}, [logits_process.NoRepeatNGramLogitsProcessor(2)]),
}


class Tokenizer:
    """Of both models, where the draft's vocabulary is padded or lacks tokens."""

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "b": 1}


@cache
def model(seed: int, vocab_size: int) -> PreTrainedModel:
    """One of one layer."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 1, "initializer_range": 0.25, "max_position_embeddings": 32}
    return tiny("llama", seed=seed, vocab_size=vocab_size, **sizes)


def models(draft_vocab_size: int = VOCAB_SIZE) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target and a draft; a round accepts 1.16 candidates of 3 by token and 1.34 by block."""
    return model(0, VOCAB_SIZE), model(12, draft_vocab_size)


def draw(
    verification: str | None,
    batches: int,
    rows: int,
    draft_vocab_size: int = VOCAB_SIZE,
    num_draft_tokens: int | str = NUM_DRAFT_TOKENS,
    **settings,
) -> torch.Tensor:
    """`first_tokens` with a draft model."""
    draft, both = models(draft_vocab_size)[1], {"tokenizer": Tokenizer(), "draft_tokenizer": Tokenizer()}
    strategy = SpeculativeDecoding(draft, num_draft_tokens=num_draft_tokens, verification=verification, **both)
    return first_tokens(strategy, batches, rows, **settings)


def first_tokens(
    strategy: SpeculativeDecoding,
    batches: int,
    rows: int,
    seeded: bool = False,
    fresh: Callable = dict,
    target: PreTrainedModel | None = None,
    **settings,
) -> torch.Tensor:
    """Those of rows that all have the same prompt, by any strategy: [batches * rows, DEPTH].

    Args:
        seeded: whether rows have the seeds 0, 1, 2, ...
        fresh: gives what is new in each call.
    """
    target, width = target or models()[0], PROMPT.shape[1]
    prompt = PROMPT.to(target.device).expand(rows, -1)
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS, "custom_generate": strategy} | settings
    torch.manual_seed(0)
    seeds = torch.arange(batches * rows).view(batches, rows).tolist()
    texts = [target.generate(**inputs, **options, **fresh(), seeds=batch if seeded else None) for batch in seeds]
    padded = [torch.nn.functional.pad(t, (0, width + NEW_TOKENS - t.shape[1]), value=PAD) for t in texts]
    return torch.cat(padded)[:, width : width + DEPTH].cpu()


@torch.no_grad()
def exact_distribution(
    processors: list, end: int | None = None, target: PreTrainedModel | None = None
) -> torch.Tensor:
    """Of DEPTH tokens in plain sampling, by plain forwards on every text there is: [V, ..., V] float64."""
    texts = torch.cartesian_prod(*[torch.arange(VOCAB_SIZE)] * DEPTH)  # [V^DEPTH, DEPTH]
    ids = torch.cat([PROMPT.expand(len(texts), -1), texts], 1)
    logits = (target or models()[0])(ids).logits
    exact, processors = torch.ones(len(texts), dtype=torch.float64), copy.deepcopy(processors)  # some keep state
    for i, token in enumerate(texts.unbind(1)):
        seen = PROMPT.shape[1] + i
        scores = LogitsProcessorList(processors)(ids[:, :seen], logits[:, seen - 1])
        chance = scores.softmax(-1).double().gather(1, token[:, None])[:, 0]
        ended = (texts[:, :i] == end).any(1) if end is not None else torch.zeros(len(texts), dtype=torch.bool)
        exact *= torch.where(ended, (token == PAD).double(), chance)
    return exact.view([VOCAB_SIZE] * DEPTH)


def p_value(tokens: torch.Tensor, exact: torch.Tensor) -> float:
    """Of tokens [N, n] under exact [V, ..., V]; bins of expected < 5 are merged, an impossible text gives 0."""
    powers = VOCAB_SIZE ** torch.arange(tokens.shape[1] - 1, -1, -1)
    seen = (tokens * powers).sum(1).bincount(minlength=exact.numel()).double()
    expected, order = (exact.flatten() / exact.sum() * len(tokens)).sort()
    seen = seen[order]
    if seen[expected == 0].any():
        return 0.0
    few = max(int((expected < 5).sum()), int((expected.cumsum(0) < 5).sum()) + 1)
    seen, expected = (torch.cat([bins[:few].sum(0, keepdim=True), bins[few:]]) for bins in (seen, expected))
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, ((seen - expected) ** 2 / expected).sum() / 2).item()


def p_values(tokens: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Of the first three tokens, and of the three after the first one, which no draft took part in."""
    return p_value(tokens[:, :3], exact.sum(-1)), p_value(tokens[:, 1:], exact.sum(0))
