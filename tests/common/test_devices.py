"""Where a model runs, by the hooks that accelerate puts on it; accelerators need not be here to be named in hooks."""

from pathlib import Path

import pytest
import torch
import zoo
from accelerate.hooks import AlignDevicesHook, CpuOffload, SequentialHook
from tiny import prompts, tiny
from transformers import DynamicCache, PreTrainedModel

from hf_specx.common import devices
from hf_specx.common.devices import execution_device, hardware, last_device
from hf_specx.models.slots import CACHE


CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


def hooked(top: object = None, embeddings: object = None, head: object = None) -> PreTrainedModel:
    """A model with hooks that are looked at, not run."""
    model = tiny()
    for module, hook in ((model, top), (model.model.embed_tokens, embeddings), (model.lm_head, head)):
        if hook is not None:
            module._hf_hook = hook
    return model


def at(device: object) -> AlignDevicesHook:
    return AlignDevicesHook(execution_device=device)


@pytest.mark.parametrize(
    ("model", "first", "last"),
    [
        (tiny(), CPU, CPU),
        (hooked(at("cuda:0"), at("cuda:0"), at("cuda:1")), FIRST, SECOND),
        (hooked(at(None), at(FIRST), at(SECOND)), FIRST, SECOND),
        (hooked(None, at(FIRST), at(SECOND)), FIRST, SECOND),  # the model in a wrapper, which has the first hook
        (hooked(SequentialHook(at(None), SequentialHook(at(FIRST))), None, at(SECOND)), FIRST, SECOND),
        (hooked(CpuOffload(SECOND)), SECOND, SECOND),
    ],
)
def test_hooks_say_where(model: PreTrainedModel, first: torch.device, last: torch.device):
    assert (execution_device(model), last_device(model)) == (first, last)


def test_hardware_is_named_with_what_makes_its_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    facts, threads = tmp_path / "cpuinfo", f", {torch.get_num_threads()} threads"
    facts.write_text("processor\t: 0\nmodel name\t: Cores: 2 of them\nmodel name\t: again\n")
    monkeypatch.setattr(devices, "CPU_FACTS", facts)
    assert hardware(CPU) == f"Cores: 2 of them{threads}"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"number {device.index}")
    assert [hardware(SECOND), hardware(torch.device("mps"))] == ["number 1", "mps"]


def test_memory_that_is_free_counts_what_can_be_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pages of files, and what torch keeps of a GPU's."""
    facts = tmp_path / "meminfo"
    monkeypatch.setattr(devices, "MEMORY_FACTS", facts)
    model = tiny()
    assert devices.free_tokens([model]) is None
    facts.write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 8000 kB\n")
    per_token = 2 * model.config.num_hidden_layers * 2 * 8 * 4  # keys and values, 2 heads of 8, float32
    assert devices.free_tokens([model]) == 8000 * 1024 // 2 // per_token
    for name, size in {"mem_get_info": (100, 900), "memory_reserved": 70, "memory_allocated": 30}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size)
    assert devices._free_bytes(SECOND) == 140


@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "deepseek_v2", "deepseek_v3", "gemma4_text", "glm4_moe_lite", "minicpm3"]
)
def test_a_token_takes_what_it_takes_in_the_cache(model_type: str):
    model, cache = zoo.build("causal", model_type), DynamicCache()
    model(**prompts(1, width=5), **{CACHE: cache})
    cached = sum(x.numel() for layer in cache.layers for x in (layer.keys, layer.values))
    assert devices.cached_numbers(model.config) == cached // 5
