"""Positions judged in order where rows have unequal numbers of candidates: the text of `generate` all the same."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny import VOCAB_SIZE, near, prompts, tiny
from transformers import LogitsProcessor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_specx import SpeculativeDecoding, SuffixDraft


class Late(LogitsProcessor):
    """Changes nothing, but may keep state for all that is known of it."""

    def __call__(self, input_ids, scores):
        return scores


UNEQUAL = {
    "heuristic": {"num_assistant_tokens_schedule": "heuristic", "num_assistant_tokens": 4},
    "threshold": {"assistant_confidence_threshold": 0.2, "num_assistant_tokens": 5},
    "lookup": {},
    "suffix": {},
}
EARLY = {
    "penalty": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "prefix": {"prefix_allowed_tokens_fn": lambda row, text: [n for n in range(VOCAB_SIZE) if (n + len(text)) % 3]},
}
LOOKUP = partial(PromptLookupCandidateGenerator, num_output_tokens=4, max_matching_ngram_size=1, max_length=400)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("unequal", UNEQUAL)
def test_text_of_generate(unequal: str, early: str, do_sample: bool):
    target, lengths_differ = tiny(), False
    for seed in range(3):
        draft: Any = {"lookup": LOOKUP, "suffix": SuffixDraft}.get(unequal, partial(near, target, 0.02))()
        settings = {"do_sample": do_sample, "max_new_tokens": 32, "pad_token_id": 0, **EARLY[early]}
        settings["logits_processor"] = [Late()]
        inputs = prompts(3, seed=seed)
        torch.manual_seed(seed)
        expected = target.generate(**inputs, **settings)
        strategy = SpeculativeDecoding(draft, verification="coupled")
        torch.manual_seed(seed)
        output = target.generate(**inputs, **settings, **UNEQUAL[unequal], custom_generate=strategy)
        assert torch.equal(output, expected)
        assert "in order" in strategy.report.layout_reason
        rounds = zip(*strategy.report.history, strict=False)
        lengths_differ |= any(len({record.drafted for record in records}) > 1 for records in rounds)
    assert lengths_differ
