"""The report in Chromium: no errors, no requests, nothing wider than the window, a trace by mouse, touch and keyboard.

SPECX_CHROMIUM names the browser where it is not found by its name, SPECX_SCREENSHOTS a folder that gets the pictures.
"""

import os
import shutil
from pathlib import Path

import pytest
from page_cases import HOSTILE, TOLD, made

from hf_specx.metrics.page import write_report


playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("SPECX_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
SHOWN = "node => getComputedStyle(node, '::after').content"  # beside a token
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(NAMES)} is on the PATH"),
]


@pytest.fixture
def opened(tmp_path):
    """Opens the report; at the end nothing may have gone wrong, and nothing have been asked for but the file."""
    path, wrong, asked = write_report(made(), tmp_path / "report.html"), [], []
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, headless=True, args=["--no-sandbox"])

        def open_page(width: int, **settings):
            page = browser.new_context(viewport={"width": width, "height": 800}, **settings).new_page()
            page.on("console", lambda message: wrong.append(message.text))
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("request", lambda request: asked.append(request.url))
            page.goto(path.as_uri())
            return page

        yield open_page
        browser.close()
    assert wrong == []
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1280, "light")])
def test_nothing_is_wider_than_the_window(opened, tmp_path, width, scheme):
    """What decides is seen at once; text of models is not run."""
    page = opened(width, color_scheme=scheme)
    assert page.title() == f"passed: specx check of my-pair {HOSTILE}"
    assert page.locator(".verdict").bounding_box()["y"] < 800
    for each in page.locator("details").all():
        each.evaluate("node => { node.open = true; }")
    page.locator("#tokens .token").nth(2).hover()
    assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    folder = Path(os.environ.get("SPECX_SCREENSHOTS", tmp_path))
    page.screenshot(path=folder / f"{width}-{scheme}.png", full_page=True)


@pytest.mark.parametrize("by", ["hover", "focus", "tap"])
def test_a_token_says_where_it_came_from(opened, by):
    page = opened(400, has_touch=True, is_mobile=True) if by == "tap" else opened(1280)
    tokens = page.locator("#tokens .token")
    assert tokens.first.evaluate(SHOWN) == "none"
    for place, told in enumerate(TOLD):
        getattr(tokens.nth(place), by)()
        assert tokens.nth(place).evaluate(SHOWN).strip('"').replace('\\"', '"') == told
    if by == "focus":
        page.keyboard.press("Shift+Tab")
        assert tokens.nth(len(TOLD) - 2).evaluate(SHOWN) != "none"
