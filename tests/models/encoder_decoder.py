"""Tests of encoder-decoder targets share: the call without and with speculation."""

import torch
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding


LAYOUTS = ("padded", "lockstep")
DRAFT_TOKENS = 3


def stock(target: PreTrainedModel, **call) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    return target.generate(**call), torch.get_rng_state()


def ours(target: PreTrainedModel, draft: PreTrainedModel, layout: str, **call) -> tuple[torch.Tensor, torch.Tensor]:
    strategy = SpeculativeDecoding(draft, num_draft_tokens=DRAFT_TOKENS, verification="coupled", layout=layout)
    torch.manual_seed(4)
    return target.generate(**call, custom_generate=strategy), torch.get_rng_state()


def assert_equals_stock(target: PreTrainedModel, drafts: dict[str, PreTrainedModel], layout: str, **call):
    """Returns stock's tokens."""
    expected, state = stock(target, **call)
    for name, draft in drafts.items():
        output, left = ours(target, draft, layout, **call)
        assert torch.equal(output, expected), name
        assert torch.equal(left, state), name
    return expected
