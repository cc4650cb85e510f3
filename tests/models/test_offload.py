"""Weights on the CPU, on disk, or split: the text is that of the models in memory, in fewer forwards than plainly."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from accelerate import cpu_offload, disk_offload, dispatch_model
from all_pairs import each_value
from counting import counting
from tiny import near, prompts, tiny
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

import hf_specx


NEW_TOKENS = 14
NOISE = {"t5": 0.25}
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "top_k": 0}


def build(kind: str) -> PreTrainedModel:
    if kind == "t5":
        return zoo.build("seq2seq", "t5")
    return tiny("llama" if kind == "tied" else kind, tie_word_embeddings=kind == "tied")


def parts(module: torch.nn.Module, prefix: str = "") -> list[str]:
    """Names of embeddings, blocks, norms and heads."""
    names = []
    for name, child in module.named_children():
        whole = not isinstance(child, (torch.nn.ModuleList, PreTrainedModel))
        names += [prefix + name] if whole else parts(child, f"{prefix}{name}.")
    return names


def offload(model: PreTrainedModel, where: str, folder: Path) -> None:
    """Weights are on the meta device between forwards: kept beside the model, on disk, or block by block in turns."""
    if where == "cpu":
        cpu_offload(model, execution_device="cpu")
    elif where == "disk":
        disk_offload(model, folder, execution_device="cpu")
    else:
        device_map = {name: ("disk", "cpu")[n % 2] for n, name in enumerate(parts(model))}
        keys = model._skip_keys_device_placement
        dispatch_model(model, device_map, offload_dir=folder, skip_keys=keys, force_hooks=True)
    homes = {parameter.device.type for parameter in model.parameters()}
    assert homes == ({"meta", "cpu"} if where == "both" else {"meta"})


def speculate(target: PreTrainedModel, draft: PreTrainedModel, settings: dict[str, Any]) -> torch.Tensor:
    """Our text, once it is shown that the target ran less often than plainly, and the draft more often."""
    options = {"verification": "coupled", "num_draft_tokens": 3} | settings
    with counting(target) as judged, counting(draft) as drafted:
        torch.manual_seed(0)
        output = hf_specx.generate(model=target, draft_model=draft, **options)
    assert len(judged) < NEW_TOKENS - 2
    assert len(drafted) > len(judged)
    return output


LLAMA = [("llama", "ragged"), ("llama", "padded"), ("llama", "packed")]
CASES = [*LLAMA, ("gpt2", "ragged"), ("opt", "padded"), ("tied", "lockstep"), ("t5", "padded")]
ROLES = ["target", "draft", "target draft"]


@pytest.mark.parametrize(
    ("case", "where", "which", "do_sample"), each_value(CASES, ["cpu", "disk", "both"], ROLES, [False, True])
)
def test_text_of_the_models_in_memory(case: tuple[str, str], where: str, which: str, do_sample: bool, tmp_path: Path):
    kind, layout = case
    target = build(kind)
    draft = near(target, NOISE.get(kind, 0.05))
    settings = prompts(3) | (SAMPLED if do_sample else GREEDY) | {"max_new_tokens": NEW_TOKENS}
    torch.manual_seed(0)
    expected = target.generate(**settings)
    for role, model in (("target", target), ("draft", draft)):
        if role in which:
            offload(model, where, tmp_path / role)
    assert torch.equal(speculate(target, draft, settings | {"layout": layout}), expected)


@pytest.mark.parametrize(("kind", "all_on_disk"), [("llama", True), ("tied", False), ("t5", True)])
def test_as_from_pretrained_loads_them(kind: str, all_on_disk: bool, tmp_path: Path):
    target = build(kind)
    target.tie_weights()
    draft = near(target, NOISE.get(kind, 0.05))
    settings = prompts(3) | SAMPLED | {"max_new_tokens": NEW_TOKENS}
    torch.manual_seed(0)
    expected = target.generate(**settings)
    auto, loaded = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM, []
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(tmp_path / name)
        device_map = dict.fromkeys(parts(model), "disk") | ({} if all_on_disk else {"lm_head": "cpu"})
        if kind != "llama":  # what is tied lies in one place
            device_map |= {x: device_map["lm_head"] for x in device_map if x == "shared" or "embed" in x}
        loaded.append(
            auto.from_pretrained(tmp_path / name, device_map=device_map, offload_folder=tmp_path / f"{name} offloaded")
        )
        assert any(parameter.is_meta for parameter in loaded[-1].parameters())
    assert all_on_disk <= (loaded[0].device.type == "meta")
    assert torch.equal(speculate(*loaded, settings), expected)


@pytest.mark.usefixtures("draft_pays")
def test_everything_else_that_a_call_can_want(tmp_path: Path):
    """Costs are measured, states and a cache are given back."""
    target = tiny()
    draft = near(target, 0.05)
    extras = {"return_dict_in_generate": True, "output_logits": True}
    settings = prompts(3) | GREEDY | extras | {"max_new_tokens": 8}
    expected = target.generate(**settings)
    offload(target, "disk", tmp_path / "target")
    offload(draft, "disk", tmp_path / "draft")
    strategy = hf_specx.SpeculativeDecoding(draft)
    output = target.generate(**settings, custom_generate=strategy)
    assert torch.equal(output.sequences, expected.sequences)
    bounds = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(torch.stack(output.logits), torch.stack(expected.logits), **bounds)
    for ours, stocks in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys[:, :, -5:], stocks.keys[:, :, -5:], **bounds)
    assert list(strategy.costs.forward_times) == [3]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "places", [("cuda:0", "cuda:1", "cuda:1"), ("cuda:0", "cuda:1", "cuda:0"), ("cpu", "cuda:0", "cpu")]
)
def test_over_accelerators(places: tuple[str, str, str]):
    """The target's first half, its second half, and the draft."""
    first, second, home = places
    if torch.cuda.device_count() < 1 + ("cuda:1" in places):
        pytest.skip("there are not as many CUDA devices")
    target = tiny()
    draft, split = near(target, 0.05).to(home), copy.deepcopy(target)
    settings = {name: x.to("cuda:0") for name, x in prompts(3).items()} | GREEDY | {"max_new_tokens": NEW_TOKENS}
    expected = target.to("cuda:0").generate(**settings)
    names = parts(split)
    device_map = {name: first if n < len(names) // 2 else second for n, name in enumerate(names)}
    dispatch_model(split, device_map, skip_keys=split._skip_keys_device_placement)
    assert torch.equal(speculate(split, draft, settings), expected)
