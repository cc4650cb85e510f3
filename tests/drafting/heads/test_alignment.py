"""Each candidate of each round is the one that the reference proposes from the whole text; controls are not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from alignment import GREEDY, SAMPLED, followed, loaded, target_of
from head_files import random_head
from tiny import prompts

from hf_specx import SpeculativeDecoding


pytestmark = pytest.mark.filterwarnings("ignore:in this batch all rows advance")
LAYOUTS = ("ragged", "padded", "packed", "lockstep")
WINDOW = {"layers": 2, "layer_types": ["sliding_attention", "full_attention"], "window": 6}
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab": 24},
    "eagle3 of the target's residual": {"norm_before_residual": True, "biases": True},
    "eagle3 with one norm": {"norms": "one", "norm_output": True},
    "eagle3 with a norm each": {"norms": "each", "rotary_factor": 0.5},
    "eagle3 of three layers": {"layers": 3, "qk_norm": True, "layer_ids": (0, 3, 6, 7)},
    "eagle3 of another width": {"width": 64, "draft_vocab": 24},
    "eagle3 with a window": WINDOW,
    "peagle": {"draft_vocab": 24, "layers": 2, "own_embeddings": True},
    "dflash": {"draft_vocab": 24, "layers": 2},
    "dflash with a window": WINDOW,
    "dflash with a window of blocks": WINDOW | {"window_non_causal": True},
    "dflash with its anchor": {"from_anchor": True},
    "dspark": {"draft_vocab": 24, "layers": 2},
    "dspark gated": {"markov": "gated"},
    "dspark rnn": {"markov": "rnn", "width": 64},
    "medusa": {"layers": 2},
}


def head_of(name: str, **more: Any):
    return random_head(name.split()[0], **HEADS[name] | more)


def form_of(name: str) -> str:
    return "medusa" if name == "medusa" else "speculators"


@pytest.mark.parametrize("name", HEADS)
def test_heads(name: str, tmp_path: Path):
    target, head = target_of(), head_of(name)
    draft = loaded(head, tmp_path / "head", target, form_of(name))
    watch = followed(head, draft, target, prompts(4), SAMPLED)
    assert watch.compared > 100
    assert not watch.wrong
    assert any(len(set(lengths)) > 1 for lengths in watch.lengths)  # rows that end draft fewer


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["eagle3", "peagle", "dspark", "medusa"])
def test_layouts(name: str, layout: str, tmp_path: Path):
    target, head = target_of(), head_of(name)
    draft = loaded(head, tmp_path / "head", target, form_of(name))
    for settings in (GREEDY, SAMPLED):
        watch = followed(head, draft, target, prompts(3), settings, layout=layout)
        assert watch.compared > 80
        assert not watch.wrong
    expected = target.generate(**prompts(3), **GREEDY)
    found = target.generate(**prompts(3), **GREEDY, custom_generate=SpeculativeDecoding(draft, layout=layout))
    assert torch.equal(found, expected)
