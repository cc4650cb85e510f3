"""Each fact of transformers that hf_specx relies on, so that another version fails here first and says what moved.

A message begins with the room that relies on the fact. Processors and criteria are in test_host_contract_text.py,
outputs and caches in test_host_contract_stock.py.
"""

import copy
import functools
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from collectors import Collector
from tiny import VOCAB_SIZE, prompts, tiny
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig, GenerationMixin
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.streamers import BaseStreamer, TextStreamer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from hf_specx.models.slots import CACHE


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


GENERATE = """
    self inputs generation_config logits_processor stopping_criteria prefix_allowed_tokens_fn synced_gpus
    assistant_model streamer negative_prompt_ids negative_prompt_attention_mask custom_generate kwargs
"""
SIGNATURES = [
    ("pairs", GenerationMixin.generate, GENERATE),
    ("models", GenerationMixin._prefill, "self input_ids generation_config model_kwargs is_first_iteration"),
    ("drafting", CandidateGenerator.get_candidates, "self input_ids kwargs"),
    ("drafting", CandidateGenerator.update_candidate_strategy, "self input_ids scores num_matches"),
    ("sampling", logits_process.LogitsProcessor.__call__, "self input_ids scores"),
    ("sampling", logits_process.PrefixConstrainedLogitsProcessor, "prefix_allowed_tokens_fn num_beams"),
    ("sampling", stopping_criteria.StoppingCriteria.__call__, "self input_ids scores kwargs"),
    ("pairs", stopping_criteria.StopStringCriteria, "tokenizer stop_strings"),
    ("pairs", GenerationMixin.heal_tokens, "self input_ids tokenizer"),
    ("engine", BaseStreamer.put, "self value"),
    ("engine", BaseStreamer.end, "self"),
    ("engine", TextStreamer, "tokenizer skip_prompt decode_kwargs"),
    ("engine", TextStreamer.on_finalized_text, "self text stream_end"),
    ("engine", is_fsdp_managed_module, "module"),
    ("engine", is_deepspeed_zero3_enabled, ""),
]


@pytest.mark.parametrize(("room", "function", "expected"), SIGNATURES, ids=lambda x: getattr(x, "__qualname__", ""))
def test_signatures(room: str, function: Any, expected: str):
    assert parameters(function) == expected.split(), f"{room}: other arguments"


def test_signatures_of_which_a_part_is_used():
    needed = {"input_ids", "next_sequence_length", CACHE, "attention_mask", "inputs_embeds"}
    found = set(parameters(GenerationMixin.prepare_inputs_for_generation))
    assert needed | {"is_first_iteration", "kwargs"} <= found, "models: inputs are prepared by other names"
    first = ["module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"]
    message = "models: GroupedAttention must take the arguments of sdpa_attention_forward"
    assert parameters(sdpa_attention_forward)[:8] == first, message
    assert hasattr(CandidateGenerator, "requires_model_outputs"), "engine: generators"


def test_attention_functions_can_be_put_over():
    found = AttentionInterface._global_mapping["sdpa"]
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is found, "models: _global_mapping is not looked at"
    assert found is sdpa_attention_forward, "models: sdpa is another function"


class Arrival:
    """A callable for `custom_generate=` that notes what arrives; what is withheld is in its signature."""

    def __call__(
        self,
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        seeds=None,
        inputs_tensor=None,
        streamer=None,
        tokenizer=None,
        assistant_tokenizer=None,
        assistant_model=None,
        synced_gpus=None,
        **model_kwargs,
    ):
        self.frame = sys._getframe(1)
        self.__dict__ |= {k: v for k, v in locals().items() if k not in ("self", "model_kwargs")}
        self.kwargs = model_kwargs
        return input_ids


def test_what_a_callable_receives():
    model, arrival, inputs = tiny(), Arrival(), prompts(2)
    model.generate(**inputs, max_new_tokens=5, eos_token_id=[3, 4], seeds=[7], custom_generate=arrival)
    given = {"attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep"}
    assert arrival.kwargs.keys() == given, "models: a decoder-only model is prepared with other inputs"
    assert torch.equal(arrival.input_ids, inputs["input_ids"])
    assert torch.equal(arrival.kwargs["attention_mask"], inputs["attention_mask"])
    assert arrival.seeds == [7], "engine: options that are named parameters do not arrive"
    assert torch.equal(arrival.inputs_tensor, inputs["input_ids"]), "models: inputs_tensor does not arrive"
    config = arrival.generation_config
    assert config.max_length == 11 + 5, "engine: max_length is not resolved"
    assert config._eos_token_tensor.tolist() == [3, 4], "sampling: special tokens are no tensors"
    assert int(config._pad_token_tensor) == 0, "engine: the pad id is no tensor"
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    real = inputs["attention_mask"].bool()
    message = "models: positions do not count the tokens of a row"
    assert torch.equal(arrival.kwargs["position_ids"][real], positions[real]), message
    with pytest.raises(ValueError, match="not used by the model"):
        model.generate(**inputs, max_new_tokens=5, seed=7, custom_generate=arrival)


def test_what_an_encoder_decoder_gives_a_callable():
    sizes = {"vocab_size": VOCAB_SIZE, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = AutoConfig.for_model("t5", **sizes, decoder_start_token_id=0)
    arrival = Arrival()
    AutoModelForSeq2SeqLM.from_config(config).generate(**prompts(2), max_new_tokens=5, custom_generate=arrival)
    needed = {"encoder_outputs", CACHE, "use_cache", "attention_mask"}
    assert needed <= arrival.kwargs.keys(), "models: an encoder-decoder is prepared with other inputs"
    assert arrival.input_ids.tolist() == [[0], [0]], "models: its decoder starts otherwise"
    cache = arrival.kwargs[CACHE]
    message = "models: the parts of an EncoderDecoderCache have other names"
    assert len({id(cache.self_attention_cache), id(cache.cross_attention_cache)}) == 2, message


def test_a_mask_without_pads_is_dropped_or_left():
    """5.23 drops it and notes its length; 5.17 leaves it. Both are handled."""
    arrival = Arrival()
    tiny().generate(
        prompts(1)["input_ids"], attention_mask=torch.ones(1, 11), max_new_tokens=5, custom_generate=arrival
    )
    mask, config = arrival.kwargs["attention_mask"], arrival.generation_config
    noted = getattr(config, "_mask_length", None) if mask is None else mask.shape[1]
    assert noted == 11, "models: where there is no mask, _mask_length has its length"


def test_what_is_withheld_from_a_callable():
    """If one of these arrives by now, the check that refuses it can go."""
    model, stream = tiny(), Collector()
    names = {"streamer": stream, "assistant_model": model, "tokenizer": "t", "assistant_tokenizer": "a"}
    arrival = Arrival()
    model.generate(**prompts(1), **names, synced_gpus=True, max_new_tokens=5, custom_generate=arrival)
    for name in (*names, "synced_gpus"):
        assert getattr(arrival, name) is None, f"engine: {name} is no longer withheld from callables"
    assert [value.shape for value in stream.puts] == [(1, 11)], (
        "engine: a streamer that is withheld was not given the prompt"
    )
    message = "engine: the frame of generate is not where check_withheld looks"
    assert arrival.frame.f_code.co_name == "generate", message
    found = arrival.frame.f_locals
    assert {"custom_generate", "streamer", "assistant_model", "synced_gpus"} <= found.keys(), message
    assert arrival.frame.f_back.f_locals["kwargs"]["tokenizer"] == "t", message


def test_defaults_of_assisted_decoding():
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    arrival = Arrival()
    tiny().generate(**prompts(1), max_new_tokens=5, custom_generate=arrival)
    filled = [getattr(arrival.generation_config, name) for name in names]
    assert filled == [20, "constant", 0.4], "drafting: other defaults, which mean unset in a callable"
    unset = [getattr(GenerationConfig(), name) for name in names]
    assert unset == [None] * 3, "pairs: a config of the user says numbers that the user did not"


def test_the_config_and_the_cache_of_a_callable_are_its_own():
    model, config, arrival = tiny(), GenerationConfig(max_new_tokens=5), Arrival()
    model.generate(**prompts(1), generation_config=config, custom_generate=arrival)
    assert arrival.generation_config is not config, "engine: the user's config is not copied"
    cache = arrival.kwargs[CACHE]
    message = "engine: _is_user_defined does not tell the user's cache from one that was made"
    assert not getattr(cache, "_is_user_defined", False), message
    model.generate(**prompts(1), generation_config=config, **{CACHE: cache}, custom_generate=arrival)
    assert arrival.kwargs[CACHE] is cache
    assert cache._is_user_defined, message


def test_a_shallow_copy_of_a_model_generates_by_its_own_settings():
    model, arrival, healed = tiny(), Arrival(), []
    alike = copy.copy(model)
    alike.generation_config = GenerationConfig(top_k=7)
    vars(alike)["heal_tokens"] = lambda ids, tokenizer: healed.append(tokenizer) or ids
    ids = prompts(1)["input_ids"]
    GenerationMixin.generate(alike, ids, token_healing=True, max_new_tokens=5, custom_generate=arrival)
    message = "pairs: a shallow copy does not take the place of its model"
    assert (arrival.generation_config.top_k, arrival.model) == (7, alike), message
    assert healed == [None], message
    assert model.generation_config.top_k is None, "models: a shallow copy changes its model"


FOLDER = {
    "generate.py": "from .first import one\n\n\ndef generate(**kwargs):\n    return one, kwargs\n",
    "first.py": "from .second import one\n",
    "second.py": "one = 1\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with a `custom_generate` of its own."""
    tiny().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "custom_generate").mkdir()
    for name, text in FOLDER.items():
        (tmp_path / "model" / "custom_generate" / name).write_text(text)
    return tmp_path / "model"


def test_a_folder_is_called_with_every_argument(folder: Path):
    model = tiny()
    _, given = model.generate(
        prompts(1)["input_ids"], custom_generate=str(folder), trust_remote_code=True, revision="r"
    )
    expected = set(GENERATE.split()) - {"self", "kwargs", "custom_generate"} | {"model", "revision"}
    assert given.keys() == expected, "pairs: a folder's function is called with other arguments"


def test_a_folder_holds_flat_siblings_only(folder: Path):
    sub = folder / "custom_generate" / "sub"
    sub.mkdir()
    (sub / "__init__.py").write_text("one = 1\n")
    (folder / "custom_generate" / "generate.py").write_text(FOLDER["generate.py"].replace(".first", ".sub"))
    with pytest.raises(OSError, match=r"sub\.py"):
        tiny().generate(prompts(1)["input_ids"], custom_generate=str(folder), trust_remote_code=True)


def test_a_model_loaded_from_a_folder_has_its_function(folder: Path):
    model = type(tiny()).from_pretrained(folder, trust_remote_code=True)
    message = "pairs: from_pretrained binds the function otherwise than partial(function, model=model)"
    assert isinstance(model.generate, functools.partial), message
    assert model.generate.keywords == {"model": model}, message
    assert not model.generate.args, message
