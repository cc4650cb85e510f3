"""What tests of the report share: results that no check has made, with text that would like to be more than text."""

from html.parser import HTMLParser

from hf_specx import CheckResult
from hf_specx.equivalence.result import FAILED, PASSED, UNTOLD, CheckLine
from hf_specx.equivalence.settings import Settings


HOSTILE = "</script><img src=x onerror=\"document.title='taken'\">"
COUNTS = {"judged_per_position": [40, 30, 24], "accepted_per_position": [30, 24, 18]}
ACCEPTANCE = {
    "alpha": 0.731,
    "tokens_per_round": 2.8,
    "rounds": 40,
    "accepted_lengths": [10, 6, 6, 18],
    **COUNTS,
}
LINES = [
    CheckLine("greedy, batch 1: the same tokens as plain generate", PASSED, 0.0, 16.0, "all 4 rows are equal"),
    CheckLine(
        "token, batch 1: sampled from the target's distribution",
        PASSED,
        0.6,
        3.7,
        "p = 0.25; 64 tokens, 17 statistics",
    ),
    CheckLine("token: texts alike those of plain generate", UNTOLD, None, 3.7, "too few texts for this level"),
    CheckLine("token: quality of plain text", PASSED, 0.414, 1.0, "of 4 measures furthest off: length 9, plain 8"),
]
WRONG = CheckLine("coupled, batch 1: the same tokens as plain generate", FAILED, None, 16.0, "1 of 4 rows differs")


def candidate(text: str, p: float, q: float | None, acceptance: float, accepted: bool, token: int = 7) -> dict:
    return {
        "token": token,
        "text": text,
        "p": p,
        "q": q,
        "acceptance": acceptance,
        "overlap": 0.5,
        "accepted": accepted,
    }


def token(text: str, origin: str, p: float, q: float | None, token: int = 7) -> dict:
    return {"token": token, "text": text, "origin": origin, "p": p, "q": q}


TRACE = {
    "verification": "token",
    "prompt": [1, 2],
    "rounds": [
        {"candidates": [], "rejected": None, "tokens": [token("the", "bonus", 0.125, None, 11)]},
        {
            "candidates": [
                candidate(" cat", 0.0584, 0.1347, 0.4342, True, 12),
                candidate(HOSTILE, 0.001234, 0.5, 0.002468, False, 13),
                candidate(" mat", 0.9, 0.9, 1.0, False, 14),
            ],
            "rejected": 1,
            "tokens": [token(" cat", "accepted", 0.0584, 0.1347, 12), token("\n    ", "recovered", 0.3, 0.0777, 15)],
        },
        {
            "candidates": [
                candidate(HOSTILE, 0.62, 0.31, 1.0, True, 13),
                candidate(" on", 5.53e-05, 4.0, 0.1, True, 16),
            ],
            "rejected": None,
            "tokens": [
                token(HOSTILE, "accepted", 0.62, 0.31, 13),
                token(" on", "accepted", 5.53e-05, 4.0, 16),
                token("\tend", "bonus", 0.017, None, 17),
            ],
        },
    ],
}
SPEED = {
    "verification": "block",
    "batch": 1,
    "new_tokens": 64,
    "repeats": 3,
    "alpha": 0.751,
    "cost_coefficient": 0.183,
    "plain": {"median": 61.5, "min": 60.0, "max": 63.0},
    "numbers": [
        {
            "num_draft_tokens": number,
            "tokens_per_second": {"median": 60.0 + number, "min": 60.0, "max": 80.0},
            "times_plain": 1.5 - 0.1 * abs(4 - number),
            "speedup": {"median": 1.51 - 0.1 * abs(4 - number), "min": 1.0, "max": 1.75},
            "tokens_per_round": 1 + number / 3,
            "expected": 1.6,
            "forward_limited": 1.55,
        }
        for number in range(1, 9)
    ],
}


def made(passed: bool = True, **changes: object) -> CheckResult:
    """A result of a check of three verifications."""
    given = {
        "lines": LINES if passed else [*LINES, WRONG],
        "settings": Settings((1, 8), 8, temperature=0.7, top_p=0.9, options={"min_new_tokens": 3}).to_dict(),
        "provenance": {"hf_specx": "0.1.0", "target": f"Llama {HOSTILE}", "draft": "Llama, 99 parameters"},
        "prompts": [f"def {HOSTILE}(", "the dog"],
        "cells": {
            name: {"acceptance": ACCEPTANCE} for name in ("greedy, batch 1", "coupled, batch 1", "token, batch 1")
        },
        "texts": {"plain sampled": [{"prompt": 1, "text": f" & {HOSTILE}\n"}]},
        "trace": TRACE,
        "speed": SPEED,
        "pair": f"my-pair {HOSTILE}",
        "command": f"specx check my-pair --batch 1 --file {HOSTILE} --report a-report-with-a-long-name.html",
    }
    return CheckResult(**given | changes)


class Page(HTMLParser):
    """What a page has.

    Attributes:
        elements: each with its attributes, in order.
        texts: pieces of text, but for those of styles and scripts.
        within: the text in each element that has an id.
    """

    VOID = ("meta", "link", "img")

    def __init__(self, source: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.within: dict[str, str] = {}
        self.open: list[tuple[str, str | None]] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append((tag, dict(attributes).get("id")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag  # each end belongs to its start

    def handle_data(self, data):
        if not self.open or self.open[-1][0] in ("style", "script"):
            return
        self.texts.append(data)
        for _, name in self.open:
            if name is not None:
                self.within[name] = self.within.get(name, "") + data

    @property
    def text(self) -> str:
        """All of it, with single spaces."""
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        """Attributes of the elements of a kind that have these; `class_` is one of its classes."""
        chosen = attributes.pop("class_", None)
        return [
            found
            for name, found in self.elements
            if name == tag
            and (chosen is None or chosen in (found.get("class") or "").split())
            and attributes.items() <= found.items()
        ]
