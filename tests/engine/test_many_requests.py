"""Requests of `generate_many`: which are taken when, which are refused, and what a cache may hold."""

import re

import pytest
import torch
from many import GREEDY, SAMPLED, alone, completed, requests
from rounds import Heard
from tiny import VOCAB_SIZE, Forwards, near, tiny
from tiny_tokenizer import tiny_tokenizer
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessor

from hf_specx import Request, SpeculativeDecoding
from hf_specx.models.layers import SlotLayer
from hf_specx.models.slots import MARGIN


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
    target = tiny()
    taken = Heard(lambda done: len(done.rows) * (done.batch.width + max(done.emitted_before)))  # slots of the cache
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=3)
    strategy.listeners = (taken,)
    asked = [Request([1] * length, 10) for length in (4, 4, 20, 4, 60, 4)]
    completions = completed(strategy, target, asked, batch_size=4, max_batch_tokens=60, **GREEDY)
    assert completions[4].finish_reason == "refused"
    assert (
        "the prompt has 60 tokens and may get 10 new ones, more than there is room for: max_batch_tokens=60"
        in completions[4].error
    )
    expected = [alone(target, request, **GREEDY) for request in asked]
    assert all(completions[index].tokens == expected[index] for index in (0, 1, 2, 3, 5))
    assert max(taken) <= 60


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


TEMPLATE = (
    "{% for m in messages %}{{ m['content'] + '' }} {% endfor %}{% if think %}the cat{% endif %}"
    "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}"
)


def test_prompts_may_be_chats():
    """As lists of messages, or in a request with what the template reads besides; one that it fails on is refused."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    target = tiny(vocab_size=280)
    chat = [{"role": "user", "content": "a dog"}]
    template_options = {"think": True, "tools": [{"name": "on"}]}
    asked = [chat, Request(messages=chat, chat_template_kwargs=template_options, max_new_tokens=5)]
    asked += [tokenizer("a dog the caton").input_ids, Request(messages=[{"role": "user", "content": {}}])]
    asked += [Request(messages="a dog")]
    asked += [Request([1], messages=chat), Request([1], chat_template_kwargs={"think": True})]
    asked.append(Request(messages=chat, chat_template_kwargs={"tokenize": True}))
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=2, tokenizer=tokenizer)
    completions = completed(strategy, target, asked, batch_size=2, **GREEDY)
    expected = [alone(target, Request(tokenizer(text).input_ids), **GREEDY) for text in ("a dog ", "a dog the caton")]
    assert completions[0].tokens == expected[0]
    assert completions[1].tokens == expected[1][:5]
    assert completions[2].tokens == expected[1]
    words = ["the chat template fails on", "messages='a dog' is no list of messages", "leave one of them out"]
    words += ["is for messages", "tokenize, which is settled"]
    for index, word in enumerate(words, 3):
        assert word in completions[index].error
    with pytest.raises(ValueError, match="needs a tokenizer with a chat template"):
        completed(SpeculativeDecoding(near(target, 0.2)), target, [chat], **GREEDY)


NOT_SERVED = [
    ([], "no prompt"),
    (Request([1], seed=-1), "seed=-1"),
    (Request([1], max_new_tokens=200), "position"),
    ([1.5], "no prompt"),
    ("a text", "no prompt"),
    ([[1, 2]], "no prompt"),
    (torch.ones(3, dtype=torch.int64, device="meta"), "no prompt"),
    ([1, VOCAB_SIZE], f"the token id {VOCAB_SIZE}"),
    ([-1], "the token id -1"),
    (Request([1], max_new_tokens="3"), "max_new_tokens='3'"),
    (Request([1], logits_processor=max), "no list"),
]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_requests_that_cannot_be_served(batch_size: int):
    """Each is refused with its reason, and those around them get their texts."""
    target = tiny("gpt2")
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=2)
    asked = [[1, 2], *(wrong for wrong, _ in NOT_SERVED), [3]]
    completions = completed(strategy, target, asked, batch_size=batch_size, **GREEDY)
    for number, (_, word) in enumerate(NOT_SERVED, 1):
        assert (completions[number].finish_reason, completions[number].tokens) == ("refused", None)
        assert re.search(word, completions[number].error)
    for number in (0, len(asked) - 1):
        assert completions[number].tokens == alone(target, Request(asked[number]), **GREEDY)


class Ending(LogitsProcessor):
    """Excludes every token behind a text of some tokens, as a grammar does that leads nowhere."""

    def __init__(self, length: int, stateless: bool):
        self.length, self.stateless = length, stateless

    def __call__(self, input_ids, scores):
        return scores if input_ids.shape[1] < self.length else torch.full_like(scores, -torch.inf)


@pytest.mark.parametrize("stateless", [True, False], ids=["in a batch", "in order"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_request_whose_own_processors_exclude_every_token(batch_size: int, stateless: bool):
    """It is refused as soon as it gets there, and the others get their texts; where it is of the call, that fails."""
    target, asked = tiny(), requests(7)
    strategy = SpeculativeDecoding(near(target, 0.1), num_draft_tokens=4, verification="coupled")
    for index in (1, 6):
        asked[index] = Request([1, 2, 3], 20, seed=9, logits_processor=[Ending(6, stateless)])
    completions = completed(strategy, target, asked, batch_size=batch_size, **SAMPLED | {"eos_token_id": None})
    for index, done in completions.items():
        if index in (1, 6):
            assert (done.finish_reason, done.tokens) == ("refused", None)
            assert re.search("no next token after 3 new ones|probability tensor", done.error)
        else:
            assert done.tokens == alone(target, asked[index], **SAMPLED | {"eos_token_id": None})
    with pytest.raises(RuntimeError, match="no next token after 3 new ones"):
        completed(strategy, target, [[1, 2, 3]], logits_processor=[Ending(6, True)], **SAMPLED)


NOTHING = {
    "a function": {"prefix_allowed_tokens_fn": lambda row, ids: [5, 6] if len(ids) < 6 else []},
    "tokens": {"suppress_tokens": list(range(VOCAB_SIZE))},
}


@pytest.mark.parametrize("own", NOTHING)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_request_whose_own_arguments_exclude_every_token(batch_size: int, own: str):
    target, asked = tiny(), requests(5)
    strategy = SpeculativeDecoding(near(target, 0.1), num_draft_tokens=4, verification="coupled")
    asked[1] = Request([1, 2, 3], 20, seed=9, generate_kwargs=NOTHING[own])
    completions = completed(strategy, target, asked, batch_size=batch_size, **SAMPLED | {"eos_token_id": None})
    assert completions[1].finish_reason == "refused"
    for index in (0, 2, 3, 4):
        assert completions[index].tokens == alone(target, asked[index], **SAMPLED | {"eos_token_id": None})


def failing(*_):
    raise RuntimeError("no device is left")


@pytest.mark.parametrize("stateless", [True, False], ids=["in a batch", "in order"])
def test_an_error_that_no_request_has_brought_is_that_of_all(stateless: bool):
    """Of the target, also if the request has processors of its own; and of what was given for all requests."""
    target = tiny()
    strategy, processors = SpeculativeDecoding(near(target, 0.1)), [Ending(99, stateless)]
    asked = [Request([1, 2, 3], temperature=0.9)]
    with pytest.raises(RuntimeError, match="no next token after 3 new ones"):
        completed(strategy, target, asked, logits_processor=[Ending(6, True)], **SAMPLED)
    target.register_forward_pre_hook(failing)
    with pytest.raises(RuntimeError, match="no device is left"):
        completed(strategy, target, [Request([1, 2, 3], logits_processor=processors)], **SAMPLED)


@pytest.mark.parametrize("wrong", ["a text", [0.5, 1.0], [[1, 2]]])
def test_the_type_of_the_first_prompt_is_that_of_all(wrong: object):
    """So it is an error at once."""
    target = tiny()
    with pytest.raises(ValueError, match="no prompt"):
        list(SpeculativeDecoding(near(target, 0.2)).generate_many(target, [wrong, wrong], **GREEDY))


SEVERAL = "num_return_sequences=2"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_batch_tokens": -1}, "max_batch_tokens=-1"),
        ({"seeds": [1]}, "seeds="),
        ({"generation_config": GenerationConfig(num_return_sequences=2, do_sample=True)}, SEVERAL),
        ({"foo": 2}, "no argument 'foo'"),
        ({"do_sample": True, "temperature": -1.0}, "temperature"),
        ({"requests": {"input_ids": [[1, 2]]}}, "a dict"),
        ({"requests": [1, 2]}, "a single prompt"),
        ({"requests": torch.tensor([[0, 0, 4], [1, 2, 3]])}, "a Tensor"),
    ],
)
def test_arguments_that_are_refused(options: dict, word: str):
    """Before anything is iterated over."""
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.2))
    with Forwards(target) as forwards, pytest.raises((ValueError, TypeError), match=word):
        strategy.generate_many(target, **{"requests": [[1]]} | GREEDY | options)
    assert not forwards.ids


@pytest.mark.parametrize("verification", ["coupled", "block"])
def test_requests_with_a_temperature_and_a_top_p_of_their_own(verification: str):
    """In one batch, each with the text that it would have alone; the draft's distribution has them too."""
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=3, verification=verification)
    warps = [{}, {"temperature": 0.3}, {"top_p": 0.4}, {"temperature": 2.0, "top_p": 0.9}] * 2
    asked = [Request([3, 4, 5], 12, seed=7, **warp) for warp in warps]
    by = strategy if verification == "block" else None
    expected = [alone(target, Request([3, 4, 5], 12, seed=7), by, **SAMPLED | warp) for warp in warps]
    assert len({*map(tuple, expected)}) > 2
    completions = completed(strategy, target, asked, batch_size=3, **SAMPLED)
    assert [completions[index].tokens for index in range(8)] == expected
    (refused,) = strategy.generate_many(target, [Request([1], 4, temperature=-1.0)], **SAMPLED)
    assert "temperature" in refused.error


def test_an_error_of_the_input_loses_nothing_that_was_taken():
    """Nor is anything read after it, though the iterable could go on."""
    target, asked, completions = tiny(), requests(9), {}
    broken = map({number: asked[number] for number in range(9) if number != 6}.__getitem__, range(9))
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=2)
    with pytest.raises(KeyError, match="6"):
        completions.update(
            (done.index, done.tokens) for done in strategy.generate_many(target, broken, batch_size=4, **GREEDY)
        )
    assert completions == {index: alone(target, request, **GREEDY) for index, request in enumerate(asked[:6])}


@pytest.mark.parametrize("spread", [0, 1])
def test_models_that_are_spread_over_processes_are_refused(spread: int, monkeypatch: pytest.MonkeyPatch):
    """The target or the draft."""
    models = [tiny(), near(tiny(), 0.2)]
    monkeypatch.setattr("hf_specx.engine.queue.synced_by_default", lambda *asked: models[spread] in asked)
    with Forwards(models[0]) as forwards, pytest.raises(ValueError, match="spread over processes"):
        SpeculativeDecoding(models[1]).generate_many(models[0], [[1]], **GREEDY)
    assert not forwards.ids
