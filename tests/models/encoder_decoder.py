"""Tests of encoder-decoder targets share: the call without and with speculation, and forwards counted by hooks."""

import contextlib
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding


LAYOUTS = ("padded", "lockstep")
DRAFT_TOKENS = 3


@contextlib.contextmanager
def counted(*modules: torch.nn.Module) -> Iterator[list[int]]:
    """Forwards of each module, by hooks."""
    counts = [0] * len(modules)

    def note(place: int):
        def hook(*_):
            counts[place] += 1

        return hook

    handles = [module.register_forward_pre_hook(note(place)) for place, module in enumerate(modules)]
    yield counts
    for handle in handles:
        handle.remove()


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
