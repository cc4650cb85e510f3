"""A head that was trained a little is accepted more as it is than in any wrong variant."""

from pathlib import Path
from typing import Any

import pytest
from alignment import adjusted_early, begun_early, loaded, unshifted
from head_files import random_head
from taught import NUMBER, TOPICS, WORDS, accepted, taught, taught_target

from hf_specx import DraftHead
from hf_specx.drafting.heads.block import Block, MarkovHead
from hf_specx.drafting.heads.eagle import Eagle
from hf_specx.drafting.heads.head_drafter import HeadDrafter


FORWARD = Eagle.forward
OF_BOTH: dict[str, tuple[Any, str, Any]] = {  # what is changed of what; "head" is the head's config
    "states of the layers before": ("head", "layer_ids", [0, 1]),
    "states of the layers behind": ("head", "layer_ids", [2, 3]),
    "states in another order": ("head", "layer_ids", [2, 1]),
    "offsets as ids": (DraftHead, "ids", property(lambda draft: draft.d2t)),
}
WRONG: dict[str, dict[str, tuple[Any, str, Any]]] = {
    "dspark": {
        "places for their own tokens": ("head", "sample_from_anchor", False),
        "a block that begins early": (HeadDrafter, "first_step", begun_early),
        "no word of the token before": (MarkovHead, "forward", lambda head, logits, *others: (logits, others[-1])),
        "word of an earlier token": (Block, "adjust_logits", adjusted_early),
    },
    "eagle3": {
        "tokens not shifted": (HeadDrafter, "shifted_tokens", unshifted),
        "states for tokens": (
            Eagle,
            "forward",
            lambda network, cache, *inputs: FORWARD(network, cache, *inputs[::-1]),
        ),
    },
}


SLOW = [pytest.param("dspark", markov, marks=pytest.mark.slow) for markov in ("vanilla", "rnn")]


@pytest.mark.parametrize(("kind", "markov"), [("eagle3", None), ("dspark", "gated"), *SLOW])
def test_it_is_accepted_less_if_anything_is_wrong(kind: str, markov: str | None, tmp_path: Path):
    sizes: dict[str, Any] = {"vocab": WORDS + TOPICS + 1, "draft_vocab": WORDS + 2, "layer_ids": (1, 2)}
    blocks = {"block": NUMBER + 1, "mask_token": WORDS + TOPICS, "rank": 16, "markov": markov} if markov else {}
    draft = loaded(random_head(kind, **sizes | blocks), tmp_path / "head", taught_target())
    untaught = accepted(draft).acceptance_rate
    draft = taught(draft)
    report = accepted(draft)
    right = report.acceptance_rate
    assert right > 2 * untaught
    assert not report.misread_reason
    for name, (owner, what, wrong) in (OF_BOTH | WRONG[kind]).items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draft.config if owner == "head" else owner, what, wrong)
            assert accepted(draft).acceptance_rate < 0.9 * right, name
