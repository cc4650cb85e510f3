"""Each row its own number of candidates: what is proposed is what is counted, and the text is that of `generate`."""

import pytest
import torch
from tiny import prompts, tiny
from transformers.generation.candidate_generator import CandidateGenerator, PromptLookupCandidateGenerator

from hf_specx import SpeculativeDecoding


LAYOUTS = ("ragged", "padded", "packed", "lockstep")
pytestmark = pytest.mark.filterwarnings("ignore:in this batch all rows advance")


class Noted(CandidateGenerator):
    """Proposes the right text to rows of one length and nothing to others, and notes what it is told."""

    def __init__(self, texts: torch.Tensor, helped: list[int], number: int = 4):
        self.texts = [text[text != 0] for text in texts]  # without pads
        self.helped, self.number = helped, number
        self.asked: list[int] = []
        self.told: list[tuple[int, int, int]] = []  # length of the text, logits and matches

    def get_candidates(self, input_ids, **kwargs):
        length = input_ids.shape[1]
        row = next(n for n, text in enumerate(self.texts) if torch.equal(text[:length], input_ids[0]))
        self.asked.append(row)
        if row not in self.helped:
            return input_ids, None
        return self.texts[row][None, : length + self.number], None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        self.told.append((input_ids.shape[1], scores.shape[1], num_matches))


def unpadded(rows: int) -> dict[str, torch.Tensor]:
    """Prompts without the token 0, so that pads can be told from tokens."""
    inputs = prompts(rows)
    inputs["input_ids"] = inputs["input_ids"].clamp(min=1) * inputs["attention_mask"]
    return inputs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_with_nothing_to_propose_cost_the_others_nothing(layout: str):
    target, inputs = tiny(), unpadded(4)
    settings = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0, "suppress_tokens": [0]}
    expected = target.generate(**inputs, **settings)
    generator = Noted(expected, helped=[1, 3])
    strategy = SpeculativeDecoding(generator, layout=layout, num_draft_tokens=4)
    output = target.generate(**inputs, **settings, custom_generate=strategy)
    assert torch.equal(output, expected)
    report = strategy.report
    assert [bool(number) for number in report.drafted_per_row] == [False, True, False, True]
    if layout != "lockstep":
        assert report.acceptance_rate == 1
        assert report.emitted_per_row == [24] * 4
        steps = [len(row) for row in report.history]
        assert max(steps[1], steps[3]) < min(steps[0], steps[2]) == 24


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_a_row_in_a_batch_is_counted_as_it_is_alone(layout: str):
    """A row that proposed less was filled up once, and its acceptance reported far too low."""
    target, inputs = tiny("llama", vocab_size=8), prompts(8)
    inputs["input_ids"] %= 8
    settings = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}

    def report(given: dict[str, torch.Tensor]):
        lookup = PromptLookupCandidateGenerator(num_output_tokens=4, max_matching_ngram_size=2, max_length=400)
        strategy = SpeculativeDecoding(lookup, layout=layout, num_draft_tokens=4)
        target.generate(**given, **settings, custom_generate=strategy)
        return strategy.report

    together = report(inputs)
    for row in range(8):
        real = inputs["attention_mask"][row].bool()
        alone = report({name: value[row : row + 1, real] for name, value in inputs.items()})
        counts = (together.drafted_per_row[row], together.accepted_per_row[row])
        assert counts == (alone.drafted, alone.accepted)
    assert len(set(together.drafted_per_row)) > 2
