"""When the ragged layout gives a model no mask: where one token a row sees all that the cache holds."""

import pytest
from tiny import near, prompts, tiny

from hf_specx import SpeculativeDecoding


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

    def note(module, args, kwargs):
        if kwargs["past_key_values"].get_seq_length():
            seen = single if kwargs["input_ids"].shape[1] == 1 else several
            seen.add(kwargs.get("attention_mask") is not None)

    for model in (target, draft):
        model.register_forward_pre_hook(note, with_kwargs=True)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, layout="ragged")
    target.generate(**inputs, do_sample=False, max_new_tokens=12, custom_generate=strategy)
    return single, several


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_that_stay_together_need_none(rows: int):
    """The draft is the target, so that all rows keep all candidates."""
    assert steps("llama", rows) == ({False}, {True})


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {"widths": (4,)}),
        ("llama", {"rows": 2, "widths": (6, 4)}),
        ("llama", {"attn_implementation": "eager"}),
        ("mistral", {"sliding_window": 4}),
        ("llama4_text", CHUNKED),
        ("gpt2", {}),  # it would ask for one wherever a token is a pad
    ],
)
def test_others_are_given_one(model_type: str, settings: dict):
    assert steps(model_type, **settings) == ({True}, {True})
