"""The report of a check: one page that needs nothing but itself."""

import base64
import datetime
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from hf_specx.common.errors import require
from hf_specx.hub.folders import check_out

from .result import CHECK_LEGEND, FAILED, PASSED, UNTOLD, CheckResult, summary


PAGES = (".html", ".htm")
SIGNS = {PASSED: "✓", FAILED: "✗", UNTOLD: "?"}
ORIGINS = {
    "accepted": "drafted, and kept",
    "recovered": "the target's own, in place of a candidate that was rejected",
    "bonus": "the target's own, after all candidates of a round were kept, or where there was none",
}


def check_can_write(path: str | Path | None) -> None:
    """Raise a ValueError if there could be no report at a path; None is none."""
    if path is not None:
        path = Path(path)
        require(path.suffix.lower() in PAGES, f"the report {path} does not end in .html, which it is; name it so.")
        check_out(path)


def write_report(result: CheckResult, path: str | Path) -> Path:
    """Write the page of a result, passed or failed, at a path that ends in .html; what is there is replaced.

    Raises:
        ValueError: for a path at which no page can be written.
    """
    path = Path(path)
    check_can_write(path)
    path.write_text(page(result), encoding="utf-8")
    return path


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
        signs=SIGNS,
        legend=CHECK_LEGEND,
        facts={"Settings": as_text(result.settings), "Where it was made": as_text(result.provenance)},
        drafts={name: cell["acceptance"] for name, cell in result.cells.items() if "acceptance" in cell},
        tokens=tokens_of(result.trace),
        origins=ORIGINS,
        written=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def as_text(values: dict[str, Any]) -> dict[str, str]:
    """Names and values as text."""
    texts = [x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in values.values()]
    return {name.replace("_", " "): text for name, text in zip(values, texts, strict=True)}


def tokens_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The tokens of a trace one by one, each with its round, its chance, and the candidate that it replaced."""
    found = []
    for place, each in enumerate(trace.get("rounds", []), 1):
        candidates = each["candidates"]
        for position, token in enumerate(each["tokens"]):
            more: dict[str, Any] = {"round": str(place), "acceptance": None, "rejected": None}
            if token["origin"] == "accepted":
                more["round"] += f", candidate {position + 1} of {len(candidates)}"
                more["acceptance"] = candidates[position]["acceptance"]
            if token["origin"] == "recovered":
                more["rejected"] = candidates[each["rejected"]]
            found.append(token | more)
    return found


def number(value: float | None) -> str:
    """Three digits of it, or that it is not known."""
    return "-" if value is None else f"{value:.3g}"


def visible(text: str) -> str:
    """Text in one line, with signs for what has none: spaces at its ends, line breaks, tabs and other controls."""
    text = re.sub("^ +| +$", lambda spaces: "␣" * len(spaces[0]), text)
    return "".join({"\n": "↵", "\t": "⇥"}.get(x, x if x.isprintable() else f"\\u{ord(x):04x}") for x in text)
