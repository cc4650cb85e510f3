"""SynthID in one pass: its state is a function of the emitted text, so candidates are judged at any position."""

import copy
from unittest import mock

import pytest
import torch
from all_pairs import once
from enumerated import ENOUGH, draw, exact_distribution, p_values
from tiny import VOCAB_SIZE, Forwards, near, prompts, tiny
from transformers import SynthIDTextWatermarkingConfig
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor, WatermarkLogitsProcessor

from hf_specx import Request, SpeculativeDecoding
from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft
from hf_specx.sampling import watermarks
from hf_specx.sampling.processors import Processors


KEYS, PAD, WIDTH, TOKENS = [3, 1, 4, 1], 0, 5, 6
FEW = VOCAB_SIZE // watermarks.FEW - 1
NUM_TESTS = 2 * 2
SETTINGS = {
    "usual": {"ngram_len": 3},
    "contexts of one token": {"ngram_len": 2},
    "no context": {"ngram_len": 1},
    "longer than the text": {"ngram_len": 40},
    "two contexts kept": {"ngram_len": 2, "context_history_size": 2},
    "none kept": {"ngram_len": 2, "context_history_size": 0},
    "first ones skipped": {"ngram_len": 3, "skip_first_ngram_calls": True},
    "first ones skipped, few kept": {"ngram_len": 4, "skip_first_ngram_calls": True, "context_history_size": 3},
    "a table of another size": {"ngram_len": 2, "sampling_table_size": 1000},
    "for testing": {"ngram_len": 2, "debug_mode": True},
}


def made(name: str) -> SynthIDTextWatermarkLogitsProcessor:
    return SynthIDTextWatermarkingConfig(keys=KEYS, **SETTINGS[name]).construct_processor(VOCAB_SIZE, "cpu")


def text(seed: int) -> Batch:
    """Four rows with unequally many tokens, few of them different, of which one has left."""
    generator = torch.Generator().manual_seed(seed)
    batch = Batch(torch.randint(1, TOKENS, (4, WIDTH), generator=generator), None, PAD)
    counts = torch.randint(0, 12, (4,), generator=generator)
    batch.emit(torch.randint(1, TOKENS, (4, 12), generator=generator), counts.tolist())
    batch.retire([2] if seed % 2 else [])
    return batch


def assert_alike(batch: Batch, lengths: list[int], processor, again, left: int = VOCAB_SIZE) -> None:
    """At each position of each row: what a new processor gives that is called token by token up to there.

    Warpers have left `left` tokens; where these are few, sums may be rounded otherwise.
    """
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(1, TOKENS, (len(lengths), max(lengths)), generator=generator)
    draft = batch.take(Draft(tokens, lengths))
    scores = 3 * torch.randn(len(lengths), max(lengths) + 1, VOCAB_SIZE, generator=generator)
    scores = scores.masked_fill(scores < scores.topk(left).values[..., -1:], -torch.inf)
    found = Processors([processor])(batch, draft, scores)
    for index, row in enumerate(batch.rows):
        synthid, count = again(), batch.counts[row]
        for emitted in range(count + lengths[index] + 1):
            position = max(0, emitted - count)
            expected = synthid(batch.prefix(emitted)[[row]], scores[[index], position])
            if emitted >= count and left > FEW:
                assert torch.equal(found[index, position], expected[0]), (row, position)
            elif emitted >= count:
                chances = found[index, position].softmax(-1), expected[0].softmax(-1)
                torch.testing.assert_close(*chances, rtol=0, atol=1e-6)
    step = Processors([processor])(batch, None, scores[:, :1], ahead=1)  # as while drafting
    live = [index for index, length in enumerate(lengths) if length]
    after_one = Processors([processor])(batch, draft, scores[:, :1].expand(-1, 2, -1))
    assert torch.allclose(step[live, 0], after_one[live, 1])


@pytest.mark.parametrize("left", [VOCAB_SIZE - 1, FEW])
@pytest.mark.parametrize("name", SETTINGS)
def test_each_position_is_as_in_transformers(name: str, left: int):
    """Of whatever a row has emitted, and so after candidates that were rejected as well."""
    processor = made(name)
    for seed in range(4):
        batch = text(seed)
        lengths = [(row + seed) % 4 for row in batch.rows]
        assert_alike(batch, lengths, processor, lambda: made(name), left)
    assert processor.state is None


def test_hashes_that_meet_or_are_zero():
    """An empty place in transformers' list of hashes is a 0, which a context may have as well."""
    hashed = SynthIDTextWatermarkLogitsProcessor.accumulate_hash

    def few(self, current, data, **numbers):
        return hashed(self, current, data, **numbers) % 5

    with mock.patch.object(SynthIDTextWatermarkLogitsProcessor, "accumulate_hash", few):
        for name in ("usual", "two contexts kept", "first ones skipped, few kept"):
            assert_alike(text(3), [3, 2, 1], made(name), lambda name=name: made(name))


THREE = ["usual", "two contexts kept", "first ones skipped"]


@pytest.mark.parametrize(("name", "do_sample", "rows"), once(THREE, [False, True], [1, 4]))
def test_text_is_that_of_plain_generate(name: str, do_sample: bool, rows: int):
    """In the usual layout, in fewer forwards; rows end at different times."""
    target, config = tiny(), SynthIDTextWatermarkingConfig(keys=KEYS, **SETTINGS[name])
    settings = {"do_sample": do_sample, "max_new_tokens": 32, "eos_token_id": 11, "pad_token_id": PAD}
    settings |= {"watermarking_config": config, "repetition_penalty": 1.1}
    settings |= {"top_p": 0.95, "top_k": 0, "renormalize_logits": True} if do_sample else {}
    torch.manual_seed(2)
    with Forwards(target) as plain:
        expected = target.generate(**prompts(rows), **settings)
    state = torch.get_rng_state()
    lookup = PromptLookupCandidateGenerator(num_output_tokens=3, max_matching_ngram_size=1, max_length=200)
    for draft in (near(target, 0.02), near(target, 1.0), lookup):
        strategy = SpeculativeDecoding(draft, num_draft_tokens=4, verification="coupled" if do_sample else None)
        torch.manual_seed(2)
        with Forwards(target) as forwards:
            assert torch.equal(target.generate(**prompts(rows), **settings, custom_generate=strategy), expected)
        assert torch.equal(torch.get_rng_state(), state)
        assert strategy.report.layout == "ragged"
        most = len(plain.ids) * (0.75 if strategy.report.acceptance_rate > 0.5 else 1)
        assert len(forwards.ids) <= most


def test_the_draft_is_marked_as_well():
    """With the draft equal to the target everything is kept."""
    target, config = tiny(), SynthIDTextWatermarkingConfig(keys=list(range(20)), ngram_len=3)
    strategy = SpeculativeDecoding(target, num_draft_tokens=4)
    target.generate(
        **prompts(4), do_sample=True, watermarking_config=config, max_new_tokens=30, custom_generate=strategy
    )
    assert strategy.report.verification == "block"
    assert strategy.report.alpha > 1 - 1e-4


def test_requests_of_a_queue_have_their_own():
    """Each text is that of the request alone, also in the place of a row that has ended."""
    target, config = tiny(), SynthIDTextWatermarkingConfig(keys=KEYS, ngram_len=2)
    settings = {"do_sample": False, "watermarking_config": config}
    wanted = [([1 + n, 5, 9 + n], 4 + 5 * (n % 3)) for n in range(5)]
    requests = [Request(ids, max_new_tokens=most) for ids, most in wanted]
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=3)
    done = {one.index: one.tokens for one in strategy.generate_many(target, requests, batch_size=2, **settings)}
    for number, (ids, most) in enumerate(wanted):
        expected = target.generate(torch.tensor([ids]), max_new_tokens=most, **settings)[0, len(ids) :]
        assert list(done[number]) == expected.tolist()


def test_one_that_was_called_before_goes_on_in_order():
    target, mine = tiny(), made("usual")
    settings = {"do_sample": False, "max_new_tokens": 12}
    target.generate(**prompts(2), **settings, logits_processor=[mine])
    again, strategy = copy.deepcopy(mine), SpeculativeDecoding(near(target, 0.05), num_draft_tokens=3)
    expected = target.generate(**prompts(2), **settings, logits_processor=[mine])
    output = target.generate(**prompts(2), **settings, logits_processor=[again], custom_generate=strategy)
    assert torch.equal(output, expected)
    assert "must be shown each token once, in order" in strategy.report.layout_reason


def of_law(**changes) -> SynthIDTextWatermarkingConfig:
    return SynthIDTextWatermarkingConfig(
        **{"keys": list(range(1, 9)), "ngram_len": 2, "sampling_table_size": 64} | changes
    )


@pytest.mark.parametrize("verification", ["token", "block"])
def test_distribution(verification: str):
    """Against all texts; a false alarm of any has probability 1e-4 over all seeds. Contexts of one token often repeat,
    and that they were forgotten, never marked or marked by the other scheme is seen."""
    tokens = draw(verification, **ENOUGH, watermarking_config=of_law())
    exact = exact_distribution([of_law().construct_processor(5, "cpu")])
    assert min(p_values(tokens, exact)) > 1e-4 / NUM_TESTS
    for wrong in (
        [],
        [of_law(context_history_size=0).construct_processor(5, "cpu")],
        [of_law(skip_first_ngram_calls=True).construct_processor(5, "cpu")],
        [WatermarkLogitsProcessor(5, "cpu")],
    ):
        assert max(p_values(tokens, exact_distribution(wrong))) < 1e-8
