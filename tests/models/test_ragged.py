"""When the ragged layout gives a model no mask: where one token a row sees all that the cache holds."""

import itertools

import pytest
from counting import reads_only
from plain import assert_plain
from tiny import near, prompts, tiny

from hf_specx import SampledCandidateGenerator, SpeculativeDecoding
from hf_specx.models.slots import CACHE


CHUNKED = {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 48, "no_rope_layers": [1, 1]}


def steps(model_type: str, rows: int = 1, widths: tuple[int, ...] = (6,), **changes) -> tuple[set, set]:
    """Whether forwards behind the prompts were given masks: of single tokens, and of several."""
    target = tiny(model_type, **changes)
    draft = near(target, 0.0)
    inputs = prompts(rows, width=6)
    inputs["attention_mask"].fill_(1)
    for row, width in enumerate(widths):
        inputs["attention_mask"][row, : 6 - width] = 0
    single, several = set(), set()

    @reads_only
    def note(module, args, kwargs):
        if kwargs[CACHE].get_seq_length():
            seen = single if kwargs["input_ids"].shape[1] == 1 else several
            seen.add(kwargs.get("attention_mask") is not None)

    for model in (target, draft):
        model.register_forward_pre_hook(note, with_kwargs=True)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, layout="ragged")
    target.generate(**inputs, do_sample=False, max_new_tokens=12, custom_generate=strategy)
    return single, several


@pytest.mark.parametrize(
    ("model_type", "settings", "gets_masks"),
    [
        ("llama", {}, False),
        ("llama", {"rows": 2}, False),
        ("llama", {"widths": (4,)}, True),
        ("llama", {"rows": 2, "widths": (6, 4)}, True),
        ("llama", {"attn_implementation": "eager"}, True),
        ("mistral", {"sliding_window": 4}, True),
        ("llama4_text", CHUNKED, True),
        ("gpt2", {}, True),  # it would ask for one wherever a token is a pad
    ],
)
def test_rows_that_stay_together_need_none(model_type: str, settings: dict, gets_masks: bool):
    """In steps of single tokens. The draft is the target, so that all rows keep all candidates."""
    assert steps(model_type, **settings) == ({gets_masks}, {True})


def test_single_steps_of_rows_that_have_drifted_apart(monkeypatch: pytest.MonkeyPatch):
    """Without pads, a shorter row must not see what the cache holds beyond its end; every third round drafts."""
    propose, rounds = SampledCandidateGenerator.propose, itertools.count(1)

    def sometimes(draft, batch, lengths):
        return propose(draft, batch, [0] * len(lengths) if next(rounds) % 3 else lengths)

    monkeypatch.setattr(SampledCandidateGenerator, "propose", sometimes)
    target, inputs = tiny(), prompts(2)
    inputs["attention_mask"].fill_(1)
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=3, layout="ragged")
    assert_plain(target, strategy, inputs, do_sample=False, max_new_tokens=24, eos_token_id=None)
    assert len(set(strategy.report.accepted_per_row)) > 1
    assert strategy.report.plain_steps >= 6
