"""What tests of the report share: results that no check has made, with text that would like to be more than text."""

import html
import re

from hf_specx import CheckResult
from hf_specx.metrics.result import FAILED, PASSED, UNTOLD, CheckLine
from hf_specx.metrics.settings import Settings


HOSTILE = "</script><img src=x onerror=\"document.title='taken'\">"
ACCEPTANCE = {
    "alpha": 0.731,
    "tokens_per_round": 2.8,
    "judged_per_position": [40, 30, 24, 20, 9],
    "accepted_per_position": [30, 24, 18, 9, 0],
}
LINES = [
    CheckLine("greedy, batch 1: the same tokens as plain generate", PASSED, 0.0, 16.0, "all 4 rows are equal"),
    CheckLine("token, batch 1: sampled from the target's distribution", PASSED, 0.6, 3.7, "p = 0.25; 64 tokens"),
    CheckLine("token: quality of plain text", UNTOLD, None, 3.7, "too few texts; ask for more samples"),
]
WRONG = CheckLine("coupled, batch 1: the same tokens as plain generate", FAILED, None, 16.0, "1 of 4 rows differs")


def entry(text: str, token: int, p: float, q: float | None, **more: object) -> dict:
    return {"token": token, "text": text, "p": p, "q": q} | more


TRACE = {
    "verification": "token",
    "rounds": [
        {"candidates": [], "rejected": None, "tokens": [entry("the", 11, 0.125, None, origin="bonus")]},
        {
            "candidates": [
                entry(" cat", 12, 0.0584, 0.1347, acceptance=0.4342),
                entry(HOSTILE, 13, 0.001234, 0.5, acceptance=0.002468),
            ],
            "rejected": 1,
            "tokens": [
                entry(" cat", 12, 0.0584, 0.1347, origin="accepted"),
                entry("\n    ", 15, 0.3, 0.0777, origin="recovered"),
            ],
        },
        {
            "candidates": [entry(HOSTILE, 13, 0.62, 0.31, acceptance=1.0)],
            "rejected": None,
            "tokens": [
                entry(HOSTILE, 13, 0.62, 0.31, origin="accepted"),
                entry("\tend", 17, 0.017, None, origin="bonus"),
            ],
        },
    ],
}
TOLD = [  # of each token
    "the: bonus, token 11, p 0.125, q -, acceptance -, round 1",
    "␣cat: accepted, token 12, p 0.0584, q 0.135, acceptance 0.434, round 2, candidate 1 of 2",
    f"↵␣␣␣␣: recovered, token 15, p 0.3, q 0.0777, acceptance -, round 2; in place of {HOSTILE}: token 13, p 0.00123, "
    "q 0.5, acceptance 0.00247",
    f"{HOSTILE}: accepted, token 13, p 0.62, q 0.31, acceptance 1, round 3, candidate 1 of 1",
    "⇥end: bonus, token 17, p 0.017, q -, acceptance -, round 3",
]


def made(passed: bool = True, **changes: object) -> CheckResult:
    """A result of a check of three verifications."""
    given = {
        "lines": LINES if passed else [*LINES, WRONG],
        "settings": Settings((1, 8), 8, temperature=0.7, options={"min_new_tokens": 3}).to_dict(),
        "provenance": {"hf_specx": "0.1.0", "target": f"Llama {HOSTILE}", "draft": "Llama, 99 parameters"},
        "prompts": [f"def {HOSTILE}(", "the dog"],
        "cells": {f"{name}, batch 1": {"acceptance": ACCEPTANCE} for name in ("greedy", "coupled", "token")},
        "texts": {"plain sampled": [{"prompt": 1, "text": f" & {HOSTILE}\n"}]},
        "trace": TRACE,
        "pair": f"my-pair {HOSTILE}",
        "command": f"specx check my-pair --batch 1 --file {HOSTILE} --report a-report-with-a-long-name.html",
    }
    return CheckResult(**given | changes)


def text_of(source: str) -> str:
    """The text of a page, with single spaces, without its style."""
    without_style = re.sub(r"<style>.*?</style>", "", source, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", without_style)).split())
