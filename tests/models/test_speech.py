"""Speech: Whisper, whose own `generate` calls ours once for each window of sound, in the three forms of a call."""

import copy
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
import zoo
from all_pairs import each_value
from counting import counting
from test_encoder_decoder import LAYOUTS, assert_equals_stock
from tiny import near
from transformers import PreTrainedModel, WhisperConfig, WhisperForCausalLM, WhisperForConditionalGeneration

import hf_specx
from hf_specx import DraftTargetPair, Request, SpeculativeDecoding
from hf_specx.bench.inputs import prompts_of_length
from hf_specx.hub.publish import write_code


VOCAB_SIZE, WINDOW = 64, 32  # frames of a window
TIMES = list(range(43, VOCAB_SIZE))  # "no timestamps", and the timestamps
PARTS = {f"{side}_{part}": 2 for side in ("encoder", "decoder") for part in ("layers", "attention_heads")}
SIZES = PARTS | {"encoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 32, "num_mel_bins": 8}
SIZES |= {"vocab_size": VOCAB_SIZE, "max_source_positions": WINDOW // 2, "max_target_positions": 40, "init_std": 0.5}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
SIZES |= {"suppress_tokens": None, "begin_suppress_tokens": None}
OPTIONS = {"num_draft_tokens": 3, "verification": "coupled"}
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0}


@cache
def target() -> PreTrainedModel:
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**SIZES)).eval()
    special = {"lang_to_id": {"<|en|>": 40, "<|fr|>": 41}, "task_to_id": {"transcribe": 42, "translate": 39}}
    special |= {"no_timestamps_token_id": 43, "is_multilingual": True, "max_initial_timestamp_index": 3}
    for name, value in special.items():
        setattr(model.generation_config, name, value)
    return model


@cache
def drafts() -> dict[str, PreTrainedModel]:
    """A copy nearby, one with fewer layers on the target's own encoder, and a decoder that has no encoder."""
    fewer = copy.deepcopy(target())
    fewer.model.encoder = target().model.encoder
    fewer.model.decoder.layers = fewer.model.decoder.layers[:1]
    fewer.config.decoder_layers = 1
    decoder = WhisperForCausalLM(copy.deepcopy(target().config)).eval()
    decoder.model.decoder.load_state_dict(target().model.decoder.state_dict())
    decoder.proj_out.load_state_dict(target().proj_out.state_dict())
    return {"near": near(target(), 0.1), "fewer layers": fewer, "decoder": near(decoder, 0.1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The core as it is published."""
    path = tmp_path_factory.mktemp("published")
    write_code(path, str(path))
    return str(path)


def strategy(draft: PreTrainedModel, folder: str, layout: str = "auto", **call) -> torch.Tensor:
    return target().generate(**call, custom_generate=SpeculativeDecoding(draft, layout=layout, **OPTIONS))


def function(draft: PreTrainedModel, folder: str, **call) -> torch.Tensor:
    return hf_specx.generate(**call, model=target(), assistant_model=draft, **OPTIONS)


def string(draft: PreTrainedModel, folder: str, name: str = "draft_model", **call) -> torch.Tensor:
    published = {"custom_generate": folder, "trust_remote_code": True, name: draft}
    return target().generate(**call, **OPTIONS, **published)


Form = Callable[..., torch.Tensor]


def one_of_three(default: Form) -> list:
    """The three forms of a call, of which the other two are slow."""
    forms = (strategy, function, string)
    return [pytest.param(form, marks=() if form is default else pytest.mark.slow, id=form.__name__) for form in forms]


def sounds(rows: int = 4, windows: int = 1) -> dict[str, torch.Tensor]:
    """Sounds of unequal length where they take several windows."""
    torch.manual_seed(5)
    features = torch.randn(rows, SIZES["num_mel_bins"], WINDOW * windows)
    if windows == 1:
        return {"input_features": features}
    lengths = WINDOW * windows * torch.tensor([6, 3, 2, 4])[:rows, None] // 6
    return {"input_features": features, "attention_mask": (torch.arange(WINDOW * windows) < lengths).long()}


def short(**changes) -> dict:
    return sounds() | {"language": "en", "max_new_tokens": 20, "suppress_tokens": TIMES} | changes


def long(**changes) -> dict:
    return sounds(windows=3) | {"language": "en", "max_new_tokens": 16, "return_timestamps": True} | changes


def assert_same(form: Form, names: list[str] | None = None, plain: bool = False, **call) -> tuple[torch.Tensor, int]:
    """Returns stock's tokens, and how many target forwards these took; fewer than ours unless ours is `plain` too."""
    chosen = {name: drafts()[name] for name in names or drafts()}
    torch.manual_seed(4)
    encoder = target().model.encoder
    with counting(target()) as plain_forwards, counting(encoder) as windows:
        expected = target().generate(**call)
    state = torch.get_rng_state()
    for name, draft in chosen.items():
        torch.manual_seed(4)
        own = draft.model.encoder if name == "near" else torch.nn.Identity()
        with counting(target()) as forwards, counting(encoder) as encoded, counting(own) as by_draft:
            output = form(draft, **call)
        assert torch.equal(output, expected), name
        assert torch.equal(torch.get_rng_state(), state), name
        assert len(forwards) < len(plain_forwards) + (name == "fewer layers") or plain, name
        assert len(encoded) == len(windows), name  # the draft never makes the target's encoder run again
        assert len(by_draft) <= len(windows), name
    return expected, len(plain_forwards)


FORMS = [*(partial(strategy, layout=layout) for layout in LAYOUTS), function, string]


@pytest.mark.parametrize(("way", "settings"), each_value(FORMS, [{}, SAMPLED]))
def test_one_window_and_several(way: Form, settings: dict, folder: str):
    """Several of our loops in one call of the user's, over a batch that gets smaller."""
    form = partial(way, folder=folder)
    expected, forwards = assert_same(form, **short(**settings))
    assert forwards == 20
    assert len({tuple(row) for row in expected.tolist()}) == 4
    assert assert_same(form, **long(**settings))[1] > 2 * 16


@pytest.mark.parametrize("name", ["near", "decoder"])
def test_a_draft_in_another_precision(name: str, folder: str):
    """Sounds and encodings come in the target's; the draft's own encoder or decoder reads them in its own."""
    draft = copy.deepcopy(drafts()[name]).bfloat16()
    for settings in ({}, SAMPLED):
        torch.manual_seed(4)
        expected = target().generate(**short(**settings))
        torch.manual_seed(4)
        with counting(target()) as forwards:
            assert torch.equal(strategy(draft, folder, **short(**settings)), expected)
        assert len(forwards) < 20


@pytest.mark.parametrize("way", one_of_three(strategy))
def test_windows_that_go_on_from_the_last(way: Form, folder: str):
    """Then prompts differ in length, and lie behind a mask."""
    form = partial(way, folder=folder)
    plain, _ = assert_same(form, ["near"], **long(max_new_tokens=12))
    conditioned, _ = assert_same(form, **long(max_new_tokens=12, condition_on_prev_tokens=True))
    assert not torch.equal(plain, conditioned)


@pytest.mark.parametrize(
    "changes",
    [
        {"return_timestamps": True, "suppress_tokens": None},
        {"prompt_ids": torch.tensor([30, 5, 6, 7])},
        {"num_return_sequences": 2, **SAMPLED},
        {"eos_token_id": [2, 10, 20]},
        {"language": None},
        {"max_new_tokens": SIZES["max_target_positions"] - 4},
    ],
    ids=["timestamps", "prompt", "several sequences", "ends", "detected language", "up to the last position"],
)
def test_other_calls(changes: dict, folder: str):
    assert_same(partial(function, folder=folder), **short(**changes))


def test_tokens_suppressed_at_the_beginning(folder: str, monkeypatch: pytest.MonkeyPatch):
    """Whisper lifts this where it sees `assistant_model`, as it does in a call by string."""
    free = target().generate(**short())
    monkeypatch.setattr(target().generation_config, "begin_suppress_tokens", free[:, 0].tolist())
    for form in (strategy, function, string):
        suppressed, _ = assert_same(partial(form, folder=folder), ["near"], **short())
        assert not (suppressed[:, 0] == free[:, 0]).any()
    with pytest.raises(ValueError, match="draft_model="):
        string(drafts()["near"], folder, name="assistant_model", **short())


@pytest.mark.parametrize("way", one_of_three(string))
def test_windows_that_are_judged_by_their_scores(way: Form, folder: str):
    """Those with low scores are tried again at other temperatures; a processor that keeps state finds silence."""
    form = partial(way, folder=folder)
    fallback = {"temperature": (0.0, 0.8), "logprob_threshold": -0.3}
    plain, _ = assert_same(form, ["near"], **long())
    tried, _ = assert_same(form, ["near"], **long(**fallback))
    silent, _ = assert_same(form, ["near"], plain=True, **long(**fallback, no_speech_threshold=0.02))
    assert not torch.equal(plain, tried)
    assert silent.shape[1] < tried.shape[1]


def test_seeds_of_rows_that_go_on_to_another_window():
    strategy = SpeculativeDecoding(drafts()["near"], **OPTIONS)
    with pytest.raises(ValueError, match="4 seeds for . rows .* Whisper goes on to another window with fewer rows"):
        target().generate(**long(**SAMPLED), seeds=[1, 2, 3, 4], custom_generate=strategy)


def test_beams_that_only_a_pipeline_has_asked_for():
    """That of speech has 5, whatever the model's own settings say."""
    strategy = SpeculativeDecoding(drafts()["near"], **OPTIONS)
    expected = target().generate(**short(num_beams=5))
    with pytest.warns(UserWarning, match="set num_beams=1 .of a pipeline for speech 5 is the default"):
        assert torch.equal(target().generate(**short(num_beams=5), custom_generate=strategy), expected)


def test_requests_are_texts():
    strategy = SpeculativeDecoding(drafts()["near"], **OPTIONS)
    sound = {"input_features": sounds(1)["input_features"]}
    with pytest.raises(ValueError, match="reads input_features, and requests are texts; call generate with a batch"):
        strategy.generate_many(target(), [Request([3], generate_kwargs=sound)], max_new_tokens=4)
    with pytest.raises(ValueError, match="reads input_features, and prompts are texts"):
        prompts_of_length(DraftTargetPair(target(), drafts()["near"]), 1, 4, 4)


def test_times_of_tokens_by_cross_attentions():
    """Whisper aligns tokens with sounds by the attentions that it asks for."""
    eager = copy.deepcopy(target())
    eager.set_attn_implementation("eager")
    eager.generation_config.alignment_heads = [[0, 0], [1, 1]]
    call = short(return_token_timestamps=True, return_timestamps=True, suppress_tokens=None)
    expected = eager.generate(**call)
    output = eager.generate(**call, custom_generate=SpeculativeDecoding(drafts()["near"], **OPTIONS))
    assert torch.equal(output["sequences"], expected["sequences"])
    torch.testing.assert_close(output["token_timestamps"], expected["token_timestamps"])


@pytest.mark.parametrize(
    ("model_type", "layout"),
    each_value(["speech_to_text", "seamless_m4t", "moonshine", "speecht5", "canary"], LAYOUTS),
)
def test_other_types(model_type: str, layout: str):
    model = zoo.build("speech", model_type)
    language = {"tgt_lang": "fra"} if model_type == "seamless_m4t" else {}
    if language:
        model.generation_config.text_decoder_lang_to_code_id = {"fra": 5}
    call = zoo.inputs(model, 4) | SAMPLED | {"max_new_tokens": 16} | language
    assert_equals_stock(model, {"near": near(model, 0.2)}, layout, **call)
