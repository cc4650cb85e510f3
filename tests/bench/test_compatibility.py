"""Whether a draft fits: the finding of each difference, and that an error is said exactly where decoding refuses."""

import pytest
import torch
from gemma4_models import assistant_of, gemma4_target
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
    "more rows": (draft(vocab_size=288), reads(), "logit rows", "note", "padding"),
    "fewer rows": (draft(vocab_size=270), reads(), "logit rows", "note", "below 270"),
    "other tokens": (draft(), reads(["some other words"]), "tokens", "note", "matched by tokens"),
    "no tokenizer": (draft(), lambda: None, "tokens", "note", "not checked"),
    "no tokenizer, other size": (draft(vocab_size=288), lambda: None, "tokens", "error", "288"),
    "other end": (with_other_end, reads(), "end tokens", "note", "target"),
    "shorter": (draft(max_position_embeddings=64), reads(), "positions", "note", "after 64 tokens"),
    "longer": (draft(max_position_embeddings=256), reads(), "positions", "note", "as far as"),
    "in training": (in_training, reads(), "decoding", "error", "training mode"),
}


def test_an_assistant_of_gemma_4_reads_keys_of_its_target():
    """Its ends and positions are the target's; another target is refused as decoding refuses it."""
    target = gemma4_target("E2B")
    (finding,) = find_fit(target, assistant_of(target), None, None)
    assert (finding.verdict, finding.draft) == ("ok", "4 of its own, by the keys of layers 2, 3")
    (finding,) = find_fit(tiny(**SIZES), assistant_of(target), tiny_tokenizer(), None)
    assert finding.verdict == "error"
    assert "LlamaForCausalLM" in finding.follows


@pytest.fixture(scope="module")
def target():
    return tiny(**SIZES)


@pytest.mark.parametrize("case", CASES)
def test_a_difference_is_found_and_refused_where_decoding_refuses_it(target, case):
    make, make_tokenizer, subject, verdict, follows = CASES[case]
    model, tokenizer, draft_tokenizer = make(), tiny_tokenizer(), make_tokenizer()
    findings = {finding.subject: finding for finding in find_fit(target, model, tokenizer, draft_tokenizer)}
    expected = set() if subject is None else {subject}
    if subject is not None:
        assert findings[subject].verdict == verdict
        assert follows in findings[subject].follows
    if case == "no tokenizer, other size":
        expected.add("logit rows")
    assert {name for name, finding in findings.items() if finding.verdict != "ok"} == expected
    strategy = SpeculativeDecoding(model, num_draft_tokens=2, tokenizer=tokenizer, draft_tokenizer=draft_tokenizer)
    refusals = []
    try:
        target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, custom_generate=strategy)
    except ValueError as error:
        refusals.append(str(error))
    assert [finding.follows for finding in findings.values() if finding.verdict == "error"] == refusals
