"""The report in Chromium: no errors, no requests, a trace that works by mouse, touch and keyboard, at any width.

SPECX_CHROMIUM names the browser where it is not found by its name, SPECX_SCREENSHOTS a folder that gets the pictures.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
from page_cases import HOSTILE, TRACE, made

from hf_specx.equivalence.page import write_report


playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("SPECX_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(NAMES)} is on the PATH"),
]
PHONE, DESKTOP = {"width": 360, "height": 740}, {"width": 1280, "height": 800}
WIDTHS = (400, 768, 1400)
DETAILS = {  # of a few tokens, by their place: what the panel says
    1: "␣cat token 12 accepted p 0.0584 q 0.135 acceptance 0.434 round 2: candidate 1 of 3",
    2: f"↵␣␣␣␣ token 15 recovered p 0.3 q 0.0777 acceptance - round 2 in place of {HOSTILE} token 13, rejected "
    "p 0.00123 q 0.5 acceptance 0.00247",
    3: f"{HOSTILE} token 13 accepted p 0.62 q 0.31 acceptance 1 round 3: candidate 1 of 2",
    5: "⇥end token 17 bonus p 0.017 q - acceptance - round 3",
}
BUTTONS = "previous next close"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=CHROMIUM, headless=True, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_report(made(), tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    named = os.environ.get("SPECX_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def opened(browser, report):
    """Opens the report; at the end nothing may have gone wrong, and nothing have been asked for but the file."""
    contexts, wrong, asked, wanted = [], [], [], []

    def open_page(path: Path = report, **settings):
        contexts.append(browser.new_context(**settings))
        page = contexts[-1].new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        wanted.append(path.as_uri())
        page.goto(wanted[-1])
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []
    assert [url for url in asked if not url.startswith("data:")] == wanted


def tokens(page):
    return page.locator("#tokens .token")


def told(page) -> str:
    """What the panel says, without its buttons."""
    assert page.locator("#panel").is_visible()
    text = " ".join(page.locator("#panel").inner_text().split())
    assert text.endswith(BUTTONS)
    return text.removesuffix(BUTTONS).strip()


def opened_whole(opened, width: int, **settings):
    """The report in a window of this width, with all that can be unfolded."""
    page = opened(viewport={"width": width, "height": 800}, **settings)
    for each in page.locator("details").all():
        each.evaluate("node => { node.open = true; }")
    return page


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(opened, pictures, width, scheme):
    page = opened_whole(opened, width, color_scheme=scheme)
    tokens(page).nth(2).hover()
    assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    name = f"{width}-{scheme}"
    page.screenshot(path=pictures / f"{name}-all.png", full_page=True)
    page.locator("#trace").scroll_into_view_if_needed()
    page.screenshot(path=pictures / f"{name}-trace.png")
    assert (pictures / f"{name}-all.png").stat().st_size > 10_000


CUT = """() => [...document.querySelectorAll("main *")]
  .filter((node) => node.scrollWidth > node.clientWidth && getComputedStyle(node).overflowX !== "visible")
  .map((node) => [node.className, node.getAttribute("aria-label"), node.previousElementSibling?.checkVisibility()])"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scripts", [True, False])
def test_nothing_is_cut_without_a_hint(opened, width, scripts):
    """Tables of numbers scroll sideways, and say so; without scripts they say it also where they need not."""
    page = opened_whole(opened, width, java_script_enabled=scripts)
    page.wait_for_timeout(0)  # observers of sizes have run
    assert page.locator(".scroll").count() == 4
    cut = page.evaluate(CUT)
    assert all(entry[0].startswith("scroll") and entry[2] for entry in cut), cut
    assert (len(cut) == 4) == (width < 1000)  # the last one fits into a wide window
    hints = sum(hint.is_visible() for hint in page.locator(".sideways").all())
    assert hints == (len(cut) if scripts else 4)


def test_a_table_that_was_scrolled_to_its_end_is_not_marked(opened):
    page = opened_whole(opened, 400)
    table = page.locator(".scroll").last
    assert "cut" in table.get_attribute("class")
    table.evaluate("node => { node.scrollLeft = node.scrollWidth; }")
    playwright.expect(table).not_to_have_class(re.compile(r"\bcut\b"))


@pytest.mark.parametrize("width", WIDTHS)
def test_what_decides_is_seen_at_once(opened, width):
    """The verdict, the pair, the speed and the command, in this order and before any table."""
    page = opened(viewport={"width": width, "height": 800})
    parts = [
        page.locator(each).first.bounding_box()
        for each in ("#pair", ".verdict", "#headline", "#command", "table.whole")
    ]
    tops = [part["y"] for part in parts]
    assert tops == sorted(tops)
    assert tops[2] < 800
    assert page.locator("#headline").inner_text().startswith("1.40 times as fast as plain generate with 5 candidates")
    texts = page.locator("#lines ~ table").first.inner_text()
    assert texts.split("\n")[0].split("\t") == ["verdict", "what, and what was seen", "figure", "at most"]


def test_by_mouse(opened):
    page = opened(viewport=DESKTOP)
    assert page.locator("#without-scripts").count() == 0
    assert page.locator("#panel").is_hidden()
    for place, details in DETAILS.items():
        tokens(page).nth(place).hover()
        assert told(page) == details
    page.mouse.move(1, 1)
    assert told(page) == DETAILS[5]  # so that it can be read
    tokens(page).nth(3).click()
    assert told(page) == DETAILS[3]
    page.get_by_role("button", name="close").click()
    assert page.locator("#panel").is_hidden()


def test_by_touch(opened):
    page = opened(viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=2)
    for place, details in DETAILS.items():
        tokens(page).nth(place).tap()
        assert told(page) == details
        assert page.locator("#panel").bounding_box()["y"] < PHONE["height"]  # in the window, wherever the text is
    page.get_by_role("button", name="previous").tap()
    page.get_by_role("button", name="previous").tap()
    assert told(page) == DETAILS[3]
    page.get_by_role("button", name="next").tap()
    page.get_by_role("button", name="next").tap()
    page.get_by_role("button", name="next").tap()  # there is none behind the last
    assert told(page) == DETAILS[5]
    page.get_by_role("button", name="close").tap()
    assert page.locator("#panel").is_hidden()


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_by_keyboard(opened, size):
    page = opened(viewport=size)
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('#tokens .token')"):
            break
    assert told(page).startswith("the token 11 bonus p 0.125")
    for place, details in list(DETAILS.items())[:3]:
        page.keyboard.press("ArrowRight")
        assert told(page) == details
        assert page.evaluate("document.activeElement.getAttribute('aria-current')") == "true"
        assert page.evaluate(HIDDEN) is False, place
    page.keyboard.press("End")
    assert told(page) == DETAILS[5]
    page.keyboard.press("ArrowDown")
    assert told(page) == DETAILS[5]
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowUp")
    assert told(page) == DETAILS[3]
    page.keyboard.press("Escape")
    assert page.locator("#panel").is_hidden()
    page.keyboard.press("Enter")
    assert told(page) == DETAILS[3]
    page.keyboard.press("Tab")  # one stop for all tokens: the next one is in the panel
    assert page.evaluate("document.activeElement.textContent") == "previous"
    page.keyboard.press("Escape")
    assert page.locator("#panel").is_hidden()
    assert page.evaluate("document.activeElement.dataset.text") == HOSTILE


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_the_panel_hides_no_token_that_is_gone_to(opened, tmp_path, size):
    """In a text that is longer than the window, forwards and back."""
    rounds = TRACE["rounds"] * 15
    page = opened(write_report(made(trace=TRACE | {"rounds": rounds}), tmp_path / "long.html"), viewport=size)
    tokens(page).first.focus()
    for key in ["ArrowRight"] * 80 + ["ArrowLeft"] * 80:
        page.keyboard.press(key)
        assert page.evaluate(HIDDEN) is False
    for button in ["next"] * 50 + ["previous"] * 45:
        page.get_by_role("button", name=button).click()
        assert (
            page.evaluate(HIDDEN.replace("document.activeElement", "document.querySelector('[aria-current]')"))
            is False
        )


HIDDEN = """() => {
  const at = document.activeElement.getBoundingClientRect();
  const x = at.left + Math.min(at.width, 8) / 2, y = at.top + Math.min(at.height, 16) / 2;
  return document.elementFromPoint(x, y)?.closest("#tokens") == null;
}"""


def test_text_of_models_is_not_run(opened):
    page = opened(viewport=DESKTOP)
    assert page.title() == f"passed: specx check of my-pair {HOSTILE}"
    assert page.locator("img").count() == 3
    assert HOSTILE in page.locator("#tokens").inner_text()


def test_figures_are_shown(opened):
    page = opened(viewport=PHONE)
    for image in page.locator("img").all():
        assert image.evaluate("node => node.decode().then(() => node.naturalWidth)") == 880
        assert image.bounding_box()["width"] > 250


def test_without_scripts(opened):
    page = opened(viewport=PHONE, java_script_enabled=False)
    assert "recovered, p 0.3, q 0.0777" in tokens(page).nth(2).get_attribute("title")
    assert page.locator("#without-scripts").is_visible()
    page.get_by_text("The same as a table").click()
    assert "0.00247" in page.locator("#tokens-table").inner_text()
