"""The report of a check: one page that needs nothing but itself."""

import base64
import datetime
import hashlib
import re
from pathlib import Path

from hf_specx.common.errors import require
from hf_specx.hub.folders import check_out

from .result import CHECK_LEGEND, FAILED, PASSED, SEEN_IN_WORDS, CheckResult, summary


PAGES = (".html", ".htm")
PAGE_MARKER = ": specx check"  # in the title of each


def check_can_write(path: str | Path | None) -> None:
    """Raise a ValueError if there could be no report at a path; None is none."""
    if path is not None:
        path = Path(path)
        require(path.suffix.lower() in PAGES, f"the report {path} does not end in .html, which it is; name it so.")
        check_out(path, PAGE_MARKER)


def page(result: CheckResult) -> str:
    """The page of a result. All text in it is escaped, and no script can run."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    style, template = ((Path(__file__).parent / f"page.{kind}").read_text("utf-8") for kind in ("css", "html"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "visible": visible}
    return environment.from_string(template).render(
        style=Markup(style),  # of this package
        style_hash=f"sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}",
        result=result,
        verdict=PASSED if result.passed else FAILED,
        summary=summary(result).partition(": ")[2],
        legend=CHECK_LEGEND,
        seen_in_words=SEEN_IN_WORDS,
        drafts={name: cell["acceptance"] for name, cell in result.cells.items() if "acceptance" in cell},
        written=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def number(value: float | None) -> str:
    """Three digits of it, or that it is not known."""
    return "-" if value is None else f"{value:.3g}"


def visible(text: str) -> str:
    """Text in one line, with signs for what has none: spaces at its ends, line breaks, tabs and other controls."""
    text = re.sub("^ +| +$", lambda spaces: "␣" * len(spaces[0]), text)
    return "".join({"\n": "↵", "\t": "⇥"}.get(x, x if x.isprintable() else f"\\u{ord(x):04x}") for x in text)
