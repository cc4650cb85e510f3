"""`generate_many`: each request gets the text of a batch of one, whatever has the other places."""

import pytest
import torch
from tiny import VOCAB_SIZE, Forwards, near, tiny

from hf_specx import Completion, Request, SpeculativeDecoding


GREEDY = {"do_sample": False, "eos_token_id": [5, 6], "pad_token_id": 0, "max_new_tokens": 24}
SAMPLED = GREEDY | {"do_sample": True, "top_k": 12, "temperature": 1.3}


def requests(number: int, seed: int = 0) -> list[Request]:
    """Prompts of 1 to 30 tokens with limits of 1 to 24."""
    made = torch.Generator().manual_seed(seed)
    lengths, limits = torch.randint(1, 31, (number,), generator=made), torch.randint(1, 25, (number,), generator=made)
    return [
        Request(torch.randint(1, VOCAB_SIZE, (int(length),), generator=made), int(limit), seed=100 + index)
        for index, (length, limit) in enumerate(zip(lengths, limits, strict=True))
    ]


def alone(target, request: Request, **options) -> list[int]:
    """What `generate` gives to a request."""
    torch.manual_seed(request.seed)
    ids = torch.as_tensor(request.input_ids)[None]
    options |= {"max_new_tokens": request.max_new_tokens} if request.max_new_tokens else {}
    return target.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()


def completed(strategy, target, asked, **options) -> dict[int, Completion]:
    found = {done.index: done for done in strategy.generate_many(target, asked, **options)}
    assert sorted(found) == list(range(len(asked)))
    return found


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
def test_requests_get_the_text_of_generate(model_type: str, batch_size: int, options: dict):
    target, asked = tiny(model_type), requests(20)
    expected = [alone(target, request, **options) for request in asked]
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=4, verification="coupled")
    with Forwards(target) as forwards:
        found = completed(strategy, target, asked, batch_size=batch_size, **options)
    assert [found[index].tokens for index in range(20)] == expected
    rounds = len(forwards.ids) - len(asked)  # at most one forward reads the prompt of each
    assert rounds < sum(map(len, expected)) / min(batch_size, 3)
    reasons = ["stop" if tokens[-1] in (5, 6) else "length" for tokens in expected]
    assert [found[index].finish_reason for index in range(20)] == reasons
