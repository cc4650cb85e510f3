"""`generate_many` with every kind of draft: new prompts reach each of them."""

import pytest
from test_many import GREEDY, SAMPLED, alone, completed, requests
from tiny import near, tiny

from hf_specx import EarlyExitDraft, Request, SpeculativeDecoding, SuffixDraft


def repeating(number: int) -> list[Request]:
    """Prompts that repeat themselves, between some that do not."""
    asked = requests(number)
    return [
        Request([*range(1, 9)] * 2 + [1, 2], request.max_new_tokens, request.seed) if index % 2 else request
        for index, request in enumerate(asked)
    ]


DRAFTS = {
    "early exit": lambda target: EarlyExitDraft(1),
    "mixture": lambda target: [SuffixDraft(min_match=1), near(target, 0.2)],
    "mixture with an early exit": lambda target: [SuffixDraft(min_match=1), EarlyExitDraft(1)],
}


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_each_draft_follows_the_requests(kind: str, options: dict, model_type: str):
    target, asked = tiny(model_type), repeating(14)
    expected = [alone(target, request, **options) for request in asked]
    strategy = SpeculativeDecoding(DRAFTS[kind](target), num_draft_tokens=4, verification="coupled")
    found = completed(strategy, target, asked, batch_size=4, **options)
    assert [found[index].tokens for index in range(14)] == expected
    assert strategy.report.accepted > 0


@pytest.mark.parametrize("number", [3, "auto"])
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("verification", ["token", "block"])
def test_a_batch_of_one_has_the_same_text(kind: str, verification: str, number: int | str):
    """With seeds each row chooses its draft, and how many candidates, for itself."""
    target, asked = tiny(), repeating(10)
    expected = []
    for request in asked:
        strategy = SpeculativeDecoding(DRAFTS[kind](target), num_draft_tokens=number, verification=verification)
        expected.append(alone(target, request, **SAMPLED, custom_generate=strategy, seeds=[request.seed]))
    strategy = SpeculativeDecoding(DRAFTS[kind](target), num_draft_tokens=number, verification=verification)
    found = completed(strategy, target, asked, batch_size=3, **SAMPLED)
    assert [found[index].tokens for index in range(10)] == expected
