"""The report: the verdict, each line and each number are on it, text stays text, and it loads nothing."""

import base64
import io
import re

import pytest
from check_cases import inject, quick
from page_cases import HOSTILE, LINES, SPEED, TRACE, WRONG, Page, made

from hf_specx import CheckResult
from hf_specx.equivalence import check as checking
from hf_specx.equivalence import page as check_page
from hf_specx.equivalence.page import (
    HOW_KEPT,
    check_can_write,
    digest,
    figures_of,
    headline_of,
    number,
    settings_in_words,
    spoken,
    visible,
    write_report,
)
from hf_specx.equivalence.plots import DPI, PNG_SIZE
from hf_specx.equivalence.settings import Settings
from hf_specx.hub.flatten import PACKAGE


pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")  # comes with matplotlib
QUICK = {"batch_sizes": (8,), "new_tokens": 8, "samples": 16, "verifications": ("greedy", "block")}
SHOWN_HOSTILE = HOSTILE  # it is one line, so that it is shown as it is


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_report(made(), tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def source(path):
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(source):
    return Page(source)


def test_the_verdict_comes_first(page):
    assert len(page.all("p", class_="verdict")) == len(page.all("p", class_="passed")) == 1
    kinds = [kind for kind, _ in page.elements]
    assert kinds.index("p") < kinds.index("table")
    assert "✓ passed No difference to plain generate was found; a correct one fails in at most 0.001" in page.text
    assert f"passed: specx check of my-pair {HOSTILE}" in page.text


def test_the_pair_its_speed_and_its_command_are_at_the_top(page):
    top, _, _ = page.text.partition("What was compared")
    assert f"The pair my-pair {HOSTILE}" in top
    assert "1.40 times as fast as plain generate with 5 candidates a round and block verification, 1 row at a" in top
    assert "(1.00 to 1.75 in 3 turns); the best of 1 to 8 candidates was 4, with 1.50 times" in top
    assert f"Made by specx check my-pair --batch 1 --file {HOSTILE}" in top


def test_a_number_that_was_not_timed_is_not_the_headline():
    assert headline_of({}, 5) is None
    assert headline_of(SPEED, 12)["times"] == "1.50"


def test_settings_are_in_words(page):
    for told in (
        "batch sizes 1 and 8",
        "new tokens at most 8 in each text",
        "sampling temperature 0.7, top-p 0.9",
        "verification greedy, coupled, token and block",
        "candidates 5 a round",
        "false alarms at most 0.001 of checks, which 12 tests share",
        "other options min_new_tokens 3",
    ):
        assert told in page.text
    settings = Settings(samples=20, top_k=5).to_dict()
    told = dict(settings_in_words(made(settings=settings)))
    assert told["sampled texts"] == "20 for each verification and batch size"
    assert told["sampling"] == "temperature 1, the 5 likeliest tokens"
    assert dict(settings_in_words(made(settings=Settings().to_dict())))["sampling"] == "temperature 1, from all tokens"


def test_a_failed_check(tmp_path):
    found = Page(write_report(made(passed=False), tmp_path / "failed.html").read_text(encoding="utf-8"))
    assert found.all("p", class_="verdict") == [{"class": "verdict failed"}]
    assert f"✗ failed What does not hold: {WRONG.what}; a correct one" in found.text
    assert f"✗ failed {WRONG.what} {WRONG.note} - 16" in found.text


def test_each_line(page):
    signs = {"passed": "✓", "not told": "?"}
    for line in LINES:
        figures = f"{number(line.figure)} {number(line.threshold)}"
        assert f"{signs[line.verdict]} {line.verdict} {line.what} {line.note} {figures}" in page.text


def test_what_was_compared(page):
    assert "on 2 prompts" in page.text
    assert "draft Llama, 99 parameters" in page.text
    assert f"def {HOSTILE}( the dog" in page.text


def test_each_number_of_the_trace(page):
    nothing = ("-", "-", "-", None)
    expected = [
        ("the", "11", "bonus", "1", "0.125", *nothing[:2], None),
        ("␣cat", "12", "accepted", "2: candidate 1 of 3", "0.0584", "0.135", "0.434", None),
        ("↵␣␣␣␣", "15", "recovered", "2", "0.3", "0.0777", "-", (SHOWN_HOSTILE, "13", "0.00123", "0.5", "0.00247")),
        (SHOWN_HOSTILE, "13", "accepted", "3: candidate 1 of 2", "0.62", "0.31", "1", None),
        ("␣on", "16", "accepted", "3: candidate 2 of 2", "5.53e-05", "4", "0.1", None),
        ("⇥end", "17", "bonus", "3", "0.017", *nothing[:2], None),
    ]
    tokens = page.all("span", role="button")
    found = []
    for each in tokens:
        known = [each[f"data-{name}"] for name in ("text", "id", "origin", "round", "p", "q", "acceptance")]
        names = ("rejected", "rejected-id", "rejected-p", "rejected-q", "rejected-acceptance")
        rejected = tuple(each[f"data-{name}"] for name in names) if "data-rejected" in each else None
        found.append((*known, rejected))
    assert found == expected
    for each, (text, _, origin, place, p, q, chance, rejected) in zip(tokens, expected, strict=True):
        assert each["class"] == f"token {origin}"
        assert (each["tabindex"], each["aria-describedby"]) == ("0", "panel")
        assert each["aria-label"].endswith(f", {origin}")
        assert f"p {p}, q {q}, acceptance {chance}" in each["title"]
        beside = "" if rejected is None else f" {rejected[0]} {' '.join(rejected[2:])}"
        assert f"{text} {origin} {place} {p} {q} {chance}{beside}" in " ".join(page.text.split())  # the table


def test_the_tokens_are_the_text(page):
    emitted = "".join(token["text"] for each in TRACE["rounds"] for token in each["tokens"])
    assert page.within["tokens"] == f"def {HOSTILE}({emitted}"
    assert len(page.all("span", class_="break")) == emitted.count("\n")


def test_origins_have_more_than_a_colour(page):
    """A line below of another kind each, and their names."""
    style = (PACKAGE / "equivalence" / "page.css").read_text(encoding="utf-8")
    kinds = {"accepted": "3px solid", "recovered": "3px double", "bonus": "3px dotted"}
    for name, kind in kinds.items():
        assert len(page.all("span", class_=name)) >= 2  # one is in the legend
        assert kind in "".join(re.findall(rf"^\.token(?:\.{name})? {{.*}}$", style, re.MULTILINE))
    assert "recovered 1: the target's own" in page.text
    assert "accepted 3: drafted" in page.text


def test_text_stays_text(page, source):
    assert HOSTILE not in source
    assert len(page.all("script")) == 1
    assert all(each["src"].startswith("data:image/png;base64,") for each in page.all("img"))
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert page.text.count(HOSTILE) >= 9  # pair, command, prompt, model, texts, trace and its table


def test_nothing_is_loaded(page, source):
    links = [x for _, each in page.elements for name, x in each.items() if name in ("src", "href", "srcset", "action")]
    assert links
    assert all(link.startswith("data:") for link in links)
    assert not re.search(r"https?://|//cdn|@import|url\(", source)


def test_only_its_own_script_and_style_may_run(page, source):
    (policy,) = (each["content"] for each in page.all("meta") if "http-equiv" in each)
    script = re.search(r"<script>(.*)</script>", source, re.DOTALL).group(1)
    style = re.search(r"<style>(.*)</style>", source, re.DOTALL).group(1)
    rules = dict(rule.split(maxsplit=1) for rule in policy.split("; "))
    assert rules == {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": f"'{digest(style)}'",
        "script-src": f"'{digest(script)}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert not [each for _, each in page.elements if "style" in each]


def test_figures_are_in_it_and_beside_it(page, path):
    images = page.all("img")
    files = sorted(figures_of(path).iterdir())
    assert [each.name for each in files] == ["acceptance.png", "lengths.png", "speed.png"]
    assert [each["id"] for each in page.all("figure")] == [each.stem for each in files]
    for image, file in zip(images, files, strict=True):
        png = base64.b64decode(image["src"].partition(",")[2], validate=True)
        assert png == file.read_bytes()
        with Image.open(io.BytesIO(png)) as opened:
            assert opened.format == "PNG"
            assert opened.size == (round(PNG_SIZE[0] * DPI), round(PNG_SIZE[1] * DPI))
            opened.load()
        assert len(image["alt"]) > 40
        assert opened.size[0] * int(image["height"]) == opened.size[1] * int(image["width"])


def test_what_there_is_not_is_left_out(tmp_path):
    path = write_report(made(trace={}, speed={}, texts={}), tmp_path / "short.html")
    page = Page(path.read_text(encoding="utf-8"))
    assert len(page.all("img")) == 2
    assert page.all("span", role="button") == []
    assert "What it would have seen" not in page.text
    assert "A few texts" not in page.text
    bare = Page(write_report(made(trace={}, speed={}, cells={}), tmp_path / "bare.html").read_text(encoding="utf-8"))
    assert bare.all("img") == []
    assert not figures_of(tmp_path / "bare.html").exists()


def test_what_it_would_have_seen(monkeypatch, tmp_path):
    to_dict, row = CheckResult.to_dict, {"what": "law", "smallest": f"0.05 {HOSTILE}", "note": "by 4,000 tokens"}
    monkeypatch.setattr(CheckResult, "to_dict", lambda result: to_dict(result) | {"power": [row]})
    page = Page(write_report(made(), tmp_path / "report.html").read_text(encoding="utf-8"))
    assert (
        "What it would have seen The smallest difference that this check finds in nine of ten such checks. "
        in page.text
    )
    assert f"{row['what']} {row['note']} {row['smallest']}" in page.text


@pytest.mark.parametrize("verification", HOW_KEPT)
def test_how_candidates_are_kept_is_told(tmp_path, verification):
    path = write_report(made(trace=TRACE | {"verification": verification}), tmp_path / "report.html")
    page = Page(path.read_text(encoding="utf-8"))
    assert HOW_KEPT[verification] in page.text
    assert '"-" stands where there is none' in page.text


def test_a_check_writes_its_report(tmp_path):
    path, steps = tmp_path / "report.html", []
    result = quick(**QUICK, report=path, advance=lambda: steps.append(1))
    assert len(steps) == Settings(**QUICK).steps(4, timed=True) > Settings(**QUICK).steps(4)
    page = Page(path.read_text(encoding="utf-8"))
    for line in result.lines:
        assert f"{line.verdict} {line.what} {line.note} {number(line.figure)} {number(line.threshold)}" in page.text
        assert line.figure is None or (line.figure > line.threshold) == (line.verdict == "failed")
    assert result.command.startswith("hf_specx.check(pair, prompts, batch_sizes=(8,), new_tokens=8, ")
    assert result.command in page.text
    tokens = [token for each in result.trace["rounds"] for token in each["tokens"]]
    assert [each["data-id"] for each in page.all("span", role="button")] == [str(token["token"]) for token in tokens]
    assert page.within["tokens"] == result.prompts[0] + "".join(token["text"] for token in tokens)
    assert "LlamaForCausalLM" in page.text
    assert len(page.all("img")) == 3


def test_a_check_that_fails_writes_its_report(monkeypatch, tmp_path):
    inject(monkeypatch, "one candidate too many")
    result = quick(**QUICK | {"verifications": ("greedy",)}, report=tmp_path / "report.html")
    assert not result.passed
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.all("p", class_="verdict") == [{"class": "verdict failed"}]
    assert {each["data-q"] for each in page.all("span", role="button")} == {"-"}  # greedy candidates are no draws


def test_refused_before_any_work(monkeypatch, tmp_path):
    monkeypatch.setattr(checking, "subject_of", None)
    with pytest.raises(ValueError, match="does not end in .html"):
        quick(report=tmp_path / "report.txt")
    monkeypatch.setattr(check_page, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs jinja2 and matplotlib: pip install jinja2 matplotlib"):
        quick(report=tmp_path / "report.html")
    with pytest.raises(ValueError, match="needs jinja2 and matplotlib"):
        write_report(made(), tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []
    check_can_write(None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cat", "cat"),
        (" a b ", "␣a b␣"),
        ("   ", "␣␣␣"),
        ("", ""),
        ("\n    x", "↵    x"),
        ("\t\r\x00", "⇥\\u000d\\u0000"),
        ("\u202eabc", "\\u202eabc"),
        ("ζ…", "ζ…"),
    ],
)
def test_text_in_one_line(text, expected):
    assert visible(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" cat", "cat"),
        ("\n    ", "1 line break and 4 spaces"),
        ("\t\t", "2 tabs"),
        ("\x0b ", "1 control character and 1 space"),
        ("a\nb", "a↵b"),
        ("", "nothing"),
    ],
)
def test_text_for_screen_readers(text, expected):
    assert spoken(text) == expected


def luminance(colour: str) -> float:
    """Relative luminance of "#rrggbb", by WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_its_ground(scheme):
    """A contrast of 4.5 for all text, and of 3 for the lines below tokens."""
    style = (PACKAGE / "equivalence" / "page.css").read_text(encoding="utf-8")
    roots = re.findall(r":root {(.*?)}", style, re.DOTALL)
    both = [dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", root)) for root in roots]
    light, dark = both
    assert light.keys() == dark.keys()
    colours = light if scheme == "light" else dark
    grounds = dict.fromkeys(("text", "quiet", "link", "passed", "failed", "untold"), ("ground", "card"))
    grounds |= {"passed": ("ground", "passed-ground"), "failed": ("ground", "card", "failed-ground")}
    grounds |= {"untold": ("untold-ground",), "text": ("ground", "card")}
    wanted = [(name, ground, 4.5) for name, places in grounds.items() for ground in places]
    for origin in ("accepted", "recovered", "bonus"):
        wanted += [("text", f"{origin}-ground", 4.5), ("quiet", f"{origin}-ground", 4.5), (origin, "ground", 3.0)]
    for name, ground, least in wanted:
        bright, dim = sorted((luminance(colours[name]), luminance(colours[ground])), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= least, (name, ground)
