"""The report: the verdict, each line and each token are on it, text stays text, and it loads and runs nothing."""

import base64
import hashlib
import html
import re
from dataclasses import replace

import pytest
from check_cases import inject, quick

from hf_specx import CheckResult
from hf_specx.metrics.page import number, page
from hf_specx.metrics.settings import Settings


HOSTILE = "</script><img src=x onerror=\"document.title='taken'\">"
QUICK = {"batch_sizes": (8,), "max_new_tokens": 8, "samples": 16, "verifications": ("greedy", "block")}
TOKEN = r'<span class="token (\w+)" tabindex="0" role="note" aria-label="([^"]*)">'


def entry(text: str, token: int, p: float, q: float | None, **more: object) -> dict:
    return {"token": token, "text": text, "p": p, "q": q} | more


TRACE = {
    "verification": "token",
    "rounds": [
        {
            "candidates": [
                entry(" cat", 12, 0.0584, 0.1347, acceptance=0.4342),
                entry(HOSTILE, 13, 0.001234, 0.5, acceptance=0.002468),
            ],
            "rejected": 1,
            "tokens": [
                entry(" cat", 12, 0.0584, 0.1347, origin="accepted"),
                entry("\n\t\u202e  ", 15, 0.3, 0.0777, origin="recovered"),
            ],
        },
        {"candidates": [], "rejected": None, "tokens": [entry(HOSTILE, 17, 0.017, None, origin="bonus")]},
    ],
}
DESCRIPTIONS = [  # of each token
    "␣cat: accepted, token 12, p 0.0584, q 0.135, acceptance 0.434, round 1, candidate 1 of 2",
    f"↵⇥\\u202e␣␣: recovered, token 15, p 0.3, q 0.0777, acceptance -, round 1; in place of {HOSTILE}: token 13, "
    "p 0.00123, q 0.5, acceptance 0.00247",
    f"{HOSTILE}: bonus, token 17, p 0.017, q -, acceptance -, round 2",
]


def text_of(source: str) -> str:
    """The text of a page, with single spaces, without its style."""
    without_style = re.sub(r"<style>.*?</style>", "", source, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", without_style)).split())


@pytest.fixture(scope="module")
def result() -> CheckResult:
    return quick(**QUICK)


def test_text_stays_text_and_nothing_is_loaded_or_run(result):
    """Wherever a text comes from; nothing but the page's own style is applied."""
    texts = {"plain sampled": [{"prompt": 1, "text": f" & {HOSTILE}\n"}]}
    changes = {"prompts": [HOSTILE, "the dog"], "texts": texts, "trace": TRACE, "provenance": {"target": HOSTILE}}
    source = page(replace(result, **changes, pair=HOSTILE, command=HOSTILE))
    assert HOSTILE not in source
    assert text_of(source).count(HOSTILE) >= 9  # pair, command, prompt, model, texts, trace and its list
    assert not re.search(r"<script|<img|https?://|//cdn|@import|url\(", source)
    assert not re.search(r"<[^>]* (on\w+|style)=", re.sub('"[^"]*"', "", source))
    assert re.findall(r' (?:src|href|srcset|action)="([^"]*)"', source) == ["data:,"]
    style = re.search(r"<style>(.*)</style>", source, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert re.search(r'Content-Security-Policy" content="([^"]*)"', source).group(1) == (
        f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert [html.unescape(description) for _, description in re.findall(TOKEN, source)] == DESCRIPTIONS
    assert all(description in text_of(source) for description in DESCRIPTIONS)  # the list


@pytest.mark.parametrize("fault", [None, "one candidate too many"])
def test_a_check_writes_its_report(monkeypatch, tmp_path, fault):
    """Whether it passes or fails, which comes first."""
    if fault:
        inject(monkeypatch, fault)
    path, steps = tmp_path / "report.html", []
    result = quick(**QUICK, report=path, advance=lambda: steps.append(1))
    assert result.passed == (fault is None)
    assert len(steps) == Settings(**QUICK).steps
    source = path.read_text(encoding="utf-8")
    top, _, below = text_of(source).partition("What was looked at")
    assert ("✗ failed" if fault else "✓ passed") in top
    for line in result.lines:
        sees = f" 9 of 10 such checks would reject: {line.sees}." if line.sees else ""
        figures = f"{number(line.figure)} {number(line.threshold)}"
        assert f"{line.verdict} {line.what} {line.note}{sees} {figures}" in below
        assert line.figure is None or (line.figure > line.threshold) == (line.verdict == "failed")
    tokens = [token for each in result.trace["rounds"] for token in each["tokens"]]
    assert [origin for origin, _ in re.findall(TOKEN, source)] == [token["origin"] for token in tokens]
    assert len(tokens) == 8
