"""Broken and hostile files of a pair: what is said of them, and what is wrong."""

import json
import os
from dataclasses import asdict

import card_cases
import repositories as r
from repositories import after, cut, edit, link, load, load_draft, model, move, pickled, put, said, tokenizer, write

from hf_specx.common.drafts import PAIR_CONFIG_NAME


ROW = {"target": {"1": 1.0, "5": 2.0}, "draft": 0.5}
COSTS = {"hardware": "a clock", "dtype": "float32", "table": {}, "alpha": {}}
EXIT, SHORT = {"exit_layer": 1}, {"min_match": 3, "max_match": 2}
TIMES = r"costs: table\['2'\]: target"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
TEXT_MODEL = "clip_text_model"  # of which transformers knows the config, and no model to generate with
OWN = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
INSIDE_ANOTHER = {"model_type": TEXT_MODEL, "auto_map": {"AutoModel": "own.Model"}}
NOT_WHOLE = "model.safetensors is not whole, or no safetensors"
TEMPLATE = "additional_chat_templates/x.jinja"
HIDING = "shard-00001-model-00001-of-00001.safetensors"


def whole(content: str | bytes):
    """A case that has something else in place of its config."""
    return after(write(PAIR_CONFIG_NAME, content))


def costs(**row: object):
    return said("costs", COSTS | {"table": {"2": ROW | row}})


def rounds(seen: object):
    return said("costs", COSTS | {"rounds": seen})


def measured(**changes: object):
    return said("measurements", [asdict(card_cases.measured(**changes))])


def own_code(name: str, **changes: object) -> tuple[r.Change, r.Change]:
    """Puts code beside a config, and names it there."""
    return r.with_code(f"{name.rpartition('/')[0] or '.'}/own.py", "Config Model T"), edit(name, **changes)


ELSEWHERE = move("draft", "up/draft"), link("up", "elsewhere"), put("draft.subfolder", "up/draft")  # behind a link
OUTSIDE = "../tokenizer.1.0.json"
FOREIGN = move("tokenizer.json", OUTSIDE), edit("tokenizer_config.json", fast_tokenizer_files=[OUTSIDE])
AS_REFERENCE = write("org/draft/config.json", "{}"), put("draft.name", "org/draft"), put("draft.subfolder", "")
IN_PICKLE = pickled("x.bin"), write(r.INDEX, '{"metadata": {}, "weight_map": {"lm_head.weight": "x.bin"}}')
CASES = [
    # What its config says
    (
        "has more than 4194304 bytes, .*get it again",
        after(lambda f: os.truncate(f / PAIR_CONFIG_NAME, 2**40)),
    ),
    ("notes has the control character '.x1b', wh", said("notes", "\x1b[2J")),
    ("target: name is '/models/x', no id on the Hub; .*pass the", said("target.name", "/models/x")),
    ("draft: name is '../x', no id", said("draft.name", "../x")),
    ("name is 'https://host/x', no id", said("draft.name", "https://host/x")),
    ("draft: name is '.rg/draft', no id", said("draft.name", "\u043erg/draft")),
    ("revision is '../main', no name of", said("draft.revision", "../main")),
    ("revision is '--all', no name", said("draft.revision", "--all")),
    (r"subfolder is '\.\./x', no name of a", said("draft.subfolder", "../x")),
    ("subfolder is 'a/../../x', no", said("draft.subfolder", "a/../../x")),
    ("subfolder is '/etc', no", said("draft.subfolder", "/etc")),
    (r"subfolder is '\.\.\\\\x', no", said("draft.subfolder", "..\\x")),
    ("subfolder is 'C:x', no", said("draft.subfolder", "C:x")),
    (r"subfolder is 'aaaa.*\.\.\., no", said("draft.subfolder", "a" * 5000)),
    ("has no specx_config.json, so it is no draft-target", after(r.remove(PAIR_CONFIG_NAME))),
    ("is not JSON .*may be cut off: get it again", after(cut(PAIR_CONFIG_NAME, -20))),
    ("is not JSON .maximum recursion", whole("[" * 100_000)),
    ("is not JSON .'utf-8' codec", whole(b'{"schema": 1, "notes": "\xff"}')),
    ("is not JSON .*surrogates", whole('{"schema": 1, "notes": "\\ud800"}')),
    ("is not JSON .*4300 digits", whole('{"schema": 1' + "0" * 5000 + "}")),
    ("does not say its schema .it has None", said("schema", ...)),
    ("has schema 2 and this version reads up to 1; install a newer", said("schema", 2)),
    ("target is 'org/target', not an object; save", said("target", "org/target")),
    ("has a field 'auto_map' that its schema does not", said("auto_map", "x.py")),
    ("has no 'draft'; save", said("draft", ...)),
    ("target: parameters is '9', not int or null", said("target.parameters", "9")),
    ("alpha is True, not float", measured(alpha=True)),
    (r"batch is 10{76}\.\.\., not int", measured(batch=10**400)),
    ("both in the folder of the pair under ''; a draft needs", said("draft.subfolder", "")),
    ("num_draft_tokens is 1000000000, neither 'auto' nor an int from 0 to 64", said("num_draft_tokens", 10**9)),
    ("layout is 'os.system'", said("layout", "os.system")),
    ("tree is True", said("tree", True)),
    (r"table\['2'\]: draft is -1.0, no time; measure it anew with specx tune", costs(draft=-1.0)),
    (rf"{TIMES}\['5'\] is inf, no positive finite number", costs(target={"1": 1.0, "5": float("inf")})),
    (f"{TIMES} is .*, not for 1 and at least one more number", costs(target={"2": 1.0, "3": 2.0})),
    (rf"{TIMES} is \[\[.*, not dict", costs(target=json.loads("[" * 500 + "]" * 500))),
    ("rounds.* is '1000'", rounds({"2": {"1000": 1.0}})),
    ("alpha is nan", measured(alpha=float("nan"))),
    ("early_exit: exit_layer is 0", said("early_exit", {"exit_layer": 0})),
    ("has both a suffix and an early_exit; take one of them out", after(put("suffix", {}), put("early_exit", EXIT))),
    ("has a draft without weights, and says where a draft model is; take", said("early_exit", EXIT)),
    ("max_match of suffix is 2, less than min_match=3", after(put("draft", {}), put("suffix", SHORT))),
    # What runs code or reads elsewhere
    ("means the repository 'org/draft', and a local folder of that", after(*AS_REFERENCE, use=r.from_there)),
    ("model.safetensors is a link out of", after(link("model.safetensors", "w"))),
    ("specx_config.json is a link out of", after(link(PAIR_CONFIG_NAME, "c"))),
    ("draft is a link out of", after(link("draft", "d"))),
    ("up/draft is a link out of", after(*ELSEWHERE, use=lambda folder: load(folder, target=r.pair().target))),
    ("tokenizer.json is a link out of", after(link("tokenizer.json", "t"))),
    ("x.jinja is a link", after(write(TEMPLATE, ""), link(TEMPLATE, "j"))),
    ("own defaults; get", after(cut("generation_config.json", -9))),
    ("generation_config.json has num_beams=3, for which .*; take", after(edit("generation_config.json", num_beams=3))),
    ("brings code of its own, which is not run; read it, and", after(*own_code("config.json", **OWN))),
    ("brings code of its own", after(*own_code("config.json", text_config=INSIDE_ANOTHER))),
    ("draft brings code of its own, which is not", after(*own_code("draft/config.json", **OWN), use=load_draft)),
    ("tokenizer in .* brings", after(*own_code("tokenizer_config.json", auto_map={"AutoTokenizer": ["own.T", None]}))),
    ("attn_implementation='org/k', code from elsewhere", model(attn_implementation="org/k")),
    ("'org/k', code", model(text_config={"experts_implementation": "org/k"})),
    ("attn_implementation='org/k', code", model(attn_implementation={"": "org/k"})),
    ("'org/k@v1', code", model(text_config={"_experts_implementation": {"text_config": {"": "org/k@v1"}}})),
    ("has transformers_weights='x.safetensors', which was not", model(transformers_weights="x.safetensors")),
    ("has configuration_files=.'config.1.0.json'., which was not", model(configuration_files=["config.1.0.json"])),
    ("which names a model elsewhere; merge", after(write("adapter_config.json", "{}"))),
    ("tokenizer_class='Trainer', which is no tok", tokenizer(tokenizer_class="Trainer")),
    ("config.json has tokenizer_class='AutoModel', which is no tokenizer", model(tokenizer_class="AutoModel")),
    ("has gguf_file='../x', no file of its own; take", tokenizer(gguf_file="../x")),
    ("has vocab='/etc/passwd', no file", tokenizer(vocab="/etc/passwd")),
    ("has init_inputs=.*/passwd'., no", tokenizer(init_inputs=["/etc/passwd"])),
    ("has fast_tokenizer_files=.*no file of its own", after(*FOREIGN)),
    # What is not what the config says
    ("has tokens=[0-9]+, and its pair was checked with 9", said("tokenizers.tokens", 9)),
    ("tokens of the tokenizer of .* have other ids than those that", after(r.swap_ids)),
    ("have other ids than", after(r.swap_ids, use=load_draft)),
    ("has eos_token='<pad>', and its pair was checked with '<end>'; get", tokenizer(eos_token="<pad>")),
    ("has vocab_size=2[0-9]+, and the pair was made with 7", said("target.vocab_size", 7)),
    ("has model_type='mistral', and", model(model_type="mistral")),
    ("pair draft has model_type='llama', and", after(put("draft.model_type", "gpt2"), use=load_draft)),
    # Weights
    ("does not say which file has which weights", r.indexed(weight_map={})),
    ("has no metadata, so it may be cut", r.indexed(metadata=...)),
    ("names '../one.safetensors', which is outside", r.indexed(weight_map={"lm_head.weight": "../one.safetensors"})),
    ("names '/x.safet", r.indexed(weight_map={"lm_head.weight": "/x.safetensors"})),
    ("names 'a.*x.safet", r.indexed(weight_map={"a": "a\\x.safetensors"})),
    ("names 'x.bin', and only safetensors are loaded, since other files may run code; save", after(*IN_PICKLE)),
    ("weights in pytorch_model.bin, a pickle, which may run code; convert it", after(pickled("pytorch_model.bin"))),
    ("draft has its weights in model.pt", after(pickled("draft/model.pt"))),
    ("in x.pkl, a pickle", after(pickled("x.pkl", bare=True))),
    ("draft has its .* DraftHead", after(pickled("draft/pytorch_model.bin"), use=load_draft)),
    (f"has {HIDING}, a part", after(r.weights(lambda w: {name: 3 * weight for name, weight in w.items()}, HIDING))),
    ("has no model.safetensors: weights are missing", after(r.remove("model.safetensors"))),
    (f"{NOT_WHOLE} .*; get", after(write("model.safetensors", LFS))),
    (NOT_WHOLE, after(lambda f: (f / "model.safetensors").open("a").write("x"))),
    ("two.safetensors is not whole", after(r.shard, cut("two.safetensors", -1))),
    ("num_hidden_layers=30, and there are 21 weights", model(num_hidden_layers=30)),
    ("has [0-9]+ numbers in its weights, and the model of its config [0-9]+;", model(vocab_size=10**9)),
    ("lacks 9 of the model's weights, 'model.layers.2.input_layernorm.weight' among them", model(num_hidden_layers=3)),
    ("lacks 1 of .*, 'lm_head.weight'", after(r.weights(lambda w: w | {"lm_head.weighs": w.pop("lm_head.weight")}))),
    ("'model.layers.0.mlp.down_proj.weight' is .8, 8., and its config says .8, 12.", model(intermediate_size=12)),
    ("has weights for more layers than its config, 'model.layers.1.input_lay", model(num_hidden_layers=1)),
    # What is asked for
    ("nowhere' is neither a folder nor an id on the Hub", lambda f: load(f / "nowhere")),
    ("is a folder, which has no revision 'v1'; leave", lambda f: load(f, revision="v1")),
    ("subfolder= has no place in loading a pair", lambda f: load(f, subfolder="draft")),
    ("compile= has no place in loading a pair", lambda f: load(f, compile=True)),
    ("stream_by= has no place in loading a pair", lambda f: load(f, draft_kwargs={"stream_by": "run"})),
    # What is there
    ("draft has no config.json: .*written half; get", after(r.remove("draft/config.json"))),
    ("other has no config.json", said("draft.subfolder", "other")),
    ("config.json is not a JSON object; get", after(cut("config.json", 40))),
    ("cannot read the config of .*model type `evil`", model(model_type="evil")),
    ("cannot read .*Unrecognized", model(model_type=TEXT_MODEL)),
    ("cannot read .*Overflow", model(vocab_size=10**30)),
    ("has no tokenizer_config.json, though its", after(r.remove("tokenizer_config.json"))),
    ("cannot read the tokenizer of .*get it", after(cut("tokenizer.json", 200))),
]
