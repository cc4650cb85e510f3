"""Draft heads are read from every published form, and what is wrong in one is said before anything runs."""

import json
from pathlib import Path

import pytest
import torch
from head_files import EPS, FORMS, random_head, write
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE, tiny

from hf_specx import DraftHead
from hf_specx.drafting.heads.reading import read_head


LAYERS = 8  # then (2, 4, 5) are the states that EAGLE-3 reads unless it is said
OWN = {"own_embeddings": True, "own_head": True}
HEADS = {
    "speculators": {"draft_vocab": 24, "norm_before_residual": True, "norm_output": True},
    "speculators one norm": {"norms": "one", "layers": 3, "biases": True, "rotary_factor": 0.5, **OWN},
    "speculators each norm": {"norms": "each", "qk_norm": True, "draft_vocab": 24, "width": 16},
    "speculators peagle": {"kind": "peagle", "layers": 2, **OWN},
    "speculators dflash": {"kind": "dflash", "layers": 2, "draft_vocab": 24, **OWN},
    "speculators windows": {
        "kind": "dflash",
        "layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "window": 6,
        "window_non_causal": True,
    },
    "speculators dspark": {"kind": "dspark", "layer_ids": (1, 3, 7), "markov": "gated", "confidence": True, **OWN},
    "safeailab": {"draft_vocab": 24, "theta": 10000.0},
    "safeailab whole vocabulary": {"theta": 10000.0, "own_head": True},
    "specforge": {"draft_vocab": 24, "layer_ids": (1, 4, 6), "norms": "each"},
    "angelslim": {"draft_vocab": 24},
    "deepspec": {"layer_ids": (2, 3, 4, 5, 6), "qk_norm": True, **OWN},
    "deepspec dflash": {"kind": "dflash", "layer_ids": (2, 4, 6), **OWN},
    "deepspec dspark": {"kind": "dspark", "markov": "rnn", **OWN},
    "z-lab": {"kind": "dflash", "layers": 2},
    "medusa": {"kind": "medusa"},
    "medusa safetensors": {"kind": "medusa", "layers": 2},
}


@pytest.fixture(scope="module")
def target():
    return tiny(num_hidden_layers=LAYERS)


def form_of(name: str) -> str:
    return next(form for form in sorted(FORMS, key=len, reverse=True) if name.startswith(form))


@pytest.mark.parametrize("name", HEADS)
def test_every_form_is_read_and_kept(target, tmp_path: Path, name: str):
    """All tensors as they are, all settings; and again from what the config writes, in the form of speculators."""
    head = random_head(**HEADS[name])
    config, weights = read_head(write(head, tmp_path / "published", form_of(name)), target)
    assert weights.keys() == head.weights.keys()
    assert all(torch.equal(weights[tensor], value) for tensor, value in head.weights.items())
    assert config.kind == head.kind
    assert config.draft_vocab_size == head.draft_vocab
    if head.kind == "medusa":
        assert (config.medusa_num_heads, config.medusa_num_layers) == (3, head.layers)
    else:
        assert config.layer_ids == head.layer_ids
        assert config.rope_parameters["rope_theta"] == head.theta
        assert config.partial_rotary_factor == head.rotary_factor
        assert config.rms_norm_eps == EPS
        assert (config.norm_before_residual, config.norm_output) == (head.norm_before_residual, head.norm_output)
        assert (config.sliding_window, config.layer_types) == (head.window, head.layer_types)
        assert config.own_head == ("lm_head.weight" in weights)
    if head.kind in ("dflash", "dspark"):
        assert (config.block_size, config.mask_token_id) == (head.block, head.mask_token)
        assert (config.sample_from_anchor, config.markov_head_type) == (head.from_anchor, head.markov or "vanilla")
    DraftHead.from_pretrained(tmp_path / "published", target=target).save_pretrained(tmp_path / "kept")
    again, same = read_head(tmp_path / "kept", target)
    assert vars(again) == vars(config)
    assert all(torch.equal(same[tensor], value) for tensor, value in weights.items())


def test_layer_ids_that_nothing_names_are_those_of_the_trainer(target, tmp_path: Path):
    head = random_head(extra={"eagle_aux_hidden_state_layer_ids": None})
    assert read_head(write(head, tmp_path / "eagle3"), target)[0].layer_ids == [2, 4, 5]
    head = random_head("dflash", layer_ids=(2, 4, 6), extra={"dflash_config": {"mask_token_id": 3}})
    assert read_head(write(head, tmp_path / "dflash", "z-lab"), target)[0].layer_ids == [2, 4, 6]


def test_embeddings_without_numbers_are_the_targets(target, tmp_path: Path):
    head = random_head()
    head.weights["embed_tokens.weight"] = torch.full((VOCAB_SIZE, 32), torch.nan)
    config, weights = read_head(write(head, tmp_path), target)
    assert not config.own_embeddings
    assert "embed_tokens.weight" not in weights


def test_a_head_in_several_files(target, tmp_path: Path):
    head = random_head()
    folder = write(head, tmp_path)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(sorted(weights))}
    for file in set(files.values()):
        save_file({name: weights[name] for name in weights if files[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert read_head(folder, target)[1].keys() == head.weights.keys()
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(files, "../model.safetensors")}))
    with pytest.raises(ValueError, match=r"no file of weights beside it"):
        read_head(folder, target)


def test_a_head_in_the_cache_of_the_hub(target, tmp_path: Path):
    repository = tmp_path / "models--org--head"
    write(random_head(), repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    config, _ = read_head("org/head", target, cache_dir=tmp_path, local_files_only=True)
    assert config.kind == "eagle3"
    assert read_head("org/head", target, cache_dir=tmp_path, revision="a" * 40)[0].kind == "eagle3"
