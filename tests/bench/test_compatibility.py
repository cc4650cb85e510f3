"""Whether a draft fits: what is found of each difference, and that an error is said exactly where decoding refuses."""

import pytest
import torch
from tiny import near, tiny
from tiny_tokenizer import PAD, tiny_tokenizer

from hf_specx import SpeculativeDecoding
from hf_specx.bench.compatibility import find_fit


SIZES = {"vocab_size": 280, "eos_token_id": 0, "pad_token_id": 1}


def in_training():
    return tiny(**SIZES, attention_dropout=0.1).train()


def with_other_end():
    model = tiny(**SIZES)
    model.generation_config.eos_token_id = [5, 0]
    return model


def with_fewer_merges():
    return tiny_tokenizer(fewer_merges=12)


# name: (draft, its tokenizer, what differs, its verdict, part of what follows)
CASES = {
    "a copy": (lambda: near(tiny(**SIZES), 0.05), tiny_tokenizer, None, "ok", ""),
    "more rows": (lambda: tiny(**SIZES | {"vocab_size": 288}), tiny_tokenizer, "logit rows", "note", "is padding"),
    "fewer rows": (lambda: tiny(**SIZES | {"vocab_size": 270}), tiny_tokenizer, "logit rows", "note", "from 270 on"),
    "other tokens": (
        lambda: tiny(**SIZES),
        lambda: tiny_tokenizer(["some other words"]),
        "tokens",
        "note",
        "another tokenizer, matched by tokens",
    ),
    "no tokenizer": (lambda: tiny(**SIZES), lambda: None, "tokens", "note", "not checked"),
    "no tokenizer, other size": (
        lambda: tiny(**SIZES | {"vocab_size": 288}),
        lambda: None,
        "tokens",
        "error",
        "280 tokens and the draft 288",
    ),
    "other merges": (lambda: tiny(**SIZES), with_fewer_merges, "encoding", "note", "other splits"),
    "other pad": (
        lambda: tiny(**SIZES),
        lambda: tiny_tokenizer(pad_token="<end>"),
        "special tokens",
        "note",
        "the target's count",
    ),
    "other end": (with_other_end, tiny_tokenizer, "end tokens", "note", "ends at the target's"),
    "shorter": (
        lambda: tiny(**SIZES, max_position_embeddings=64),
        tiny_tokenizer,
        "positions",
        "note",
        "after 64 tokens",
    ),
    "longer": (lambda: tiny(**SIZES, max_position_embeddings=256), tiny_tokenizer, "positions", "note", "as far as"),
    "other family": (lambda: tiny("gpt2", **SIZES), tiny_tokenizer, "model type", "note", "families may differ"),
    "in training": (in_training, tiny_tokenizer, "decoding", "error", "draft is in training mode"),
}


@pytest.fixture(scope="module")
def target():
    return tiny(**SIZES)


@pytest.mark.parametrize("case", CASES)
def test_each_difference_is_found(target, case):
    make_draft, make_tokenizer, subject, verdict, follows = CASES[case]
    found = {f.subject: f for f in find_fit(target, make_draft(), tiny_tokenizer(), make_tokenizer(), ["the cat"])}
    if subject is not None:
        assert found[subject].verdict == verdict
        assert follows in found[subject].follows
    others = {name: f.verdict for name, f in found.items() if name != subject}
    also = {"no tokenizer, other size": "logit rows"}.get(case)
    assert also is None or others.pop(also) == "note"
    assert set(others.values()) == {"ok"}


@pytest.mark.parametrize("case", CASES)
def test_errors_are_what_decoding_refuses(target, case):
    draft, tokenizer, own = CASES[case][0](), tiny_tokenizer(), CASES[case][1]()
    errors = [f.follows for f in find_fit(target, draft, tokenizer, own) if f.verdict == "error"]
    strategy = SpeculativeDecoding(draft, num_draft_tokens=2, tokenizer=tokenizer, draft_tokenizer=own)
    said = []
    try:
        target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, custom_generate=strategy)
    except ValueError as error:
        said.append(str(error))
    assert errors == said


def test_values_of_both_are_shown(target):
    draft = tiny("gpt2", **SIZES | {"vocab_size": 288})
    found = {f.subject: f[1:3] for f in find_fit(target, draft, tiny_tokenizer(), tiny_tokenizer(pad_token="a"))}
    assert found["model type"] == ("llama", "gpt2")
    assert found["logit rows"] == ("280", "288")
    assert found["special tokens"] == (f"pad {PAD}", "pad a")
    assert found["tokens"] == ("277", "277")


def test_texts_of_the_user_are_encoded_too(target):
    """A merge that no text of ours has."""
    texts = ["qqzz"] * 9
    one, other = tiny_tokenizer(texts), tiny_tokenizer(texts, fewer_merges=1)
    assert one.get_vocab() == other.get_vocab()
    assert {f.subject: f for f in find_fit(target, target, one, other)}["encoding"].verdict == "ok"
    found = {f.subject: f for f in find_fit(target, target, one, other, ["qqzz"])}["encoding"]
    assert found.verdict == "note"
    assert "'qqzz'" in found.follows


def test_lockstep_is_said(target):
    draft = tiny("roformer", **SIZES, is_decoder=True)
    found = {f.subject: f for f in find_fit(target, draft, tiny_tokenizer(), tiny_tokenizer())}["layout"]
    assert (found.target, found.draft, found.verdict) == ("ragged", "lockstep", "note")
