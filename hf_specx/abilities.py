"""In which layouts each architecture was shown to be exact: by tests/test_sweep.py, on transformers 5.23.

`python scripts/sweep.py --discover` prints `GROUPS` anew; `model_type` is that of a config, or of its text part.
"""

GROUPS = {
    "ragged padded packed lockstep": """
        cohere gemma gemma2 gpt2 gpt_neox granite llama mistral olmo olmo2 phi phi3 qwen2 qwen3 smollm3 stablelm
        starcoder2
    """,
}
LAYOUTS_OF = {name: tuple(layouts.split()) for layouts, names in GROUPS.items() for name in names.split()}
UNKNOWN = ("lockstep",)  # for an architecture that the sweep has not seen: the host's own cache, cropped
BY_MASK = ("ragged", "packed")  # layouts that need an attention which takes a 4D mask
MASKED = ("sdpa", "eager")

# Encoders that decode too: they do so causally only where their config says is_decoder=True
ENCODERS = frozenset(
    """
    bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
    roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod
    """.split()
)
_STEPS = "its forward of several tokens behind a cache gives other logits than single steps do (transformers 5.23)"
_OWN_CACHE = "it keeps its past in a structure of its own, which cannot be taken back"
# As targets; as drafts they are as good as any, since their candidates are judged by the law that they gave
INEXACT = dict.fromkeys("mamba falcon_mamba jamba zamba zamba2 nemotron_h nemo_speechlm cpmant fsmt".split(), _STEPS)
REFUSED = {
    "minimax": _OWN_CACHE,
    "rwkv": _OWN_CACHE,
    "xlstm": _OWN_CACHE,
    "xlnet": _OWN_CACHE,
    "reformer": _OWN_CACHE,
    "openai-gpt": "it keeps no cache, so that every forward reads the whole text again",
    "prophetnet": "its cache takes one token at a time",
    "blt": "its patches depend on the bytes that follow, candidates among them",
}
