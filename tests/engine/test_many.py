"""`generate_many`: each request gets the text of a batch of one, whatever has the other places.

That what is sampled in places that are filled again has the right distribution follows: over seeds the text of a batch
of one has the distribution of the target (test_law.py).
"""

import gc
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from all_pairs import each_value, once
from criteria import Counting, Raising
from many import DRAFTS, GREEDY, MODES, PENALTIES, SAMPLED, alone, assert_alone, completed, repeating, requests
from plain import coupled
from rounds import numbers
from tiny import VOCAB_SIZE, Forwards, near, tiny
from tiny_tokenizer import tiny_tokenizer
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessor

from hf_specx import Drafter, Request, SampledCandidateGenerator, SpeculativeDecoding
from hf_specx.drafting.drafter import no_candidates
from hf_specx.engine import run


OPTIONS = MODES | {
    "penalties": PENALTIES,
    "words and ends": GREEDY | {"bad_words_ids": [[7], [8, 9]], "min_new_tokens": 6, "forced_eos_token_id": 5},
    "prefix": SAMPLED
    | {"prefix_allowed_tokens_fn": lambda row, ids: [int(i) for i in (ids[-1] + torch.arange(1, 20)) % 48]},
    "decay": SAMPLED | {"exponential_decay_length_penalty": (3, 1.3)},
}


@pytest.mark.parametrize(
    ("model_type", "batch_size", "options"), each_value(("llama", "mistral", "gpt2", "gpt_neox"), [1, 3, 8], OPTIONS)
)
def test_requests_get_the_text_of_generate(model_type: str, batch_size: int, options: str):
    """Processors see each request alone."""
    target, asked = tiny(model_type), requests(20)
    strategy = coupled(target, 0.2)
    with Forwards(target) as forwards:
        completions = assert_alone(strategy, target, asked, batch_size=batch_size, **OPTIONS[options])
    num_forwards = (
        len(forwards.ids) - strategy.report.emitted - len(asked)
    )  # plain ones came first, one for each token
    assert options not in MODES or num_forwards < strategy.report.emitted / min(batch_size, 3)
    for done in completions.values():
        assert done.finish_reason == ("stop" if done.tokens[-1] in (5, 6) else "length")


@pytest.mark.parametrize(
    ("model_type", "options", "batch_size"),
    [
        ("gpt2", SAMPLED, 3),
        pytest.param("llama", GREEDY, 3, marks=pytest.mark.slow),
        pytest.param("mistral", SAMPLED, 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:compile=True compiles")
def test_compiled_forwards(traced: None, model_type: str, options: dict, batch_size: int):
    """Prompts that are wider than those before them move all slots; a second queue finds all forwards compiled."""
    target = tiny(model_type, num_hidden_layers=1)
    strategy = coupled(target, 0.2, num_draft_tokens=2, compile=True)
    compilations = []
    for _ in range(2):
        assert_alone(strategy, target, requests(10), batch_size=batch_size, **options)
        compilations.append(strategy.report.compilations)
    assert strategy.report.accepted > 0
    assert compilations[0] > compilations[1] == 0


@pytest.mark.parametrize(("model_type", "mode", "kind"), once(["llama", "gpt2"], MODES, DRAFTS))
def test_each_draft_follows_the_requests(kind: str, mode: str, model_type: str):
    target = tiny(model_type)
    strategy = SpeculativeDecoding(DRAFTS[kind](target), num_draft_tokens=4, verification="coupled")
    cooler = {"temperature": 0.2} if mode == "coupled" else {}  # so that suffixes come again
    assert_alone(strategy, target, repeating(14), **MODES[mode] | cooler)
    assert (strategy.report.drafted if kind.startswith("suffix") else strategy.report.accepted) > 0


@pytest.mark.parametrize(("verification", "number", "kind"), each_value(["token", "block"], [3, "auto"], DRAFTS))
def test_rejection_gives_the_text_of_a_batch_of_one(kind: str, verification: str, number: int | str):
    """With seeds each row chooses its draft, its random numbers and how many candidates for itself."""
    target = tiny()
    options = {"num_draft_tokens": number, "verification": verification}
    strategy = lambda: SpeculativeDecoding(DRAFTS[kind](target), **options)  # noqa: E731
    assert_alone(strategy(), target, repeating(10), by=strategy, batch_size=3, **SAMPLED)


def test_a_short_prompt_beside_a_draft_that_rested(monkeypatch: pytest.MonkeyPatch):
    """Eight rounds without candidates, then one with: the draft has several tokens to read then, of which some rows
    have fewer."""
    propose, rounds = SampledCandidateGenerator.propose, itertools.count(1)

    def sometimes(draft, batch, lengths):
        return propose(draft, batch, [0] * len(lengths) if next(rounds) % 9 else lengths)

    monkeypatch.setattr(SampledCandidateGenerator, "propose", sometimes)
    target, options = tiny(), {"do_sample": False, "pad_token_id": 0}
    asked = [Request([3, 4, 5] * 9, 40), Request([7], 2), Request([9], 40), Request([11], 40)]
    strategy = SpeculativeDecoding(near(target, 0.1), num_draft_tokens=4)
    assert_alone(strategy, target, asked, batch_size=2, **options)
    assert strategy.report.accepted > 0


@pytest.mark.parametrize("processors", [list, lambda: [Counting()]], ids=["none", "in order"])
def test_log_probabilities_are_those_of_plain_decoding(processors: Callable):
    """Also where a request has a processor that keeps state, so that transformers' own sampler decodes."""
    target, outputs = tiny(), {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    asked = [Request(one.input_ids, one.max_new_tokens, one.seed, None, processors()) for one in requests(6)]
    strategy = coupled(target, 0.2, num_draft_tokens=3)
    for index, done in completed(strategy, target, asked, batch_size=2, logprobs=True, **SAMPLED).items():
        torch.manual_seed(asked[index].seed)
        ids = asked[index].input_ids[None]
        options = SAMPLED | outputs | {"max_new_tokens": asked[index].max_new_tokens, "logits_processor": processors()}
        plain = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
        for logprobs, steps in ((done.logprobs, plain.scores), (done.raw_logprobs, plain.logits)):
            expected = [step[0].log_softmax(-1)[token] for step, token in zip(steps, done.tokens, strict=True)]
            torch.testing.assert_close(torch.tensor(logprobs), torch.stack(expected), atol=1e-4, rtol=1e-4)


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


class Looks(Drafter):
    """Proposes nothing, and notes the text of each row that has ended."""

    def __init__(self):
        self.texts = []

    def propose(self, batch, lengths):
        return no_candidates(batch)

    def observe(self, done):
        self.texts += [done.batch.row(row).tolist() for row in done.ended]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_drafts_are_told_of_a_text_before_the_next_has_its_place(batch_size: int):
    """Of the tokens of the last round as well."""
    target, texts, options = tiny(), [[1, 2, 3, 4, 5], [6, 7], [8] * 9], GREEDY | {"max_new_tokens": 7}
    expected = [text + alone(target, Request(text), **options) for text in texts]
    looks = Looks()
    completed(SpeculativeDecoding(looks), target, texts, batch_size=batch_size, **options)
    assert sorted(looks.texts) == sorted(expected)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_auto_beside_requests_with_seeds(draft_pays: None, verification: str):
    """A request with a seed has the text of a batch of one; the others draft as many as is best at the time."""
    target, seen = tiny(), numbers()
    draft = near(target, 0.02)
    asked = [Request(r.input_ids, 20, r.seed if n % 3 == 2 else None) for n, r in enumerate(requests(12))]
    strategy = SpeculativeDecoding(draft, verification=verification)
    by = SpeculativeDecoding(draft, verification=verification)
    strategy.listeners = (seen,)
    completions = completed(strategy, target, asked, batch_size=2, **SAMPLED)  # two without a seed come first
    assert all(completions[n].tokens == alone(target, asked[n], by, **SAMPLED) for n in range(2, 12, 3))
    assert max(seen) > 5


STOPS = [None, ["a b"], "cd", ["e", "xyz"]]
CALL = {"repetition_penalty": 1.15, "min_new_tokens": 2, "no_repeat_ngram_size": 4}


def random_requests(number: int, seed: int = 0) -> list[Request]:
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


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize(
    ("number", "batch_sizes"), [(16, (3,)), pytest.param(500, (1, 3, 8, 16, 8), marks=pytest.mark.slow)]
)
def test_orders_and_batch_sizes(number: int, batch_sizes: Sequence[int], options: dict):
    """The target runs fewer forwards than plain decoding."""
    target, asked, options = tiny(vocab_size=280), random_requests(number), options | CALL
    expected = [alone(target, request, tokenizer=tiny_tokenizer(), **options) for request in asked]
    draft = near(target, 0.2)
    for turn, batch_size in enumerate(batch_sizes):
        order = torch.randperm(number, generator=torch.Generator().manual_seed(turn)).tolist()
        strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification="coupled", tokenizer=tiny_tokenizer())
        with Forwards(target) as forwards:
            completions = completed(strategy, target, [asked[n] for n in order], batch_size=batch_size, **options)
        assert [completions[place].tokens for place in range(number)] == [expected[n] for n in order]
        assert len(forwards.ids) < sum(map(len, expected)) / min(2, batch_size) + number


def test_stop_strings_of_a_config():
    """As if they had been given to the call: its options are tried at once, when no tokenizer is bound to them yet."""
    target, asked = tiny(vocab_size=280), [Request(one.input_ids, one.max_new_tokens) for one in random_requests(3)]
    config = GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=24, stop_strings=list("aeiou"))
    options = {"generation_config": config, "tokenizer": tiny_tokenizer()}
    completions = assert_alone(coupled(target, 0.2), target, asked, **options)
    assert any(len(completions[index].tokens) < request.max_new_tokens for index, request in enumerate(asked))


def test_a_request_in_the_place_of_another_has_stop_strings_of_its_own():
    target, stops = tiny(vocab_size=280), [None, list("aeiou")]
    asked = [
        Request(one.input_ids, 24, stop_strings=stops[number % 2]) for number, one in enumerate(random_requests(6))
    ]
    options = GREEDY | {"tokenizer": tiny_tokenizer()}
    completions = assert_alone(coupled(target, 0.2), target, asked, batch_size=1, **options)
    assert len(completions[0].tokens) == 24 > min(len(completions[index].tokens) for index in (1, 3, 5))


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
