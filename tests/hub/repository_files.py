"""Broken and hostile files of a pair, its config aside: what is said of them, and what is wrong."""

from repositories import (
    INDEX,
    after,
    begins,
    cut,
    edit,
    from_there,
    header,
    indexed,
    link,
    load,
    load_draft,
    model,
    move,
    other_weights,
    pair,
    pickled,
    put,
    remove,
    said,
    shard,
    swap_ids,
    tokenizer,
    with_code,
    write,
)

from hf_specx.hub.pair_config import CONFIG_NAME


DEEP = "[" * 100_000
TEXT_MODEL = "clip_text_model"  # of which transformers knows the config, and no model to generate with

CASES = [
    # What is there
    (
        "means the repository 'org/draft', and a local folder of that name.*rename",
        after(
            write("org/draft/config.json", "{}"),
            put("draft.name", "org/draft"),
            put("draft.subfolder", ""),
            use=from_there,
        ),
    ),
    ("model.safetensors is a link out of", after(link("model.safetensors", "w"))),
    ("specx_config.json is a link out of", after(link(CONFIG_NAME, "c"))),
    ("draft is a link out of", after(link("draft", "d"))),
    (
        "up/draft is a link out of the pair's folder; put the",
        after(
            move("draft", "up/draft"),
            link("up", "elsewhere"),
            put("draft.subfolder", "up/draft"),
            use=lambda folder: load(folder, target=pair().target),
        ),
    ),
    ("tokenizer.json is a link out of", after(link("tokenizer.json", "t"))),
    (
        "x.jinja is a link out of",
        after(write("additional_chat_templates/x.jinja", ""), link("additional_chat_templates/x.jinja", "j")),
    ),
    ("own defaults; get", after(cut("generation_config.json", -9))),
    ("own defaults", after(write("generation_config.json", "[1]"))),
    (
        "generation_config.json has num_beams=3, which .*; take it out",
        after(edit("generation_config.json", num_beams=3)),
    ),
    ("draft.*num_beams=2", after(edit("draft/generation_config.json", num_beams=2))),
    (
        "the model in .* brings code of its own, which is not run; read it, and load it yourself with trust_remote",
        after(
            with_code("own.py", "Config Model"),
            edit("config.json", model_type="own", auto_map={"AutoConfig": "own.Config"}),
        ),
    ),
    (
        "brings code of its own",
        after(
            with_code("own.py", "Model"),
            edit("config.json", text_config={"model_type": TEXT_MODEL, "auto_map": {"AutoModel": "own.Model"}}),
        ),
    ),
    (
        "draft brings code of its own, which is not run; read it, and load it yourself",
        after(
            with_code("draft/own.py", "Config Model"),
            edit("draft/config.json", model_type="own", auto_map={"AutoConfig": "own.Config"}),
            use=load_draft,
        ),
    ),
    ("attn_implementation='org/k', code from elsewhere", model(attn_implementation="org/k")),
    ("'org/k', code", model(text_config={"experts_implementation": "org/k"})),
    (
        "has transformers_weights='x.safetensors', which was not checked; take it out",
        after(other_weights("x.safetensors"), edit("config.json", transformers_weights="x.safetensors")),
    ),
    (
        "has configuration_files=.'config.1.0.json'., which was not",
        after(write("config.1.0.json", "{}"), edit("config.json", configuration_files=["config.1.0.json"])),
    ),
    ("which names a model elsewhere; merge", after(write("adapter_config.json", "{}"))),
    (
        "the tokenizer in .* brings code of its own, which is not run; read it",
        after(with_code("own.py", "T"), edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["own.T", None]})),
    ),
    ("tokenizer_class='Trainer', which is no tok", tokenizer(tokenizer_class="Trainer")),
    ("config.json has tokenizer_class='AutoModel', which is no tokenizer", model(tokenizer_class="AutoModel")),
    ("has gguf_file='../x', no file of its own; take", tokenizer(gguf_file="../x")),
    ("has vocab='/etc/passwd', no file", tokenizer(vocab="/etc/passwd")),
    ("has init_inputs=.*/passwd'., no", tokenizer(init_inputs=["/etc/passwd"])),
    (
        "has fast_tokenizer_files=.*no file of its own",
        after(
            move("tokenizer.json", "../tokenizer.1.0.json"),
            edit("tokenizer_config.json", fast_tokenizer_files=["../tokenizer.1.0.json"]),
        ),
    ),
    ("has [0-9]+ tokens, and its pair was checked with 9", said("tokenizers.tokens", 9)),
    ("tokens, and its pair was checked with", tokenizer(added_tokens_decoder={"900": {"content": "<more>"}})),
    ("tokens of the tokenizer of .* have other ids than those that", after(swap_ids)),
    ("have other ids than", said("tokenizers.vocabulary", "0" * 64)),
    ("have other ids than", after(swap_ids, use=load_draft)),
    ("has eos_token='<pad>', and its pair was checked with '<end>'; get", tokenizer(eos_token="<pad>")),
    ("has eos_token=None, and", tokenizer(eos_token=...)),
    ("has vocab_size=2[0-9]+, and the pair was made with 7", said("target.vocab_size", 7)),
    ("has model_type='mistral', and", model(model_type="mistral")),
    (
        "the draft of .* has model_type='llama', and the pair was made with 'gpt2'",
        after(put("draft.model_type", "gpt2"), use=load_draft),
    ),
    # Weights
    ("does not say which file has which weights", indexed(weight_map={})),
    ("does not say which file", indexed(weight_map={"lm_head.weight": 1})),
    ("does not say which file", after(shard, cut(INDEX, -30))),
    ("has no metadata, so it may be cut", indexed(metadata=...)),
    (
        "names '../one.safetensors', which is outside the model's folder",
        indexed(weight_map={"lm_head.weight": "../one.safetensors"}),
    ),
    ("names '/x.safet", indexed(weight_map={"lm_head.weight": "/x.safetensors"})),
    ("names 'a.*x.safet", indexed(weight_map={"a": "a\\x.safetensors"})),
    (
        "names 'x.bin', and only safetensors are loaded, since other files may run code; save",
        after(pickled("x.bin"), write(INDEX, '{"metadata": {}, "weight_map": {"lm_head.weight": "x.bin"}}')),
    ),
    ("weights in pytorch_model.bin, a pickle, which may run code; convert it", after(pickled("pytorch_model.bin"))),
    ("draft has its weights in model.pt", after(pickled("draft/model.pt"))),
    ("in x.pkl, a pickle", after(pickled("x.pkl", bare=True))),
    (
        "draft has its .* convert it to safetensors, or load it yourself with use_safetensors=False if",
        after(pickled("draft/pytorch_model.bin"), use=load_draft),
    ),
    (
        "has shard-00001-model-00001-of-00001.safetensors, a part",
        after(other_weights("shard-00001-model-00001-of-00001.safetensors")),
    ),
    ("has no model.safetensors: weights are missing", after(remove("model.safetensors"))),
    ("has no two.safetensors: weights", after(shard, remove("two.safetensors"))),
    ("draft has no model.safetensors", after(remove("draft/model.safetensors"))),
    (
        "model.safetensors is not whole, or no safetensors .*; get",
        after(write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")),
    ),
    ("is not whole, or no safetensors", after(write("model.safetensors", ""))),
    ("is not whole, or no safetensors", begins(DEEP.encode())),
    ("is not whole, or no safetensors", after(cut("model.safetensors", 100))),
    ("is not whole, or no safetensors", header(lambda h: h["lm_head.weight"].update(dtype="X"))),
    ("is not whole, or no safetensors", header(lambda h: h["lm_head.weight"].update(shape=[1, 8]))),
    (
        "is not whole, or no safetensors",
        header(lambda h: h["lm_head.weight"].update(data_offsets=h["model.embed_tokens.weight"]["data_offsets"])),
    ),
    ("is not whole, or no safetensors", after(cut("model.safetensors", -100))),
    ("two.safetensors is not whole", after(shard, cut("two.safetensors", -1))),
    ("is not whole", after(lambda f: (f / "model.safetensors").open("a").write("x"))),
    ("num_hidden_layers=30, and there are 21 weights", model(num_hidden_layers=30)),
    ("has [0-9]+ numbers in its weights, and the model of its config [0-9]+;", model(vocab_size=3000)),
    ("lacks 9 of the model's weights, 'model.layers.2.input_layernorm.weight' among them", model(num_hidden_layers=3)),
    (
        "lacks 1 of the model's weights, 'lm_head.weight'",
        header(lambda h: h.update({"lm_head.weighs": h.pop("lm_head.weight")})),
    ),
    ("'model.layers.0.mlp.down_proj.weight' is .8, 8., and its config says .8, 12.", model(intermediate_size=12)),
    ("has weights for more layers than its config, 'model.layers.1.input_lay", model(num_hidden_layers=1)),
    ("more layers than its config", model(num_hidden_layers=0)),
    # What is asked for
    ("nowhere' is neither a folder nor an id on the Hub", lambda f: load(f / "nowhere")),
    ("other' is neither a folder nor", lambda f: load(f, target=f / "other")),
    ("revision='v1' is for repositories on .*; leave", lambda f: load(f, revision="v1")),
    ("subfolder= has no place in loading a pair", lambda f: load(f, subfolder="draft")),
    ("num_draft_tokens= has no .*to a call", lambda f: load(f, num_draft_tokens=3)),
    # What is there
    ("draft has no config.json: .*written half; get", after(remove("draft/config.json"))),
    ("has no config.json", after(remove("config.json"))),
    ("other has no config.json", said("draft.subfolder", "other")),
    ("config.json is not a JSON object; get", after(cut("config.json", 40))),
    ("config.json is not a JSON", after(write("config.json", DEEP))),
    ("cannot read the config of .*model type `evil`", model(model_type="evil")),
    ("cannot read .*a `model_type` key", model(model_type=...)),
    ("cannot read .*Unrecognized", model(model_type=TEXT_MODEL)),
    ("cannot read .*'os.system'", model(hidden_act="os.system")),
    ("cannot read .*Overflow", model(vocab_size=10**30)),
    ("has no tokenizer_config.json, though its", after(remove("tokenizer_config.json"))),
    ("cannot read the tokenizer of .*get it", after(cut("tokenizer.json", 200))),
    (
        "cannot read the tokenizer of",
        after(write("tokenizer.json", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")),
    ),
    ("cannot read the tokenizer", after(remove("tokenizer.json"))),
]
