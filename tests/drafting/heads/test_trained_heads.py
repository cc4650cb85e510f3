"""A head that was trained a little is accepted more as it is than in any wrong variant.

Its target has learned texts whose first token, the topic, says by which of three permutations each word follows the
one before: what comes next follows from the last token and the target's states, and from neither alone.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from alignment import begun_early, loaded, told_early, unshifted
from head_files import random_head
from tiny import tiny
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from transformers import PreTrainedModel

from hf_specx import DraftHead, Request, SpeculativeDecoding, distill
from hf_specx.drafting.heads.block import Block, MarkovHead
from hf_specx.drafting.heads.driver import HeadDrafter
from hf_specx.drafting.heads.eagle import Eagle


WORDS, TOPICS, NOISE = 20, 3, 0.15
LENGTH, ROWS = 24, 32
NUMBER = 3  # candidates


def some_texts(rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, length], of which some words are others, from which the text goes on."""
    draws = torch.Generator().manual_seed(1)
    after = torch.stack([torch.randperm(WORDS, generator=draws) for _ in range(TOPICS)])
    topic = torch.randint(0, TOPICS, (rows,), generator=generator)
    word = torch.randint(0, WORDS, (rows,), generator=generator)
    found = [topic + WORDS, word]
    while len(found) < length:
        other = torch.rand(rows, generator=generator) < NOISE
        word = torch.where(other, torch.randint(0, WORDS, (rows,), generator=generator), after[topic, word])
        found.append(word)
    return torch.stack(found, 1)


@cache
def taught_target() -> PreTrainedModel:
    target = tiny(num_hidden_layers=3, vocab_size=WORDS + TOPICS + 1, initializer_range=0.1)
    optimizer = torch.optim.AdamW(target.parameters(), lr=1e-2, weight_decay=0.0)
    schedule, generator = LinearLR(optimizer, 1.0, 0.05, 60), torch.Generator().manual_seed(2)
    for _ in range(60):
        text = some_texts(ROWS, LENGTH, generator)
        logits = target(text).logits[:, 1:-1]
        nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 2:].flatten()).backward()
        optimizer.step(), schedule.step(), optimizer.zero_grad()
    return target


def taught(draft: DraftHead, target: PreTrainedModel) -> DraftHead:
    """It has learned from texts that go on behind others."""
    texts = some_texts(300, LENGTH, torch.Generator().manual_seed(2)).tolist()
    size = {"texts_per_phase": 256, "passes": 16, "phases": 1, "batch_size": 32, "num_draft_tokens": NUMBER}
    how = {"learn_from_prompts": True, "learning_rate": 1e-2, "max_new_tokens": 1, "do_sample": True, "top_k": 0}
    return distill(target, draft, texts, progress=lambda *_: None, **size, **how).pair.draft


def acceptance(draft: DraftHead) -> float:
    """Over some 1,500 candidates or more, so that its standard deviation is about 0.015."""
    strategy = SpeculativeDecoding(draft, num_draft_tokens=NUMBER, verification="token")
    texts = some_texts(96, 4, torch.Generator().manual_seed(3)).tolist()
    requests = [Request(text, seed=number) for number, text in enumerate(texts)]
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 20, "pad_token_id": 0}
    list(strategy.generate_many(taught_target(), requests, batch_size=96, **options))
    return strategy.report.acceptance_rate


FORWARD = Eagle.forward
OF_BOTH: dict[str, tuple[Any, str, Any]] = {  # what is changed of what; "head" is the head's config
    "states of the layers before": ("head", "layer_ids", [0, 1]),
    "states of the layers behind": ("head", "layer_ids", [2, 3]),
    "states in another order": ("head", "layer_ids", [2, 1]),
    "offsets as ids": (DraftHead, "ids", property(lambda draft: draft.d2t)),
}
WRONG: dict[str, dict[str, tuple[Any, str, Any]]] = {
    "dspark": {
        "places for their own tokens": ("head", "sample_from_anchor", False),
        "a block that begins early": (HeadDrafter, "begin", begun_early),
        "no word of the token before": (MarkovHead, "forward", lambda head, scores, *given: (scores, given[-1])),
        "word of an earlier token": (Block, "scored", told_early),
    },
    "eagle3": {
        "tokens not shifted": (HeadDrafter, "tokens", unshifted),
        "states for tokens": (Eagle, "forward", lambda body, entries, *two: FORWARD(body, entries, *two[::-1])),
    },
}


SLOW = [pytest.param("dspark", markov, marks=pytest.mark.slow) for markov in ("vanilla", "rnn")]


@pytest.mark.parametrize(("kind", "markov"), [("eagle3", None), ("dspark", "gated"), *SLOW])
def test_it_is_accepted_less_if_anything_is_wrong(kind: str, markov: str | None, tmp_path: Path):
    sizes: dict[str, Any] = {"vocab": WORDS + TOPICS + 1, "draft_vocab": WORDS + 2, "layer_ids": (1, 2)}
    blocks = {"block": NUMBER + 1, "mask_token": WORDS + TOPICS, "rank": 16, "markov": markov} if markov else {}
    draft = loaded(random_head(kind, **sizes | blocks), tmp_path / "head", taught_target())
    untaught = acceptance(draft)
    draft = taught(draft, taught_target())
    right = acceptance(draft)
    assert right > 2 * untaught
    for name, (owner, what, wrong) in (OF_BOTH | WRONG[kind]).items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draft.config if owner == "head" else owner, what, wrong)
            found = acceptance(draft)
            assert found < 0.9 * right, name
