"""`generate_many`: each request gets the text of a batch of one, whatever has the other places."""

import re

import pytest
import torch
from all_pairs import all_pairs, once
from tiny import VOCAB_SIZE, Forwards, near, tiny
from transformers.generation.logits_process import LogitsProcessor

from hf_specx import (
    Completion,
    Drafter,
    Request,
    SampledCandidateGenerator,
    SpeculativeDecoding,
    SuffixDraft,
    SuffixPool,
)
from hf_specx.models.slots import MARGIN, SlotLayer


MODEL_TYPES = ("llama", "mistral", "gpt2", "gpt_neox")
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
    torch.manual_seed(request.seed or 0)
    ids = torch.as_tensor(request.input_ids)[None]
    options |= {"max_new_tokens": request.max_new_tokens} if request.max_new_tokens else {}
    return target.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()


def completed(strategy, target, asked, **options) -> dict[int, Completion]:
    found = {done.index: done for done in strategy.generate_many(target, asked, **options)}
    assert sorted(found) == list(range(len(asked)))
    return found


@pytest.mark.parametrize(("model_type", "batch_size", "options"), all_pairs(MODEL_TYPES, [1, 3, 8], [GREEDY, SAMPLED]))
def test_requests_get_the_text_of_generate(model_type: str, batch_size: int, options: dict):
    target, asked = tiny(model_type), requests(20)
    expected = [alone(target, request, **options) for request in asked]
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=4, verification="coupled")
    with Forwards(target) as forwards:
        found = completed(strategy, target, asked, batch_size=batch_size, **options)
    assert [found[index].tokens for index in range(20)] == expected
    assert strategy.report.emitted == sum(map(len, expected))
    rounds = len(forwards.ids) - len(asked)  # at most one forward reads the prompt of each
    assert rounds < sum(map(len, expected)) / min(batch_size, 3)
    reasons = ["stop" if tokens[-1] in (5, 6) else "length" for tokens in expected]
    assert [found[index].finish_reason for index in range(20)] == reasons


PROCESSORS = {
    "repetition": {"repetition_penalty": 1.4},
    "ngrams": {"no_repeat_ngram_size": 2},
    "least": {"min_new_tokens": 6},
    "words": {"bad_words_ids": [[7], [8, 9]]},
    "forced end": {"forced_eos_token_id": 5},
    "prefix": {"prefix_allowed_tokens_fn": lambda row, ids: [int(i) for i in (ids[-1] + torch.arange(1, 20)) % 48]},
    "decay": {"exponential_decay_length_penalty": (3, 1.3)},
    "many": {"repetition_penalty": 1.2, "min_new_tokens": 4, "top_p": 0.9, "no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize(("options", "name"), once([GREEDY, SAMPLED], PROCESSORS))
def test_processors_see_each_request_alone(name: str, options: dict):
    target, options = tiny(), options | PROCESSORS[name]
    asked = [request for request in requests(16) if request.max_new_tokens > 6]
    expected = [alone(target, request, **options) for request in asked]
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=4, verification="coupled")
    found = completed(strategy, target, asked, batch_size=4, **options)
    assert [found[index].tokens for index in range(len(asked))] == expected


@pytest.mark.parametrize(("batch_size", "verification"), once([1, 3, 8], ["token", "block"]))
def test_rejection_gives_the_text_of_a_batch_of_one(verification: str, batch_size: int):
    """Whatever is beside a request: its random numbers, and how many it needs, follow from it alone."""
    target, asked = tiny(), requests(16)
    draft = near(target, 0.2)
    expected = []
    for request in asked:
        strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification=verification)
        options = SAMPLED | {"custom_generate": strategy, "seeds": [request.seed]}
        expected.append(alone(target, request, **options))
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification=verification)
    found = completed(strategy, target, asked, batch_size=batch_size, **SAMPLED)
    assert [found[index].tokens for index in range(16)] == expected


@pytest.mark.parametrize("options", [GREEDY, SAMPLED | {"temperature": 0.2}], ids=["greedy", "coupled"])
@pytest.mark.parametrize("apart", [True, False])
def test_suffix_drafts_follow_the_requests(options: dict, apart: bool):
    target = tiny()
    asked = [Request([*range(1, 9)] * 2 + [number], 20, seed=number) for number in range(1, 13)]
    expected = [alone(target, request, **options) for request in asked]
    pool = None if apart else SuffixPool(max_tokens=1000)
    strategy = SpeculativeDecoding(SuffixDraft(pool=pool, min_match=1), num_draft_tokens=4)
    found = completed(strategy, target, asked, batch_size=4, **options)
    assert [found[index].tokens for index in range(12)] == expected
    assert strategy.report.drafted > 0


def test_log_probabilities_are_those_of_plain_decoding():
    target, asked = tiny(), requests(6)
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=3, verification="coupled")
    for index, done in completed(strategy, target, asked, batch_size=2, logprobs=True, **SAMPLED).items():
        torch.manual_seed(asked[index].seed)
        ids = asked[index].input_ids[None]
        options = SAMPLED | {"max_new_tokens": asked[index].max_new_tokens, "attention_mask": torch.ones_like(ids)}
        options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        plain = target.generate(ids, **options)
        for found, steps in ((done.logprobs, plain.scores), (done.raw_logprobs, plain.logits)):
            expected = [step[0].log_softmax(-1)[token] for step, token in zip(steps, done.tokens, strict=True)]
            torch.testing.assert_close(torch.tensor(found), torch.stack(expected), atol=1e-4, rtol=1e-4)


class Odd(LogitsProcessor):
    """Leaves odd tokens, and writes to the scores that it is given."""

    def __call__(self, input_ids, scores):
        scores[:, ::2] = -torch.inf
        return scores


@torch.no_grad()
def test_raw_log_probabilities_are_those_of_the_model_beside_a_processor_that_writes_in_place():
    target, request = tiny(), Request([3, 4, 5], 8, seed=1, logits_processor=[Odd()])
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=3)
    done = completed(strategy, target, [request], logprobs=True, **SAMPLED)[0]
    chances = target(torch.tensor([[3, 4, 5, *done.tokens]])).logits[0, 2:-1].log_softmax(-1)
    expected = chances.gather(-1, torch.tensor(done.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(done.raw_logprobs), expected, atol=1e-4, rtol=1e-4)


def test_requests_are_taken_as_places_become_free():
    """Of an endless iterable no more than the batch and one more are read ahead."""
    target, read = tiny(), []

    def endless():
        while True:
            read.append(len(read))
            yield Request([1 + len(read) % 40], 4, seed=len(read))

    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=2)
    completions = strategy.generate_many(target, endless(), batch_size=3, ordered=True, **GREEDY)
    for number in range(20):
        assert next(completions).index == number
        assert len(read) <= number + 8
    completions.close()


def test_a_bounded_cache():
    """Requests that do not fit beside others wait, and one that never fits is refused by its number."""
    target, seen = tiny(), []
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=3)
    strategy.listeners = (Watch(seen),)
    asked = [Request([1] * length, 10) for length in (4, 4, 20, 4, 60, 4)]
    found = completed(strategy, target, asked, batch_size=4, max_batch_tokens=60, **GREEDY)
    assert found[4].finish_reason == "refused"
    assert (
        "request 4: the prompt has 60 tokens and may get 10 new ones, more than there is room for: max_batch_tokens=60"
        in found[4].error
    )
    expected = [alone(target, request, **GREEDY) for request in asked]
    assert all(found[index].tokens == expected[index] for index in (0, 1, 2, 3, 5))
    assert max(seen) <= 60


@pytest.mark.parametrize("sizes", [[(80, 5), (80, 9), (90, 4), (100, 10)], [(10, 5), (10, 5), (10, 100), (10, 100)]])
def test_buffers_do_not_double_beyond_what_can_be_needed(sizes: list, monkeypatch: pytest.MonkeyPatch):
    """Not even as other requests come, with longer prompts and limits."""
    target, taken, update = tiny(), [], SlotLayer.update

    def noting(layer, *args, **kwargs):
        seen = update(layer, *args, **kwargs)
        taken.append(layer.keys.shape[0] * (layer.keys.shape[2] - MARGIN))
        return seen

    monkeypatch.setattr(SlotLayer, "update", noting)
    asked = [Request([1] * length, limit) for length, limit in sizes]
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=3)
    completed(strategy, target, asked, batch_size=2, max_batch_tokens=220, **GREEDY | {"eos_token_id": None})
    assert max(taken) <= 220


class Watch:
    """How many slots of the cache rows have taken."""

    def __init__(self, seen: list[int]):
        self.seen = seen

    def observe(self, done):
        self.seen.append(len(done.rows) * (done.batch.width + max(done.before)))


def test_a_short_prompt_beside_a_draft_that_rested():
    """When the draft reads several tokens again, a row with fewer has nothing before its first."""
    target, asked = tiny(), [Request([3, 4, 5] * 9, 40), Request([7], 2), Request([9], 40), Request([11], 40)]
    options = {"do_sample": False, "pad_token_id": 0}

    class Sometimes(Drafter):
        """Eight rounds without candidates, then one with."""

        def __init__(self, drafter):
            self.drafter, self.rounds = drafter, 0
            self.model, self.has_probs = drafter.model, drafter.has_probs

        def read(self, reading):
            self.drafter.read(reading)
            self.decoder = self.drafter.decoder

        def propose(self, batch, lengths):
            self.rounds += 1
            return self.drafter.propose(batch, lengths if self.rounds % 9 == 0 else [0] * len(lengths))

        def admit(self, batch, rows):
            self.drafter.admit(batch, rows)

        def observe(self, done):
            self.drafter.observe(done)

    expected = [alone(target, request, **options) for request in asked]
    drafter = Sometimes(SampledCandidateGenerator(near(target, 0.1)))
    strategy = SpeculativeDecoding(drafter, num_draft_tokens=4)
    found = completed(strategy, target, asked, batch_size=2, **options)
    assert [found[index].tokens for index in range(4)] == expected
    assert strategy.report.accepted > 0


NOT_SERVED = [
    ([], r"input_ids=\[\] is no prompt; give a list of token ids"),
    (Request([1], seed=-1), "seed=-1"),
    (Request([1], max_new_tokens=200), "position"),
    ([1.5], r"input_ids=\[1.5\] is no prompt; give"),
    (None, "input_ids=None is no prompt; give"),
    ("a b", "input_ids='a b' is no prompt; give"),
    (torch.ones(3, dtype=torch.int64, device="meta"), "device='meta'.* is no prompt; give"),
    ([1, VOCAB_SIZE], f"the token id {VOCAB_SIZE}"),
    ([-1], "the token id -1"),
    (Request([1], max_new_tokens="3"), "max_new_tokens='3' is no number"),
    (Request([1], logits_processor=max), "put a single one into a list"),
]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_requests_that_cannot_be_served(batch_size: int):
    """Each is refused by its number, and those around them get their texts."""
    target = tiny("gpt2")
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=2)
    asked = [[1, 2], *(wrong for wrong, _ in NOT_SERVED), [3]]
    found = completed(strategy, target, asked, batch_size=batch_size, **GREEDY)
    for number, (_, told) in enumerate(NOT_SERVED, 1):
        assert found[number].finish_reason == "refused"
        assert re.search(f"request {number}: .*{told}", found[number].error)
    assert [found[n].tokens for n in (0, 12)] == [alone(target, Request(ids), **GREEDY) for ids in ([1, 2], [3])]


@pytest.mark.parametrize("wrong", ["a text", [0.5, 1.0], [[1, 2]]])
def test_the_type_of_the_first_prompt_is_that_of_all(wrong: object):
    """So it is an error at once; a later one is refused alone, and its tokens are none that could be an answer."""
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=2)
    with pytest.raises(ValueError, match="is no prompt; give a list of token ids"):
        list(strategy.generate_many(target, [wrong, wrong], **GREEDY))
    found = completed(strategy, target, [[1, 2], wrong], **GREEDY)
    assert found[1].tokens is None
    assert "is no prompt" in found[1].error
    assert found[0].tokens == alone(target, Request([1, 2]), **GREEDY)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_batch_tokens": -1}, "max_batch_tokens=-1"),
        ({"seeds": [1]}, "seeds= belongs to one call"),
        ({"foo": 2}, "unknown argument 'foo'; pass arguments of generate here, .* SpeculativeDecoding"),
        ({"max_new_token": 2}, "unknown argument 'max_new_token'; did you mean 'max_new_tokens'"),
        ({"do_sample": True, "temperature": -1.0}, "temperature"),
        ({"requests": 7}, "requests is an int; give a list of prompts, each a list of token ids"),
        ({"requests": "a text"}, "requests is a str; give"),
        ({"requests": {"input_ids": [[1, 2]]}}, "requests is a dict; give"),
        ({"requests": [1, 2]}, "requests is a single prompt; give a list of prompts"),
        (
            {"requests": torch.tensor([[0, 0, 4], [1, 2, 3]])},
            "a Tensor, whose rows may hold pads; ",
        ),
    ],
)
def test_arguments_that_are_refused(options: dict, told: str):
    """Before anything is iterated over."""
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.2))
    with Forwards(target) as forwards, pytest.raises(ValueError, match=told):
        strategy.generate_many(target, **{"requests": [[1]]} | GREEDY | options)
    assert not forwards.ids


def test_an_error_of_the_input_loses_nothing_that_was_taken():
    """Nor is anything read after it, though the iterable could go on."""
    target, asked, found = tiny(), requests(9), {}
    broken = map({number: asked[number] for number in range(9) if number != 6}.__getitem__, range(9))
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=2)
    with pytest.raises(KeyError, match="6"):
        found.update(
            (done.index, done.tokens) for done in strategy.generate_many(target, broken, batch_size=4, **GREEDY)
        )
    assert found == {index: alone(target, request, **GREEDY) for index, request in enumerate(asked[:6])}


@pytest.mark.parametrize("spread", [0, 1])
def test_models_that_are_spread_over_processes_are_refused(spread: int, monkeypatch: pytest.MonkeyPatch):
    """The target or the draft."""
    models = [tiny(), near(tiny(), 0.2)]
    monkeypatch.setattr("hf_specx.engine.queue.synced_by_default", lambda *asked: models[spread] in asked)
    told = r"spread over processes \(FSDP or ZeRO-3\)"
    with Forwards(models[0]) as forwards, pytest.raises(ValueError, match=told):
        SpeculativeDecoding(models[1]).generate_many(models[0], [[1]], **GREEDY)
    assert not forwards.ids
