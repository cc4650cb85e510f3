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
from hf_specx.drafting.heads.formats import read_head
from hf_specx.drafting.heads.layers import Rotary


LAYERS = 8  # then (2, 4, 5) are the states that EAGLE-3 reads unless it is said


@pytest.fixture(scope="module")
def target():
    return tiny(num_hidden_layers=LAYERS)


def refused(folder: Path, target, message: str, **loading) -> None:
    with pytest.raises(ValueError, match=message):
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
    frequencies = Rotary(read_head(tmp_path, target)[0], target.device).frequencies
    assert frequencies.tolist() == pytest.approx([-0.5, -0.5 * THETA**-0.5, 0.5, 0.5 * THETA**-0.5])


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
        refused(folder, target, "weights beside it|JSON")


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


def as_ids(mask: torch.Tensor) -> torch.Tensor:
    return mask.nonzero().flatten()


SELECTOR = "candidate_selector."


def spoken(number: int, **more) -> TinyHead:
    """A head of blocks of 5 in the form of speculators that is to propose so many tokens."""
    proposal = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": number}]}
    return random_head("dflash", extra={"speculators_config": proposal} | more)


IDS = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
CASES = {
    "width": (lambda: random_head(states=24, width=24), "72 numbers"),
    "states": (lambda: more(target_hidden_size=64), "64 numbers in a state"),
    "vocabulary": (lambda: random_head(vocab=64), "64 tokens"),
    "layers": (lambda: more(num_target_layers=36), "36 layers"),
    "deeper": (lambda: random_head(layer_ids=(2, 4, 20)), "layer 20"),
    "ids in d2t": (lambda: with_table("d2t", as_ids), r"torch\.arange"),
    "ids in d2t alone": (lambda: with_table("d2t", as_ids, "t2d"), "d2t"),
    "no d2t": (lambda: changed(lacks="d2t", draft_vocab=24), "no d2t"),
    "other t2d": (lambda: with_table("t2d", torch.logical_not), "t2d"),
    "few ids": (lambda: more(eagle_aux_hidden_state_layer_ids=[2, 4]), "layer_ids="),
    "no ids": (lambda: more(eagle_aux_hidden_state_layer_ids=["x"]), "no list"),
    "ids twice": (lambda: more(**IDS, eagle_config=IDS), "two places"),
    "last state": (lambda: random_head(layer_ids=(2, 4, LAYERS)), "last state"),
    "missing": (lambda: changed(lacks="norm.weight"), r"norm\.weight"),
    "missing part": (lambda: changed(lacks="layers.0.mlp.up_proj.weight"), "up_proj"),
    "no fc": (lambda: changed(lacks="fc.weight"), r"fc\.weight"),
    "left over": (lambda: plus("layers.0.extra.weight", 3), r"layers\.0\.extra"),
    "misshapen": (lambda: plus("layers.0.mlp.up_proj.weight", 3, 32), r"\[48, 32\]"),
    "attention": (lambda: more(transformer_layer_config={"num_attention_heads": 5}), "attention heads"),
    "mla": (lambda: plus("layers.0.self_attn.kv_a_proj_with_mqa.weight", 3), "MLA"),
    "eagle1": (lambda: bare(), "EAGLE-1"),
    "lilicorr": (lambda: plus("lilicorr.out_head.weight", 3), "LiLiCorr"),
    "torchspec": (lambda: plus("causal_gru.bias", 3), "TorchSpec"),
    "bundled": (lambda: plus("mtp.0.main_proj.weight", 3), "target's own files"),
    "mtp layers": (lambda: plus("mtp_layers.0.input_proj.weight", 3), "MtpDraft"),
    "sinks": (lambda: plus("layers.0.self_attn.attention_sink_bias", 3), "attention sinks"),
    "nvfp4": (lambda: plus("layers.0.mlp.up_proj.weight_scale", 3), "quantised"),
    "gemma": (lambda: plus("layers.0.pre_feedforward_layernorm.weight", 32), "Gemma"),
    "convolutions": (lambda: plus("layers.0.attention_conv.base_kernel", 2), "attention_conv"),
    "selector": (
        lambda: changed("dflash2", f"{SELECTOR}hidden_projection.weight"),
        "hidden_projection",
    ),
    "no codebook": (
        lambda: changed("dflash2", f"{SELECTOR}successor_codebook"),
        "successor_codebook",
    ),
    "no convolution": (
        lambda: changed("dflash2", "layers.0.mlp_conv.base_kernel"),
        "mlp_conv",
    ),
    "DFlash2 by name": (
        lambda: of_block("dflash", "z-lab", architectures=["DFlash2DraftModel"]),
        "DFlash2",
    ),
    "no GRU": (
        lambda: changed("domino", "prefix_gru.weight_ih_l0"),
        "weight_ih",
    ),
    "Domino by name": (
        lambda: random_head("dflash", form="z-lab", parts={"projector_type": "domino"}),
        "Domino",
    ),
    "pure prefix": (lambda: random_head("domino", pure=-1), "pure_draft_prefix_len"),
    "top k": (lambda: of_block("dflash2", "z-lab 2", dflash_config={}), "selector_top_k=None"),
    "wide top k": (lambda: of_block("dflash2", selector_top_k=49), "selector_top_k=49"),
    "rank": (lambda: of_block("dflash2", selector_rank=7), "selector_rank=7"),
    "softcap": (lambda: of_block("dflash2", final_logit_softcapping="x"), "final_logit_softcapping='x'"),
    "part": (lambda: random_head("dflash2", draft_vocab=24), "selects from 48"),
    "cap of DFlash": (
        lambda: of_block("dflash", final_logit_softcapping=30.0),
        "final_logit_softcapping",
    ),
    "mtp": (lambda: more(speculators_model_type="mtp"), "MtpDraft"),
    "hydra": (lambda: more(speculators_model_type="hydra"), "hydra"),
    "other kind": (lambda: more(speculators_model_type="dflash"), "tensors of eagle3"),
    "peagle without masks": (lambda: more(speculators_model_type="peagle"), "mask_token_id=None"),
    "false option": (lambda: more(no_such_norm=False), "no_such_norm"),
    "own embeddings said": (lambda: more(has_embed_tokens=True), "has_embed_tokens"),
    "eagle not causal": (lambda: more(is_causal=False), "is_causal=False"),
    "dynamic": (
        lambda: more(rope_scaling={"type": "dynamic", "factor": 2.0}),
        "dynamic",
    ),
    "longrope": (lambda: more(rope_parameters={"rope_type": "longrope"}), "longrope"),
    "scaled twice": (
        lambda: more(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default"}),
        "differ",
    ),
    "odd channels": (lambda: more(rope_scaling={"rope_dim": 3}), r"rotates 3 of the 8 channels"),
    "causal and not": (
        lambda: random_head("dflash", form="z-lab", parts={"causal": True}, extra={"is_causal": False}),
        "contradict",
    ),
    "causal windows": (
        lambda: random_head("dflash", extra={"is_causal": True}, window_non_causal=True),
        "sliding_window_non_causal",
    ),
    "fill-in proposes all": (lambda: spoken(5), "layout='anchor' if it was trained"),
    "anchor proposes less": (lambda: spoken(4, sample_from_anchor=True), "layout='anchor' if it proposes fewer"),
    "assistant": (lambda: more(model_type="gemma4_assistant"), "draft_model"),
    "option": (lambda: more(final_logit_softcapping=30.0), "final_logit_softcapping"),
    "nested option": (lambda: more(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state"),
    "activation": (lambda: more(transformer_layer_config={"hidden_act": "gelu"}), "gelu"),
    "positions": (lambda: more(transformer_layer_config={"rope_scaling": {"rope_type": "new"}}), "rope_type"),
    "markov": (lambda: random_head("dspark", markov="new"), "markov_head_type"),
    "type": (lambda: more(speculators_config=5), "wrong type"),
    "block": (lambda: random_head("dflash", block=0), "block_size=0"),
    "mask": (lambda: random_head("dflash", mask_token=48), "mask_token_id=48"),
    "own embeddings": (lambda: random_head(width=16, own_embeddings=False), "embed_tokens"),
    "own head": (lambda: random_head(width=16, own_head=False), "lm_head"),
}


def bare() -> TinyHead:
    head = changed(lacks="norm.weight")
    del head.weights["layers.0.hidden_norm.weight"]
    return head


LAYOUTS_IN_FILES: dict[str, tuple[str, str, dict, bool]] = {  # kind, form, what is said, from the anchor
    "DSpark of DeepSpec": ("dspark", "deepspec", {}, True),
    "DFlash of DeepSpec": ("dflash", "deepspec", {}, True),
    "DFlash of DeepSpec, where it is said": ("dflash", "deepspec", {"query_zero_predicts_next": True}, True),
    "DFlash of z-lab": ("dflash", "z-lab", {}, False),
    "DSpark of SpecForge": ("dspark", "specforge dspark", {}, True),
    "a shifted label": ("dflash", "z-lab", {"shift_label": True}, True),
    "no shifted label": ("dspark", "specforge dspark", {"shift_label": False}, False),
    "DSpark of Nemotron": ("dspark", "deepspec", {"sample_from_anchor": False}, False),
    "DSpark of speculators": ("dspark", "speculators", {}, True),
    "DFlash of speculators": ("dflash", "speculators", {}, False),
    "DSpark of early speculators": ("dspark", "old speculators", {}, False),
    "DFlash of early speculators": ("dflash", "old speculators", {}, False),
}


@pytest.mark.parametrize("case", LAYOUTS_IN_FILES)
def test_layout_of_a_block(target, tmp_path: Path, case: str):
    """By what the producer means where nothing is said; the user has the last word."""
    kind, form, extra, anchor = LAYOUTS_IN_FILES[case]
    folder = write(random_head(kind, extra=extra), tmp_path, form)
    config = read_head(folder, target)[0]
    assert config.sample_from_anchor == anchor
    if "of early" in case or form != "speculators":
        assert config.num_draft_tokens == 4 + anchor
    for layout in ("anchor", "fill-in"):
        assert read_head(folder, target, layout=layout)[0].sample_from_anchor == (layout == "anchor")


def test_norms_that_specforge_meant_otherwise(target, tmp_path: Path):
    """Its norm_output is believed where there are the norms of EAGLE-3.1; what speculators says holds."""
    for form, norms, normed in (("specforge", "", False), ("specforge", "each", True), ("speculators", "", True)):
        folder = write(random_head(norms=norms, norm_output=True, extra={"norm_output": True}), tmp_path / form, form)
        assert read_head(folder, target)[0].norm_output == normed
        for norm_output in (True, False):
            assert read_head(folder, target, norm_output=norm_output)[0].norm_output == norm_output
    assert not read_head(folder, target, use_last_layernorm=False)[0].use_last_layernorm


def test_options_that_are_neutral(target, tmp_path: Path):
    """Such as change nothing where they are false, and such as are not set."""
    extra = {"attention_sink_bias": False, "has_lm_head": False, "do_sample": False, "no_such_norm": None}
    assert read_head(write(more(**extra), tmp_path), target)[0].kind == "eagle3"


def test_a_part_of_the_channels_turns_only_if_it_is_meant(target, tmp_path: Path):
    folder = write(random_head(rotary_factor=0.5), tmp_path / "head")
    for options, number in ({}, 8), ({"partial_rotary_factor": 0.5}, 4):
        draft = DraftHead.from_pretrained(folder, target=target, **options)
        draft.save_pretrained(tmp_path / "again")
        for config in (draft.config, read_head(tmp_path / "again", target)[0]):
            assert len(Rotary(config, target.device).frequencies) == number


def test_scaled_positions_in_two_places(target, tmp_path: Path):
    scaling = {"rope_type": "linear", "factor": 2.0}
    extra = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": scaling | {"rope_theta": THETA}}
    config = read_head(write(more(**extra), tmp_path), target)[0]
    assert config.rope_parameters == scaling | {"rope_theta": THETA}


def test_windows_as_the_config_of_qwen3_says_them(target, tmp_path: Path):
    says = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    config = read_head(write(random_head(layers=2, extra=says), tmp_path, "safeailab"), target)[0]
    assert (config.layer_types, config.sliding_window) == (["full_attention", "sliding_attention"], 6)


VECTORS = {
    "other mask": (
        {"mask_token_id": 3, "embedding": torch.zeros(32)},
        "mask_token_id=3",
    ),
    "each position": ({"embedding": torch.zeros(5, 32), "per_position": True}, "each position"),
    "several": (torch.zeros(5, 32), "no vector"),
    "width": (torch.zeros(16), r"\[16\]"),
    "code": (Path("x"), "tensors and numbers alone"),
}


@pytest.mark.parametrize("case", VECTORS)
def test_vectors_of_masks_that_are_wrong(target, tmp_path: Path, case: str):
    stored, message = VECTORS[case]
    torch.save(stored, write(random_head("dflash"), tmp_path) / "mask_embedding.pt")
    refused(tmp_path, target, message)


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named(target, tmp_path: Path, case: str):
    make, message = CASES[case]
    refused(write(make(), tmp_path), target, message)


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
    refused(folder, target, "did you mean 'revision'", revison="main")
    refused(folder, target, r"layer_ids='last'", layer_ids="last")
    refused(folder, target, "'fill-in'", layout="first")
    refused(folder, target, "True or False", norm_output="no")
    refused(folder, target, "partial_rotary_factor=2", partial_rotary_factor=2)
    refused(folder, target, "layout=", layout="anchor")
    folder = write(random_head("dflash"), tmp_path / "dflash")
    refused(folder, target, "norm_output=", norm_output=True)
    for other in ("org/model", None):
        refused(folder, other, "the target itself")
