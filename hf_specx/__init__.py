"""Speculative sampling for Hugging Face transformers: the same distribution, faster, at any batch size.

A name is imported when it is first used, so that `import hf_specx` and the command line's help take no time.
"""

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:  # what type checkers and editors see
    from hf_specx.common.round import Draft
    from hf_specx.drafting.candidates import SampledCandidateGenerator
    from hf_specx.drafting.costs import Costs
    from hf_specx.drafting.drafter import Drafter
    from hf_specx.drafting.early_exit import EarlyExitDraft
    from hf_specx.drafting.heads.head import DraftHead
    from hf_specx.drafting.heads.mtp import MtpDraft
    from hf_specx.drafting.suffix import SuffixDraft
    from hf_specx.drafting.suffix_pool import SuffixPool
    from hf_specx.engine.outputs import BatchStreamer
    from hf_specx.engine.report import SpeculationReport
    from hf_specx.engine.requests import Completion, Request
    from hf_specx.engine.strategy import SpeculativeDecoding
    from hf_specx.metrics.check import check
    from hf_specx.metrics.result import CheckResult
    from hf_specx.pairs.generate import generate
    from hf_specx.pairs.pair import DraftTargetPair
    from hf_specx.training.distill import distill


__version__ = "0.1.0"
__all__ = [
    "BatchStreamer",
    "CheckResult",
    "Completion",
    "Costs",
    "Draft",
    "DraftHead",
    "DraftTargetPair",
    "Drafter",
    "EarlyExitDraft",
    "MtpDraft",
    "Request",
    "SampledCandidateGenerator",
    "SpeculationReport",
    "SpeculativeDecoding",
    "SuffixDraft",
    "SuffixPool",
    "check",
    "distill",
    "generate",
]
_MODULES = {
    "common.round": ("Draft",),
    "drafting.candidates": ("SampledCandidateGenerator",),
    "drafting.costs": ("Costs",),
    "drafting.drafter": ("Drafter",),
    "drafting.early_exit": ("EarlyExitDraft",),
    "drafting.heads.head": ("DraftHead",),
    "drafting.heads.mtp": ("MtpDraft",),
    "drafting.suffix": ("SuffixDraft",),
    "drafting.suffix_pool": ("SuffixPool",),
    "engine.outputs": ("BatchStreamer",),
    "engine.report": ("SpeculationReport",),
    "engine.requests": ("Completion", "Request"),
    "engine.strategy": ("SpeculativeDecoding",),
    "metrics.check": ("check",),
    "metrics.result": ("CheckResult",),
    "pairs.generate": ("generate",),
    "pairs.pair": ("DraftTargetPair",),
    "training.distill": ("distill",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:  # PEP 562
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
