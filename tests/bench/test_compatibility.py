"""Whether a draft fits: what is found of each difference, and that an error is said exactly where decoding refuses."""

import pytest
import torch
from tiny import near, tiny
from tiny_tokenizer import SIZES, tiny_tokenizer

from hf_specx import SpeculativeDecoding
from hf_specx.bench.compatibility import find_fit


def draft(**changes):
    return lambda: tiny(**SIZES | changes)


def in_training():
    return tiny(**SIZES, attention_dropout=0.1).train()


def with_other_end():
    model = tiny(**SIZES)
    model.generation_config.eos_token_id = [5, 0]
    return model


def reads(*texts):
    return lambda: tiny_tokenizer(*texts)


# (draft, its tokenizer, what differs, its verdict, part of what follows)
CASES = {
    "a copy": (lambda: near(tiny(**SIZES), 0.05), reads(), None, "ok", ""),
    "more rows": (draft(vocab_size=288), reads(), "logit rows", "note", "is padding"),
    "fewer rows": (draft(vocab_size=270), reads(), "logit rows", "note", "from 270 on"),
    "other tokens": (draft(), reads(["some other words"]), "tokens", "note", "another tokenizer, matched by tokens"),
    "no tokenizer": (draft(), lambda: None, "tokens", "note", "not checked"),
    "no tokenizer, other size": (draft(vocab_size=288), lambda: None, "tokens", "error", "and the draft 288"),
    "other end": (with_other_end, reads(), "end tokens", "note", "ends at the target's"),
    "shorter": (draft(max_position_embeddings=64), reads(), "positions", "note", "after 64 tokens"),
    "longer": (draft(max_position_embeddings=256), reads(), "positions", "note", "as far as"),
    "in training": (in_training, reads(), "decoding", "error", "draft is in training mode"),
}


@pytest.fixture(scope="module")
def target():
    return tiny(**SIZES)


@pytest.mark.parametrize("case", CASES)
def test_a_difference_is_found_and_refused_where_decoding_refuses_it(target, case):
    make, make_tokenizer, subject, verdict, follows = CASES[case]
    model, tokenizer, own = make(), tiny_tokenizer(), make_tokenizer()
    found = {f.subject: f for f in find_fit(target, model, tokenizer, own)}
    if subject is not None:
        assert found[subject].verdict == verdict
        assert follows in found[subject].follows
    also = {"logit rows"} if case == "no tokenizer, other size" else set()
    assert {name for name, f in found.items() if f.verdict != "ok"} == also | ({subject} if subject else set())
    strategy, said = SpeculativeDecoding(model, num_draft_tokens=2, tokenizer=tokenizer, draft_tokenizer=own), []
    try:
        target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, custom_generate=strategy)
    except ValueError as error:
        said.append(str(error))
    assert [f.follows for f in found.values() if f.verdict == "error"] == said
