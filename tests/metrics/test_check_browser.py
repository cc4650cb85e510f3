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
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(NAMES)} is on the PATH"),
]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=CHROMIUM, headless=True, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens the report; at the end nothing may have gone wrong, and nothing have been asked for but the file."""
    path, wrong, asked, contexts = write_report(made(), tmp_path / "report.html"), [], [], []

    def open_page(width: int, **settings):
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, **settings))
        page = contexts[-1].new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(opened, tmp_path, width, scheme):
    """The table of numbers scrolls sideways, and says so; what decides is seen at once."""
    page = opened(width, color_scheme=scheme)
    assert page.locator(".verdict").bounding_box()["y"] < page.locator("#headline").bounding_box()["y"] < 800
    for each in page.locator("details").all():
        each.evaluate("node => { node.open = true; }")
    page.locator("#tokens .token").nth(2).hover()
    assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    cut = page.locator(".scroll").evaluate("node => node.scrollWidth > node.clientWidth")
    assert page.locator(".sideways").is_visible() == cut
    folder = Path(os.environ.get("SPECX_SCREENSHOTS", tmp_path))
    page.screenshot(path=folder / f"{width}-{scheme}.png", full_page=True)


def test_by_mouse_and_keyboard(opened):
    page = opened(1280)
    tokens, panel = page.locator("#tokens .token"), page.locator("#panel")
    assert page.title() == f"passed: specx check of my-pair {HOSTILE}"  # text of models is not run
    assert panel.is_hidden()
    for place in (1, 2, 3):
        tokens.nth(place).hover()
        assert panel.text_content() == TOLD[place]
    tokens.first.focus()
    assert panel.text_content() == TOLD[0]
    for key, place in (("ArrowRight", 1), ("End", 4), ("ArrowDown", 4), ("ArrowLeft", 3), ("Home", 0)):
        page.keyboard.press(key)
        assert panel.text_content() == TOLD[place]
        assert page.evaluate("document.activeElement.getAttribute('aria-current')") == "true"
    page.keyboard.press("Tab")  # one stop for all tokens
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    page.keyboard.press("Escape")
    assert panel.is_hidden()


def test_by_touch_the_panel_is_in_the_window(opened):
    page = opened(400, has_touch=True, is_mobile=True)
    for place, told in enumerate(TOLD):
        page.locator("#tokens .token").nth(place).tap()
        assert page.locator("#panel").text_content() == told
        box = page.locator("#panel").bounding_box()
        assert 0 <= box["y"] < box["y"] + box["height"] <= 800


def test_without_scripts(opened):
    page = opened(400, java_script_enabled=False)
    assert page.locator("#tokens .token").nth(2).get_attribute("title") == TOLD[2]
    page.get_by_text("The same as a list").click()
    assert page.get_by_text("in place of").last.is_visible()
