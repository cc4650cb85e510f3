"""Processors of the text, vectorized: for each row and position, to the bit what transformers' own gives there.

Each is compared with the processor itself, called on one prefix after another with the whole batch.
"""

import pytest
import torch
from all_pairs import each_value
from transformers.generation import logits_process as host
from transformers.generation.logits_process import LogitsProcessorList

from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft
from hf_specx.sampling.processors import Processors


VOCAB, WIDTH, PAD, END = 9, 6, 0, 5  # few tokens, so that they and n-grams come again


def num_pads(rows: int) -> torch.Tensor:
    """How many columns of each prompt are pads."""
    return (torch.arange(rows) * 2) % WIDTH


MAKERS = {
    "repetition": lambda rows: host.RepetitionPenaltyLogitsProcessor(1.3),
    "repetition without pads": lambda rows: host.RepetitionPenaltyLogitsProcessor(0.7, num_pads(rows)),
    "repetition without prompts": lambda rows: host.RepetitionPenaltyLogitsProcessor(1.3, WIDTH),
    "repetition of few": lambda rows: host.RepetitionPenaltyLogitsProcessor(1.3, WIDTH + 3),
    "unigrams": lambda rows: host.NoRepeatNGramLogitsProcessor(1),
    "bigrams": lambda rows: host.NoRepeatNGramLogitsProcessor(2),
    "trigrams": lambda rows: host.NoRepeatNGramLogitsProcessor(3),
    "n-grams as long as the text": lambda rows: host.NoRepeatNGramLogitsProcessor(WIDTH + 3),
    "length penalty": lambda rows: host.ExponentialDecayLengthPenalty((2, 1.37), [END, 2], WIDTH),
    "bad words": lambda rows: host.NoBadWordsLogitsProcessor([[3], [4, 5], [6, 7, 1], [7, 1], [1] * (WIDTH + 3)]),
    "bad words of one token": lambda rows: host.NoBadWordsLogitsProcessor([[3], [4]]),
    "bad words of repeats": lambda rows: host.NoBadWordsLogitsProcessor([[i, i, i, 3] for i in range(VOCAB)]),
    "sequence bias": lambda rows: host.SequenceBiasLogitsProcessor(
        [[[7], 0.1], [[4, 7], 0.7], [[1, 7], -0.3], [[2, 4, 7], 1.1], [[2, 1], -3.3]]
    ),
    "minimum length": lambda rows: host.MinLengthLogitsProcessor(WIDTH + 4, [END, 2, VOCAB + 3]),
    "minimum of new tokens": lambda rows: host.MinNewTokensLengthLogitsProcessor(WIDTH, 3, END),
    "minimum for all": lambda rows: host.MinNewTokensLengthLogitsProcessor(WIDTH, 99, END),
    "suppressed": lambda rows: host.SuppressTokensLogitsProcessor([1, 4]),
    "suppressed at first": lambda rows: host.SuppressTokensAtBeginLogitsProcessor([1, 4], WIDTH + 2),
    "forced begin": lambda rows: host.ForcedBOSTokenLogitsProcessor(4),
    "forced end": lambda rows: host.ForcedEOSTokenLogitsProcessor(WIDTH + 5, [END, 1]),
}


def text(rows: int, width: int = WIDTH, seed: int = 0) -> Batch:
    """Prompts of unequal length, to which unequally many tokens were emitted; every fourth row has ended."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (rows, width), generator=generator)
    mask = torch.arange(width) >= num_pads(rows)[:, None] % max(width, 1)
    batch = Batch(ids * mask, mask if width else None, PAD)
    for _ in range(seed):
        emitted = torch.randint(0, 4, (rows,), generator=generator)
        batch.emit(torch.randint(1, VOCAB, (rows, 3), generator=generator), emitted.tolist())
    batch.drop_rows([row for row in range(rows) if row % 4 == 3])
    return batch


def drafted(batch: Batch, seed: int = 0) -> Draft:
    """Candidates, of each row its own number."""
    generator = torch.Generator().manual_seed(seed + 100)
    lengths = [(row * 3 + seed) % 5 for row in batch.rows]
    return batch.write_draft(
        Draft(torch.randint(1, VOCAB, (len(lengths), max(lengths)), generator=generator), lengths)
    )


def drawn(batch: Batch, positions: int) -> torch.Tensor:
    scores = 3 * torch.randn(len(batch.rows), positions, VOCAB, generator=torch.Generator().manual_seed(1))
    scores[..., 1] = -torch.inf
    return scores


def assert_as_called(
    processor, batch: Batch, draft: Draft, scores: torch.Tensor, processed: torch.Tensor, ahead: int = 0
):
    """At each position up to a row's last: the scores of the processor that is called with the whole batch there."""
    for index, row in enumerate(batch.rows):
        for position in range(min(scores.shape[1], draft.lengths[index] + 1 - ahead)):
            every = scores.new_zeros(len(batch.ids), VOCAB)
            every[row] = scores[index, position]
            expected = processor(batch.prefix(batch.counts[row] + ahead + position), every)[row]
            assert processed.dtype == expected.dtype
            assert torch.equal(processed[index, position], expected), (row, position)


@pytest.mark.parametrize(("name", "rows"), each_value(MAKERS, [1, 4, 8]))
def test_each_position_is_as_in_transformers(name: str, rows: int, monkeypatch: pytest.MonkeyPatch):
    """Over rounds that keep some of the candidates, perhaps none, and in the steps of the draft; and none is called.

    But once for one row, to learn what becomes of -inf under a length penalty.
    """
    batch, processors, processor = text(rows, seed=1), Processors([MAKERS[name](rows)]), MAKERS[name](rows)
    generator, called, asked = torch.Generator().manual_seed(8), type(processor).__call__, []
    monkeypatch.setattr(type(processor), "__call__", lambda self, *args: asked.append(self) or called(self, *args))
    for seed in range(5):
        draft = drafted(batch, seed)
        for ahead in range(draft.tokens.shape[1]):
            scores = drawn(batch, 1)
            assert_as_called(processor, batch, draft, scores, processors(batch, None, scores, ahead), ahead)
        scores = drawn(batch, draft.tokens.shape[1] + 1)
        before = scores.clone()
        assert_as_called(processor, batch, draft, scores, processors(batch, draft, scores))
        assert torch.equal(scores, before), "changed in place"
        accepted = [(seed + row) % (length + 1) for row, length in zip(batch.rows, draft.lengths, strict=True)]
        tokens = torch.nn.functional.pad(draft.tokens, (0, 1))
        tokens[range(len(accepted)), accepted] = torch.randint(1, VOCAB, (len(accepted),), generator=generator)
        batch.emit(tokens, [number + 1 for number in accepted])
        if seed == 2 and rows > 1:
            batch.drop_rows([0])
    assert name == "length penalty" or all(one_asked is processor for one_asked in asked)


class Mine(host.RepetitionPenaltyLogitsProcessor):
    """A user's own, which is not what it inherits from."""

    stateless = True

    def __call__(self, input_ids, scores):
        return scores + input_ids[:, -1:] + torch.arange(len(scores))[:, None]


def test_processors_keep_their_order():
    """With one of the user's own among them, and warpers before and after."""
    several = [
        host.SequenceBiasLogitsProcessor([[[4, 7], 0.7], [[2], -0.5]]),
        host.RepetitionPenaltyLogitsProcessor(1.3, num_pads(8)),
        host.NoRepeatNGramLogitsProcessor(2),
        host.TemperatureLogitsWarper(0.7),
        Mine(2.0),
        host.RepetitionPenaltyLogitsProcessor(0.8),
        host.MinNewTokensLengthLogitsProcessor(WIDTH, 5, END),
        host.TopPLogitsWarper(0.9),
        host.InfNanRemoveLogitsProcessor(),
    ]
    batch = text(8, seed=2)
    draft = drafted(batch, 1)
    scores = drawn(batch, draft.tokens.shape[1] + 1)
    processed = Processors(several)(batch, draft, scores)
    assert_as_called(LogitsProcessorList(several), batch, draft, scores, processed)


OUTSIDE = {
    "repetition": lambda: host.RepetitionPenaltyLogitsProcessor(1.3),
    "n-grams": lambda: host.NoRepeatNGramLogitsProcessor(2),
    "bias": lambda: host.SequenceBiasLogitsProcessor([[[VOCAB + 1, 3], 2.0]]),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_prompts_may_hold_ids_that_have_no_scores(name: str):
    """As those of images."""
    batch = text(4, seed=2)
    batch.ids[:, 3:5] = VOCAB + 1
    draft = drafted(batch, 1)
    scores = drawn(batch, draft.tokens.shape[1] + 1)
    if name == "bias":
        with pytest.raises(ValueError, match="vocabulary size"):
            Processors([OUTSIDE[name]()])(batch, draft, scores)
    else:
        assert_as_called(OUTSIDE[name](), batch, draft, scores, Processors([OUTSIDE[name]()])(batch, draft, scores))


REFUSED = {
    "padding of other rows": lambda: host.RepetitionPenaltyLogitsProcessor(1.3, torch.zeros(3, dtype=torch.int64)),
    "forced end": lambda: host.ForcedEOSTokenLogitsProcessor(WIDTH + 1, VOCAB),
    "penalised end": lambda: host.ExponentialDecayLengthPenalty((0, 1.1), [VOCAB], 0),
    "penalty that overflows": lambda: host.ExponentialDecayLengthPenalty((0, 1e200), [END], 0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_those_of_transformers(name: str):
    processor = REFUSED[name]()
    batch, scores = text(4), torch.zeros(4, 1, VOCAB)
    batch = batch.view_at(batch.counts, list(range(4)))
    with pytest.raises(Exception) as expected:  # noqa: PT011
        processor(batch.prefix(0), scores[:, 0])
    with pytest.raises(expected.type) as error:
        Processors([processor])(batch, Draft(torch.zeros(4, 0, dtype=torch.int64), [0] * 4), scores)
    assert str(error.value) == str(expected.value)
