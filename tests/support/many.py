"""Requests for `generate_many`, and the text that each has to get: that of a batch of one."""

from collections.abc import Callable

import torch
from tiny import VOCAB_SIZE, near

from hf_specx import Completion, EarlyExitDraft, Request, SpeculativeDecoding, SuffixDraft, SuffixPool


GREEDY = {"do_sample": False, "eos_token_id": [5, 6], "pad_token_id": 0, "max_new_tokens": 24}
SAMPLED = GREEDY | {"do_sample": True, "top_k": 12, "temperature": 1.3}
MODES = {"greedy": GREEDY, "coupled": SAMPLED}
PENALTIES = SAMPLED | {"repetition_penalty": 1.2, "min_new_tokens": 4, "top_p": 0.9, "no_repeat_ngram_size": 3}
DRAFTS = {
    "model": lambda target: near(target, 0.2),
    "early exit": lambda target: EarlyExitDraft(1),
    "suffix": lambda target: SuffixDraft(min_match=1),
    "suffix with a pool": lambda target: SuffixDraft(pool=SuffixPool(max_tokens=1000), min_match=1),
    "mixture": lambda target: [SuffixDraft(min_match=1), near(target, 0.2)],
    "mixture with an early exit": lambda target: [SuffixDraft(min_match=1), EarlyExitDraft(1)],
}


def requests(number: int, seed: int = 0) -> list[Request]:
    """Prompts of 1 to 30 tokens with limits of 1 to 24."""
    made = torch.Generator().manual_seed(seed)
    lengths, limits = torch.randint(1, 31, (number,), generator=made), torch.randint(1, 25, (number,), generator=made)
    return [
        Request(torch.randint(1, VOCAB_SIZE, (int(length),), generator=made), int(limit), seed=100 + index)
        for index, (length, limit) in enumerate(zip(lengths, limits, strict=True))
    ]


def repeating(number: int) -> list[Request]:
    """Prompts that repeat themselves, between some that do not."""
    text = [*range(1, 9)] * 2 + [1, 2]
    return [
        Request(text, request.max_new_tokens, request.seed) if index % 2 else request
        for index, request in enumerate(requests(number))
    ]


def alone(target, request: Request, by: SpeculativeDecoding | None = None, **options) -> list[int]:
    """What `generate` gives to a request, plainly or by a strategy under the request's seed."""
    ids = torch.as_tensor(request.input_ids)[None]
    options |= {"max_new_tokens": request.max_new_tokens} if request.max_new_tokens else {}
    options |= {"stop_strings": request.stop_strings} if request.stop_strings else {}
    options |= {"logits_processor": request.logits_processor} if request.logits_processor else {}
    options |= {"custom_generate": by, "seeds": [request.seed]} if by else {}
    torch.manual_seed(request.seed or 0)
    text = target.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0]
    return text[1 if target.config.is_encoder_decoder else ids.shape[1] :].tolist()


def completed(strategy, target, asked, **options) -> dict[int, Completion]:
    found = {done.index: done for done in strategy.generate_many(target, asked, **options)}
    assert sorted(found) == list(range(len(asked)))
    return found


def assert_alone(
    strategy: SpeculativeDecoding,
    target,
    asked: list[Request] | Callable[[], list[Request]],
    by: Callable[[], SpeculativeDecoding] | None = None,
    batch_size: int = 4,
    logprobs: bool = False,
    **options,
) -> dict[int, Completion]:
    """Assert that requests get their texts; returns what came, by index.

    Args:
        asked: the requests, or what makes them, where their processors keep state.
        by: makes a strategy that writes the texts alone; by default it is plain `generate`.
    """
    make = asked if callable(asked) else lambda: asked
    expected = [alone(target, request, by and by(), **options) for request in make()]
    found = completed(strategy, target, make(), batch_size=batch_size, logprobs=logprobs, **options)
    assert [found[index].tokens for index in range(len(expected))] == expected
    assert strategy.report.emitted == sum(map(len, expected))
    return found
