"""Every way to call: as a function, from a folder, by an override, as a pair, in a pipeline. None loses an argument.

Each streams its text to a reader in another thread, and ends the stream once.
"""

import copy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from all_pairs import each_value, once
from collectors import Collector
from criteria import RowAndPrefix, RowSumIs
from defaults import defaults
from forms import ALL_FORMS, FORMS, GREEDY, OURS, SAMPLED, equal, make_world
from tiny import Forwards, prompts
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
    pipeline,
)

from hf_specx import BatchStreamer, Costs, SpeculativeDecoding


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return make_world(tmp_path_factory.mktemp("entries"))


def evens(batch_id: int, input_ids: torch.Tensor) -> list[int]:
    return list(range(2 + batch_id, 4096, 2))


IDS, MASK = prompts(3).values()
NEGATIVE = prompts(3, width=5, seed=3)
CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "keyword inputs": SAMPLED | {"inputs": IDS, "attention_mask": MASK},
    "keyword input_ids": SAMPLED | {"input_ids": IDS, "attention_mask": MASK},
    "config": {"generation_config": GenerationConfig(**SAMPLED, temperature=0.7, min_new_tokens=3)},
    "config and arguments": {"generation_config": GenerationConfig(**SAMPLED, temperature=0.7), "temperature": 1.3},
    "logits_processor": SAMPLED | {"logits_processor": LogitsProcessorList([RowAndPrefix()])},
    "stopping_criteria": GREEDY | {"stopping_criteria": StoppingCriteriaList([RowSumIs()])},
    "prefix_allowed_tokens_fn": SAMPLED | {"prefix_allowed_tokens_fn": evens},
    "negative prompts": SAMPLED
    | {
        "guidance_scale": 1.7,
        "negative_prompt_ids": NEGATIVE["input_ids"],
        "negative_prompt_attention_mask": NEGATIVE["attention_mask"],
    },
    "several ends": GREEDY | {"eos_token_id": [7, 8, 9, 10], "pad_token_id": 1},
    "synced_gpus": SAMPLED | {"synced_gpus": False},
    "loader": GREEDY | {"trust_remote_code": True},  # a folder and an override are made by it themselves
}


@pytest.mark.parametrize("form", ALL_FORMS)
def test_torchs_defaults_change_nothing(world: SimpleNamespace, form: str):
    """A default device and dtype that are not the models' do no more to our text than to that of plain `generate`."""
    inputs, texts = prompts(3), []
    for call in (world.target.generate, partial(world.call[form], **OURS)):
        torch.manual_seed(5)
        with defaults():
            texts.append(call(**inputs, **SAMPLED))
    assert torch.equal(*texts)


CALLS = [(form, case) for form in FORMS for case in CASES if case != "loader" or form not in ("folder", "override")]


@pytest.mark.parametrize(("form", "case"), CALLS)
def test_each_argument_counts_as_in_stock(world: SimpleNamespace, form: str, case: str):
    arguments = CASES[case]
    config = copy.deepcopy(arguments.get("generation_config"))
    output = equal(world, form, **arguments, drafts=case != "negative prompts")
    assert output.shape[1] > 11
    if config is not None:
        assert config.to_dict() == arguments["generation_config"].to_dict()


@pytest.mark.parametrize("form", FORMS)
def test_positional_arguments(world: SimpleNamespace, form: str):
    config = GenerationConfig(**SAMPLED, temperature=0.8)
    equal(world, form, IDS, attention_mask=MASK, **SAMPLED)
    equal(world, form, IDS, config, attention_mask=MASK)
    equal(world, form, IDS, config, LogitsProcessorList([RowAndPrefix()]), attention_mask=MASK)


@pytest.mark.parametrize(("where", "form"), once(["argument", "config", "the model's own", "criterion"], ALL_FORMS))
def test_stop_strings(world: SimpleNamespace, form: str, where: str, monkeypatch: pytest.MonkeyPatch):
    text = world.target.generate(**prompts(3), **GREEDY)[:, 11:]
    strings = [world.tokenizer.decode(row[place]) for row, place in zip(text, (6, 4, 5), strict=True)]
    both = GREEDY | {"tokenizer": world.tokenizer}
    if where == "argument":
        arguments = both | {"stop_strings": strings}
    elif where == "config":
        config = GenerationConfig(**GREEDY, stop_strings=strings)
        arguments = {"generation_config": config, "tokenizer": world.tokenizer}
    elif where == "criterion":  # stock takes a user's own criterion for the one it would build
        criteria = StoppingCriteriaList([StopStringCriteria(world.tokenizer, strings[:1])])
        arguments = both | {"stop_strings": strings[1:], "stopping_criteria": criteria}
    else:
        for model in (world.target, world.own):
            monkeypatch.setattr(model.generation_config, "stop_strings", strings)
        arguments = both
        equal(world, form, **both, stop_strings=None)
    output = equal(world, form, **arguments)
    assert output.shape[1] <= (11 + 14 if where == "criterion" else 11 + 7)
    if form == "pair":
        del arguments["tokenizer"]
        equal(world, form, **arguments, stock={"tokenizer": world.tokenizer})


@pytest.mark.parametrize("form", ALL_FORMS)
def test_token_healing(world: SimpleNamespace, form: str):
    """In one of the rows the healed prompt is shorter than the given one."""
    inputs = world.tokenizer(["import os\nprint(os.pat", "for i in ran "], return_tensors="pt", padding=True)
    settings = SAMPLED | {"token_healing": True, "tokenizer": world.tokenizer, **inputs}
    healed = equal(world, form, **settings)
    assert not torch.equal(healed[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])
    assert "heal_tokens" not in vars(world.target) | vars(world.own)
    assert isinstance(world.own.generate, Callable)


@pytest.mark.parametrize("form", FORMS)
def test_token_healing_by_the_models_own_config(world: SimpleNamespace, form: str, monkeypatch: pytest.MonkeyPatch):
    """Healing generates by itself, which then wants a tokenizer: refused as by stock, and not healed over and over."""
    for model in (world.target, world.own):
        monkeypatch.setattr(model.generation_config, "token_healing", True)
    with pytest.raises(ValueError, match="tokenizer"):
        world.call[form](**prompts(1), **GREEDY, tokenizer=world.tokenizer)


@pytest.mark.parametrize("form", ALL_FORMS)
def test_synced_gpus_arrives(world: SimpleNamespace, form: str, monkeypatch: pytest.MonkeyPatch):
    """Were there other ranks, they would be asked whether they are finished; alone it says nothing."""
    equal(world, form, **GREEDY, stock={"synced_gpus": False}, synced_gpus=True)
    for name in [name for name in sys.modules if name.endswith(("hf_specx.engine.call", "custom_generate.engine"))]:
        monkeypatch.setattr(sys.modules[name], "world_size", lambda: 2)
    world.call[form](**prompts(2), **GREEDY)
    with pytest.raises((ValueError, RuntimeError), match="process group"):
        world.call[form](**prompts(2), **GREEDY, synced_gpus=True)


@pytest.mark.parametrize(("layout", "form"), once(["ragged", "padded", "packed", "lockstep"], FORMS))
def test_options(world: SimpleNamespace, form: str, layout: str):
    output = world.call[form](
        **prompts(3), **SAMPLED, return_dict_in_generate=True, layout=layout, verification="token", num_draft_tokens=2
    )
    report = output.speculation_report
    assert (report.layout, report.verification, report.num_draft_tokens) == (layout, "token", 2)
    costs = Costs()
    world.call[form](**prompts(3), **SAMPLED, costs=costs, compile=False)
    assert 3 in costs.forward_times


def test_custom_generate_in_a_call_of_the_override(world: SimpleNamespace):
    expected = world.target.generate(**prompts(2), **GREEDY)
    strategy = SpeculativeDecoding(world.draft, num_draft_tokens=2)
    assert torch.equal(world.own.generate(**prompts(2), **GREEDY, custom_generate=strategy), expected)
    assert strategy.report.num_draft_tokens == 2
    same = {"custom_generate": str(world.folder), "trust_remote_code": True, "assistant_model": world.draft}
    assert torch.equal(world.own.generate(IDS[:2], attention_mask=MASK[:2], **GREEDY, **same), expected)
    with pytest.raises(ValueError, match="draft"):
        world.own.generate(**prompts(2), **GREEDY)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED, GREEDY | {"stop_sequence": "an"}])
def test_a_pipeline(world: SimpleNamespace, options: dict):
    write = pipeline("text-generation", model=world.target, tokenizer=world.tokenizer)
    texts = ["def read(self):", "import", "class Reader(Base):\n    def", "for line in", "if"]
    settings = options | {"batch_size": 4, "return_full_text": False}
    torch.manual_seed(7)
    expected = write(texts, **settings)
    strategy = SpeculativeDecoding(world.draft, **OURS)
    torch.manual_seed(7)
    with Forwards(world.target) as forwards:
        assert write(texts, **settings, custom_generate=strategy) == expected
    assert len({outputs[0]["generated_text"] for outputs in expected}) == len(texts)
    assert {len(ids) for ids in forwards.ids} >= {1, 4}
    assert len(forwards.ids) < 2 * 14
    assert strategy.report.accepted > 0


TIMEOUT = 60


def call_of(world: SimpleNamespace, form: str, **kwargs: Any) -> Callable[[], Any]:
    if form != "own":
        return partial(world.call[form], **kwargs, num_draft_tokens=3)
    strategy = SpeculativeDecoding(world.draft, num_draft_tokens=3, streamer=kwargs.pop("streamer"))
    return partial(world.target.generate, **kwargs, custom_generate=strategy)


def read(streamer: BatchStreamer | TextIteratorStreamer, job: Callable[[], Any]) -> tuple[list, Any]:
    """The parts that come while a job runs in another thread, and its result."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(job)
        return list(streamer), future.result()


def parts_of_stock(tokenizer: PreTrainedTokenizerBase, prompt: torch.Tensor, text: torch.Tensor) -> list[str]:
    """What a reader gets from stock's streamer, which is fed token by token."""
    streamer = TextIteratorStreamer(tokenizer)
    streamer.put(prompt[None])
    for token in text:
        streamer.put(token[None])
    streamer.end()
    return list(streamer)


@pytest.mark.parametrize(("form", "settings"), each_value([*ALL_FORMS, "own"], [GREEDY, SAMPLED]))
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


@pytest.mark.parametrize(("form", "fault"), each_value([*ALL_FORMS, "own"], ["target", "draft", "refused"]))
def test_every_form_ends_its_stream_once(world: SimpleNamespace, form: str, fault: str):
    def fail(module, args):
        if len(collector.puts) > 3:
            raise RuntimeError("in the middle")

    collector, settings = Collector(), GREEDY
    if fault == "refused":
        settings = GREEDY | {"num_beams": 2}
        error = pytest.raises(ValueError, match="num_beams=2")
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
