"""The report of a check: one page that needs nothing but itself, and its figures as files of their own."""

import base64
import datetime
import hashlib
import json
import os
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from hf_specx.bench.checks import check_out
from hf_specx.common.errors import require

from .plots import PNG_SIZE, Plot, plots
from .result import CHECK_LEGEND, FAILED, PASSED, UNTOLD, CheckResult, summary
from .settings import LEAST_SAMPLES, RUNS


PAGES = (".html", ".htm")
REPORT_PACKAGES = ("jinja2", "matplotlib")
SIGNS = {PASSED: "✓", FAILED: "✗", UNTOLD: "?"}
DASH = "-"
SPOKEN = {" ": "space", "\n": "line break", "\t": "tab"}
ORIGINS = {
    "accepted": "drafted, and kept",
    "recovered": "the target's own, in place of a candidate that was rejected",
    "bonus": "the target's own, after all candidates of a round were kept, or where there was none",
}
HOW_KEPT = {  # by verification, what the chance of a candidate is
    "token": "A candidate is kept with probability min(1, p / q), its acceptance.",
    "block": "Acceptance is min(1, p / q), by which token verification keeps a candidate; block verification, which "
    "made this text, looks at the candidates of a round together and keeps no fewer on average.",
    "coupled": "A candidate is kept where both models, drawing with the same noise, choose the same token; acceptance "
    "is min(1, p / q), by which token verification would keep it.",
    "greedy": "A candidate is kept where it is the target's own choice, so its acceptance is 1 or 0. It is no draw "
    "from a distribution, so it has no q.",
}


def check_can_write(path: str | Path | None) -> None:
    """Raise a ValueError if there could be no report at a path; None is none."""
    if path is None:
        return
    path, figures = Path(path), figures_of(Path(path))
    require(path.suffix.lower() in PAGES, f"the report {path} does not end in .html, which it is; name it so.")
    check_out(path)
    told = f"the figures of the report go into {figures}, which is a file; move it, or name another report."
    require(figures.is_dir() or not figures.exists(), told)
    for each in (path, figures):
        writable = os.access(each if each.exists() else each.parent, os.W_OK)
        require(writable, f"the report cannot be written: {each} is not yours to write; name another file.")
    missing = [name for name in REPORT_PACKAGES if find_spec(name) is None]
    require(not missing, f"a report needs {' and '.join(missing)}: pip install {' '.join(missing)}.")


def figures_of(path: Path) -> Path:
    """The folder of a page's figures: "report_files" next to "report.html"."""
    return path.with_name(f"{path.stem}_files")


def write_report(result: CheckResult, path: str | Path) -> Path:
    """Write the page of a result, and its figures as PNG into the folder `figures_of` the page.

    The page has them in it, so it can be sent and kept without the folder.

    Args:
        result: of `check`, passed or failed.
        path: of the page, ending in .html; replaced if it is there.

    Returns:
        The page.

    Raises:
        ValueError: for a path at which no page can be written, and without jinja2 or matplotlib.
    """
    path = Path(path)
    check_can_write(path)
    drawn = plots(result.to_dict())
    for plot in drawn:
        figures_of(path).mkdir(exist_ok=True)
        (figures_of(path) / f"{plot.name}.png").write_bytes(plot.png)
    path.write_text(page(result, drawn), encoding="utf-8")
    return path


def page(result: CheckResult, drawn: list[Plot]) -> str:
    """The page of a result with these figures. All text in it is escaped, and no script but its own can run."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    style, script, template = (
        (Path(__file__).parent / f"page.{kind}").read_text("utf-8") for kind in ("css", "js", "html")
    )
    found = result.to_dict()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        style=Markup(style),  # of this package
        script=Markup(script),
        style_hash=digest(style),
        script_hash=digest(script),
        verdict=PASSED if result.passed else FAILED,
        summary=summary(result).partition(": ")[2],
        signs=SIGNS,
        lines=[line_of(line) for line in found["lines"]],
        legend=CHECK_LEGEND,
        pair=result.pair,
        command=result.command,
        headline=headline_of(found["speed"], found["settings"].get("num_draft_tokens")),
        power=found.get("power"),
        plots=[picture(plot) for plot in drawn],
        width=round(PNG_SIZE[0] * 100),
        height=round(PNG_SIZE[1] * 100),
        models={role: found["provenance"].get(role, DASH) for role in ("target", "draft")},
        settings=settings_in_words(result),
        provenance=as_text(found["provenance"]),
        prompts=found["prompts"],
        trace=trace_of(found["trace"], found["prompts"]),
        origins=ORIGINS,
        texts=found["texts"],
        written=datetime.datetime.now(datetime.timezone.utc).isoformat(" ", "minutes").replace("+00:00", " UTC"),
    )


def digest(text: str) -> str:
    """What a content security policy calls a script or style of this text by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def headline_of(speed: dict[str, Any], checked: int | None) -> dict[str, str] | None:
    """How fast: first with the number of candidates that was checked, as the best of several noisy ones is too high.

    Args:
        speed: of a result; {} where it was not measured.
        checked: candidates a round of the check.
    """
    if not speed:
        return None
    numbers = {each["num_draft_tokens"]: each for each in speed["numbers"]}
    best = max(numbers.values(), key=lambda each: each["times_plain"])
    chosen = numbers.get(checked, best)
    least, most = (chosen["speedup"][name] for name in ("min", "max"))
    rows = "1 row" if speed["batch"] == 1 else f"{speed['batch']} rows"
    note = (
        f"with {chosen['num_draft_tokens']} candidates a round and {speed['verification']} verification, {rows} at a "
        f"time ({least:.2f} to {most:.2f} in {speed['repeats']} turns); the best of 1 to {max(numbers)} candidates "
        f"was {best['num_draft_tokens']}, with {best['times_plain']:.2f} times. Speed is measured, and no part of the "
        "verdict."
    )
    return {"times": f"{chosen['times_plain']:.2f}", "note": note}


def settings_in_words(result: CheckResult) -> list[tuple[str, str]]:
    """What a check did, each with its name."""
    known = result.settings
    top_k, top_p, samples = known["top_k"], known["top_p"], known["samples"]
    kept = [f"the {top_k} likeliest tokens"] * (top_k > 0) + [f"top-p {top_p:g}"] * (top_p < 1)
    texts = f"{RUNS} batches of each size, at the largest at least {LEAST_SAMPLES} texts and one for each prompt"
    options = ", ".join(f"{name} {value}" for name, value in known["options"].items())
    return [
        ("batch sizes", listed(known["batch_sizes"])),
        ("new tokens", f"at most {known['new_tokens']} in each text"),
        ("sampling", f"temperature {known['temperature']:g}, {' and '.join(kept) or 'from all tokens'}"),
        ("verification", listed(known["verifications"])),
        ("sampled texts", texts if samples is None else f"{samples} for each verification and batch size"),
        ("candidates", f"{known['num_draft_tokens']} a round"),
        ("seed", str(known["seed"])),
        ("false alarms", f"at most {known['level']:g} of checks, which {result.comparisons} tests share"),
        ("other options", options or "none"),
    ]


def listed(values: list[Any]) -> str:
    """Values as people write them: "1, 2 and 8"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last


def line_of(line: dict[str, Any]) -> dict[str, str]:
    """A line as text, with the sign of its verdict."""
    numbers = {name: number(line[name]) for name in ("figure", "threshold")}
    return line | numbers | {"sign": SIGNS[line["verdict"]]}


def picture(plot: Plot) -> dict[str, Any]:
    """A figure, its picture as an address."""
    return plot._asdict() | {"source": f"data:image/png;base64,{base64.b64encode(plot.png).decode()}"}


def as_text(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values as text."""
    shown = ((name, x if isinstance(x, str) else json.dumps(x, ensure_ascii=False)) for name, x in values.items())
    return [(name.replace("_", " "), value) for name, value in shown]


def number(value: float | None) -> str:
    """Three digits of it, or that it is not known."""
    return DASH if value is None else f"{value:.3g}"


def trace_of(trace: dict[str, Any], prompts: list[str]) -> dict[str, Any] | None:
    """A trace as the page shows it: its tokens one by one, each with the candidate that it replaced; None without."""
    if not trace:
        return None
    tokens = []
    for round_number, each in enumerate(trace["rounds"], 1):
        candidates = each["candidates"]
        for position, token in enumerate(each["tokens"]):
            accepted = token["origin"] == "accepted"
            rejected = candidates[each["rejected"]] if token["origin"] == "recovered" else None
            chance = candidates[position]["acceptance"] if accepted else None
            which = f": candidate {position + 1} of {len(candidates)}" if accepted else ""
            own = {
                "origin": token["origin"],
                "spoken": spoken(token["text"]),
                "round": f"{round_number}{which}",
                "pieces": token["text"].split("\n"),
                "rejected": None if rejected is None else shown(rejected, rejected["acceptance"]),
            }
            tokens.append(shown(token, chance) | own)
    return {
        "verification": trace["verification"],
        "kept": HOW_KEPT[trace["verification"]],
        "prompt": prompts[0],
        "tokens": tokens,
        "counts": {name: sum(token["origin"] == name for token in tokens) for name in ORIGINS},
    }


def shown(entry: dict[str, Any], acceptance: float | None) -> dict[str, str]:
    """A token or candidate as text: p and q of it, and the chance that it is kept."""
    return {
        "text": visible(entry["text"]),
        "id": str(entry["token"]),
        "p": number(entry["p"]),
        "q": number(entry["q"]),
        "acceptance": number(acceptance),
    }


def visible(text: str) -> str:
    """Text in one line, with signs for what has none: spaces at its ends, line breaks, tabs and other controls."""
    inner = text.strip(" ")
    if not inner:
        return "␣" * len(text)
    left, right = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
    marked = "".join({"\n": "↵", "\t": "⇥"}.get(x, x if x.isprintable() else f"\\u{ord(x):04x}") for x in inner)
    return "␣" * left + marked + "␣" * right


def spoken(text: str) -> str:
    """What a screen reader says: the words alone, or what white space there is."""
    if text.strip():
        return visible(text.strip())
    runs = [(len(list(run)), SPOKEN.get(sign, "control character")) for sign, run in groupby(text)]
    return " and ".join(f"{length} {name}{'s' if length > 1 else ''}" for length, name in runs) or "nothing"
