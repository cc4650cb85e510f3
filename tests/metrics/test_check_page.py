"""The report: the verdict, each line and each number are on it, text stays text, and it loads and runs nothing."""

import base64
import hashlib
import html
import re

import pytest
from check_cases import inject, quick
from page_cases import HOSTILE, LINES, TOLD, WRONG, made, text_of

from hf_specx.metrics import check as checking
from hf_specx.metrics.page import number, page, visible
from hf_specx.metrics.settings import Settings


QUICK = {"batch_sizes": (8,), "new_tokens": 8, "samples": 16, "verifications": ("greedy", "block")}
TOKEN = r'<span class="token (\w+)" tabindex="0" role="note" aria-label="([^"]*)">'


@pytest.fixture(scope="module")
def source() -> str:
    return page(made())


@pytest.fixture(scope="module")
def text(source) -> str:
    return text_of(source)


def test_what_decides_comes_first(text):
    top, _, _ = text.partition("What was looked at")
    assert f"passed: specx check of my-pair {HOSTILE}" in top
    assert "✓ passed No difference to plain generate was found; a correct one fails in at most 0.001" in top
    assert f"Made by specx check my-pair --batch 1 --file {HOSTILE}" in top
    failed = text_of(page(made(passed=False, trace={}, cells={}, texts={}, pair="", command="")))
    assert f"✗ failed What does not hold: {WRONG.what}; a correct one" in failed
    assert f"✗ failed {WRONG.what} {WRONG.note} - 16" in failed
    for told in ("How a text came about", "What the draft was worth", "Made by"):
        assert told not in failed


def test_what_is_told(text):
    signs = {"passed": "✓", "not told": "?"}
    for line in LINES:
        figures = f"{number(line.figure)} {number(line.threshold)}"
        assert f"{signs[line.verdict]} {line.verdict} {line.what} {line.note} {figures}" in text
    assert "batch sizes [1, 8] new tokens 8 temperature 0.7" in text
    assert f"def {HOSTILE}( the dog" in text
    assert "token, batch 1 0.731 2.80 0.75 of 40 0.80 of 30 0.75 of 24 0.45 of 20 0.00 of 9" in text


def test_each_token_of_the_trace(source, text):
    tokens = re.findall(TOKEN, source)
    assert [html.unescape(told) for _, told in tokens] == TOLD
    assert [origin for origin, _ in tokens] == ["bonus", "accepted", "recovered", "accepted", "bonus"]
    assert all(told in text for told in TOLD)  # the list


def test_text_stays_text_and_nothing_is_loaded_or_run(source, text):
    """Nothing but its own style is applied."""
    assert HOSTILE not in source
    assert not re.search(r"<script|<img|https?://|//cdn|@import|url\(", source)
    assert not re.search(r"<[^>]* (on\w+|style)=", re.sub('"[^"]*"', "", source))
    assert text.count(HOSTILE) >= 9  # pair, command, prompt, model, texts, trace and its list
    assert re.findall(r' (?:src|href|srcset|action)="([^"]*)"', source) == ["data:,"]
    style = re.search(r"<style>(.*)</style>", source, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert re.search(r'Content-Security-Policy" content="([^"]*)"', source).group(1) == (
        f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


@pytest.mark.parametrize("fault", [None, "one candidate too many"])
def test_a_check_writes_its_report(monkeypatch, tmp_path, fault):
    """Whether it passes or fails."""
    if fault:
        inject(monkeypatch, fault)
    path, steps = tmp_path / "report.html", []
    result = quick(**QUICK, report=path, advance=lambda: steps.append(1))
    assert result.passed == (fault is None)
    assert len(steps) == Settings(**QUICK).steps
    source = path.read_text(encoding="utf-8")
    for line in result.lines:
        told = f"{line.verdict} {line.what} {line.note} {number(line.figure)} {number(line.threshold)}"
        assert told in text_of(source)
        assert line.figure is None or (line.figure > line.threshold) == (line.verdict == "failed")
    tokens = [token for each in result.trace["rounds"] for token in each["tokens"]]
    assert len(re.findall(TOKEN, source)) == len(tokens) == 8


def test_refused_before_any_work(monkeypatch, tmp_path):
    monkeypatch.setattr(checking, "subject_of", None)
    with pytest.raises(ValueError, match="does not end in .html"):
        quick(report=tmp_path / "report.txt")
    assert list(tmp_path.iterdir()) == []


def test_text_in_one_line():
    texts = {" a b ": "␣a b␣", "   ": "␣␣␣", "": "", "\n    x": "↵    x", "\t\x00\u202eζ": "⇥\\u0000\\u202eζ"}
    assert [visible(text) for text in texts] == list(texts.values())
