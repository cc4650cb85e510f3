"""Where two models go, on machines that are not here; what the loader makes of a plan is held against the limits."""

from collections import Counter
from typing import Any

import pytest
import torch
import zoo
from tiny import prompts, tiny
from transformers.integrations.accelerate import _get_device_map
from transformers.quantizers import HfQuantizer, auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_specx.pairs.placement import Placement, cache_bytes, plan, weights_of


TOKENS = 64
LARGE, SMALL = tiny(num_hidden_layers=8), tiny(num_hidden_layers=2)
LAYER_CACHE = TOKENS * 2 * 2 * 8 * 4  # bytes: keys and values of two heads of width 8


def bytes_of(model: torch.nn.Module) -> int:
    return sum(x.numel() * x.element_size() for x in [*model.parameters(), *model.buffers()])


TARGET, DRAFT = bytes_of(LARGE), bytes_of(SMALL)
CACHE, DRAFT_CACHE = 8 * LAYER_CACHE, 2 * LAYER_CACHE
ALL = TARGET + CACHE + DRAFT + DRAFT_CACHE
LAYER = bytes_of(LARGE.model.layers[0])


def planned(max_memory: dict[Any, int], device_map: Any = "auto", **options: Any) -> Placement:
    options = {"cache_tokens": TOKENS} | options
    return plan(LARGE.config, SMALL.config, device_map=device_map, max_memory=max_memory, **options)


def load(place: Placement) -> tuple[Counter, Counter, Any]:
    """Bytes that lie on each device by what the loader makes of a plan; the target's weights alone; the draft's.

    A cache lies where its layer runs, which is the first accelerator for a layer that is offloaded.
    """
    placed = _get_device_map(LARGE, place.target["device_map"], place.target["max_memory"], None)
    runs = sorted({x for x in placed.values() if x not in ("cpu", "disk")}) or ["cpu"]
    weights: Counter = Counter()
    cached: Counter = Counter()
    for name, part in LARGE.named_modules():
        parents = [name.rsplit(".", n)[0] for n in range(name.count(".") + 1)] + [""]
        home = next((placed[key] for key in parents if key in placed), None)
        if isinstance(part, type(LARGE.model.layers[0])):
            cached[home if home in runs else runs[0]] += LAYER_CACHE
        weights[home] += sum(x.numel() * x.element_size() for x in [*part.parameters(False), *part.buffers(False)])
    home = place.draft_device or next(device for device in reversed(placed.values()) if device in runs)
    return weights + cached + Counter({home: DRAFT + DRAFT_CACHE}), +weights, home


MACHINES: dict[str, tuple[dict[Any, int], Any, set[Any]]] = {  # limits, home of the draft, homes of the target
    "one accelerator": ({0: ALL + 2 * LAYER, "cpu": ALL}, 0, {0}),
    "two": ({0: int(0.85 * ALL), 1: int(0.85 * ALL), "cpu": ALL}, 1, {0, 1}),
    "two, the last one small": ({0: ALL + 2 * LAYER, 1: DRAFT + DRAFT_CACHE - 1, "cpu": ALL}, 0, {0}),
    "one, too small": ({0: int(0.6 * (TARGET + DRAFT)) + CACHE + DRAFT_CACHE, "cpu": 2 * ALL}, 0, {0, "cpu"}),
    "two, neither for the draft": ({0: DRAFT, 1: DRAFT, "cpu": 2 * ALL}, "cpu", {0, 1, "cpu"}),
    "none": ({"cpu": int(1.3 * ALL)}, "cpu", {"cpu"}),
    "none, too little memory": ({"cpu": int(0.7 * ALL)}, "cpu", {"cpu", "disk"}),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_both_models_and_their_caches_have_room(machine: str):
    limits, home, homes = MACHINES[machine]
    place = planned(limits)
    cached, weights, draft_device = load(place)
    assert draft_device == home
    assert set(weights) == homes
    assert weights.total() == TARGET
    for device, limit in limits.items():
        assert cached[device] <= limit, (device, cached)


@pytest.mark.parametrize("device_map", ["balanced", "balanced_low_0", "sequential"])
def test_the_draft_is_where_the_target_ends(device_map: str):
    limits = dict.fromkeys((0, 1, 2), int(0.85 * ALL)) | {"cpu": ALL}
    place = planned(limits, device_map)
    cached, _, home = load(place)
    assert home == (1 if device_map == "sequential" else 2)
    assert all(cached[device] <= limit for device, limit in limits.items())
    assert (cached[0] == 0) == (device_map == "balanced_low_0")


@pytest.mark.parametrize(("asked", "home"), [(1, 1), ("cuda:1", 1), ("cuda", 0), ("cpu", "cpu")])
def test_room_is_left_where_the_draft_is_asked_for(asked: Any, home: Any):
    """And nowhere else; the device itself is given to the loader."""
    limits = dict.fromkeys((0, 1, "cpu"), 4 * ALL)
    place, whole = (planned(limits, draft_device_map=where) for where in (asked, {"": "disk"}))
    left = {device for device, size in whole.target["max_memory"].items() if place.target["max_memory"][device] < size}
    assert (place.draft_device, left) == (None, {home})


@pytest.mark.parametrize("device_map", [None, 1, "cuda:1", torch.device("cpu"), {"model": 0, "lm_head": "cuda:1"}])
def test_what_is_asked_for_is_left_alone(device_map: Any):
    assert planned({0: 1, "cpu": 1}, device_map) == Placement({} if device_map is None else {"device_map": device_map})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_device_map": "balanced"}, "draft_device_map='balanced' spreads the draft"),
        ({"cache_tokens": -1}, "cache_tokens=-1 is no number"),
        ({"device_map": "everywhere"}, "found everywhere"),
    ],
)
def test_what_means_nothing_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        planned({0: ALL}, **{"device_map": "auto"} | options)


MODELS = {
    "gpt2": lambda: tiny("gpt2"),
    "tied": lambda: tiny(tie_word_embeddings=True),
    "t5": lambda: zoo.build("seq2seq", "t5"),
    "deepseek_v3": lambda: zoo.build("causal", "deepseek_v3"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_sizes_are_those_of_the_model_and_of_the_cache_that_it_makes(kind: str):
    model = MODELS[kind]()
    model.tie_weights()
    assert weights_of(model.config, "auto", False) == bytes_of(model) > weights_of(model.config, "bfloat16", False)
    output = model.generate(**prompts(1, width=9), min_new_tokens=10, max_new_tokens=10, return_dict_in_generate=True)
    past = output.past_key_values
    caches = [past.self_attention_cache, past.cross_attention_cache] if kind == "t5" else [past]
    layers = [layer for cache in caches for layer in cache.layers]
    a_token = sum(4 * x[0, :, 0].numel() for each in layers for x in (each.keys, each.values))
    assert cache_bytes(model.config, "auto") == a_token


class Eighths(HfQuantizer):
    """Weights of layers take half a byte each, once the model was made ready."""

    is_trainable, is_serializable, quantized_element_size = False, True, 0.5

    def param_needs_quantization(self, model: torch.nn.Module, param_name: str, **_: Any) -> bool:
        return "layers" in param_name and model.is_quantized


def test_a_quantised_target_takes_less(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "eighths", Eighths)
    smaller = sum(p.numel() for p in LARGE.model.layers.parameters()) * 7 // 2  # half a byte, where it took four
    assert weights_of(LARGE.config, "auto", False, "auto", QuantizationConfigMixin("eighths")) == TARGET - smaller
