"""What stands behind the server, without HTTP: requests that come together, each with its own settings."""

import asyncio
import copy
import json

import pytest
import torch
from tiny import Forwards, near
from tiny_tokenizer import tiny_tokenizer
from transformers import GenerationConfig
from vision import inputs, seeing

from hf_specx import DraftTargetPair
from hf_specx.pairs.serving import BODY_FIELDS_ATTRIBUTE, QueueManager


@pytest.fixture(scope="module")
def pair() -> DraftTargetPair:
    pair = DraftTargetPair.embedded(dtype=torch.float32)
    pair.strategy.verification, pair.strategy.num_draft_tokens = "coupled", 3
    return pair


@pytest.fixture
def manager(pair: DraftTargetPair):
    manager = QueueManager(pair, batch_size=4)
    yield manager
    manager.stop()
    manager.decoding.join(60)
    assert not manager.decoding.is_alive()
    assert "generate" not in vars(pair.target)


SETTINGS = [
    {"do_sample": True, "temperature": 0.8, "top_k": 20, "max_new_tokens": 24},
    {"do_sample": False, "max_new_tokens": 16},
    {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.2, "max_new_tokens": 20},
    {"do_sample": True, "max_new_tokens": 24, "stop_strings": ["\n", "e"]},
    {"do_sample": False, "max_new_tokens": 12, "stop_strings": "("},
]
TEXTS = ["def main(", "import os", "class Reader:", "for line in", "    return"]


def asked(pair: DraftTargetPair, number: int, **fields) -> tuple[dict, GenerationConfig]:
    """Inputs and a config as transformers' handlers make them."""
    config = copy.deepcopy(pair.target.generation_config)
    config.update(**SETTINGS[number % len(SETTINGS)])
    setattr(config, BODY_FIELDS_ATTRIBUTE, {"seed": 50 + number} | fields)
    return pair.tokenizer(TEXTS[number % len(TEXTS)], return_tensors="pt"), config


def plain(pair: DraftTargetPair, number: int) -> list[int]:
    inputs, config = asked(pair, number)
    delattr(config, BODY_FIELDS_ATTRIBUTE)
    torch.manual_seed(50 + number)
    text = type(pair.target).generate(pair.target, **inputs, generation_config=config, tokenizer=pair.tokenizer)
    return text[0, inputs["input_ids"].shape[1] :].tolist()


async def streamed(manager: QueueManager, pair: DraftTargetPair, number: int, leave_after: int | None = None):
    """The text of a client that streams, or its error; it may leave after so many parts."""
    inputs, config = asked(pair, number)
    parts, streamer = manager.generate_streaming(pair.target, pair.tokenizer, inputs, config, str(number))
    text, count = "", 0
    while (part := await parts.get()) is not None:
        text, count = text + part, count + 1
        if count == leave_after:
            streamer.cancel()
    return text, streamer.total_tokens


def test_clients_that_come_together_get_the_texts_of_plain_generate(manager: QueueManager, pair: DraftTargetPair):
    expected = [plain(pair, number) for number in range(10)]
    rows = []

    class Watch:
        def observe(self, done) -> None:
            rows.append(len(done.rows))

    manager.strategy.listeners = (Watch(),)

    async def clients():
        def whole(number: int):
            return manager.generate_non_streaming(pair.target, pair.tokenizer, *asked(pair, number), str(number))

        return await asyncio.gather(
            *(whole(number) for number in range(5)), *(streamed(manager, pair, number) for number in range(5, 10))
        )

    results = asyncio.run(clients())
    for number, result in enumerate(results[:5]):
        text, prompt_length, tokens = result
        assert tokens.tolist() == expected[number]
        assert text == pair.tokenizer.decode(expected[number], skip_special_tokens=True)
        assert prompt_length == asked(pair, number)[0]["input_ids"].shape[1]
    for number, (text, count) in enumerate(results[5:], 5):
        assert text == pair.tokenizer.decode(expected[number], skip_special_tokens=True)
        assert count == len(expected[number])
    assert max(rows) == 4
    assert manager.strategy.report.accepted > 0


def test_images_go_to_generate_with_candidates():
    """And a text beside them to the queue."""
    target = seeing("llava")
    pair = DraftTargetPair(target, near(target, 0.05), tiny_tokenizer())
    pair.strategy.num_draft_tokens = 3
    given, config = inputs(target, (1,)), GenerationConfig(do_sample=False, max_new_tokens=12, pad_token_id=0)
    expected = target.generate(**given, generation_config=config)[0, given["input_ids"].shape[1] :].tolist()
    manager, text = QueueManager(pair), {name: given[name][:, -4:] for name in ("input_ids", "attention_mask")}
    expected_of_text = target.generate(**text, generation_config=config)[0, 4:].tolist()

    async def clients():
        whole = manager.generate_non_streaming
        both = (whole(target, pair.tokenizer, each, copy.deepcopy(config), "0") for each in (given, text))
        return await asyncio.gather(*both)

    with Forwards(target) as forwards:
        results = asyncio.run(clients())
    manager.stop()
    assert [tokens.tolist() for _, _, tokens in results] == [expected, expected_of_text]
    assert len(forwards.ids) < 20


@pytest.fixture
def seen() -> DraftTargetPair:
    """A pair whose target sees images."""
    target = seeing("llava")
    pair = DraftTargetPair(target, near(target, 0.05), tiny_tokenizer())
    pair.strategy.verification, pair.strategy.num_draft_tokens = "coupled", 3
    return pair


def with_seed(config: GenerationConfig, seed: int | None) -> GenerationConfig:
    config = copy.deepcopy(config)
    setattr(config, BODY_FIELDS_ATTRIBUTE, {} if seed is None else {"seed": seed})
    return config


def test_images_have_the_texts_of_their_seeds(seen: DraftTargetPair):
    """Whatever comes beside them; several sampled rows of one request have none, and are refused by name."""
    target = seen.target
    image = inputs(target, (1,))
    length = image["input_ids"].shape[1]
    sampled = GenerationConfig(do_sample=True, max_new_tokens=12, pad_token_id=0)
    beams = GenerationConfig(num_beams=2, max_new_tokens=6, pad_token_id=0)
    expected = []
    for config in (sampled, sampled, beams):
        torch.manual_seed(len(expected))
        text = target.generate(**image, generation_config=copy.deepcopy(config))
        expected.append(text[0, length:].tolist())
    manager = QueueManager(seen)
    asked = [with_seed(sampled, 0), with_seed(sampled, 1), with_seed(beams, 2)]
    asked.append(with_seed(GenerationConfig(num_beams=2, do_sample=True, max_new_tokens=6), 3))

    async def clients():
        whole = manager.generate_non_streaming
        each = (whole(target, seen.tokenizer, image, config, "0") for config in asked)
        return await asyncio.gather(*each, return_exceptions=True)

    torch.manual_seed(7)
    *results, error = asyncio.run(clients())
    manager.stop()
    assert torch.initial_seed() == 7
    assert [tokens.tolist() for _, _, tokens in results] == expected
    assert isinstance(error, ValueError)
    assert "seed=3 with num_beams=2" in str(error)


def test_a_client_that_leaves_ends_the_text_of_its_image(seen: DraftTargetPair):
    seen.strategy.num_draft_tokens = 1
    manager, config = QueueManager(seen), with_seed(GenerationConfig(max_new_tokens=60, eos_token_id=None), None)
    image = inputs(seen.target, (1,))

    async def client() -> None:
        loop = asyncio.get_running_loop()
        answer = manager.generate_non_streaming(seen.target, seen.tokenizer, image, config, "0")
        answering = asyncio.ensure_future(answer)

        def leave(*_: object) -> None:
            loop.call_soon_threadsafe(answering.cancel)

        hook = seen.target.register_forward_hook(leave)
        with pytest.raises(asyncio.CancelledError):
            await answering
        await manager.async_submit(hook.remove)  # once it is decoded

    with Forwards(seen.target) as forwards:
        asyncio.run(client())
    manager.stop()
    assert 0 < len(forwards.ids) < 20


def test_who_leaves_is_not_decoded_any_further(manager: QueueManager, pair: DraftTargetPair):
    expected = plain(pair, 2)

    async def clients():
        return await asyncio.gather(streamed(manager, pair, 0, leave_after=1), streamed(manager, pair, 2))

    (_, count), (text, _) = asyncio.run(clients())
    assert count < 24
    assert text == pair.tokenizer.decode(expected, skip_special_tokens=True)


def test_a_request_that_cannot_be_served_is_refused_and_others_go_on(manager: QueueManager, pair: DraftTargetPair):
    async def clients():
        inputs, config = asked(pair, 0)
        config.num_return_sequences = 2
        refused = manager.generate_non_streaming(pair.target, pair.tokenizer, inputs, config, "0")
        return await asyncio.gather(refused, streamed(manager, pair, 1), return_exceptions=True)

    error, (text, _) = asyncio.run(clients())
    assert isinstance(error, ValueError)
    assert "num_return_sequences=2" in str(error)
    assert text == pair.tokenizer.decode(plain(pair, 1), skip_special_tokens=True)


def test_an_error_is_told_to_all_who_wait_and_the_next_is_served(manager: QueueManager, pair: DraftTargetPair):
    class Fails:
        def observe(self, done) -> None:
            raise OSError("the disk is full")

    manager.strategy.listeners = (Fails(),)

    def whole(number: int):
        return manager.generate_non_streaming(pair.target, pair.tokenizer, *asked(pair, number), str(number))

    async def clients():
        return await asyncio.gather(*(whole(number) for number in range(3)), return_exceptions=True)

    assert all("the disk is full" in str(error) for error in asyncio.run(clients()))
    manager.strategy.listeners = ()
    assert asyncio.run(whole(1))[2].tolist() == plain(pair, 1)


def test_a_response_format_is_a_grammar(manager: QueueManager, pair: DraftTargetPair):
    for name in ("outlines", "llguidance"):
        pytest.importorskip(name)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}

    async def clients():
        inputs, config = asked(pair, 0, response_format=response_format)
        config.max_new_tokens = 60
        return await asyncio.gather(
            manager.generate_non_streaming(pair.target, pair.tokenizer, inputs, config, "0"),
            streamed(manager, pair, 1),
        )

    (text, *_), (other, _) = asyncio.run(clients())
    assert set(json.loads(text)) == {"ok"}
    assert other == pair.tokenizer.decode(plain(pair, 1), skip_special_tokens=True)
    with pytest.raises(ValueError, match="response_format"):
        manager._grammar({"type": "xml"})
