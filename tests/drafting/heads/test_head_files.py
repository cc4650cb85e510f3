"""What published files of draft heads leave out, and where they may lie; `test_alignment` reads every form."""

import json
from pathlib import Path

import pytest
import torch
from head_files import random_head, write
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE, tiny

from hf_specx.drafting.heads.reading import read_head


LAYERS = 8  # then (2, 4, 5) are the states that EAGLE-3 reads unless it is said


@pytest.fixture(scope="module")
def target():
    return tiny(num_hidden_layers=LAYERS)


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
