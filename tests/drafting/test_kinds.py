"""What holds for every kind of draft: rows under seeds do not depend on their mates, and threads may share it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from all_pairs import once
from repeating import few_tokens, run
from tiny import near, tiny

from hf_specx import EarlyExitDraft, SpeculativeDecoding, SuffixDraft, SuffixPool


SAMPLED = {"do_sample": True, "top_k": 4, "temperature": 0.5, "eos_token_id": 3}
KINDS: dict[str, tuple[Callable, dict[str, Any]]] = {  # draft made of a draft model; settings
    "suffix": (lambda draft: SuffixDraft(pool=SuffixPool()), {}),
    "early exit": (lambda draft: EarlyExitDraft(1), {"num_assistant_tokens": 3}),
    "several": (lambda draft: [SuffixDraft(), draft], {}),
    "model": (lambda draft: draft, {"num_assistant_tokens_schedule": "heuristic"}),
    "unsure": (lambda draft: draft, {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.3}),
}


@pytest.mark.parametrize(("kind", "verification"), once(KINDS, ["coupled", "token", "block"]))
def test_a_row_under_its_seed_is_the_same_in_any_batch(kind: str, verification: str):
    """Among mates that draft more or less, or end sooner."""
    target, inputs, drafted = tiny(vocab_size=12), few_tokens(4), []
    make, settings = KINDS[kind]

    def texts(rows: list[int]) -> list[list[int]]:
        strategy = SpeculativeDecoding(make(near(target, 0.2)), verification=verification)
        given = {name: value[rows] for name, value in inputs.items()}
        output = run(target, given, strategy, **SAMPLED, **settings, seeds=[7 + row for row in rows])
        drafted.append(strategy.report.drafted)
        new = output[:, inputs["input_ids"].shape[1] :].tolist()
        return [text[: text.index(3)] if 3 in text else text for text in new]

    alone = [texts([row])[0] for row in range(4)]
    assert texts([0, 1, 2, 3]) == alone
    assert len({len(text) for text in alone}) > 1
    assert sum(drafted[:4]) > 0


@pytest.mark.parametrize("draft", [SuffixDraft(pool=SuffixPool(500)), EarlyExitDraft(1)], ids=["suffix", "early exit"])
def test_calls_at_once_with_one_draft(draft: Any):
    target, rows = tiny(vocab_size=12), (1, 2, 3, 4)

    def text(number: int, drafts: bool = True) -> torch.Tensor:
        strategy = SpeculativeDecoding(draft) if drafts else None
        return run(target, few_tokens(number), strategy, do_sample=False)

    expected = [text(number, drafts=False) for number in rows]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(text, rows))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
