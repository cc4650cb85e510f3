"""Broken and hostile files of a pair, its config aside: what is said of them, and what is wrong."""

import repositories as r
from repositories import after, cut, edit, link, load, load_draft, model, move, pickled, put, said, tokenizer, write

from hf_specx.hub.pair_config import CONFIG_NAME


DEEP = "[" * 100_000
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
TEXT_MODEL = "clip_text_model"  # of which transformers knows the config, and no model to generate with
OWN = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
INSIDE_ANOTHER = {"model_type": TEXT_MODEL, "auto_map": {"AutoModel": "own.Model"}}
NOT_WHOLE = "model.safetensors is not whole, or no safetensors"
TEMPLATE = "additional_chat_templates/x.jinja"
HIDING = "shard-00001-model-00001-of-00001.safetensors"


def own_code(name: str, **changes: object) -> r.Change:
    """Put code beside a config, and name it there."""

    def change(folder):
        r.with_code((folder / name).parent.relative_to(folder).joinpath("own.py").as_posix(), "Config Model T")(folder)
        edit(name, **changes)(folder)

    return change


def elsewhere(folder) -> None:
    """Have the draft in a folder behind a link."""
    after(move("draft", "up/draft"), link("up", "elsewhere"), put("draft.subfolder", "up/draft"), use=id)(folder)


def foreign_files(folder) -> None:
    """Have the tokenizer in a file outside."""
    move("tokenizer.json", "../tokenizer.1.0.json")(folder)
    edit("tokenizer_config.json", fast_tokenizer_files=["../tokenizer.1.0.json"])(folder)


def as_reference(folder) -> None:
    """Have a local folder with the name of the draft's repository."""
    after(write("org/draft/config.json", "{}"), put("draft.name", "org/draft"), put("draft.subfolder", ""), use=id)(
        folder
    )


def pickled_shard(folder) -> None:
    pickled("x.bin")(folder)
    write(r.INDEX, '{"metadata": {}, "weight_map": {"lm_head.weight": "x.bin"}}')(folder)


def overlapping(header) -> None:
    header["lm_head.weight"].update(data_offsets=header["model.embed_tokens.weight"]["data_offsets"])


CASES = [
    # What runs code or reads elsewhere
    ("means the repository 'org/draft', and a local folder of that", after(as_reference, use=r.from_there)),
    ("model.safetensors is a link out of", after(link("model.safetensors", "w"))),
    ("specx_config.json is a link out of", after(link(CONFIG_NAME, "c"))),
    ("draft is a link out of", after(link("draft", "d"))),
    ("up/draft is a link out of", after(elsewhere, use=lambda folder: load(folder, target=r.pair().target))),
    ("tokenizer.json is a link out of", after(link("tokenizer.json", "t"))),
    ("x.jinja is a link", after(write(TEMPLATE, ""), link(TEMPLATE, "j"))),
    ("own defaults; get", after(cut("generation_config.json", -9))),
    ("generation_config.json has num_beams=3, which .*; take", after(edit("generation_config.json", num_beams=3))),
    ("brings code of its own, which is not run; read it, and", after(own_code("config.json", **OWN))),
    ("brings code of its own", after(own_code("config.json", text_config=INSIDE_ANOTHER))),
    ("draft brings code of its own, which is not", after(own_code("draft/config.json", **OWN), use=load_draft)),
    ("tokenizer in .* brings", after(own_code("tokenizer_config.json", auto_map={"AutoTokenizer": ["own.T", None]}))),
    ("attn_implementation='org/k', code from elsewhere", model(attn_implementation="org/k")),
    ("'org/k', code", model(text_config={"experts_implementation": "org/k"})),
    ("has transformers_weights='x.safetensors', which was not", model(transformers_weights="x.safetensors")),
    ("has configuration_files=.'config.1.0.json'., which was not", model(configuration_files=["config.1.0.json"])),
    ("which names a model elsewhere; merge", after(write("adapter_config.json", "{}"))),
    ("tokenizer_class='Trainer', which is no tok", tokenizer(tokenizer_class="Trainer")),
    ("config.json has tokenizer_class='AutoModel', which is no tokenizer", model(tokenizer_class="AutoModel")),
    ("has gguf_file='../x', no file of its own; take", tokenizer(gguf_file="../x")),
    ("has vocab='/etc/passwd', no file", tokenizer(vocab="/etc/passwd")),
    ("has init_inputs=.*/passwd'., no", tokenizer(init_inputs=["/etc/passwd"])),
    ("has fast_tokenizer_files=.*no file of its own", after(foreign_files)),
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
    ("does not say which file", after(r.shard, cut(r.INDEX, -30))),
    ("has no metadata, so it may be cut", r.indexed(metadata=...)),
    ("names '../one.safetensors', which is outside", r.indexed(weight_map={"lm_head.weight": "../one.safetensors"})),
    ("names '/x.safet", r.indexed(weight_map={"lm_head.weight": "/x.safetensors"})),
    ("names 'a.*x.safet", r.indexed(weight_map={"a": "a\\x.safetensors"})),
    ("names 'x.bin', and only safetensors are loaded, since other files may run code; save", after(pickled_shard)),
    ("weights in pytorch_model.bin, a pickle, which may run code; convert it", after(pickled("pytorch_model.bin"))),
    ("draft has its weights in model.pt", after(pickled("draft/model.pt"))),
    ("in x.pkl, a pickle", after(pickled("x.pkl", bare=True))),
    ("draft has its .* DraftHead", after(pickled("draft/pytorch_model.bin"), use=load_draft)),
    (f"has {HIDING}, a part", after(r.other_weights(HIDING))),
    ("has no model.safetensors: weights are missing", after(r.remove("model.safetensors"))),
    (f"{NOT_WHOLE} .*; get", after(write("model.safetensors", LFS))),
    (NOT_WHOLE, r.begins(DEEP.encode())),
    (NOT_WHOLE, after(cut("model.safetensors", -100))),
    (NOT_WHOLE, r.header(lambda h: h["lm_head.weight"].update(dtype="X"))),
    (NOT_WHOLE, r.header(lambda h: h["lm_head.weight"].update(shape=[1, 8]))),
    (NOT_WHOLE, r.header(overlapping)),
    (NOT_WHOLE, after(lambda f: (f / "model.safetensors").open("a").write("x"))),
    ("two.safetensors is not whole", after(r.shard, cut("two.safetensors", -1))),
    ("num_hidden_layers=30, and there are 21 weights", model(num_hidden_layers=30)),
    ("has [0-9]+ numbers in its weights, and the model of its config [0-9]+;", model(vocab_size=10**9)),
    ("lacks 9 of the model's weights, 'model.layers.2.input_layernorm.weight' among them", model(num_hidden_layers=3)),
    ("lacks 1 of .*, 'lm_head.weight'", r.header(lambda h: h.update({"lm_head.weighs": h.pop("lm_head.weight")}))),
    ("'model.layers.0.mlp.down_proj.weight' is .8, 8., and its config says .8, 12.", model(intermediate_size=12)),
    ("has weights for more layers than its config, 'model.layers.1.input_lay", model(num_hidden_layers=1)),
    # What is asked for
    ("nowhere' is neither a folder nor an id on the Hub", lambda f: load(f / "nowhere")),
    ("is a folder, which has no revision 'v1'; leave", lambda f: load(f, revision="v1")),
    ("subfolder= has no place in loading a pair", lambda f: load(f, subfolder="draft")),
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
