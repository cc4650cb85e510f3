"""`generate_many` with every kind of draft: new prompts reach each of them."""

import pytest
import torch
from all_pairs import once
from test_many import GREEDY, SAMPLED, alone, completed, requests
from tiny import near, tiny
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specx import Drafter, EarlyExitDraft, Request, SpeculativeDecoding, SuffixDraft
from hf_specx.drafting.drafter import no_candidates


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


@pytest.mark.parametrize(("model_type", "options", "kind"), once(["llama", "gpt2"], [GREEDY, SAMPLED], DRAFTS))
def test_each_draft_follows_the_requests(kind: str, options: dict, model_type: str):
    target, asked = tiny(model_type), repeating(14)
    expected = [alone(target, request, **options) for request in asked]
    strategy = SpeculativeDecoding(DRAFTS[kind](target), num_draft_tokens=4, verification="coupled")
    found = completed(strategy, target, asked, batch_size=4, **options)
    assert [found[index].tokens for index in range(14)] == expected
    assert strategy.report.accepted > 0


@pytest.mark.parametrize(("verification", "kind", "number"), once(["token", "block"], DRAFTS, [3, "auto"]))
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


class Repeats(CandidateGenerator):
    """Proposes the last token again, and notes the texts of which it was told."""

    def __init__(self):
        self.told = []

    def get_candidates(self, input_ids):
        return torch.cat([input_ids, input_ids[:, -1:]], -1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        self.told.append(input_ids[0].tolist())


class Looks(Drafter):
    """Proposes nothing, and notes the text of each row that has ended."""

    def __init__(self):
        self.told = []

    def propose(self, batch, lengths):
        return no_candidates(batch)

    def observe(self, done):
        self.told += [done.batch.row(row).tolist() for row in done.ended]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_drafts_are_told_of_a_text_before_the_next_has_its_place(batch_size: int):
    """Of the tokens of the last round as well."""
    target, texts, options = tiny(), [[1, 2, 3, 4, 5], [6, 7], [8] * 9], GREEDY | {"max_new_tokens": 7}
    expected = [text + alone(target, Request(text), **options) for text in texts]
    repeats, looks = Repeats(), Looks()
    completed(SpeculativeDecoding(repeats), target, texts, batch_size=batch_size, **options)
    completed(SpeculativeDecoding(looks), target, texts, batch_size=batch_size, **options)
    assert all(any(told == text[: len(told)] for text in expected) for told in repeats.told)
    assert sorted(looks.told) == sorted(expected)
