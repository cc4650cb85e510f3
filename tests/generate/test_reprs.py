"""What objects say of themselves: strategies, pairs, drafts, pools and reports."""

import pytest

from hf_specx import DraftTargetPair, EarlyExitDraft, SpeculativeDecoding, SuffixDraft, SuffixPool


def test_objects_say_what_they_are(world):
    kind = type(world.draft).__name__
    said = f"SpeculativeDecoding({kind}, num_draft_tokens=3, verification=None, layout='auto', compile=False)"
    assert repr(SpeculativeDecoding(world.draft, num_draft_tokens=3)) == said
    pool = SuffixPool(100)
    pool.add([1, 2, 3])
    several = [SuffixDraft(4, pool=pool), EarlyExitDraft(1)]
    held = "SuffixPool(3 of at most 100 tokens, 1 texts)"
    suffix = f"SuffixDraft(max_candidates=4, min_match=2, max_match=32, pool={held})"
    assert f"SpeculativeDecoding([{suffix}, EarlyExitDraft(1)], " in repr(SpeculativeDecoding(several))
    said = repr(DraftTargetPair(world.target, [SuffixDraft(), world.draft]))
    assert said.startswith(f"DraftTargetPair(target={type(world.target).__name__}")
    assert f"draft=SuffixDraft(max_candidates=16, min_match=2, max_match=32) + {kind}" in said


@pytest.mark.parametrize("name", ["device", "generation_config", "eval"])
def test_what_is_taken_for_a_model_says_that_it_is_none(world, name: str):
    """As `pipeline(model=pair)` and `pipeline(assistant_model=strategy)` take it."""
    for given in (SpeculativeDecoding(world.draft), DraftTargetPair(world.target, world.draft)):
        assert not hasattr(given, "anything")
        with pytest.raises(AttributeError, match=f"has no attribute '{name}' and is no model; give the model itself"):
            getattr(given, name)
