"""Many requests of every kind, in several orders of arrival and batch sizes: each has the text of plain `generate`.

That what is sampled in places that are filled again has the right distribution follows: a request under a seed has the
text of a batch of one (test_many.py), and over seeds that has the distribution of the target (test_law.py).
"""

import gc
import itertools
from collections.abc import Sequence

import pytest
import torch
from criteria import Raising
from many import GREEDY, SAMPLED, alone, completed
from tiny import VOCAB_SIZE, Forwards, near, tiny
from tiny_tokenizer import tiny_tokenizer
from transformers import GenerationConfig

from hf_specx import Request, SpeculativeDecoding
from hf_specx.engine import run


STOPS = [None, ["a b"], "cd", ["e", "xyz"]]
CALL = {"repetition_penalty": 1.15, "min_new_tokens": 2, "no_repeat_ngram_size": 4}


def made(number: int, seed: int = 0) -> list[Request]:
    """Prompts of 1 to 40 tokens, limits of 1 to 40, stop strings and processors of some, seeds of all."""
    generator = torch.Generator().manual_seed(seed)
    lengths, limits, kinds = (torch.randint(1, 41, (3, number), generator=generator)).tolist()
    return [
        Request(
            torch.randint(1, VOCAB_SIZE, (length,), generator=generator),
            limit,
            seed=1000 + index,
            stop_strings=STOPS[kind % 4],
            logits_processor=[Raising(kind)] if kind % 5 == 0 else None,
        )
        for index, (length, limit, kind) in enumerate(zip(lengths, limits, kinds, strict=True))
    ]


def check(number: int, batch_sizes: Sequence[int], options: dict) -> None:
    """All orders and batch sizes, with logprobs; the target runs fewer forwards than plain decoding."""
    target, asked, options = tiny(vocab_size=280), made(number), options | CALL
    expected = [alone(target, request, tokenizer=tiny_tokenizer(), **options) for request in asked]
    draft = near(target, 0.2)
    for turn, batch_size in enumerate(batch_sizes):
        order = torch.randperm(number, generator=torch.Generator().manual_seed(turn)).tolist()
        strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification="coupled", tokenizer=tiny_tokenizer())
        with Forwards(target) as forwards:
            found = completed(strategy, target, [asked[n] for n in order], batch_size=batch_size, **options)
        assert [found[place].tokens for place in range(number)] == [expected[n] for n in order]
        assert len(forwards.ids) < sum(map(len, expected)) / min(2, batch_size) + number


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
def test_some_requests(options: dict):
    check(16, (3,), options)


def test_stop_strings_of_a_config():
    """As if they had been given to the call: its options are tried at once, when no tokenizer is bound to them yet."""
    target, asked, tokenizer = tiny(vocab_size=280), made(3), tiny_tokenizer()
    config = GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=24, stop_strings=list("aeiou"))
    asked = [Request(request.input_ids, request.max_new_tokens) for request in asked]
    expected = [alone(target, request, generation_config=config, tokenizer=tokenizer) for request in asked]
    assert any(len(tokens) < request.max_new_tokens for tokens, request in zip(expected, asked, strict=True))
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=3, tokenizer=tokenizer)
    found = completed(strategy, target, asked, generation_config=config)
    assert [found[place].tokens for place in range(3)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
def test_five_hundred_requests(options: dict):
    check(500, (1, 3, 8, 16, 8), options)


@pytest.mark.slow
def test_memory_stays_flat(monkeypatch: pytest.MonkeyPatch):
    """The number of objects after 100 and after 400 requests of an endless input differs by less than one a request.

    Without letting go of old rounds a request leaves some four.
    """
    monkeypatch.setattr(run, "KEPT_ROUNDS", 8)
    target = tiny(num_hidden_layers=1)
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=2)
    endless = (Request([1 + number % 40] * (1 + number % 7), 2 + number % 9) for number in itertools.count())
    completions = strategy.generate_many(target, endless, batch_size=4, do_sample=True, pad_token_id=0)
    counts = []
    for number in range(1, 401):
        emitted = len(next(completions).tokens)
        assert emitted
        if number % 100 == 0:
            gc.collect()
            counts.append(len(gc.get_objects()))
    completions.close()
    assert counts[-1] - counts[0] < 300
