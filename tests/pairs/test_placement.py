"""Where two models go, on machines that are not here; what the loader makes of a plan is held against the limits."""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import zoo
from tiny import prompts, tiny
from transformers import AutoModelForCausalLM, DynamicCache, EncoderDecoderCache
from transformers.integrations.accelerate import _get_device_map

from hf_specx.pairs.placement import Placement, Sketch, plan


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


def load(place: Placement, times: int = 1) -> tuple[Counter, Counter, list[Any]]:
    """Bytes that lie on each device by what the loader makes of a plan; the target's weights alone; its map's devices.

    A cache lies where its layer runs, which is the first accelerator for a layer that is offloaded.
    """
    placed = _get_device_map(LARGE, place.target["device_map"], place.target.get("max_memory"), None)
    runs = sorted({x for x in placed.values() if x not in ("cpu", "disk")}) or ["cpu"]
    weights: Counter = Counter()
    held: Counter = Counter()
    for name, part in LARGE.named_modules():
        home = next((placed[key] for key in (name, *parents(name)) if key in placed), None)
        if isinstance(part, type(LARGE.model.layers[0])):
            held[home if home in runs else runs[0]] += times * LAYER_CACHE
        own = sum(x.numel() * x.element_size() for x in [*part.parameters(False), *part.buffers(False)])
        if own:
            weights[home] += own
    draft = place.draft["device_map"][""]
    return weights + held + Counter({draft: DRAFT + times * DRAFT_CACHE}), weights, list(placed.values())


def parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) - 1, -1, -1)]


def check_within(place: Placement, max_memory: dict[Any, int], times: int = 1) -> Counter:
    held, weights, _ = load(place, times)
    for device, limit in max_memory.items():
        assert held[device] <= limit, (device, held, max_memory)
    assert sum(weights.values()) == TARGET
    return weights


def test_one_accelerator_takes_both():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limits = {0: ALL + LAYER, "cpu": ALL}
        place = planned(limits)
    assert place.draft == {"device_map": {"": 0}}
    assert check_within(place, limits) == {0: TARGET}
    assert place.reason == "the draft is on 0, where the target's last layers run"


@pytest.mark.parametrize("device_map", ["auto", "balanced", "sequential"])
def test_two_accelerators_share_the_target(device_map: str):
    limits = {0: int(0.7 * ALL), 1: int(0.7 * ALL), "cpu": ALL}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        place = planned(limits, device_map)
    assert place.draft == {"device_map": {"": 1}}
    weights = check_within(place, limits)
    assert weights.keys() == {0, 1}
    assert load(place)[2][-1] == 1  # the head


def test_balanced_low_0_leaves_the_first_accelerator_alone():
    limits = {0: ALL, 1: ALL, 2: ALL, "cpu": ALL}
    place = planned(limits, "balanced_low_0")
    assert place.draft == {"device_map": {"": 2}}
    assert check_within(place, limits).keys() == {1, 2}


def test_next_best_where_there_is_no_room_beside_the_last_layers():
    """The second accelerator is too small for the draft, which is not split; the target still goes over both."""
    limits = {0: int(0.9 * ALL), 1: DRAFT + DRAFT_CACHE - 1, "cpu": ALL}
    with pytest.warns(UserWarning, match=r"the draft .* is on 0, not with the target's last layers on 1, since"):
        place = planned(limits)
    assert place.draft == {"device_map": {"": 0}}
    assert check_within(place, limits).keys() == {0, 1}


@pytest.mark.parametrize("times", [1, 6])
def test_offloaded_layers_leave_room_for_their_cache_on_the_accelerator(times: int):
    limits = {0: int(0.6 * (TARGET + DRAFT)) + times * (CACHE + DRAFT_CACHE), "cpu": 2 * ALL}
    with pytest.warns(UserWarning, match="GB a round come from slower memory"):
        place = planned(limits, cache_tokens=times * TOKENS)
    assert place.draft == {"device_map": {"": 0}}
    assert check_within(place, limits, times).keys() == {0, "cpu"}


def test_a_draft_that_fits_on_no_accelerator():
    limits = {0: DRAFT, 1: DRAFT, "cpu": 2 * ALL}
    with pytest.warns(UserWarning, match="is on cpu, not with the target's last layers on"):
        place = planned(limits)
    assert place.draft == {"device_map": {"": "cpu"}}
    check_within(place, limits)


def test_a_draft_makes_room_for_what_is_worth_more():
    """The accelerator has room for one of them; a draft is read for each of five candidates, its target once."""
    for width, place in ((64, 0), (4000, "cpu")):
        large, small = tiny(num_hidden_layers=1, intermediate_size=width), tiny(num_hidden_layers=1)
        limits = {0: bytes_of(large) + LAYER_CACHE + LAYER, "cpu": 10 * bytes_of(large)}
        with pytest.warns(UserWarning, match="slower memory"):
            found = plan(large.config, small.config, device_map="auto", max_memory=limits, cache_tokens=TOKENS)
        assert found.draft == {"device_map": {"": place}}


def test_one_large_accelerator_is_enough():
    """Balanced over both, "auto" would put some of the target on the CPU; nothing has to be."""
    limits = {0: ALL + LAYER, 1: LAYER, "cpu": ALL}
    place = planned(limits)
    assert place.target["device_map"] == "sequential"
    assert place.draft == {"device_map": {"": 0}}
    assert check_within(place, limits).keys() == {0}
    with pytest.warns(UserWarning, match="slower memory"):
        assert planned(limits, "balanced").target["device_map"] == "balanced"


@pytest.mark.parametrize(("share", "disk"), [(1.2, False), (0.7, True)])
@pytest.mark.filterwarnings("ignore:the draft")
def test_no_accelerator(share: float, disk: bool):
    limits = {"cpu": int(share * ALL)}
    place = planned(limits)
    assert place.draft == {"device_map": {"": "cpu"}}
    assert (check_within(place, limits)["disk"] > 0) == disk


def test_no_memory_for_anything():
    with pytest.warns(UserWarning, match="is on disk, not with the target's last layers on cpu"):
        place = planned({"cpu": DRAFT})
    assert place.draft == {"device_map": {"": "disk"}}
    assert load(place)[1]["disk"] > 0.9 * TARGET


def test_no_limits_are_what_is_free():
    place = plan(LARGE.config, SMALL.config, device_map="auto")
    assert place.target["max_memory"]["cpu"] > TARGET
    assert place.draft["device_map"][""] in (0, "mps", "cpu")


HALVES = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": "cuda:1"}
HALVES |= {f"model.layers.{n}": 0 if n < 4 else 1 for n in range(8)}


def test_a_dict_is_left_alone():
    place = planned({0: ALL, 1: ALL, "cpu": ALL}, dict(HALVES))
    assert place.target == {"device_map": HALVES}
    assert place.draft == {"device_map": {"": 1}}
    on_second = bytes_of(LARGE.lm_head) + bytes_of(LARGE.model.norm) + 4 * (LAYER + LAYER_CACHE)
    for spare, draft in ((DRAFT + DRAFT_CACHE + LAYER_CACHE, 1), (DRAFT, 0)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            place = planned({0: ALL, 1: on_second + spare, "cpu": ALL}, dict(HALVES))
        assert place.draft == {"device_map": {"": draft}}
        assert len(said) == (draft == 0)


def test_a_dict_on_the_cpu_keeps_the_draft_there():
    stored = {"model": "cpu", "lm_head": "disk"}
    with pytest.warns(UserWarning, match="slower memory"):
        place = planned({0: ALL, "cpu": 2 * ALL}, stored)
    assert place == Placement({"device_map": stored}, {"device_map": {"": "cpu"}}, place.reason)


@pytest.mark.parametrize("device", [1, "cuda:1", "cpu", torch.device("cpu")])
def test_one_device_takes_both_unasked(device: Any):
    both = {"device_map": device}
    assert planned({0: 1, 1: 1, "cpu": 1}, device) == Placement(both, both)
    elsewhere = planned({0: 1, 1: 1, "cpu": 1}, device, draft_device_map=0)
    assert elsewhere == Placement(both, {"device_map": 0})


def test_no_map_is_no_plan():
    assert planned({0: ALL}, None) == Placement({}, {})
    assert planned({0: ALL}, None, draft_device_map="cpu") == Placement({}, {"device_map": "cpu"})


def test_room_is_left_where_the_draft_is_asked_for():
    limits = {0: ALL, 1: ALL, "cpu": ALL}
    rooms = [planned(limits, draft_device_map=place).target["max_memory"] for place in ("cpu", 0, "cuda:1")]
    taken = [{device: rooms[0][device] - room[device] for device in (0, 1)} for room in rooms]
    needed = (DRAFT + DRAFT_CACHE) * TARGET / (TARGET + CACHE)  # what is left is shared by weights and their cache
    assert taken[0] == {0: 0, 1: 0}
    assert taken[1] == {0: pytest.approx(needed, abs=2), 1: 0}
    assert taken[2] == {0: 0, 1: pytest.approx(needed, abs=2)}
    split = {"model": 0, "lm_head": 1}
    assert planned(limits, draft_device_map=split).draft == {"device_map": split}


def test_precision_and_caches_count():
    limits = {0: int(0.7 * ALL), "cpu": ALL}
    assert not planned(limits, dtype=torch.bfloat16).reason.endswith("slower memory")
    assert not planned(limits, dtype="bfloat16").reason.endswith("slower memory")
    for more in ({}, {"dtype": torch.bfloat16, "cache_tokens": 20 * TOKENS}):
        with pytest.warns(UserWarning, match="slower memory"):
            assert planned(limits, **more).reason.endswith("slower memory")


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


@pytest.mark.parametrize("kind", ["llama", "gpt2", "tied", "t5", "deepseek_v3"])
def test_a_sketch_knows_weights_and_cache(kind: str):
    """Against the real model, and the cache that it really makes."""
    if kind in ("t5", "deepseek_v3"):
        model = zoo.build("seq2seq" if kind == "t5" else "causal", kind)
        model.tie_weights()
    else:
        model = tiny("llama" if kind == "tied" else kind, tie_word_embeddings=kind == "tied")
    sketch = Sketch(model.config, "auto", 1, False)
    assert sketch.weights == bytes_of(model)
    output = model.generate(**prompts(1, width=9), min_new_tokens=10, max_new_tokens=10, return_dict_in_generate=True)
    past = output.past_key_values
    caches = (
        [past.self_attention_cache, past.cross_attention_cache] if isinstance(past, EncoderDecoderCache) else [past]
    )
    assert all(isinstance(cache, DynamicCache) for cache in caches)
    layers = [layer for cache in caches for layer in cache.layers]
    a_token = sum(x[0, :, 0].numel() * x.element_size() for layer in layers for x in (layer.keys, layer.values))
    assert sketch.cache == a_token


def test_a_sketch_of_a_class_that_needs_no_weights():
    with torch.device("meta"):
        large = AutoModelForCausalLM.from_config(LARGE.config)
    assert Sketch(LARGE.config, None, 0, False).sizes.keys() == {name for name, _ in large.named_parameters()} | {
        name for name, _ in large.named_buffers()
    }
