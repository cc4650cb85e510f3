"""Speculative sampling for Hugging Face transformers: the same distribution, faster, at any batch size.

A name is imported when it is first used, so that `import hf_specx` and the command line's help take no time.
"""

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:  # what type checkers and editors see
    from hf_specx.common.round import Draft as Draft
    from hf_specx.drafting.candidates import SampledCandidateGenerator as SampledCandidateGenerator
    from hf_specx.drafting.costs import Costs as Costs
    from hf_specx.drafting.drafter import Drafter as Drafter
    from hf_specx.drafting.early_exit import EarlyExitDraft as EarlyExitDraft
    from hf_specx.drafting.heads.head import DraftHead as DraftHead
    from hf_specx.drafting.heads.mtp import MtpDraft as MtpDraft
    from hf_specx.drafting.suffix import SuffixDraft as SuffixDraft
    from hf_specx.drafting.suffix_pool import SuffixPool as SuffixPool
    from hf_specx.engine.outputs import BatchStreamer as BatchStreamer
    from hf_specx.engine.report import SpeculationReport as SpeculationReport
    from hf_specx.engine.requests import Completion as Completion
    from hf_specx.engine.requests import Piece as Piece
    from hf_specx.engine.requests import Request as Request
    from hf_specx.engine.strategy import SpeculativeDecoding as SpeculativeDecoding
    from hf_specx.metrics.check import check as check
    from hf_specx.metrics.result import CheckResult as CheckResult
    from hf_specx.pairs.generate import generate as generate
    from hf_specx.pairs.pair import DraftTargetPair as DraftTargetPair
    from hf_specx.sampling.thinking import GrammarAfter as GrammarAfter
    from hf_specx.sampling.thinking import ThinkingBudget as ThinkingBudget
    from hf_specx.training.callback import SpeculationCallback as SpeculationCallback
    from hf_specx.training.distill import distill as distill


__version__ = "0.1.0"
_MODULE_OF = {
    "BatchStreamer": "engine.outputs",
    "CheckResult": "metrics.result",
    "Completion": "engine.requests",
    "Costs": "drafting.costs",
    "Draft": "common.round",
    "DraftHead": "drafting.heads.head",
    "DraftTargetPair": "pairs.pair",
    "Drafter": "drafting.drafter",
    "EarlyExitDraft": "drafting.early_exit",
    "GrammarAfter": "sampling.thinking",
    "MtpDraft": "drafting.heads.mtp",
    "Piece": "engine.requests",
    "Request": "engine.requests",
    "SampledCandidateGenerator": "drafting.candidates",
    "SpeculationCallback": "training.callback",
    "SpeculationReport": "engine.report",
    "SpeculativeDecoding": "engine.strategy",
    "SuffixDraft": "drafting.suffix",
    "SuffixPool": "drafting.suffix_pool",
    "ThinkingBudget": "sampling.thinking",
    "check": "metrics.check",
    "distill": "training.distill",
    "generate": "pairs.generate",
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:  # PEP 562
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
