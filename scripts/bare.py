"""Whole calls over their bare forwards: `python scripts/bare.py`, two grafted models of 30M and 7M parameters.

Bare are the same forwards without a mask, on transformers' `DynamicCache`: as many steps of the draft, of one token
for each row, and as many of the target as the call had, each for as many rows and tokens. Both take turns; seconds are
those that the thread has worked for.
"""

import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch
from grafted import RECIPES, graft
from transformers import DynamicCache

from hf_specx import SpeculativeDecoding


CANDIDATES, PROMPT, NEW_TOKENS, TURNS, FIRST = 5, 32, 96, 20, 3
OPTIONS: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
made = graft(RECIPES["30M"])
target: Any = made.target
draft: Any = made.draft
rounds: list[tuple[int, int, int, int]] = []  # rows, steps of the draft, query length, tokens of a row after it


def note(done: Any) -> None:
    if any(done.before):
        tokens = sum(done.before) + sum(done.gained)
        rounds.append((len(done.rows), done.draft.steps, max(done.draft.lengths) + 1, tokens // len(done.rows)))


@torch.no_grad()
def bare(ids: torch.Tensor) -> None:
    caches = DynamicCache(config=target.config), DynamicCache(config=draft.config)
    for model, cache in zip((target, draft), caches, strict=True):
        model(ids, past_key_values=cache, logits_to_keep=1)
    for rows, steps, query, tokens in rounds:
        if rows < len(ids):
            ids = ids[:rows]
            for cache in caches:
                cache.batch_select_indices(torch.arange(rows))
        for _ in range(steps):
            draft(ids[:, :1], past_key_values=caches[1])
        target(ids[:, :1].repeat(1, query), past_key_values=caches[0])
        for cache in caches:
            if (over := cache.get_seq_length() - PROMPT - tokens) > 0:
                cache.crop(-over)


torch.set_num_threads(1)
for batch in (1, 4, 8):
    strategy, ratios = SpeculativeDecoding(draft, num_draft_tokens=CANDIDATES), []
    strategy.listeners = (SimpleNamespace(observe=note),)
    for turn in range(TURNS):
        torch.manual_seed(turn)
        ids = torch.randint(3, target.config.vocab_size, (batch, PROMPT))
        rounds.clear()
        begun = time.thread_time()
        target.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=strategy, **OPTIONS)
        whole = time.thread_time() - begun
        bare(ids)
        ratios.append(whole / (time.thread_time() - begun - whole))
    print(batch, f"{statistics.median(ratios[FIRST:]):.3f}", flush=True)
