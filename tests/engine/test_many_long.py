"""Long queues: what is kept does not grow with the number of requests, and "auto" follows rows that come and go."""

import gc
import itertools

import pytest
from test_many import GREEDY, SAMPLED, alone, completed, requests
from tiny import near, tiny

from hf_specx import Request, SpeculativeDecoding, SuffixDraft
from hf_specx.engine import run


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


@pytest.mark.parametrize("verification", ["token", "block"])
def test_auto_beside_requests_with_seeds(draft_pays: None, verification: str):
    """A request with a seed has the text of a batch of one; the others draft as many as is best at the time."""
    target = tiny()
    draft = near(target, 0.02)
    asked = [Request(r.input_ids, 20, r.seed if n % 3 == 2 else None) for n, r in enumerate(requests(12))]
    expected = {}
    for number in range(2, 12, 3):
        strategy = SpeculativeDecoding(draft, verification=verification)
        options = SAMPLED | {"custom_generate": strategy, "seeds": [asked[number].seed]}
        expected[number] = alone(target, asked[number], **options)
    strategy, seen = SpeculativeDecoding(draft, verification=verification), set()
    strategy.listeners = (Numbers(seen),)
    found = completed(strategy, target, asked, batch_size=2, **SAMPLED)  # two without a seed come first
    assert {number: found[number].tokens for number in expected} == expected
    assert max(seen) > 5
    again = SpeculativeDecoding(draft, verification=verification, num_draft_tokens=5)
    assert completed(again, target, asked[2::3], batch_size=2, **SAMPLED)[0].tokens == expected[2]


class Numbers:
    def __init__(self, seen: set[int]):
        self.seen = seen

    def observe(self, done):
        self.seen.update(done.draft.lengths)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
def test_a_prompt_that_comes_late_drafts_at_once(options: dict):
    """Its first token is judged with candidates after it, which saves a round for each."""
    target, asked = tiny(), requests(12)
    strategy, first = SpeculativeDecoding(SuffixDraft(min_match=1), num_draft_tokens=4), []
    asked = [Request([3, 4, 5, 6] * 4, 12, seed=n) for n in range(12)]

    class First:
        def observe(self, done):
            first.extend(n for n, count in zip(done.draft.lengths, done.before, strict=True) if not count)

    strategy.listeners = (First(),)
    found = completed(strategy, target, asked, batch_size=3, **options)
    assert first[:3] == [0, 0, 0]
    assert sum(number > 0 for number in first) > 1
    assert [found[index].tokens for index in range(12)] == [alone(target, request, **options) for request in asked]
