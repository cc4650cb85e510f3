"""Processors of a queue: each request has the text of a batch of one, and rows with equal processors share a call."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from all_pairs import once
from criteria import Raising
from many import GREEDY, MODES, SAMPLED, assert_alone, completed, requests
from plain import coupled
from rounds import numbers
from tiny import near, tiny
from transformers import SynthIDTextWatermarkingConfig
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hf_specx import Request, SpeculativeDecoding
from hf_specx.common.batch import Batch
from hf_specx.sampling import per_request
from hf_specx.sampling.per_request import comparison_key
from hf_specx.sampling.processors import ALL_VECTORIZED


SETTINGS = {
    "repetition": {"repetition_penalty": 1.4},
    "n-grams": {"no_repeat_ngram_size": 2},
    "one token once": {"no_repeat_ngram_size": 1},
    "bad words": {"bad_words_ids": [[7], [8, 9], [3, 4, 5]]},
    "bias": {"sequence_bias": [[[7], -3.0], [[11, 12], 2.5]]},
    "length": {"min_length": 20},
    "new tokens": {"min_new_tokens": 6},
    "suppressed": {"suppress_tokens": [3, 4, 5], "begin_suppress_tokens": [6, 7]},
    "forced end": {"forced_eos_token_id": 5},
    "forced begin": {"forced_bos_token_id": 9},
    "decay": {"exponential_decay_length_penalty": (3, 1.3)},
    "several": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[7]], "min_new_tokens": 4},
}


@pytest.mark.parametrize(("mode", "name"), once(MODES, SETTINGS))
def test_settings_of_the_call(mode: str, name: str):
    """Prompts have 1 to 30 tokens, so that each row has pads of its own, and later ones have the places of others."""
    target, asked = tiny(), [*requests(9), Request([9] * 20, 12, seed=5)]
    strategy = coupled(target, 0.2, num_draft_tokens=3)
    assert_alone(strategy, target, asked, **MODES[mode] | SETTINGS[name])
    assert strategy.report.accepted > 0


def test_a_watermark():
    target, config = tiny(), SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)
    strategy = coupled(target, 0.2, num_draft_tokens=3)
    assert_alone(strategy, target, requests(8), watermarking_config=config, **SAMPLED)
    assert strategy.report.accepted > 0


class Wide(LogitsProcessor):
    """Gives what it gets in double precision."""

    stateless = True

    def __call__(self, input_ids, scores):
        return scores.double()


OWN = [
    lambda: None,
    lambda: [RepetitionPenaltyLogitsProcessor(1.7)],
    lambda: [Raising(3), RepetitionPenaltyLogitsProcessor(1.7)],
    lambda: [NoRepeatNGramLogitsProcessor(2), TemperatureLogitsWarper(0.7), RepetitionPenaltyLogitsProcessor(0.8)],
    lambda: [TopKLogitsWarper(5)],
]


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
def test_requests_with_different_processors_beside_each_other(options: dict):
    """In other numbers and orders, of which some are equal."""
    target = tiny()
    strategy = coupled(target, 0.1, num_draft_tokens=3)
    asked = lambda: [replace(each, logits_processor=OWN[n % 5]()) for n, each in enumerate(requests(12))]  # noqa: E731
    assert_alone(strategy, target, asked, repetition_penalty=1.3, min_new_tokens=3, **options)
    assert strategy.report.accepted > 0


def test_a_processor_of_one_request_that_gives_another_precision():
    target, asked = tiny(), requests(6)
    asked[1] = replace(asked[1], logits_processor=[Wide()])
    assert_alone(coupled(target, 0.1, num_draft_tokens=3), target, asked, repetition_penalty=1.3, **GREEDY)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[type]:
    """How often what computes processors of each type was called."""
    counts = Counter[type]()

    def counted(kind: type):
        compute = ALL_VECTORIZED[kind]

        def call(*args):
            counts[kind] += 1
            return compute(*args)

        return call

    for kind in list(ALL_VECTORIZED):
        monkeypatch.setitem(ALL_VECTORIZED, kind, counted(kind))
    return counts


@pytest.mark.parametrize("different", [1, 2])
def test_equal_processors_are_called_once_for_all_rows(different: int, calls: Counter[type]):
    """Once a round, and once a step of the draft, for each of the settings that rows have."""
    target, positions = tiny(), numbers()
    strategy = SpeculativeDecoding(near(target, 0.1), num_draft_tokens=3, verification="coupled")
    strategy.listeners = (positions,)
    asked = requests(16)
    for number in range(0, 16, 2) if different == 2 else ():
        asked[number] = replace(asked[number], logits_processor=[RepetitionPenaltyLogitsProcessor(1.8)])
    settings = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4}
    if different == 2:
        settings.pop("repetition_penalty")
        for number in range(1, 16, 2):
            asked[number] = replace(asked[number], logits_processor=[RepetitionPenaltyLogitsProcessor(1.3)])
    completed(strategy, target, asked, batch_size=8, **SAMPLED | settings)
    steps = len(positions) + sum(positions)
    assert 0 < calls[NoRepeatNGramLogitsProcessor] <= steps
    assert 0 < calls[MinNewTokensLengthLogitsProcessor] <= steps  # whose settings tell the length of the prompt
    assert 0 < calls[RepetitionPenaltyLogitsProcessor] <= different * steps


def test_columns_that_count_pads_are_seen(monkeypatch: pytest.MonkeyPatch):
    """The tests above can fail: with the columns of the batch a row has another text."""
    first_columns = per_request._first_columns
    without_pads = lambda processors, pads: first_columns(processors, [0] * len(pads))  # noqa: E731
    monkeypatch.setattr(per_request, "_first_columns", without_pads)
    target = tiny()
    with pytest.raises(AssertionError):
        assert_alone(coupled(target, 0.2), target, requests(9), no_repeat_ngram_size=2, min_length=20, **GREEDY)


def test_what_is_equal():
    """Settings are compared by value, tensors too; a length that a prompt adds to does not count."""
    ends = torch.tensor([5, 6])
    at_least = [MinNewTokensLengthLogitsProcessor(length, 4, ends.clone()) for length in (3, 9)]
    assert comparison_key(at_least[0]) == comparison_key(at_least[1])
    assert comparison_key(at_least[0]) != comparison_key(MinNewTokensLengthLogitsProcessor(3, 4, ends + 1))
    low, low_again, high = (comparison_key(RepetitionPenaltyLogitsProcessor(penalty)) for penalty in (1.3, 1.3, 1.4))
    assert low == low_again != high
    assert comparison_key(Raising(3)) is None


def test_a_row_is_replaced_in_one_place():
    """A request that has the place of another brings a new row, with nothing of the one before."""
    replaced, admit = [], Batch.admit

    def noted(batch, number, row, prompt):
        replaced.append((batch.row_states[number], row))
        admit(batch, number, row, prompt)

    target = tiny()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "admit", noted)
        completed(coupled(target, 0.2), target, requests(7), batch_size=2, **SAMPLED)
    assert len(replaced) == 5
    for old, new in replaced:
        assert old.stopped_at == len(old.emitted_ids) > 0
        assert new is not old
        assert new.request.index > old.request.index
