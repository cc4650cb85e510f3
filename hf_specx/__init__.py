"""Speculative sampling for Hugging Face transformers: the same distribution, faster, at any batch size."""

from .candidates import SampledCandidateGenerator
from .check_result import CheckResult
from .checking import check
from .costs import Costs
from .generate import generate
from .pairs import DraftTargetPair
from .report import SpeculationReport
from .strategy import SpeculativeDecoding
from .streaming import BatchStreamer


__version__ = "0.1.0"
__all__ = [
    "BatchStreamer",
    "CheckResult",
    "Costs",
    "DraftTargetPair",
    "SampledCandidateGenerator",
    "SpeculationReport",
    "SpeculativeDecoding",
    "check",
    "generate",
]
