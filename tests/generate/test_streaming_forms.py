"""Every way to generate streams its text to a reader in another thread, and ends the stream once."""

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collectors import Collector
from forms import ALL_FORMS, GREEDY, SAMPLED
from tiny import prompts
from transformers import PreTrainedTokenizerBase, TextIteratorStreamer

from hf_specx import BatchStreamer, SpeculativeDecoding


TIMEOUT = 60


def call_of(world: SimpleNamespace, form: str, **kwargs: Any) -> Callable[[], Any]:
    if form != "own":
        return partial(world.call[form], **kwargs, num_draft_tokens=3)
    strategy = SpeculativeDecoding(world.draft, num_draft_tokens=3, streamer=kwargs.pop("streamer"))
    return partial(world.target.generate, **kwargs, custom_generate=strategy)


def read(streamer: BatchStreamer | TextIteratorStreamer, job: Callable[[], Any]) -> tuple[list, Any]:
    """The parts that come while a job runs in another thread, and its result or error."""
    found = []

    def finish() -> None:
        try:
            found.append(job())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=finish)
    thread.start()
    parts = list(streamer)
    thread.join()
    return parts, found[0]


def parts_of_stock(tokenizer: PreTrainedTokenizerBase, prompt: torch.Tensor, text: torch.Tensor) -> list[str]:
    """What a reader gets from stock's streamer, which is fed token by token."""
    streamer = TextIteratorStreamer(tokenizer)
    streamer.put(prompt[None])
    for token in text:
        streamer.put(token[None])
    streamer.end()
    return list(streamer)


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED])
@pytest.mark.parametrize("form", [*ALL_FORMS, "own"])
def test_every_form_streams_to_another_thread(world: SimpleNamespace, form: str, settings: dict):
    streamer = TextIteratorStreamer(world.tokenizer, timeout=TIMEOUT)
    parts, output = read(streamer, call_of(world, form, **prompts(1), **settings, streamer=streamer))
    assert parts == parts_of_stock(world.tokenizer, output[0, :11], output[0, 11:])
    batch, mask = BatchStreamer(world.tokenizer, timeout=TIMEOUT), prompts(4)["attention_mask"].bool()
    parts, output = read(batch, call_of(world, form, **prompts(4), **settings, streamer=batch))
    for row in range(4):
        shown = mask[row] | (form in ("strategy", "attached"))  # where transformers hands over the prompts, with pads
        expected = parts_of_stock(world.tokenizer, output[row, :11][shown], output[row, 11:])
        assert [text for number, text in parts if number == row] == [text for text in expected if text]


@pytest.mark.parametrize("form", [*ALL_FORMS, "own"])
@pytest.mark.parametrize("fault", ["target", "draft", "refused"])
def test_every_form_ends_its_stream_once(world: SimpleNamespace, form: str, fault: str):
    def fail(module, args):
        if len(collector.puts) > 3:
            raise RuntimeError("in the middle")

    collector, settings = Collector(), GREEDY
    if fault == "refused":
        settings, error = GREEDY | {"num_beams": 2}, pytest.raises(ValueError, match="num_beams=2 is beam search")
    else:
        error = pytest.raises(RuntimeError, match="in the middle")
    failing = {"target": [world.target, world.own], "draft": [world.draft], "refused": []}[fault]
    handles = [model.register_forward_pre_hook(fail) for model in failing]
    with error:
        call_of(world, form, **prompts(1), **settings, streamer=collector)()
    for handle in handles:
        handle.remove()
    assert collector.ends == 1
    assert (len(collector.puts) > 3) == (fault != "refused")
