"""Plain `generate` beside ours: the same text under one seed, and the generator left in the same state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from counting import counting
from tiny import near, prompts
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding


def generator_state(device: torch.device) -> torch.Tensor:
    """Of the generator that sampling on a device draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def coupled(target: PreTrainedModel, noise: float, **options: Any) -> SpeculativeDecoding:
    """By default four candidates of a draft that is the target with noise, judged so that the text is plain's."""
    return SpeculativeDecoding(near(target, noise), **{"num_draft_tokens": 4, "verification": "coupled"} | options)


class Compared(NamedTuple):
    """What both calls came to.

    Attributes:
        text: [B, L + N].
        forwards: how many of the target ours took.
        plain: how many plain `generate` took.
        state: of the generator, in which plain `generate` left it.
    """

    text: torch.Tensor
    forwards: int
    plain: int
    state: torch.Tensor


def assert_plain(
    target: PreTrainedModel,
    strategy: SpeculativeDecoding,
    inputs: dict[str, Any] | None = None,
    fresh: Callable[[], dict] = dict,
    seed: int = 1,
    before: Compared | None = None,
    **settings: Any,
) -> Compared:
    """
    Args:
        inputs: of the call, by default four prompts.
        fresh: gives settings that have to be new in each of both calls, as processors that keep state.
        before: what the same call of the same target came to with another strategy; plain `generate` is not run again.
    """
    inputs = prompts(4) if inputs is None else inputs

    def run(custom_generate: SpeculativeDecoding | None) -> tuple[torch.Tensor, torch.Tensor, int]:
        torch.manual_seed(seed)
        with counting(target) as forwards:
            output = target.generate(**inputs, **settings | fresh(), custom_generate=custom_generate)
        return getattr(output, "sequences", output), generator_state(target.device), len(forwards)

    expected, state, plain = run(None) if before is None else (before.text, before.state, before.plain)
    text, left, ours = run(strategy)
    assert torch.equal(text, expected), "another text"
    if strategy.report.verification not in ("token", "block"):
        assert torch.equal(left, state)
    return Compared(text, ours, plain, state)
