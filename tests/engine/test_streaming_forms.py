"""Every way to generate streams its text to a reader in another thread, and ends the stream once."""

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collectors import Collector, Words
from tiny import near, prompts, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from hf_specx import BatchStreamer, DraftTargetPair, SpeculativeDecoding, generate
from hf_specx.hub.known_pairs import embedded_folder
from hf_specx.hub.publish import write_code


GREEDY = {"do_sample": False, "max_new_tokens": 24}
SAMPLED = {"do_sample": True, "top_k": 20, "max_new_tokens": 24}
FORMS = ("function", "strategy", "pair", "folder", "override")
TIMEOUT = 60


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(embedded_folder())


@pytest.fixture(scope="module")
def world(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A target and a draft with the vocabulary of the tokenizer, and `call`, every way to generate with a streamer."""
    target = tiny(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    draft, folder = near(target, 0.05), tmp_path_factory.mktemp("streaming")
    target.save_pretrained(folder)
    write_code(folder, str(folder))
    own = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

    def by_strategy(streamer: BaseStreamer, num_draft_tokens: int = 3, **kwargs: Any) -> Any:
        strategy = SpeculativeDecoding(draft, num_draft_tokens=num_draft_tokens, streamer=streamer)
        return target.generate(**kwargs, custom_generate=strategy)

    loaded = {"custom_generate": str(folder), "trust_remote_code": True}
    call = {
        "function": partial(generate, model=target, draft_model=draft),
        "strategy": by_strategy,
        "pair": DraftTargetPair(target, draft, tokenizer).generate,
        "folder": partial(target.generate, assistant_model=draft, **loaded),
        "override": partial(own.generate, assistant_model=draft),
    }
    return SimpleNamespace(target=target, draft=draft, own=own, call=call)


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
@pytest.mark.parametrize("form", FORMS)
def test_every_form_streams_to_another_thread(
    world: SimpleNamespace, tokenizer: PreTrainedTokenizerBase, form: str, settings: dict
):
    streamer = TextIteratorStreamer(tokenizer, timeout=TIMEOUT)
    call = partial(world.call[form], **prompts(1), **settings, num_draft_tokens=3, streamer=streamer)
    parts, output = read(streamer, call)
    assert parts == parts_of_stock(tokenizer, output[0, :11], output[0, 11:])
    batch, mask = BatchStreamer(tokenizer, timeout=TIMEOUT), prompts(4)["attention_mask"].bool()
    call = partial(world.call[form], **prompts(4), **settings, num_draft_tokens=3, streamer=batch)
    parts, output = read(batch, call)
    for row in range(4):
        expected = parts_of_stock(tokenizer, output[row, :11][mask[row]], output[row, 11:])
        assert [text for number, text in parts if number == row] == [text for text in expected if text]


@pytest.mark.parametrize("form", FORMS)
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
        world.call[form](**prompts(1), **settings, num_draft_tokens=3, streamer=collector)
    for handle in handles:
        handle.remove()
    assert collector.ends == 1
    assert (len(collector.puts) > 3) == (fault != "refused")


def test_a_streamer_that_is_withheld_is_ended(world: SimpleNamespace):
    """transformers gives it the prompt and nothing else, so the call is refused; its reader does not wait."""
    own = Collector()
    strategy = SpeculativeDecoding(world.draft, streamer=own)
    for streamer in (TextIteratorStreamer(Words(), timeout=TIMEOUT), BatchStreamer(Words(), timeout=TIMEOUT)):
        call = partial(world.target.generate, **prompts(1), **GREEDY, streamer=streamer, custom_generate=strategy)
        _, error = read(streamer, call)
        assert isinstance(error, ValueError)
        assert "SpeculativeDecoding(streamer=...)" in str(error)
    assert own.ends == 2
