"""SynthID, vectorized: its state is a function of the emitted text, so candidates are judged at any position."""

import copy
from unittest import mock

import pytest
from all_pairs import once
from many import assert_alone
from plain import assert_plain, coupled
from tiny import VOCAB_SIZE, near, prompts, tiny
from transformers import SynthIDTextWatermarkingConfig
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor

from hf_specx import Request, SpeculativeDecoding
from hf_specx.sampling import synthid


KEYS = [3, 1, 4, 1]
FEW = VOCAB_SIZE // synthid.FEW - 1
SETTINGS = {
    "usual": {"ngram_len": 3},
    "contexts of one token": {"ngram_len": 2},
    "no context": {"ngram_len": 1},
    "longer than the text": {"ngram_len": 40},
    "two contexts kept": {"ngram_len": 2, "context_history_size": 2},
    "none kept": {"ngram_len": 2, "context_history_size": 0},
    "a small table": {"ngram_len": 2, "sampling_table_size": 64},
}


MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_p": 0.95, "top_k": 0, "renormalize_logits": True},
    "few tokens left": {"do_sample": True, "top_k": FEW},
}


def compare(name: str, mode: str, rows: int) -> None:
    """In the usual layout, in fewer forwards; rows end at different times, and short contexts come again."""
    target = tiny()
    config = SynthIDTextWatermarkingConfig(keys=KEYS, **SETTINGS[name])
    settings = MODES[mode] | {"max_new_tokens": 32, "eos_token_id": 11, "pad_token_id": 0, "repetition_penalty": 1.1}
    settings |= {"watermarking_config": config}
    lookup = PromptLookupCandidateGenerator(num_output_tokens=3, max_matching_ngram_size=1, max_length=200)
    verification = None if mode == "greedy" else "coupled"
    for draft in (near(target, 0.02), near(target, 1.0), lookup):
        strategy = SpeculativeDecoding(draft, num_draft_tokens=4, verification=verification)
        compared = assert_plain(target, strategy, prompts(rows), seed=2, **settings)
        assert strategy.report.layout == "ragged"
        assert compared.forwards <= compared.plain * (0.75 if strategy.report.acceptance_rate > 0.5 else 1)


@pytest.mark.parametrize(("name", "mode", "rows"), once(SETTINGS, MODES, [4, 1]))
def test_text_is_that_of_plain_generate(name: str, mode: str, rows: int):
    compare(name, mode, rows)


HASHES = {
    "that meet": lambda hashes: hashes % 5,
    "that are zero": lambda hashes: hashes.where(hashes & 3 > 0, 0),
}


@pytest.mark.parametrize("hashes", HASHES)
@pytest.mark.parametrize("name", ["usual", "two contexts kept"])
def test_hashes(name: str, hashes: str):
    """An empty place in transformers' list of hashes is a 0, which a context may have as well."""
    hashed = SynthIDTextWatermarkLogitsProcessor.accumulate_hash

    def changed(self, current, data, **numbers):
        return HASHES[hashes](hashed(self, current, data, **numbers))

    with mock.patch.object(SynthIDTextWatermarkLogitsProcessor, "accumulate_hash", changed):
        compare(name, "sampled", 8)


def test_requests_of_a_queue_have_their_own():
    """Each text is that of the request alone, also in the place of a row that has ended."""
    config = SynthIDTextWatermarkingConfig(keys=KEYS, ngram_len=2)
    asked = [Request([1 + n, 5, 9 + n], 4 + 5 * (n % 3)) for n in range(5)]
    options = {"do_sample": False, "watermarking_config": config}
    assert_alone(coupled(tiny(), 0.05), tiny(), asked, batch_size=2, **options)


def test_one_that_was_called_before_goes_on_in_order():
    target = tiny()
    used = SynthIDTextWatermarkingConfig(keys=KEYS, ngram_len=3).construct_processor(VOCAB_SIZE, "cpu")
    settings = {"do_sample": False, "max_new_tokens": 12}
    target.generate(**prompts(2), **settings, logits_processor=[used])
    strategy = coupled(target, 0.05)
    assert_plain(target, strategy, prompts(2), lambda: {"logits_processor": [copy.deepcopy(used)]}, **settings)
    assert "SynthID has candidates where its processor is unused" in strategy.report.layout_reason
