"""The report: the verdict, each line and each number are on it, text stays text, and it loads nothing."""

import base64
import hashlib
import re

import pytest
from check_cases import inject, quick
from page_cases import HOSTILE, LINES, TOLD, WRONG, Page, made

from hf_specx.metrics import check as checking
from hf_specx.metrics.page import check_can_write, number, visible
from hf_specx.metrics.page import page as rendered
from hf_specx.metrics.settings import Settings


QUICK = {"batch_sizes": (8,), "new_tokens": 8, "samples": 16, "verifications": ("greedy", "block")}


@pytest.fixture(scope="module")
def source() -> str:
    return rendered(made())


@pytest.fixture(scope="module")
def page(source) -> Page:
    return Page(source)


def test_what_decides_comes_first(page):
    top, _, _ = page.text.partition("What was looked at")
    assert f"passed: specx check of my-pair {HOSTILE}" in top
    assert "✓ passed No difference to plain generate was found; a correct one fails in at most 0.001" in top
    assert "1.40 times as fast as plain generate , with 5 candidates a round, block verification and 1 row at" in top
    assert f"Made by specx check my-pair --batch 1 --file {HOSTILE}" in top
    failed = Page(rendered(made(passed=False, trace={}, speed={}, cells={}, texts={}, pair="", command="")))
    assert f"✗ failed What does not hold: {WRONG.what}; a correct one" in failed.text
    assert f"✗ failed {WRONG.what} {WRONG.note} - 16" in failed.text
    for told in ("times as fast", "How a text came about", "What the draft was worth", "Made by"):
        assert told not in failed.text


def test_what_is_told(page):
    signs = {"passed": "✓", "not told": "?"}
    for line in LINES:
        figures = f"{number(line.figure)} {number(line.threshold)}"
        assert f"{signs[line.verdict]} {line.verdict} {line.what} {line.note} {figures}" in page.text
    assert "on 2 prompts" in page.text
    assert "draft Llama, 99 parameters" in page.text
    assert "batch sizes [1, 8] new tokens 8 temperature 0.7" in page.text
    assert f"def {HOSTILE}( the dog" in page.text
    assert "token, batch 1 0.731 2.80 0.75 of 40 0.80 of 30 0.75 of 24 0.45 of 20 0.00 of 9" in page.text
    assert [each["value"] for each in page.all("meter")] == ["0.75", "0.8", "0.75", "0.45", "0.0"] * 3


def test_each_token_of_the_trace(page):
    tokens = [each for each in page.all("span") if each.get("role") == "note"]
    assert [each["aria-label"] for each in tokens] == TOLD
    origins = ["bonus", "accepted", "recovered", "accepted", "bonus"]
    assert [each["class"] for each in tokens] == [f"token {origin}" for origin in origins]
    assert all(told in page.text for told in TOLD)  # the list
    assert "recovered 1: the target's own" in page.text


def test_text_stays_text(page, source):
    assert HOSTILE not in source
    assert page.all("script") == page.all("img") == []
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert page.text.count(HOSTILE) >= 9  # pair, command, prompt, model, texts, trace and its list


def test_nothing_is_loaded_and_nothing_but_its_own_style_may_run(page, source):
    links = [x for _, each in page.elements for name, x in each.items() if name in ("src", "href", "srcset", "action")]
    assert all(link.startswith("data:") for link in links)
    assert not re.search(r"https?://|//cdn|@import|url\(", source)
    (policy,) = (each["content"] for each in page.all("meta") if "http-equiv" in each)
    style = re.search(r"<style>(.*)</style>", source, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert dict(rule.split(maxsplit=1) for rule in policy.split("; ")) == {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": f"'sha256-{digest}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert not [each for _, each in page.elements if "style" in each]


@pytest.mark.parametrize("fault", [None, "one candidate too many"])
def test_a_check_writes_its_report(monkeypatch, tmp_path, fault):
    """Whether it passes or fails."""
    if fault:
        inject(monkeypatch, fault)
    path, steps = tmp_path / "report.html", []
    result = quick(**QUICK, report=path, advance=lambda: steps.append(1))
    assert result.passed == (fault is None)
    assert len(steps) == Settings(**QUICK).steps(timed=True)
    page = Page(path.read_text(encoding="utf-8"))
    for line in result.lines:
        assert f"{line.verdict} {line.what} {line.note} {number(line.figure)} {number(line.threshold)}" in page.text
        assert line.figure is None or (line.figure > line.threshold) == (line.verdict == "failed")
    tokens = [token for each in result.trace["rounds"] for token in each["tokens"]]
    assert len([each for each in page.all("span") if each.get("role") == "note"]) == len(tokens) == 8
    assert "LlamaForCausalLM" in page.text


def test_refused_before_any_work(monkeypatch, tmp_path):
    monkeypatch.setattr(checking, "subject_of", None)
    with pytest.raises(ValueError, match="does not end in .html"):
        quick(report=tmp_path / "report.txt")
    assert list(tmp_path.iterdir()) == []
    check_can_write(None)


def test_text_in_one_line():
    texts = {" a b ": "␣a b␣", "   ": "␣␣␣", "": "", "\n    x": "↵    x", "\t\x00\u202eζ": "⇥\\u0000\\u202eζ"}
    assert [visible(text) for text in texts] == list(texts.values())
