"""Heads that were trained, in files that were once misread: what is accepted as they are read now, and as before.

`pytest -m slow -s tests/drafting/heads/test_misreadings.py` prints the table of the room's README.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from alignment import loaded
from head_files import HEAD_DIM, TinyHead, random_head, write
from taught import TOPICS, WORDS, accepted, taught, taught_target

from hf_specx import DraftHead
from hf_specx.drafting.heads import formats


BACK = 5  # words that a text looks back, so that heads have to look at positions
SIZES: dict[str, Any] = {"vocab": WORDS + TOPICS + 1, "layer_ids": (1, 2), "theta": 10.0}
BLOCK = SIZES | {"block": 5, "mask_token": WORDS + TOPICS}
WINDOW = {"layers": 2, "layer_types": ["sliding_attention"] * 2, "window": 12}
LAYERS = {"num_target_layers": 3}
# for each misreading the head that is trained, how its files differ, and how they were read before
MISREADINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "DSpark of early speculators, from the anchor": (
        "dspark",
        BLOCK | {"from_anchor": False, "rank": 16},
        {"form": "old speculators"},
        {"layout": "anchor"},
    ),
    "partial_rotary_factor beside default positions": (
        "eagle3",
        SIZES,
        {"rotary_factor": 0.5},
        {"partial_rotary_factor": 0.5},
    ),
    "is_causal=false, as causal in windows": (
        "dflash",
        BLOCK | WINDOW | {"window_non_causal": True},
        {"form": "z-lab", "extra": LAYERS | {"is_causal": False}},
        {"change": lambda draft: setattr(draft.config, "sliding_window_non_causal", False)},
    ),
    "is_neox_style=false, as halves": ("eagle3", SIZES | {"qk_norm": True}, {"in_pairs": True}, {"patch": True}),
    "mask_embedding.pt, not read": (
        "dflash",
        BLOCK | {"mask_vector": True},
        {"form": "z-lab", "extra": LAYERS},
        {"change": lambda draft: delattr(draft, "mask_embedding")},
    ),
    "SpecForge's norm_output=true, as fed back": (
        "eagle3",
        SIZES | {"norm_before_residual": True},
        {"form": "specforge", "extra": {"norm_output": True, "norm_before_residual": True}},
        {"norm_output": True},
    ),
}


def in_pairs(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same attention where neighbours turn together, in place of channels of the two halves."""
    order = torch.arange(HEAD_DIM).view(2, -1).T.flatten()
    moved = dict(weights)
    for name in weights:
        if ".q_proj." in name or ".k_proj." in name or ".q_norm." in name or ".k_norm." in name:
            moved[name] = weights[name].unflatten(0, (-1, HEAD_DIM))[:, order].flatten(0, 1)
    return moved


def trained(head: TinyHead, folder: Path) -> TinyHead:
    """The head with weights that it has learned."""
    draft = taught(loaded(replace(head, form="speculators"), folder, taught_target(BACK)), BACK, passes=40)
    return replace(head, weights={name.removeprefix("network."): x for name, x in draft.state_dict().items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", MISREADINGS)
def test_it_is_accepted_more_as_it_is_read_now(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kind, sizes, files, before = MISREADINGS[name]
    head = random_head(kind, **sizes)
    if "norm_output" in before:  # else the norm is about the same for all channels, and feeding it back changes little
        head.weights["norm.weight"] = (1.2 * torch.randn(32, generator=torch.Generator().manual_seed(0))).exp()
    head = replace(trained(head, tmp_path / "trained"), **files)
    if head.in_pairs:
        head.weights = in_pairs(head.weights)
    folder, wrong = write(head, tmp_path / "files"), dict(before)
    now = accepted(DraftHead.from_pretrained(folder, target=taught_target(BACK)), BACK)
    change, patch = wrong.pop("change", None), wrong.pop("patch", None)
    if patch:
        monkeypatch.setattr(formats, "pairs_to_halves", lambda *arguments: None)
    draft = DraftHead.from_pretrained(folder, target=taught_target(BACK), **wrong)
    if change is not None:
        change(draft)
    then = accepted(draft, BACK)
    print(f"| {name} | {then.mean_acceptance_length:.2f} | {now.mean_acceptance_length:.2f} |")
    assert then.acceptance_rate < 0.95 * now.acceptance_rate
    assert not now.misread_reason
    if "layout" in before:
        assert "layout='fill-in'" in then.misread_reason
