"""A head that was trained on what its target writes is accepted more often than if it is fed wrongly."""

from functools import cache
from pathlib import Path

import pytest
import torch
from alignment import loaded, target_of
from head_files import TinyHead, random_head
from head_reference import _eagle_layers, _fuse, _rms, target_states
from test_alignment import CONTROLS, OWNERS
from tiny import prompts
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding


STEPS, LENGTH = 300, 96
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": LENGTH, "pad_token_id": 0}


@cache
def target() -> PreTrainedModel:
    """Each token has one that mostly follows it, more or less so by what stands before."""
    model = target_of()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.02
            layer.mlp.down_proj.weight *= 0.02
        follower = torch.randperm(48, generator=torch.Generator().manual_seed(1))
        model.lm_head.weight[follower] = 0.7 * model.model.embed_tokens.weight
    return model


@cache
def trained() -> TinyHead:
    """To propose a first candidate, by the target's own distributions behind its own texts."""
    model, head = target(), random_head("eagle3", draft_vocab=32)
    torch.manual_seed(0)
    texts = model.generate(torch.randint(1, 48, (48, 2)), **SAMPLED)
    states = torch.cat(target_states(model, head.layer_ids, texts), -1)[:, :-1]
    with torch.no_grad():
        laws = model(texts).logits[:, 1:, torch.arange(32) + head.weights["d2t"]].softmax(-1)
    weights = {name: x.double().requires_grad_() for name, x in head.weights.items() if x.is_floating_point()}
    optimizer = torch.optim.Adam(weights.values(), 3e-3)
    for step in range(STEPS):
        row = step % len(texts)
        embedded = model.model.embed_tokens.weight.detach().double()[texts[row, 1:]]
        behind = _eagle_layers(head, weights, embedded, _fuse(weights, states[row].double()))
        scores = _rms(behind, weights["norm.weight"]) @ weights["lm_head.weight"].T
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(scores, laws[row].double()).backward()
        optimizer.step()
    head.weights |= {name: x.detach().float() for name, x in weights.items()}
    return head


def acceptance(control: str, folder: Path) -> float:
    loading, change, wrong = CONTROLS[control]
    draft = loaded(trained(), folder / control, target(), **loading)
    if change is not None:
        change(draft)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=1, verification="token")
    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in wrong.items():
            owner, attribute = name.split(".")
            patch.setattr(OWNERS[owner], attribute, value)
        target().generate(**prompts(8), **SAMPLED, custom_generate=strategy)
    return strategy.report.accepted / strategy.report.drafted


def test_acceptance(tmp_path: Path):
    right = acceptance("nothing", tmp_path)
    assert right > 0.35
    for control in ("tokens not shifted", "halves swapped", "offsets as ids"):
        assert acceptance(control, tmp_path) < 0.7 * right
