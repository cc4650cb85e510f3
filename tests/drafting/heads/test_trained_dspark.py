"""A DSpark head that was trained a little is accepted more as it is than in any wrong variant.

Its target has learned texts whose first token, the topic, says by which of three permutations each word follows the
one before: what comes next follows from the last token and the target's states, and from neither alone.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from alignment import loaded
from head_files import random_head
from tiny import tiny
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from transformers import PreTrainedModel

from hf_specx import DraftHead, Request, SpeculativeDecoding
from hf_specx.common.batch import Batch
from hf_specx.drafting.heads.block import Block, MarkovHead
from hf_specx.drafting.heads.driver import HeadDrafter
from hf_specx.drafting.heads.layers import Rotary


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


def lessons(model: nn.Module, steps: int) -> Iterator[torch.Generator]:
    """Steps of training a model, by the gradients that are there after each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule, generator = LinearLR(optimizer, 1.0, 0.05, steps), torch.Generator().manual_seed(2)
    model.requires_grad_(True)
    for _ in range(steps):
        optimizer.zero_grad()
        yield generator
        optimizer.step()
        schedule.step()
    model.requires_grad_(False)


@cache
def taught_target() -> PreTrainedModel:
    target = tiny(num_hidden_layers=3, vocab_size=WORDS + TOPICS + 1, initializer_range=0.1)
    for generator in lessons(target, 60):
        text = some_texts(ROWS, LENGTH, generator)
        logits = target(text).logits[:, 1:-1]
        nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 2:].flatten()).backward()
    return target


class AllSeen:
    """The states of a text and a block behind them, in place of the `Entries` of a call; all rows are as long."""

    def __init__(self, draft: DraftHead, length: int):
        self.turns = Rotary(draft.config, draft.device)(torch.arange(length)[None])

    def attend(self, layer: int, *parts: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.transpose(1, 2) for part in parts)
        found = nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return found.transpose(1, 2).flatten(2)


def teach(draft: DraftHead, target: PreTrainedModel) -> None:
    """Each place of a block, behind the text's own tokens, learns the target's law there."""
    config: Any = draft.config
    size, embeddings = config.block_size, target.get_input_embeddings()
    for generator in lessons(draft, 150):
        text = some_texts(2 * ROWS, LENGTH, generator)
        said = target(text, output_hidden_states=True)
        end = int(torch.randint(2, LENGTH - size, (), generator=generator))
        states = torch.cat([said.hidden_states[number][:, :end] for number in config.layer_ids], -1)
        block = text[:, end : end + 1], text.new_full((len(text), size - 1), config.mask_token_id)
        slots, _ = draft.body.begin(AllSeen(draft, end + size), embeddings(torch.cat(block, 1)), states, None, size)
        loss, memory = 0.0, None
        for place, slot in enumerate(slots.unbind(1), end):
            scores, memory, _ = draft.body.scored(draft.lm_head(slot), slot, text[:, place, None], memory, False)
            law = said.logits[:, place].softmax(-1)[:, draft.ids]
            loss -= (law * scores.log_softmax(-1)).sum(-1).mean()
        loss.backward()


def acceptance(draft: DraftHead) -> float:
    """Over some 1,500 candidates or more, so that its standard deviation is about 0.015."""
    strategy = SpeculativeDecoding(draft, num_draft_tokens=NUMBER, verification="token")
    texts = some_texts(96, 4, torch.Generator().manual_seed(3)).tolist()
    requests = [Request(text, seed=number) for number, text in enumerate(texts)]
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 20, "pad_token_id": 0}
    list(strategy.generate_many(taught_target(), requests, batch_size=96, **options))
    return strategy.report.acceptance_rate


def begun_early(feed: HeadDrafter, batch: Batch) -> None:
    """A block begins with the last token whose states are known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "last", lambda batch, count, ahead=0: LAST(batch, count + 1, ahead)[:, :count])
        BEGIN(feed, batch)


def told_early(body: Block, scores: Any, states: Any, tokens: torch.Tensor, memory: Any, asked: bool) -> Any:
    """A place is told of the token before the one before it."""
    earlier, inner = memory or (tokens, None)
    scores, inner, sure = SCORED(body, scores, states, earlier, inner, asked)
    return scores, (tokens, inner), sure


LAST, BEGIN, SCORED = Batch.last, HeadDrafter.begin, Block.scored
WRONG: dict[str, tuple[Any, str, Any]] = {  # what is changed of what; "head" is the head's config
    "states of the layers before": ("head", "layer_ids", [0, 1]),
    "states of the layers behind": ("head", "layer_ids", [2, 3]),
    "states in another order": ("head", "layer_ids", [2, 1]),
    "places for their own tokens": ("head", "sample_from_anchor", False),
    "a block that begins early": (HeadDrafter, "begin", begun_early),
    "no word of the token before": (MarkovHead, "forward", lambda head, scores, *given: (scores, given[-1])),
    "word of an earlier token": (Block, "scored", told_early),
    "offsets as ids": (DraftHead, "ids", property(lambda draft: draft.d2t)),
}


@pytest.mark.parametrize(
    "markov", ["gated", pytest.param("vanilla", marks=pytest.mark.slow), pytest.param("rnn", marks=pytest.mark.slow)]
)
def test_it_is_accepted_less_if_anything_is_wrong(markov: str, tmp_path: Path):
    sizes = {"vocab": WORDS + TOPICS + 1, "draft_vocab": WORDS + 2, "block": NUMBER + 1, "mask_token": WORDS + TOPICS}
    head = random_head("dspark", **sizes, layer_ids=(1, 2), rank=16, markov=markov)
    draft = loaded(head, tmp_path / "head", taught_target())
    untaught = acceptance(draft)
    teach(draft, taught_target())
    right = acceptance(draft)
    assert right > 2 * untaught
    for name, (owner, what, wrong) in WRONG.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draft.config if owner == "head" else owner, what, wrong)
            found = acceptance(draft)
            assert found < 0.9 * right, name
