"""A draft that looks for the end of a row's text in what was read and emitted, through `generate`."""

import pytest
import torch
from repeating import NEW_TOKENS, cyclic, few_tokens, repetitive, run
from tiny import Forwards, prompts, tiny

from hf_specx import SpeculativeDecoding, SuffixDraft, SuffixPool


def test_few_forwards_on_text_that_repeats():
    inputs, settings = few_tokens(1), {"do_sample": False, "max_new_tokens": 80}
    text = run(cyclic(), inputs, **settings)
    for draft, number in ((SuffixDraft(), 8), (SuffixDraft(max_candidates=8), "auto")):
        with Forwards(cyclic()) as forwards:
            output = run(cyclic(), inputs, SpeculativeDecoding(draft, num_draft_tokens=number), **settings)
        assert torch.equal(output, text)
        assert len(forwards.lengths) <= 30
        assert max(forwards.lengths[1:]) == 9


def test_the_text_of_a_mate_and_of_an_earlier_call_is_drafted():
    """A row that has nothing to look for in itself copies what others have had before it."""
    model, row = tiny(seed=5), prompts(1)
    text = run(model, row, do_sample=False)
    mate = {"input_ids": torch.nn.functional.pad(text, (0, 0, 0, 1)), "attention_mask": torch.ones(2, text.shape[1])}
    mate["input_ids"][1, -11:] = row["input_ids"]
    mate["attention_mask"][1, :-11] = 0
    of_mates, pool = SpeculativeDecoding(SuffixDraft()), SuffixPool()
    output = run(model, mate, of_mates, do_sample=False, max_new_tokens=30)
    assert torch.equal(output[1, -30:], text[0, 11:41])
    of_pool = SpeculativeDecoding(SuffixDraft(pool=pool))
    first = [run(model, row, of_pool, do_sample=False), of_pool.report][1]
    run(model, row, of_pool, do_sample=False)
    assert len(pool) == 2 * text.shape[1]
    assert of_pool.report.accepted > first.accepted
    assert of_pool.report.rounds + of_pool.report.plain_steps < NEW_TOKENS / 3
    assert of_mates.report.accepted_per_row[1] > 10


def test_nothing_is_proposed_where_nothing_repeats():
    """Tokens in order, each but once: every forward is one of plain decoding."""
    model, inputs = tiny(vocab_size=300), prompts(4)

    def counting(input_ids, scores):
        return torch.full_like(scores, -1e4).scatter(1, input_ids[:, -1:] + 1, 0.0)

    counting.stateless = True
    settings = {"do_sample": False, "logits_processor": [counting], "max_new_tokens": 30}
    inputs["input_ids"] = (torch.arange(11) + 60 * torch.arange(1, 5)[:, None]) * inputs["attention_mask"]
    strategy = SpeculativeDecoding(SuffixDraft(), num_draft_tokens=8)
    with Forwards(model) as forwards:
        output = run(model, inputs, strategy, **settings)
    assert forwards.lengths[1:] == [1] * 29
    assert strategy.report.plain_steps == 30
    assert strategy.report.drafted == 0
    assert output[0, -1] == output[0, -30] + 29


def test_bad_options_and_a_pool_of_another_vocabulary_are_refused_before_any_forward():
    wrong = {
        "max_candidates=0": {"max_candidates": 0},
        "max_match=3": {"min_match": 5, "max_match": 3},
        "pool is an int": {"pool": 5},
    }
    for word, options in wrong.items():
        with pytest.raises(ValueError, match=word):
            SuffixDraft(**options)
    strategy = SpeculativeDecoding(SuffixDraft(pool=SuffixPool(vocab_size=13)))
    with Forwards(repetitive()) as forwards, pytest.raises(ValueError, match="13 tokens"):
        run(repetitive(), few_tokens(1), strategy)
    assert not forwards.lengths
