"""Speculative sampling for Hugging Face transformers: the same distribution, faster, at any batch size."""

from hf_specx.common.round import Draft
from hf_specx.drafting.candidates import SampledCandidateGenerator
from hf_specx.drafting.costs import Costs
from hf_specx.drafting.drafter import Drafter
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.drafting.suffix import SuffixDraft
from hf_specx.drafting.suffix_pool import SuffixPool
from hf_specx.engine.report import SpeculationReport
from hf_specx.engine.requests import Completion, Request
from hf_specx.engine.streaming import BatchStreamer
from hf_specx.equivalence.check import check
from hf_specx.equivalence.result import CheckResult
from hf_specx.pairs.pair import DraftTargetPair
from hf_specx.training.distill import distill

from .generate import generate
from .strategy import SpeculativeDecoding


__version__ = "0.1.0"
__all__ = [
    "BatchStreamer",
    "CheckResult",
    "Completion",
    "Costs",
    "Draft",
    "DraftTargetPair",
    "Drafter",
    "EarlyExitDraft",
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
