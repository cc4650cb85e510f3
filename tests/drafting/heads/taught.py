"""A target that has learned some texts, and heads that learn them from it.

The first token of a text, the topic, says by which of three permutations each word follows the one so many words
`back`: what comes next follows from that word and the target's states, and from neither alone.
"""

from functools import cache
from typing import Any

import torch
from tiny import tiny
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from transformers import PreTrainedModel

from hf_specx import DraftHead, Request, SpeculationReport, SpeculativeDecoding, distill


WORDS, TOPICS, NOISE = 20, 3, 0.15
LENGTH, ROWS = 24, 32
NUMBER = 3  # candidates
STEPS = {1: 60, 5: 400}  # of the target's training, by how far texts look back


def some_texts(rows: int, length: int, generator: torch.Generator, back: int = 1) -> torch.Tensor:
    """[rows, length], of which some words are others, from which the text goes on."""
    draws = torch.Generator().manual_seed(1)
    after = torch.stack([torch.randperm(WORDS, generator=draws) for _ in range(TOPICS)])
    topic = torch.randint(0, TOPICS, (rows,), generator=generator)
    words = [topic + WORDS, *(torch.randint(0, WORDS, (rows,), generator=generator) for _ in range(back))]
    while len(words) < length:
        other = torch.rand(rows, generator=generator) < NOISE
        word = torch.randint(0, WORDS, (rows,), generator=generator)
        words.append(torch.where(other, word, after[topic, words[-back]]))
    return torch.stack(words[:length], 1)


@cache
def taught_target(back: int = 1) -> PreTrainedModel:
    target = tiny(num_hidden_layers=3, vocab_size=WORDS + TOPICS + 1, initializer_range=0.1)
    optimizer = torch.optim.AdamW(target.parameters(), lr=1e-2, weight_decay=0.0)
    schedule, generator = LinearLR(optimizer, 1.0, 0.05, STEPS[back]), torch.Generator().manual_seed(2)
    for _ in range(STEPS[back]):
        text = some_texts(ROWS, LENGTH, generator, back)
        logits = target(text).logits[:, back:-1]
        nn.functional.cross_entropy(logits.flatten(0, 1), text[:, back + 1 :].flatten()).backward()
        optimizer.step(), schedule.step(), optimizer.zero_grad()
    return target


def taught(draft: DraftHead, back: int = 1, passes: int = 16) -> DraftHead:
    """It has learned from texts that go on behind others."""
    texts = some_texts(300, LENGTH, torch.Generator().manual_seed(2), back).tolist()
    size = {"texts_per_phase": 256, "passes": passes, "phases": 1, "batch_size": 32, "num_draft_tokens": NUMBER}
    how: dict[str, Any] = {"learn_from_prompts": True, "learning_rate": 1e-2, "max_new_tokens": 1}
    how |= {"do_sample": True, "top_k": 0, "progress": lambda *_: None}
    return distill(taught_target(back), draft, texts, **size, **how).pair.draft


def accepted(draft: DraftHead, back: int = 1) -> SpeculationReport:
    """Of some 1,500 candidates or more, so that the standard deviation of a share is about 0.015."""
    strategy = SpeculativeDecoding(draft, num_draft_tokens=NUMBER, verification="token")
    texts = some_texts(96, 3 + back, torch.Generator().manual_seed(3), back).tolist()
    requests = [Request(text, seed=number) for number, text in enumerate(texts)]
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 20, "pad_token_id": 0}
    list(strategy.generate_many(taught_target(back), requests, batch_size=96, **options))
    return strategy.report
