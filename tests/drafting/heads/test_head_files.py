"""Files of draft heads: what they may lack, where they lie, what is refused by name. Forms are in `test_alignment`."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from defaults import defaults
from head_files import THETA, TinyHead, random_head, write
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE, tiny

from hf_specx import DraftHead
from hf_specx.drafting.heads.layers import Rotary
from hf_specx.drafting.heads.reading import read_head


LAYERS = 8  # then (2, 4, 5) are the states that EAGLE-3 reads unless it is said


@pytest.fixture(scope="module")
def target():
    return tiny(num_hidden_layers=LAYERS)


def refused(folder: Path, target, told: str, **loading) -> None:
    with pytest.raises(ValueError, match=told):
        DraftHead.from_pretrained(folder, target=target, **loading)


def test_layer_ids_that_nothing_names_are_those_of_the_trainer(target, tmp_path: Path):
    head = random_head(extra={"eagle_aux_hidden_state_layer_ids": None})
    assert read_head(write(head, tmp_path / "eagle3"), target)[0].layer_ids == [2, 4, 5]
    head = random_head("dflash", layer_ids=(2, 4, 6), extra={"dflash_config": {"mask_token_id": 3}})
    assert read_head(write(head, tmp_path / "dflash", "z-lab"), target)[0].layer_ids == [2, 4, 6]


def test_embeddings_without_numbers_are_the_targets(target, tmp_path: Path):
    head = changed(has={"embed_tokens.weight": torch.full((VOCAB_SIZE, 32), torch.nan)})
    config, weights = read_head(write(head, tmp_path), target)
    assert not config.own_embeddings
    assert "embed_tokens.weight" not in weights


def test_a_part_of_the_channels_turns_also_where_positions_are_scaled(target, tmp_path: Path):
    path = write(random_head(rotary_factor=0.5), tmp_path) / "config.json"
    content = json.loads(path.read_text())
    content["transformer_layer_config"]["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    path.write_text(json.dumps(content))
    found = Rotary(read_head(tmp_path, target)[0], target.device).frequencies
    assert found.tolist() == pytest.approx([-0.5, -0.5 * THETA**-0.5, 0.5, 0.5 * THETA**-0.5])


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dspark", "dflash", "medusa"])
def test_torchs_defaults_change_nothing(target, tmp_path: Path, kind: str):
    """The head is where its target is, in the precision of its files, with the frequencies that it has otherwise."""
    folder = write(random_head(kind, layer_ids=(2, 4, 6), draft_vocab=None if kind == "medusa" else 24), tmp_path)
    expected = DraftHead.from_pretrained(folder, target=target)
    with defaults():
        head = DraftHead.from_pretrained(folder, target=target)
    assert head.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert tensor.dtype == expected.state_dict()[name].dtype
        assert torch.equal(tensor, expected.state_dict()[name])


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
    others = [json.dumps({"weight_map": {"fc.weight": file}}) for file in ("../model.safetensors", "gone.bin")]
    for content in (*others, "{}", "[", "[]"):
        index.write_text(content)
        refused(folder, target, r"no file of weights beside it|is no JSON|is not a JSON object")


def test_a_head_in_the_cache_of_the_hub(target, tmp_path: Path):
    repository = tmp_path / "models--org--head"
    write(random_head(), repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    config, _ = read_head("org/head", target, cache_dir=tmp_path, local_files_only=True)
    assert config.kind == "eagle3"
    assert read_head("org/head", target, cache_dir=tmp_path, revision="a" * 40)[0].kind == "eagle3"


def changed(kind: str = "eagle3", lacks: str = "", has: dict | None = None, **settings) -> TinyHead:
    """A head without one of its tensors, or with others; `extra` is what its config says besides."""
    head = random_head(kind, **settings)
    head.weights |= has or {}
    head.weights.pop(lacks, None)
    return head


def more(**extra) -> TinyHead:
    return changed(extra=extra)


def of_block(kind: str, form: str = "speculators", **extra) -> TinyHead:
    return random_head(kind, form=form, extra=extra)


def with_table(name: str, change: Callable[[torch.Tensor], torch.Tensor], lacks: str = "") -> TinyHead:
    """A head for a part of the vocabulary, with another table of what that is."""
    return changed(lacks=lacks, has={name: change(random_head(draft_vocab=24).weights["t2d"])}, draft_vocab=24)


def plus(name: str, *shape: int) -> TinyHead:
    return changed(has={name: torch.zeros(shape)})


def as_ids(kept: torch.Tensor) -> torch.Tensor:
    return kept.nonzero().flatten()


SELECTOR = "candidate_selector."
IDS = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
CASES = {
    "width": (lambda: random_head(states=24, width=24), r"72 numbers a position.*have 32.*choose a head"),
    "states": (lambda: more(target_hidden_size=64), r"64 numbers in a state, and LlamaForCausalLM has 32"),
    "vocabulary": (lambda: random_head(vocab=64), r"target with 64 tokens, and LlamaForCausalLM has 48"),
    "layers": (lambda: more(num_target_layers=36), r"target with 36 layers, and LlamaForCausalLM has 8"),
    "deeper": (lambda: random_head(layer_ids=(2, 4, 20)), r"output of layer 20, and LlamaForCausalLM has 8"),
    "ids in d2t": (lambda: with_table("d2t", as_ids), r"d2t holds ids instead of offsets; subtract torch\.arange"),
    "ids in d2t alone": (lambda: with_table("d2t", as_ids, "t2d"), r"d2t (holds ids|leads to ids)"),
    "no d2t": (lambda: changed(lacks="d2t", draft_vocab=24), r"scores 24 of the target's 48 tokens and has no d2t"),
    "other t2d": (lambda: with_table("t2d", torch.logical_not), r"d2t and t2d do not name the same tokens"),
    "few ids": (lambda: more(eagle_aux_hidden_state_layer_ids=[2, 4]), r"2 layer ids.*reads 3 states.*layer_ids="),
    "no ids": (lambda: more(eagle_aux_hidden_state_layer_ids=["x"]), r"no list of numbers"),
    "ids twice": (lambda: more(**IDS, eagle_config=IDS), r"two places, which mean different states.*layer_ids="),
    "last state": (lambda: random_head(layer_ids=(2, 4, LAYERS)), r"the last state \(layer id 8\).*layer_ids="),
    "missing": (lambda: changed(lacks="norm.weight"), r"lacks norm\.weight"),
    "missing part": (lambda: changed(lacks="layers.0.mlp.up_proj.weight"), r"lacks 1 tensors.*up_proj"),
    "no fc": (lambda: changed(lacks="fc.weight"), r"lacks fc\.weight.*joins states of several layers"),
    "left over": (lambda: plus("layers.0.extra.weight", 3), r"1 tensors that a head of kind eagle3.*extra"),
    "misshapen": (lambda: plus("layers.0.mlp.up_proj.weight", 3, 32), r"up_proj.weight' is \[3, 32\].*\[48, 32\]"),
    "attention": (lambda: more(transformer_layer_config={"num_attention_heads": 5}), r"attention heads"),
    "gemma": (lambda: plus("layers.0.pre_feedforward_layernorm.weight", 32), r"blocks of Gemma"),
    "convolutions": (lambda: plus("layers.0.attention_conv.base_kernel", 2), r"1 tensors that a head of kind eagle3"),
    "selector": (
        lambda: changed("dflash2", f"{SELECTOR}hidden_projection.weight"),
        r"lacks 1 tensors.*dflash2.*hidden",
    ),
    "no codebook": (
        lambda: changed("dflash2", f"{SELECTOR}successor_codebook"),
        r"lacks 1 tensors.*successor_codebook",
    ),
    "no convolution": (
        lambda: changed("dflash2", "layers.0.mlp_conv.base_kernel"),
        r"lacks 1 tensors.*mlp_conv\.base",
    ),
    "DFlash2 by name": (
        lambda: of_block("dflash", "z-lab", architectures=["DFlash2DraftModel"]),
        r"which DFlash2 has",
    ),
    "top k": (lambda: of_block("dflash2", "z-lab 2", dflash_config={}), r"selector_top_k=None.*of how many tokens"),
    "wide top k": (lambda: of_block("dflash2", selector_top_k=49), r"selector_top_k=49"),
    "rank": (lambda: of_block("dflash2", selector_rank=7), r"selector_rank=7.* and 6 by its tensors"),
    "softcap": (lambda: of_block("dflash2", final_logit_softcapping="x"), r"final_logit_softcapping='x'.*no number"),
    "part": (lambda: random_head("dflash2", draft_vocab=24), r"scores 24 tokens and selects from 48"),
    "cap of DFlash": (
        lambda: of_block("dflash", final_logit_softcapping=30.0),
        r"final_logit_softcapping=30.0.*not sup",
    ),
    "mtp": (lambda: more(speculators_model_type="mtp"), r"speculators_model_type='mtp'.*MtpDraft"),
    "hydra": (lambda: more(speculators_model_type="hydra"), r"speculators_model_type='hydra'"),
    "other kind": (lambda: more(speculators_model_type="dflash"), r"'dflash' in.* and tensors of eagle3"),
    "peagle without masks": (lambda: more(speculators_model_type="peagle"), r"mask_token_id=None"),
    "option": (lambda: more(final_logit_softcapping=30.0), r"final_logit_softcapping=30.0.*not supported"),
    "nested option": (lambda: more(eagle_config={"use_aux_hidden_state": False}), r"use_aux_hidden_state=False"),
    "activation": (lambda: more(transformer_layer_config={"hidden_act": "gelu"}), r"hidden_act='gelu'"),
    "positions": (lambda: more(transformer_layer_config={"rope_scaling": {"rope_type": "new"}}), r"rope_type='new'"),
    "markov": (lambda: random_head("dspark", markov="new"), r"markov_head_type='new'"),
    "type": (lambda: more(speculators_config=5), r"a value of a wrong type in its config\.json"),
    "block": (lambda: random_head("dflash", block=0), r"block_size=0"),
    "mask": (lambda: random_head("dflash", mask_token=48), r"mask_token_id=48"),
    "own embeddings": (lambda: random_head(width=16, own_embeddings=False), r"no embed_tokens of its own"),
    "own head": (lambda: random_head(width=16, own_head=False), r"no lm_head of its own"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named(target, tmp_path: Path, case: str):
    make, told = CASES[case]
    refused(write(make(), tmp_path), target, told)


class Runs:
    def __reduce__(self):
        return (print, ("code of a pickle ran",))


def test_no_code_of_a_pickle_runs(target, tmp_path: Path, capsys):
    head = random_head(theta=10000.0)
    folder = write(head, tmp_path, "safeailab")
    torch.save(head.weights | {"more": Runs()}, folder / "pytorch_model.bin")
    refused(folder, target, r"cannot be read as tensors alone")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Runs()))
    refused(folder, target, r"cannot be read as tensors alone")
    torch.save([1, 2], folder / "pytorch_model.bin")
    refused(folder, target, r"save the weights alone")
    assert "ran" not in capsys.readouterr().out


def test_files_that_are_missing_or_cut(target, tmp_path: Path):
    refused(tmp_path, target, r"has no config\.json")
    folder = write(random_head(), tmp_path)
    (folder / "model.safetensors").write_bytes(b"cut")
    refused(folder, target, r"cannot be read as tensors")
    (folder / "model.safetensors").unlink()
    refused(folder, target, r"has no weights; a draft head has one of model\.safetensors")
    (folder / "config.json").write_text("[")
    refused(folder, target, r"is no JSON")


def test_options_of_loading_are_checked(target, tmp_path: Path):
    folder = write(random_head(), tmp_path)
    refused(folder, target, r"unknown option 'revison'.*did you mean 'revision'", revison="main")
    refused(folder, target, r"layer_ids='last'", layer_ids="last")
    for other in ("org/model", None):
        refused(folder, other, r"target is a (str|NoneType); give the target itself")
