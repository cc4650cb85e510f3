"""A strategy takes nothing away: what plain `generate` serves and cannot be speculated, transformers itself decodes.

The text is that of plain `generate`, under the same random numbers; the reason is in the report and in one warning.
"""

import re
import warnings
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
import transformers
import zoo
from all_pairs import each_value
from tiny import Forwards, near, prompts, tiny
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
    SynthIDTextWatermarkingConfig,
)
from transformers.cache_utils import DynamicLayer

from hf_specx import BatchStreamer, Request, SpeculativeDecoding, SuffixDraft
from hf_specx.engine import reasons
from hf_specx.engine.reasons import why_no_noise, why_out_of_step
from hf_specx.models.slots import CACHE, unknown_cache


NEW = 6
SINCE = tuple(map(int, transformers.__version__.split(".")[:2]))
WAYS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0}}


class OwnLayer(DynamicLayer):
    """A layer of the user's, which a strategy cannot know."""


class OwnCache(DynamicCache):
    """A cache of the user's."""


def mask(change: Callable[[torch.Tensor], object], target: Callable[[], PreTrainedModel] = tiny) -> Callable:
    def make() -> tuple[PreTrainedModel, dict]:
        ones = torch.ones(2, 6, dtype=torch.int64)
        changed = change(ones)
        mask = changed if isinstance(changed, torch.Tensor) else ones
        return target(), prompts(2, width=6) | {"attention_mask": mask}

    return make


def put(row, column, value: float = 0) -> Callable[[torch.Tensor], None]:
    return lambda ones: ones.__setitem__((row, column), value)


def asked(target: Callable[[], PreTrainedModel] = tiny, rows: int = 2, **options) -> Callable:
    return lambda: (target(), prompts(rows, width=6) | options)


def cached(make: Callable[[PreTrainedModel], object]) -> Callable:
    def case() -> tuple[PreTrainedModel, dict]:
        target = tiny()
        return target, prompts(2, width=6) | {CACHE: make(target)}

    return case


def of_own_layers(target: PreTrainedModel) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [OwnLayer(), OwnLayer()]
    return cache


def holds_the_whole_text() -> tuple[PreTrainedModel, dict]:
    target, ones = tiny(), torch.ones(2, 2, dtype=torch.int64)
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(input_ids=ones, **{CACHE: cache})
    return target, {"input_ids": prompts(2, width=2)["input_ids"], "attention_mask": ones, CACHE: cache}


def holed_decoder() -> tuple[PreTrainedModel, dict]:
    text = torch.ones(2, 3, dtype=torch.int64)
    holes = torch.tensor([[1, 0, 1], [1, 1, 1]])
    asks = prompts(2, width=6) | {"decoder_input_ids": text, "decoder_attention_mask": holes}
    return zoo.build("seq2seq", "led"), asks


def negative() -> tuple[PreTrainedModel, dict]:
    ids, ends = torch.ones(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 0], [1, 1, 1]])
    guidance = {"guidance_scale": 1.5, "negative_prompt_ids": ids, "negative_prompt_attention_mask": ends}
    return tiny(), prompts(2, width=6) | guidance


def synthid(**options) -> Callable:
    return asked(watermarking_config=SynthIDTextWatermarkingConfig(keys=[3, 1, 4], ngram_len=2, **options))


def embedded(chunk: int) -> Callable:
    """Plain `generate` reads the ids in pieces, and not these embeddings."""

    def case() -> tuple[PreTrainedModel, dict]:
        target, inputs = tiny(), prompts(2, width=6)
        embeds = target.get_input_embeddings()(inputs["input_ids"]).detach()
        return target, inputs | {"inputs_embeds": embeds, "prefill_chunk_size": chunk}

    return case


def training() -> PreTrainedModel:
    return tiny(attention_dropout=0.1).train()


def called(model_type: str, attention: str = "sdpa") -> PreTrainedModel:
    model = tiny()
    model.config.model_type, model.config._attn_implementation = model_type, attention
    return model


def no_plain_speculation(model_type: str) -> Callable:
    return lambda: (zoo.build("causal", model_type), prompts(2, width=6))


CASES: dict[str, Callable[[], tuple[PreTrainedModel, dict]]] = {
    # The model
    "the target is in training mode, where its text is random.*target.eval": asked(training),
    "attends in both directions.*set is_decoder=True": asked(lambda: tiny("bert", is_decoder=False)),
    "model type 'mamba' cannot be a target.*other logits than single steps": no_plain_speculation("mamba"),
    "model type 'jamba' cannot be a target.*other logits than single steps": no_plain_speculation("jamba"),
    "model type 'rwkv' cannot be a target.*a structure of its own": no_plain_speculation("rwkv"),
    "model type 'xlnet' cannot be a target.*a structure of its own": no_plain_speculation("xlnet"),
    # How it generates
    "num_beams=3 is beam search, .*set num_beams=1": asked(num_beams=3, num_return_sequences=2),
    "prompt_lookup_num_tokens=3 selects .*SuffixDraft.3.*leave it out": asked(rows=1, prompt_lookup_num_tokens=3),
    "assistant_early_exit=1 selects .*EarlyExitDraft.1.*leave it out": asked(rows=1, assistant_early_exit=1),
    "use_cache=False leaves no cache, .*use_cache=True": asked(use_cache=False),
    "is a StaticCache": asked(cache_implementation="static"),
    "is a QuantizedCache": asked(cache_implementation="quantized", cache_config={"backend": "fp8"}),
    "is a StaticCache, from which .* use a DynamicCache": cached(lambda target: StaticCache(target.config, 40)),
    "is a QuantizedCache, from which": cached(lambda target: QuantizedCache("fp8", target.config)),
    "is a OwnCache, from which": cached(lambda target: OwnCache(config=target.config)),
    "is a DynamicCache with a OwnLayer, from which": cached(of_own_layers),
    "prefill_chunk_size= reads tokens in the places of inputs_embeds=": embedded(1),
    # Its text
    "has 7 columns, and the text 6": mask(lambda _: torch.ones(2, 7)),
    "has the value -1000.0; pass 1": mask(lambda ones: (ones.tril() - 1) * 1e3),
    "the prompt of row 1 is empty .*; pass": mask(put(1, slice(None))),
    "row 1 .* ends in 0.*padding_side='left'": mask(put(1, slice(4, 6))),
    "decoder_attention_mask has zeros between.*on the left only": holed_decoder,
    "holds 2 tokens, and the whole text has 2; pass": holds_the_whole_text,
    # Processors that few use
    "guidance_scale= feeds a second text": asked(guidance_scale=1.5),
    "guidance_scale= feeds a second text to the model": negative,
    "a WatermarkingConfig draws": asked(watermarking_config={"greenlist_ratio": 0.4, "bias": 2.0}),
    "a WatermarkingConfig draws a list": asked(watermarking_config={"seeding_scheme": "selfhash", "context_width": 2}),
    "SynthID .* without debug_mode=": synthid(debug_mode=True),
    "SynthID .* skip_first_ngram_calls=": synthid(skip_first_ngram_calls=True),
    "SynthID .* a power of 2": synthid(sampling_table_size=1000),
    "encoder_repetition_penalty= is applied": asked(encoder_repetition_penalty=1.3),
    "encoder_no_repeat_ngram_size= is applied": asked(encoder_no_repeat_ngram_size=2),
    "encoder_repetition_penalty= is applied to one": asked(
        partial(zoo.build, "seq2seq", "t5"), encoder_repetition_penalty=1.3
    ),
}


def run(target: PreTrainedModel, inputs: dict, **options) -> torch.Tensor:
    torch.manual_seed(0)
    return target.generate(**inputs, pad_token_id=0, max_new_tokens=NEW, **options)


def ours(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if "transformers' own sampler decodes" in str(each.message)]


@pytest.mark.parametrize(("reason", "way"), each_value(CASES, WAYS))
def test_plain_text_with_the_reason(reason: str, way: str):
    target, inputs = CASES[reason]()
    expected = run(*CASES[reason](), **WAYS[way])
    strategy = SpeculativeDecoding(SuffixDraft(), num_draft_tokens=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(run(target, inputs, **WAYS[way], custom_generate=strategy), expected)
        run(*CASES[reason](), **WAYS[way], custom_generate=strategy)
    (message,) = ours(caught)  # not again with the second call
    assert re.search(reason, message)
    assert strategy.report.layout == "plain"
    assert re.search(reason, strategy.report.layout_reason)
    assert strategy.report.drafted == 0
    assert strategy.report.rows == len(expected)


CACHES: dict[str, Callable[[PreTrainedModel], object]] = {
    "fp8": lambda target: QuantizedCache("fp8", target.config),
    "static": lambda target: StaticCache(target.config, 40),
    "of the user": lambda target: OwnCache(config=target.config),
    "of the user's layers": of_own_layers,
}


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_keeps_its_layers_and_serves_the_next_turn(kind: str):
    """Two turns on one object, as with plain `generate`: the same text, class and layers."""
    target, texts = tiny(), []
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=3)
    for one in (None, strategy):
        cache = CACHES[kind](target)
        layers, text, options = list(cache.layers), prompts(2)["input_ids"].clamp(min=1), {"custom_generate": one}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                text = target.generate(
                    text, max_new_tokens=7, do_sample=False, pad_token_id=0, **{CACHE: cache}, **options
                )
                assert cache.get_seq_length() == text.shape[1] - 1
        assert all(new is old for new, old in zip(cache.layers, layers, strict=True))
        texts.append(text)
    assert torch.equal(*texts)
    assert strategy.report.layout == "plain"


def test_a_cache_by_name_is_returned_as_plain_generate_returns_it():
    """In fp8, which this text feels."""
    target = tiny()
    by_name = {
        "cache_implementation": "quantized",
        "cache_config": {"backend": "fp8"},
        "return_dict_in_generate": True,
    }
    call = prompts(3) | {"max_new_tokens": 20, "do_sample": False}
    expected = target.generate(**call | by_name)
    with pytest.warns(UserWarning, match="is a QuantizedCache"):
        output = target.generate(**call | by_name, custom_generate=SpeculativeDecoding(near(target, 0.05)))
    assert torch.equal(output.sequences, expected.sequences)
    assert type(output[CACHE]) is QuantizedCache
    assert output[CACHE].get_seq_length() == expected[CACHE].get_seq_length()
    assert not torch.equal(expected.sequences, target.generate(**call))


HONOURED = [
    ("llama", False),
    ("llama", True),
    ("mistral", False),
    ("mistral", True),
    ("lfm2", True),
]  # with its config


@pytest.mark.parametrize("layout", ["auto", "lockstep"])
@pytest.mark.parametrize(("model_type", "config"), HONOURED)
def test_nothing_is_swapped_inside_a_cache_that_is_honoured(model_type: str, config: bool, layout: str):
    """The layers of the user's object are filled, and a second turn goes on with them, within and beyond a window."""
    target = zoo.build("causal", "lfm2") if model_type == "lfm2" else tiny(model_type)
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=3, layout=layout)
    for new in (3, 20):
        texts = []
        for one in (None, strategy):
            cache = DynamicCache(config=target.config) if config else DynamicCache()
            layers, text = list(cache.layers), prompts(1, width=4)["input_ids"].clamp(min=1)
            for _ in range(2):
                options = {CACHE: cache, "custom_generate": one, "pad_token_id": 0}
                text = target.generate(text, max_new_tokens=new, do_sample=False, **options)
                assert cache.get_seq_length() == text.shape[1] - 1
                layers = layers or list(cache.layers)
                assert all(x is y for x, y in zip(cache.layers, layers, strict=True))
                assert not any(callable(x) for layer in cache.layers for x in vars(layer).values())
            texts.append(target.generate(text, max_new_tokens=5, do_sample=False, pad_token_id=0, **{CACHE: cache}))
        assert torch.equal(*texts)
    assert strategy.report.accepted > 0


def test_an_offloaded_cache_is_unknown():
    """Plain `generate` takes it on CUDA alone."""
    cache = DynamicCache()
    assert unknown_cache(cache) == ""
    cache.offloading = True
    assert unknown_cache(cache).endswith("is offloaded to the CPU")
    assert unknown_cache(EncoderDecoderCache(DynamicCache(), cache)).endswith("is offloaded to the CPU")


def test_noise_and_steps_that_cannot_be_kept():
    assert "device type 'mps' does not have" in why_no_noise(torch.device("mps"), "block")
    assert why_no_noise(torch.device("mps"), "greedy") == ""
    assert "layout='lockstep' only is fed again" in why_out_of_step(called("never_heard_of"))
    assert why_out_of_step(tiny()) == ""


@pytest.mark.parametrize("options", [{"verification": "coupled"}, {}], ids=["asked for", "without probabilities"])
def test_noise_that_cannot_be_drawn_again(options: dict):
    """As if this device had other noise, where "coupled" was asked for or follows from the draft."""
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.05) if options else SuffixDraft(), **options)
    expected = run(target, prompts(2), do_sample=True)
    with patch.object(reasons, "NOISE_DEVICES", ()), pytest.warns(UserWarning, match="cannot redraw the noise"):
        assert torch.equal(run(target, prompts(2), do_sample=True, custom_generate=strategy), expected)


def checkpointed(model_type: str) -> PreTrainedModel:
    none = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0) if model_type == "gpt2" else {}
    model = tiny(model_type, **none).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of another name from 5.24 on
        model.gradient_checkpointing_enable()
    return model


@pytest.mark.parametrize(("model_type", "keeps"), [("llama", True), ("gemma2", True), ("gpt2", False)])
def test_training_with_gradient_checkpointing(model_type: str, keeps: bool):
    """Layers of transformers keep their cache without gradients from 5.24 on; GPT-2 turns its own off still."""
    target = checkpointed(model_type)
    draft = near(tiny(model_type), 0.05)
    keeps = keeps and SINCE >= (5, 24)
    expected = run(target, prompts(3), do_sample=False)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3)
    with warnings.catch_warnings(record=True) as caught, Forwards(target) as forwards:
        warnings.simplefilter("always")
        assert torch.equal(run(target, prompts(3), do_sample=False, custom_generate=strategy), expected)
    assert bool(ours(caught)) != keeps
    assert (len(forwards.ids) < NEW) == keeps
    assert target.training
    if keeps:  # as a draft it drafts as without
        strategy = SpeculativeDecoding(checkpointed(model_type), num_draft_tokens=3)
        evaluating = tiny(model_type)
        assert torch.equal(run(evaluating, prompts(3), do_sample=False, custom_generate=strategy), expected)
        assert strategy.report.accepted == strategy.report.judged > 0


def test_beams_are_those_of_plain_generate():
    """Sampled and with scores as well; a strategy that is attached goes on with the next call."""
    target = tiny(eos_token_id=7)
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=3)
    asks = {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True}
    for way in WAYS.values():
        expected = run(target, prompts(3), **asks, **way)
        with strategy.attached(target), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = run(target, prompts(3), **asks, **way)
            assert output.keys() == expected.keys()
            assert torch.equal(output.sequences, expected.sequences)
            assert torch.equal(output.sequences_scores, expected.sequences_scores)
            assert output.speculation_report.emitted_per_row == [expected.sequences.shape[1] - 11] * 6
            run(target, prompts(3), do_sample=False)
            assert strategy.report.layout == "ragged"
    streaming = SpeculativeDecoding(near(target, 0.05), streamer=BatchStreamer(None))
    with pytest.raises(ValueError, match="num_beams=3 has no text before its end, which a streamer could get"):
        run(target, prompts(1), num_beams=3, custom_generate=streaming)


@pytest.mark.filterwarnings("ignore")
def test_assisted_generation_shows_its_text():
    """Of prompt lookup, by a streamer that takes one token at a time."""
    target, shown = tiny(), []

    class Collector:
        put, end = staticmethod(lambda tokens: shown.append(tokens.flatten().tolist())), staticmethod(lambda: None)

    strategy = SpeculativeDecoding(near(target, 0.05))
    text = run(target, prompts(1), prompt_lookup_num_tokens=2, streamer=Collector(), custom_generate=strategy)
    assert [token for part in shown for token in part] == text[0].tolist()


@pytest.mark.parametrize("options", [{"top_k": 4, "penalty_alpha": 0.6}, {"dola_layers": "low"}], ids=str)
def test_what_the_hub_decodes_is_left_to_it_inside_attached(options: dict):
    """As without a strategy: there it asks for trust, or decodes."""
    target, calls = tiny(), []
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=3)
    with strategy.attached(target):
        warned = pytest.warns(UserWarning, match="transformers-community/.* of the Hub decodes this call")
        with warned, pytest.raises(ValueError, match="requires `trust_remote_code=True` in your `generate` call"):
            run(target, prompts(1), do_sample=False, **options)
        with patch.object(type(target), "load_custom_generate", lambda *_, **__: lambda **given: calls.append(given)):
            run(target, prompts(1), do_sample=False, trust_remote_code=True, **options)
    assert calls
    with pytest.raises(ValueError, match="selects transformers-community/.* of the Hub .*leave it out"):
        run(target, prompts(1), do_sample=False, custom_generate=strategy, **options)


QUEUED: dict[str, tuple[Callable[[], PreTrainedModel], dict]] = {
    "use_cache=False": (tiny, {"use_cache": False}),
    "a static cache": (tiny, {"cache_implementation": "static"}),
    "a type that is refused": (lambda: zoo.build("causal", "mamba"), {}),
    "training": (lambda: tiny(attention_dropout=0.1).train(), {}),
    "prompt lookup": (tiny, {"prompt_lookup_num_tokens": 2}),
    "guidance": (tiny, {"guidance_scale": 1.5}),
    "a penalty for what is not in the prompt": (tiny, {"encoder_repetition_penalty": 1.3}),
}


@pytest.mark.parametrize("kind", QUEUED)
@pytest.mark.filterwarnings("ignore")
def test_requests_are_decoded_alone(kind: str):
    make, options = QUEUED[kind]
    target, asks = make(), [Request(list(range(1, 3 + n)), 4 + n, seed=n) for n in range(4)]
    options = options | {"do_sample": kind == "training", "pad_token_id": 0}
    strategy, expected = SpeculativeDecoding(SuffixDraft(), num_draft_tokens=2), []
    for one in asks:
        torch.manual_seed(one.seed)
        ids = torch.tensor([one.input_ids])
        text = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=one.max_new_tokens, **options)
        expected.append(text[0, ids.shape[1] :].tolist())
    done = list(strategy.generate_many(target, asks, batch_size=2, ordered=True, **options))
    assert [each.tokens for each in done] == expected
    assert strategy.report.layout == "plain"


def test_requests_have_one_row():
    strategy = SpeculativeDecoding(SuffixDraft())
    several = GenerationConfig(do_sample=True, num_return_sequences=2)
    for options, message in (
        ({"num_beams": 2}, "num_beams=2.*leave"),
        ({"generation_config": several}, "_sequences=2"),
    ):
        with pytest.raises(ValueError, match=message):
            list(strategy.generate_many(tiny(), [[1, 2]], **options))
