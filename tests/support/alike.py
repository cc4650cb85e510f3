"""A call of `generate` as its user makes it: stock's, ours by a strategy and ours by the function, held together."""

import copy
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from counting import counting
from tiny import near, tiny
from transformers import PreTrainedModel

import hf_specx
from hf_specx import DraftTargetPair, SpeculativeDecoding


OPTIONS = {"num_draft_tokens": 3, "verification": "coupled"}


@cache
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny()
    return target, near(target, 0.05)


def stock(target: PreTrainedModel, draft: PreTrainedModel, *inputs: torch.Tensor, **call: Any) -> Any:
    return target.generate(*inputs, **call)


def by_strategy(target: PreTrainedModel, draft: PreTrainedModel, *inputs: torch.Tensor, **call: Any) -> Any:
    return target.generate(*inputs, **call, custom_generate=SpeculativeDecoding(draft, **OPTIONS))


def by_function(target: PreTrainedModel, draft: PreTrainedModel, *inputs: torch.Tensor, **call: Any) -> Any:
    return hf_specx.generate(*inputs, model=target, assistant_model=draft, **OPTIONS, **call)


def by_pair(target: PreTrainedModel, draft: PreTrainedModel, *inputs: torch.Tensor, **call: Any) -> Any:
    return DraftTargetPair(target, draft).generate(*inputs, **OPTIONS, **call)


ENTRIES = [by_strategy, by_function]
WAYS = [*ENTRIES, by_pair]


def said(entry: Callable, *inputs: torch.Tensor, pair: tuple | None = None, **call: Any) -> tuple[Any, list[str]]:
    """What a call returns under a fixed seed, and its warnings."""
    pair = pair or models()  # before the seed, since making a model draws
    torch.manual_seed(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = entry(*pair, *inputs, **copy.copy(call))
    return output, [str(w.message) for w in caught]


def same(*inputs: torch.Tensor, pair: tuple | None = None, **call: Any) -> torch.Tensor:
    """Assert that both entries give stock's tokens and warnings, and leave its generator; returns the tokens.

    Where there is more than one, the draft has taken part in each.
    """
    pair = pair or models()
    with counting(pair[0]) as plain:
        expected, warned = said(stock, *inputs, pair=pair, **call)
    state = torch.get_rng_state()
    for entry in ENTRIES:
        with counting(pair[1]) as drafted:
            output, messages = said(entry, *inputs, pair=pair, **call)
        assert torch.equal(output, expected), entry.__name__
        assert messages == warned, entry.__name__
        assert torch.equal(torch.get_rng_state(), state), entry.__name__
        assert drafted or len(plain) == 1, entry.__name__
    return expected
