"""Each candidate of each round is the one that the reference proposes from the whole text; controls are not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from alignment import (
    GREEDY,
    SAMPLED,
    adjusted_early,
    assert_aligned,
    assert_equals_stock,
    begun_early,
    loaded,
    selected_early,
    target_of,
    unshifted,
    watched,
)
from head_files import EPS, random_head
from many import assert_alone
from plain import assert_plain
from tiny import prompts
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerTextNormedEmbedding

from hf_specx import DraftHead, Request, SpeculativeDecoding
from hf_specx.common.round import Round
from hf_specx.drafting.heads import dflash2, formats
from hf_specx.drafting.heads.block import Block, MarkovHead
from hf_specx.drafting.heads.dflash2 import DFlash2
from hf_specx.drafting.heads.domino import PrefixGru
from hf_specx.drafting.heads.eagle import Eagle
from hf_specx.drafting.heads.formats import read_head
from hf_specx.drafting.heads.head_drafter import HeadDrafter
from hf_specx.drafting.heads.runner import head_forward
from hf_specx.models import compiled_forwards


pytestmark = pytest.mark.filterwarnings("ignore:in this batch all rows advance")
LAYOUTS = ("ragged", "padded", "packed", "lockstep")
WINDOW = {"layers": 2, "layer_types": ["sliding_attention", "full_attention"], "window": 6}
OWN_TABLES = {"own_embeddings": True, "own_head": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}
KIMI = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
SPECFORGE = {"form": "specforge dspark", "layers": 2, "confidence": True}
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab": 24},
    "eagle3 of the target's residual": {"norm_before_residual": True, "biases": True},
    "eagle3 with one norm": {"norms": "one", "norm_output": True, **OWN_TABLES},
    "eagle3 with a norm each": {"norms": "each", "rotary_factor": 0.5},
    "eagle3 of three layers": {"layers": 3, "qk_norm": True, "layer_ids": (0, 3, 6, 7)},
    "eagle3 of another width": {"width": 64, "draft_vocab": 24},
    "eagle3 that turns a part": {"turning": 4, "theta": 100.0},
    "eagle3 that turns a part of scaled positions": {"rotary_factor": 0.5, "scaling": LINEAR},
    "eagle3 that turns pairs": {"in_pairs": True, "qk_norm": True, "biases": True, "theta": 100.0},
    "eagle3 that scores what is not normed": {"last_norm": False},
    "eagle3 with a window": WINDOW,
    "eagle3 with a window and yarn": WINDOW | {"scaling": YARN, "theta": 100.0},
    "eagle3 with a window and llama3": WINDOW | {"scaling": LLAMA3, "theta": 100.0},
    "eagle3 with yarn as of Kimi": {"scaling": KIMI, "theta": 100.0, "extra": {"rope_parameters": KIMI}},
    "peagle with a window and yarn": WINDOW | {"scaling": YARN, "theta": 100.0},
    "peagle with a mask of its own": {"mask_vector": True},
    "peagle": {"draft_vocab": 24, "layers": 2, "own_embeddings": True},
    "dflash": {"draft_vocab": 24, "layers": 2},
    "dflash with a window": WINDOW,
    "dflash with a window of blocks": WINDOW | {"window_non_causal": True},
    "dflash with its anchor": {"from_anchor": True},
    "dflash with a mask of its own": {"mask_vector": True},
    "dflash that is not causal": WINDOW | {"form": "z-lab", "window_non_causal": True, "extra": {"is_causal": False}},
    "dflash by ModelOpt": WINDOW | {"form": "z-lab", "window_non_causal": True, "parts": {"causal": False}},
    "dflash causal": {"form": "z-lab", "layers": 2, "causal": True, "extra": {"is_causal": True}},
    "dflash causal by NeMo": WINDOW | {"form": "z-lab", "causal": True, "parts": {"causal": True}},
    "dflash causal by JetSpec": {"form": "z-lab", "layers": 2, "causal": True, "parts": {"causal_head": True}},
    "dspark": {"draft_vocab": 24, "layers": 2, "confidence": True},
    "dspark gated": {"markov": "gated"},
    "dspark rnn": {"markov": "rnn", "width": 64},
    "domino": {"layers": 2},
    "domino of another width": {"pure": 0, "width": 64, "draft_vocab": 24, **OWN_TABLES},
    "domino by SpecForge": {"form": "domino", "layers": 2},
    "domino by SpecForge with its anchor": {"form": "domino", "from_anchor": True, "pure": 2},
    "domino by early SpecForge": {"form": "early domino"},
    "dflash2": {"layers": 2, "embedding_scale": 0.5},
    "dflash2 of three taps": {"taps": 3, "group": 4, "multiplier": 1.5, "softcap": 2.0, "top_k": 7, **OWN_TABLES},
    "dflash2 with its anchor": {"from_anchor": True, "width": 64},
    "dflash2 with a window": WINDOW | {"window_non_causal": False},
    "dflash2 with a window of blocks": WINDOW,
    "medusa": {"layers": 2},
    "eagle3 by SafeAILab": {"form": "safeailab", "draft_vocab": 24, "theta": 10000.0},
    "eagle3 by SafeAILab, whole": {"form": "safeailab", "theta": 10000.0, "own_head": True},
    "eagle3 by SpecForge": {"form": "specforge", "draft_vocab": 24, "layer_ids": (1, 4, 6), "norms": "each"},
    "eagle3 by AngelSlim": {"form": "angelslim", "draft_vocab": 24},
    "eagle3 by DeepSpec": {"form": "deepspec", "layer_ids": (2, 3, 4, 5, 6), "qk_norm": True, **OWN_TABLES},
    "dflash by DeepSpec": {"form": "deepspec", "layer_ids": (2, 4, 6), "from_anchor": True, **OWN_TABLES},
    "dflash by early speculators": {"form": "old speculators"},
    "dspark by early speculators": {"form": "old speculators", "from_anchor": False},
    "dspark by SpecForge": SPECFORGE,
    "dspark by SpecForge, gated": {"form": "early specforge dspark", "markov": "gated", "layers": 2},
    "dspark by SpecForge, that turns pairs": SPECFORGE | {"in_pairs": True, "turning": 4, "block": 9, "theta": 100.0},
    "dspark by DeepSpec": {"form": "deepspec", "markov": "rnn", **OWN_TABLES},
    "dflash by z-lab": {"form": "z-lab", "layers": 2},
    "dflash2 by z-lab": {"form": "z-lab 2", "layers": 2, "multiplier": 0.5, "softcap": 3.0, "embedding_scale": 2.0},
    "dflash2 by z-lab with a window": {"form": "z-lab 2", **WINDOW},
    "dflash2 by z-lab with a causal window": {"form": "z-lab 2", **WINDOW, "window_non_causal": False},
    "medusa in safetensors": {"form": "medusa safetensors"},
}


def head_of(name: str, **more: Any):
    return random_head(name.split()[0], **HEADS[name] | more)


@pytest.mark.parametrize("name", HEADS)
def test_heads(name: str, tmp_path: Path):
    """In every form; what is saved of one is read again as the same, in the form of speculators."""
    target, head = target_of(), head_of(name)
    draft = loaded(head, tmp_path / "published", target)
    watch = assert_aligned(head, draft, target, prompts(4), SAMPLED, least=80)
    assert any(len(set(lengths)) > 1 for lengths in watch.lengths)  # rows that end draft fewer
    draft.save_pretrained(tmp_path / "saved")
    config, weights = read_head(tmp_path / "published", target)
    saved_config, saved_weights = read_head(tmp_path / "saved", target)
    assert vars(saved_config) == vars(config)
    assert weights.keys() == saved_weights.keys() == head.weights.keys()
    expected = weights if head.in_pairs else head.weights  # the order of whose channels was changed
    assert all(torch.equal(saved_weights[name], tensor) for name, tensor in expected.items())
    assert config.rms_norm_eps == EPS or head.kind == "medusa"  # which cannot be seen in what is proposed


IN_LAYOUTS = ("eagle3", "peagle", "dflash", "medusa")  # each reads rows in its own way
OTHERS = ("dspark", "dflash2", "domino", "dflash causal by JetSpec", "dspark by SpecForge")  # which are blocks as well
SLOW_LAYOUTS = [
    pytest.param(name, layout, marks=[pytest.mark.slow] if layout != "packed" else [])
    for name in OTHERS
    for layout in LAYOUTS
]


@pytest.mark.parametrize(
    ("name", "layout"), [*((name, layout) for name in IN_LAYOUTS for layout in LAYOUTS), *SLOW_LAYOUTS]
)
def test_layouts(name: str, layout: str, tmp_path: Path):
    target, head = target_of(), head_of(name)
    draft = loaded(head, tmp_path / "head", target)
    for settings in (GREEDY, SAMPLED):
        strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification="coupled", layout=layout)
        watch = watched(strategy, head, target)
        assert_plain(target, strategy, prompts(3), **settings)
        watch.check(80)
    assert strategy.report.accepted > 0


@pytest.mark.parametrize("name", ["dflash", "dflash2", "eagle3"])
def test_targets_that_norm_their_embeddings(name: str, tmp_path: Path):
    """Blocks read the rows of Muse's table as they are, and EAGLE-3 what the target reads."""
    target, head = target_of(), head_of(name, layers=1)
    table = target.get_input_embeddings().weight
    normed = MuseGlimmerTextNormedEmbedding(*table.shape, padding_idx=0)
    normed.weight = table
    target.set_input_embeddings(normed)
    draft = loaded(head, tmp_path / "head", target)
    if name == "eagle3":
        head.weights["embed_tokens.weight"] = normed(torch.arange(len(table))).detach()
    assert_aligned(head, draft, target, prompts(3), SAMPLED, least=40)


FORWARDS = {"eagle3": 2, "dspark rnn": 3}  # of a size, compiled; others in queues and in test_head_calls.py
MORE_FORWARDS = {"eagle3 of three layers": 2, "peagle": 1, "eagle3 with a window and yarn": 2}
MORE_FORWARDS |= {"medusa": 1, "domino": 3, "dflash2": 2}
MORE_FORWARDS |= {"dflash causal by JetSpec": 1, "dspark by SpecForge": 3, "dflash with a mask of its own": 1}


@pytest.mark.filterwarnings("ignore:compile=True compiles")
@pytest.mark.parametrize("names", [FORWARDS, pytest.param(MORE_FORWARDS, marks=pytest.mark.slow)])
def test_compiled_forwards(names: dict[str, int], traced: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One target for heads that read it in other places, whose forwards are compiled apart, and the heads' own."""
    run, target = compiled_forwards.CompiledForwards.run, target_of(num_hidden_layers=4)

    def checked(self, function, size, *inputs, **named):
        if function is head_forward:
            buffers = inputs[3]
            assert not buffers or len(buffers[0][0]) == size[1]  # they have the rows that it is compiled for
        return run(self, function, size, *inputs, **named)

    monkeypatch.setattr(compiled_forwards.CompiledForwards, "run", checked)
    for name, number in names.items():
        head = head_of(name, layer_ids=(1, 2, 3))
        draft = loaded(head, tmp_path / name, target)
        assert_aligned(head, draft, target, prompts(2), SAMPLED, least=40, compile=True)
        assert 0 < compiled_forwards.COMPILED_FORWARDS[draft].compilations <= 2 * number  # of two batch sizes
        assert_equals_stock(draft, target, prompts(2), compile=True)
        assert compiled_forwards.COMPILED_FORWARDS[draft].compilations <= 2 * number


@pytest.mark.filterwarnings("ignore:compile=True compiles")
@pytest.mark.parametrize("name", ["dflash2", *(pytest.param(x, marks=pytest.mark.slow) for x in ("eagle3", "dspark"))])
def test_compiled_queues(name: str, traced: None, tmp_path: Path):
    """Prompts that come later are read into the buffers, also those that do not fit and have them grow."""
    target, head = target_of(num_hidden_layers=4), head_of(name, layer_ids=(1, 2, 3))
    strategy = SpeculativeDecoding(loaded(head, tmp_path / "head", target), num_draft_tokens=2, compile=True)
    watch = watched(strategy, head, target)
    requests = [
        Request([1 + (number + index) % 40 for index in range(length)])
        for number, length in enumerate((1, 4, 6, 90, 3))
    ]
    assert_alone(strategy, target, requests, batch_size=3, do_sample=False, max_new_tokens=8)
    watch.check(20)


def swapped(draft: DraftHead) -> None:
    attention = draft.network.layers[0].self_attn
    for part in (attention.q_proj, attention.k_proj, attention.v_proj):
        part.weight = torch.nn.Parameter(part.weight.roll(part.in_features // 2, 1), requires_grad=False)


def without_vector(draft: DraftHead) -> None:
    del draft.mask_embedding


def own_states_kept(drafter: HeadDrafter, done: Round) -> None:
    """What was written for accepted candidates while drafting stays, in place of the target's states."""
    OBSERVE(drafter, done)
    pending = drafter.num_pending_states(done.batch)
    for row, number in zip(done.batch.rows, pending, strict=True):
        drafter.num_computed_tokens[row] += number - 1
    last = (torch.tensor(pending) - 1)[:, None, None].expand(-1, 1, 96)
    drafter.pending_states = drafter.pending_states.gather(1, last)


def rejected_states_kept(drafter: HeadDrafter, done: Round) -> None:
    """The state of a row's last token is that of the candidate that was rejected behind it."""
    OBSERVE(drafter, replace(done, forward=done.forward._replace(hidden=done.forward.hidden.roll(-1, 1))))


def gates_swapped(draft: DraftHead) -> None:
    gru, size = draft.network.prefix_gru, draft.config.gru_hidden_dim
    for weight in (gru.weight_ih_l0, gru.weight_hh_l0):
        weight.copy_(torch.cat([weight[size : 2 * size], weight[:size], weight[2 * size :]]))


def codebooks_swapped(draft: DraftHead) -> None:
    selector = draft.network.candidate_selector
    books = selector.predecessor_codebook, selector.successor_codebook
    selector.successor_codebook, selector.predecessor_codebook = books


def sides_swapped(draft: DraftHead) -> None:
    for layer in draft.network.layers:
        layer.attention_conv.base_kernel.copy_(layer.attention_conv.base_kernel.flip(0))


def one_candidate_more(draft: DraftHead) -> None:
    draft.network.candidate_selector.top_k += 1


def over_borders(states: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """The blocks of all rows behind each other, as if they were one."""
    return CONVOLVED(states.flatten(0, 1)[None], kernel.flatten(0, 1)[None]).view_as(states)


WHOLE = {"rope_type": "default", "rope_theta": 100.0}
OBSERVE, FORWARD, CONVOLVED = HeadDrafter.observe, Eagle.forward, dflash2.convolved
CONTROLS: dict[str, dict[str, Any]] = {  # of "eagle3", where no other head is said
    "ids one off": {"layer_ids": [3, 5, 6]},
    "states in another order": {"layer_ids": [4, 2, 5]},
    "halves swapped": {"change": swapped},
    "wrong norm fed back": {"patch": ("config", "norm_output", True)},
    "offsets as ids": {"patch": (DraftHead, "ids", property(lambda draft: draft.d2t))},
    "tokens not shifted": {"patch": (HeadDrafter, "shifted_tokens", unshifted)},
    "states for tokens": {
        "patch": (Eagle, "forward", lambda network, cache, *inputs: FORWARD(network, cache, *inputs[::-1]))
    },
    "own states kept": {"patch": (HeadDrafter, "observe", own_states_kept)},
    "rejected states kept": {"patch": (HeadDrafter, "observe", rejected_states_kept)},
    "places for their own tokens": {"head": "dspark", "patch": ("config", "sample_from_anchor", False)},
    "places for those behind": {"head": "dspark by early speculators", "layout": "anchor"},
    "places of SpecForge for their own tokens": {"head": "dspark by SpecForge", "layout": "fill-in"},
    "causal for bidirectional": {"head": "dflash by z-lab", "is_causal": True},
    "bidirectional for causal": {"head": "dflash causal by JetSpec", "is_causal": False},
    "causal windows": {"head": "dflash that is not causal", "patch": ("config", "sliding_window_non_causal", False)},
    "all channels for a part": {"patch": ("config", "rope_parameters", WHOLE), "head": "eagle3 that turns a part"},
    "a part for all channels": {"partial_rotary_factor": 0.5, "head": "eagle3 with a norm each"},
    "pairs as halves": {
        "patch": (formats, "pairs_to_halves", lambda *arguments: None),
        "head": "eagle3 that turns pairs",
    },
    "positions that are not scaled": {
        "patch": ("config", "rope_parameters", WHOLE),
        "head": "eagle3 with yarn as of Kimi",
    },
    "scores of what is normed": {"use_last_layernorm": True, "head": "eagle3 that scores what is not normed"},
    "the mask token for its vector": {"change": without_vector, "head": "dflash with a mask of its own"},
    "a block that begins early": {"head": "dspark", "patch": (HeadDrafter, "first_step", begun_early)},
    "no word of the token before": {
        "head": "dspark gated",
        "patch": (MarkovHead, "forward", lambda head, logits, *others: (logits, others[-1])),
    },
    "a state without its tokens": {
        "head": "domino",
        "patch": (PrefixGru, "forward", lambda gru, embedded, state: state),
    },
    "a place fewer corrected": {"head": "domino", "patch": ("config", "pure_draft_prefix_len", 2)},
    "gates in another order": {"head": "domino", "change": gates_swapped},
    "places of Domino one off": {"head": "domino", "patch": ("config", "sample_from_anchor", True)},
    "a convolution over the border of blocks": {"head": "dflash2", "patch": (dflash2, "convolved", over_borders)},
    "convolutions before for those behind": {"head": "dflash2", "change": sides_swapped},
    "codebooks swapped": {"head": "dflash2", "change": codebooks_swapped},
    "one candidate more": {"head": "dflash2", "change": one_candidate_more},
    "a selector of an earlier token": {"head": "dflash2", "patch": (DFlash2, "adjust_logits", selected_early)},
    "a block not scaled": {"head": "dflash2", "patch": ("config", "input_embedding_scale", 1.0)},
    "places for those before": {"head": "dflash2", "patch": ("config", "sample_from_anchor", True)},
    "a block that sees nothing ahead": {
        "head": "dflash2 by z-lab with a window",
        "patch": ("config", "sliding_window_non_causal", False),
    },
    "word of an earlier token": {"head": "dspark rnn", "patch": (Block, "adjust_logits", adjusted_early)},
}


@pytest.mark.parametrize("control", CONTROLS)
def test_wrong_variants_are_seen(control: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wrong = dict(CONTROLS[control])
    change, patch, name = wrong.pop("change", None), wrong.pop("patch", None), wrong.pop("head", "eagle3")
    target, head = target_of(), head_of(name)
    if patch is not None and patch[0] is formats:
        monkeypatch.setattr(*patch)
    draft = loaded(head, tmp_path / "head", target, **wrong)
    if change is not None:
        change(draft)
    if patch is not None:
        owner, *what = patch
        monkeypatch.setattr(draft.config if owner == "config" else owner, *what)
    with pytest.raises(AssertionError, match="round "):
        assert_aligned(head, draft, target, prompts(4), SAMPLED | {"max_new_tokens": 10})
