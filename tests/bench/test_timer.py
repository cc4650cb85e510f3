"""Plain and speculative generation in turns: which inputs and seeds, which tokens count, what fails."""

import itertools
import random

import pytest
import torch
from tiny import near, tiny
from tiny_tokenizer import TEXTS, tiny_tokenizer
from vision import seeing

from hf_specx import Costs, DraftTargetPair, SpeculativeDecoding, SuffixDraft
from hf_specx.bench.inputs import emitted, encode, prompts_of_length
from hf_specx.bench.timed_methods import TimedMethod
from hf_specx.bench.timer import Timer, compare


OPTIONS = {"max_new_tokens": 2, "do_sample": False}


def batch(rows: int, width: int = 4) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.full((rows, width), 5), "attention_mask": torch.ones(rows, width, dtype=torch.int64)}


def strategy(draft, rows: int) -> SpeculativeDecoding:
    """With known times of forwards, so that none are measured."""
    costs = Costs({rows: {"target": {1: 1.0, 9: 2.0}, "draft": 0.1}})
    return SpeculativeDecoding(draft, num_draft_tokens=2, costs=costs)


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_are_padded_where_the_model_wants_it(side, t5):
    """Also by a tokenizer without a pad token, which stays as it is."""
    tokenizer, bare = tiny_tokenizer(), tiny_tokenizer()
    bare.pad_token = None
    expected = tokenizer(list(TEXTS), return_tensors="pt", padding=True, padding_side=side)
    model = tiny(vocab_size=280) if side == "left" else t5
    inputs = encode(tokenizer, model, list(TEXTS), 4)
    assert torch.equal(inputs["input_ids"], expected["input_ids"])
    assert torch.equal(inputs["attention_mask"], expected["attention_mask"])
    assert torch.equal(encode(bare, model, list(TEXTS), 4)["attention_mask"], expected["attention_mask"])
    assert bare.pad_token is None


def test_prompts_of_one_length():
    """The pair's own from another one on in each row; random tokens where nothing can be read."""
    target, tokenizer = tiny(vocab_size=280), tiny_tokenizer()
    pair = DraftTargetPair(target, target, tokenizer)
    with pytest.raises(ValueError, match="no prompts"):
        prompts_of_length(pair, 2, 9, 4)
    pair.config.prompts = list(TEXTS)
    ids = prompts_of_length(pair, 2, 9, 4)["input_ids"].tolist()
    endless = [token for text in TEXTS * 9 for token in tokenizer(text)["input_ids"]]
    second = len(tokenizer(TEXTS[0])["input_ids"])
    assert ids == [endless[:9], endless[second : second + 9]]
    bare = DraftTargetPair(target, target)
    first, same, other = (prompts_of_length(bare, 2, 9, 4, 0, seed)["input_ids"] for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    seen = DraftTargetPair(seeing("llava"), SuffixDraft())  # whose vocabulary is that of a config inside
    assert prompts_of_length(seen, 2, 9, 4)["input_ids"].shape == (2, 9)
    with pytest.raises(ValueError, match="128 positions"):
        prompts_of_length(bare, 1, 125, 8)


def test_methods_take_turns_in_an_order_that_rotates(monkeypatch):
    """With the same prompts and the same seed in a turn; the first turn warms up."""
    target, calls = tiny(), []
    monkeypatch.setattr(torch, "manual_seed", lambda seed: calls.append(seed))

    class Noted(TimedMethod):
        def __call__(self, inputs, options):
            calls.append((self.name, inputs["input_ids"].shape[1]))
            return super().__call__(inputs, options)

    names, steps = ("plain", "assisted-2", "block-2"), []
    batches = [batch(1, 6), batch(1, 7)]
    timer = Timer(lambda name: Noted(name, target, target), batches, OPTIONS, [7, 8, 9], lambda: steps.append(1))
    timings = timer.time(names)
    order = [names, names, ("assisted-2", "block-2", "plain"), ("block-2", "plain", "assisted-2")]
    seeds, widths = [7, 7, 8, 9], [6, 6, 7, 6]
    expected = [x for turn, s, w in zip(order, seeds, widths, strict=True) for name in turn for x in (s, (name, w))]
    assert [x for x in calls if isinstance(x, tuple) or x in seeds] == expected
    assert len(steps) == len(names) * 4
    assert [timing.to_dict()["tokens"] for timing in timings.values()] == [[2, 2, 2]] * 3


def test_an_order_that_is_drawn():
    """The same for the same draws; each order about as often as the other, whatever was before."""
    target, calls = tiny(), []

    class Noted(TimedMethod):
        def __call__(self, inputs, options):
            calls.append(self.name)
            return super().__call__(inputs, options)

    for _ in range(2):
        methods = {name: Noted(name, target) for name in ("plain", "suffix-2")}
        Timer(methods.__getitem__, [batch(1)], OPTIONS, range(40), rng=random.Random(1)).time(("plain", "suffix-2"))
    half = len(calls) // 2
    assert calls[:half] == calls[half:]
    firsts = calls[2:half:2]
    assert 10 < firsts.count("plain") < 30
    assert 10 < sum(a == b for a, b in itertools.pairwise(firsts)) < 30


def test_turns_end_when_they_should():
    target, asked = tiny(), []

    def should_stop(plain, ours):
        asked.append((len(plain.runs), len(ours.runs)))
        return len(plain.runs) == 3

    comparison = compare(target, strategy(target, 1), [batch(1)], OPTIONS, repeats=9, should_stop=should_stop)
    assert asked == [(1, 1), (2, 2), (3, 3)]
    assert len(comparison.ours.runs) == 3


def test_what_is_compiled_for_a_width_is_not_timed(monkeypatch):
    """transformers does not say what it compiles: each width runs once before it counts, of compiled ways alone."""
    target, widths = tiny(), []

    class Noted(TimedMethod):
        def __call__(self, inputs, options):
            widths.append((self.name, inputs["input_ids"].shape[1]))
            return target.generate(**inputs, **options)

    def make_method(name):
        method = Noted("plain", target)
        method.name, method.compiled = name, name == "compiled"
        return method

    Timer(make_method, [batch(1, 6), batch(1, 7), batch(1, 6)], OPTIONS, [7, 8, 9]).time(["compiled", "plain"])
    by_name = {name: [width for which, width in widths if which == name] for name in ("compiled", "plain")}
    assert by_name == {"compiled": [6, 6, 7, 7, 6], "plain": [6, 6, 7, 6]}


def test_a_run_that_compiled_something_is_made_again():
    compiled, calls, target = iter([2, 1, 1, 0]), [], tiny()

    class Compiling(TimedMethod):
        def __call__(self, inputs, options):
            calls.append(torch.initial_seed())
            output = super().__call__(inputs, options)
            self.strategy.report.compilations = next(compiled)
            return output

    method = Compiling("ours", target, strategy=strategy(near(target, 0.05), 1))
    timings = Timer(lambda name: method, [batch(1)], OPTIONS, [7]).time(["ours"])
    assert calls == [7] * 4  # one that warms up, and those of the first turn
    assert len(timings["ours"].runs) == 1


@pytest.mark.parametrize(
    ("end_ids", "texts"), [([1, 2], [[5, 1], [5, 6, 7], [2]]), (None, [[5, 1, 1], [5, 6, 7], [2, 5, 1]])]
)
def test_rows_end_with_their_first_end_token(end_ids, texts, t5):
    output = torch.tensor([[9, 9, 5, 1, 1], [9, 1, 5, 6, 7], [9, 9, 2, 5, 1]])
    inputs, options = {"input_ids": output[:, :2]}, {"eos_token_id": end_ids}
    assert emitted(tiny(), inputs, output, options) == texts
    assert emitted(tiny(eos_token_id=end_ids), inputs, output, {}) == texts
    assert emitted(tiny(), inputs, output[:, :2], options) == [[], [], []]
    # an encoder-decoder's output begins with the token that its decoder starts from
    assert emitted(t5, {"input_ids": torch.full((3, 9), 5)}, output[:, 1:], options) == texts


def test_a_comparison_without_one_of_the_two_is_an_error():
    other_tokens = SpeculativeDecoding(tiny(vocab_size=50), num_draft_tokens=1)  # plain generate has no draft
    with pytest.raises(ValueError, match="48 tokens"):
        compare(tiny(), other_tokens, [batch(1)], OPTIONS, repeats=1)


def test_assisted_generation_may_refuse_what_ours_takes():
    """As models that score other numbers of tokens, padding included."""
    target = tiny()
    comparison = compare(target, strategy(target, 1), [batch(1)], OPTIONS, repeats=1, draft=tiny(vocab_size=50))
    assert comparison.assisted is comparison.ours_with_its_draft is None
    assert len(comparison.plain.runs) == len(comparison.ours.runs) == 1
