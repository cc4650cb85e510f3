"""Structured output compared with plain `generate` under the same processor, by the embedded pair and xgrammar.

    python scripts/structured.py [--rows 1 8] [--repeats 5] [--dtype float32] [--suffix]

Each row of its table is one schema. Plain and speculative generation take turns, greedily, and ratios are those of
median times in one run. It needs `pip install xgrammar`, and the schemas of `tests/support`.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hf_specx import SpeculativeDecoding, SuffixDraft


sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
cases: Any = __import__("grammar_cases")
SHARES = ("acceptance", "alpha", "forced")
TEXTS = ["The answer as JSON: ", "Tom wrote", "Here is what the machine said, in short: ", "{}", "Once upon a time"]
TEXTS += ["a b", "Colours", "My name is"]


def seconds(inputs: dict[str, torch.Tensor], case: str, options: dict[str, Any], strategy: Any) -> tuple[float, int]:
    """Wall time of one call with a new processor, and its new columns."""
    processor = cases.make("xgrammar", case)
    started = time.perf_counter()
    text = cases.pair().target.generate(**inputs, **options, logits_processor=[processor], custom_generate=strategy)
    return time.perf_counter() - started, text.shape[1] - inputs["input_ids"].shape[1]


def measure(case: str, rows: int, repeats: int, suffix: bool, options: dict[str, Any]) -> dict[str, float]:
    """Medians of one schema."""
    pair = cases.pair()
    pair.tokenizer.padding_side = "left"
    inputs = dict(pair.tokenizer(TEXTS[:rows], return_tensors="pt", padding=True))
    strategy = SpeculativeDecoding(SuffixDraft() if suffix else pair.draft)
    times: list[tuple[float, float]] = []
    for _ in range(1 + repeats):  # the first warms up
        torch.manual_seed(0)
        plain, columns = seconds(inputs, case, options, None)
        torch.manual_seed(0)
        times.append((plain, seconds(inputs, case, options, strategy)[0]))
    report = strategy.report
    assert report is not None
    plain, ours = (statistics.median(column) for column in zip(*times[1:], strict=True))
    forced = report.forced / max(1, report.drafted)
    figures = {"acceptance": report.acceptance_rate, "alpha": report.alpha, "forced": forced}
    return {"columns": columns, "speed": plain / ours, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--suffix", action="store_true", help="no draft model")
    asked = parser.parse_args()
    for model in (cases.pair().target, cases.pair().draft):
        model.to(getattr(torch, asked.dtype))
    options = {"max_new_tokens": asked.new_tokens, "do_sample": asked.sampled} | (
        {"top_k": 0} if asked.sampled else {}
    )
    for rows in asked.rows:
        print(f"\n{rows} rows, {asked.dtype}: columns, speed compared with plain, acceptance, alpha, part forced")
        found = {case: measure(case, rows, asked.repeats, asked.suffix, options) for case in cases.SCHEMAS}
        for case, one in found.items():
            print(f"  {case:12} {one['columns']:4d} {one['speed']:5.2f} {shares(one)}")
        mean = {name: statistics.fmean(one[name] for one in found.values()) for name in SHARES}
        speed = statistics.geometric_mean(one["speed"] for one in found.values())
        print(f"  {'mean':17} {speed:5.2f} {shares(mean)}")


def shares(one: dict[str, float]) -> str:
    return " ".join(f"{one[name]:5.2f}" for name in SHARES)


if __name__ == "__main__":
    main()
