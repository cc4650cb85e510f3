"""The result of a check: a verdict in lines, and all figures that it rests on."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from hf_specx.hub.folders import check_out

from .settings import POWER, Settings


RESULT_MARKER = '"comparisons": '  # in the file of each
PASSED, FAILED, NOT_TESTED = "passed", "failed", "not tested"
NEVER_CHOSEN = "which is never chosen"
SEEN_IN_WORDS = "9 of 10 such checks would reject"
MIN_P_VALUE = 1e-300  # a p-value of 0 has no logarithm
CHECK_LEGEND = (
    "figure: how far off, as -log10 of the p-value (3 is one in a thousand); larger is worse, and a test fails above "
    "its threshold"
)
IN_WORDS = {  # statistics of `sampled_law` and measures of `text_quality`, by the beginnings of their names
    "surprisal": "how unlikely its tokens are",
    "cdf": "where in the vocabulary its tokens are",
    "top_1": "how often the likeliest token comes",
    "rank_2_3": "how often the 2nd or 3rd likeliest token comes",
    "rank_4_10": "how often the 4th to 10th likeliest token comes",
    "rank_11_50": "how often the 11th to 50th likeliest token comes",
    "rank_51_on": "how often a token beyond the 50 likeliest comes",
    "half": "how often a token of a random half of the vocabulary comes",
    "repeated": "how often a token comes again",
    "overrated": "how often a token comes that the draft overrates",
    "distinct_1": "the share of distinct tokens",
    "distinct_2": "the share of distinct pairs of tokens",
}
WHERE = {"_first": " first", "_alternating": ", at even against odd places", "_after": ", by the token before it"}


def in_words(name: str) -> str:
    """A statistic or a measure in words."""
    subject = next((words for begins, words in IN_WORDS.items() if name.startswith(begins)), name)
    where = next((words for ends, words in WHERE.items() if name.endswith(ends)), "")
    return subject + where


class CheckLine(NamedTuple):
    """The verdict of one test."""

    what: str  # in words
    verdict: str  # "passed", "failed", or "not tested" where too little was generated
    figure: float | None  # how far off, larger is worse: -log10 of a p-value
    threshold: float  # a figure above it fails
    note: str  # what was seen
    sees: str = ""  # the least fault that 9 of 10 such checks reject, where that is known


@dataclass
class CheckResult:
    """The outcome of `check`; its attributes but the lines are values that JSON has."""

    lines: list[CheckLine]  # what was looked at, in words
    settings: dict[str, Any]
    provenance: dict[str, Any]
    prompts: list[str]
    # by "verification, batch N" the results there: "acceptance", and "equality" or "law"; by verification alone
    # "quality", None where there were too few texts
    cells: dict[str, dict[str, Any]]
    texts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # a few by each method, with prompt indices
    trace: dict[str, Any] = field(default_factory=dict)  # how one text came about; see `hf_specx.bench.trace.trace`
    pair: str = ""  # its name
    command: str = ""  # that made the check

    @property
    def passed(self) -> bool:
        """Whether no line has failed."""
        return all(line.verdict != FAILED for line in self.lines)

    @property
    def level(self) -> float:
        """The chance, at most, that a check of correct code fails in any of its tests."""
        return float(self.settings["level"])

    @property
    def comparisons(self) -> int:
        """The number of tests that share the level equally."""
        return Settings(**self.settings).comparisons

    def to_dict(self) -> dict[str, Any]:
        """All attributes and the verdict, as JSON has them."""
        verdict = {name: getattr(self, name) for name in ("passed", "level", "comparisons")}
        return verdict | vars(self) | {"lines": [line._asdict() for line in self.lines]}

    def save(self, path: str | Path) -> Path:
        """Write JSON in the form of `evaluate.save`; in a folder that is there the file is named by the time.

        A ValueError for a file that is there and is none of these.
        """
        now, path = datetime.now(), Path(path)
        file = path / now.strftime("result-%Y_%m_%d-%H_%M_%S.json") if path.is_dir() else path
        file.parent.mkdir(parents=True, exist_ok=True)
        check_out(file, RESULT_MARKER)
        where = {"_evaluate_version": version("evaluate"), "_python_version": sys.version}
        file.write_text(json.dumps(self.to_dict() | {"_timestamp": now.isoformat()} | where), encoding="utf-8")
        return file

    def __str__(self) -> str:
        lines = [f"{line.verdict}: {line.what} ({note_of(line)})" for line in self.lines]
        return "\n".join([*lines, summary(self)])


def note_of(line: CheckLine) -> str:
    """The note of a line, with the smallest fault that it would have shown."""
    return f"{line.note}. {SEEN_IN_WORDS}: {line.sees}" if line.sees else line.note


def summary(result: CheckResult) -> str:
    """The verdict in a sentence."""
    rate = f"a correct one fails in at most {result.level:g} of such checks"
    if result.passed:
        rounded = any(cell.get("equality", {}).get("differences") for cell in result.cells.values())
        exception = " but what rounding explains" if rounded else ""
        limit = "; faults smaller than the lines say may pass" if any(line.sees for line in result.lines) else ""
        return f"passed: no difference to plain generate was found{exception}; {rate}{limit}"
    failed = [line.what for line in result.lines if line.verdict == FAILED]
    return f"failed: {'; '.join(failed)}; {rate}"


def lines_of(settings: Settings, cells: dict[str, dict[str, Any]]) -> list[CheckLine]:
    """A line for each test of `CheckResult.cells`."""
    make_line: dict[str, Callable[..., CheckLine]] = {
        "equality": equality_line,
        "law": partial(distribution_line, temperature=settings.temperature),
        "quality": partial(quality_line, level=settings.level_per_test),
    }
    return [make_line[kind](name, cell[kind]) for name, cell in cells.items() for kind in cell if kind in make_line]


def equality_line(name: str, cell: dict[str, Any]) -> CheckLine:
    """The line that says whether tokens are those of plain `generate`, but for rounding."""
    what = f"{name}: the same tokens as plain generate"
    differences = cell["differences"]
    verdict = PASSED if cell["p_value"] >= cell["level"] else FAILED
    note = f"all {cell['rows']} rows are equal, {cell['tokens']} tokens"
    if differences:
        furthest = max(
            differences, key=lambda difference: math.inf if difference["gap"] is None else difference["gap"]
        )
        gap = NEVER_CHOSEN
        if furthest["gap"] is not None:
            gap = f"{furthest['gap']:.2g} nats below the best choice"
        if -1 in (furthest["plain"], furthest["ours"]):
            gap = "where one of the two texts has ended (-1)"
        note = f"{len(differences)} of {cell['rows']} rows differ; furthest off is row {furthest['row']} at token "
        note += f"{furthest['position']}: {furthest['plain']} became {furthest['ours']}, {gap}"
        if cell["gaps"] is not None:
            note += f". Over {cell['tokens']} tokens such gaps are {cell['gaps']:.2g} in sum, by rounding "
            note += f"{cell['expected_gaps']:.2g} on average, and as much with chance {cell['p_value']:.2g} at most"
    sees = ""
    if cell["detectable_gap"] is not None:
        sees = f"a verifier that keeps candidates {cell['detectable_gap']:.2g} nats below the best choice"
    return CheckLine(what, verdict, minus_log10(cell["p_value"]), minus_log10(cell["level"]), note, sees)


def minus_log10(chance: float) -> float:
    """-log10 of a p-value: the larger, the worse."""
    return 0.0 - math.log10(max(chance, MIN_P_VALUE))  # 0 for 1, and not -0


def standard_errors(chance: float) -> float:
    """The distance from the mean, in standard errors, at which a normal has this two-sided p-value."""
    return abs(NormalDist().inv_cdf(max(chance, MIN_P_VALUE) / 2))


def distribution_line(name: str, cell: dict[str, Any], temperature: float) -> CheckLine:
    """The line that says whether texts were sampled from the target's distribution."""
    note = f"{cell['positions']} tokens, looked at in {cell['comparisons']} ways"
    if not cell["comparisons"]:
        note = f"{cell['positions']} tokens, of which no other was possible"
    if cell["impossible"]:
        note += f"; {cell['impossible']} have probability 0, and not by rounding"
    elif cell["statistics"]:
        furthest = min(cell["statistics"], key=lambda key: cell["statistics"][key]["p_value"])
        statistic = cell["statistics"][furthest]
        side = "above" if statistic["z"] > 0 else "below"
        note += f"; furthest off is {in_words(furthest)}, {side} what is expected, as unlikely as "
        note += f"{standard_errors(statistic['p_value']):.1f} standard errors of a normal; a correct pair is as far "
        note += f"off in one of these ways with chance {cell['p_value']:.2g} at most"
    if cell["on_the_edge"]:
        note += f"; {cell['on_the_edge']} on the edge of what is kept, by rounding"
    sees = ""
    if cell["detectable_temperature"] is not None:
        low, high = (temperature * factor for factor in cell["detectable_temperature"])
        sees = f"a temperature of {low:.3g} or {high:.3g} in place of {temperature:g}"
    what = f"{name}: sampled from the target's distribution"
    verdict = PASSED if cell["passed"] else FAILED
    return CheckLine(what, verdict, minus_log10(cell["p_value"]), minus_log10(cell["level"]), note, sees)


def quality_line(name: str, cell: dict[str, Any] | None, level: float) -> CheckLine:
    """The line that says whether texts are as good as plain ones."""
    what = f"{name}: quality of plain text"
    threshold = minus_log10(level)
    if cell is None:
        return CheckLine(what, NOT_TESTED, None, threshold, "too few texts; ask for more samples")
    furthest = min(cell, key=lambda key: cell[key]["p_value"])
    measured = cell[furthest]
    chance = min(1.0, len(cell) * measured["p_value"])
    low, high = measured["interval"]
    note = f"of {len(cell)} measures furthest off is {in_words(furthest)}, {measured['prediction']:.3g} against "
    note += f"{measured['reference']:.3g} of plain text (95 % interval of the difference {low:.2g} to {high:.2g}); a "
    note += f"correct pair is as far off with chance {chance:.2g} at most"
    errors = standard_errors(level / len(cell)) + NormalDist().inv_cdf(POWER)  # the interval has 1.96 to each side
    seen = []
    for key, measure in cell.items():
        low, high = measure["interval"]
        size = (high - low) / 2 / 1.96 * errors
        seen.append(f"{in_words(key)} off by {size:.2g}")
    verdict = PASSED if chance >= level else FAILED
    return CheckLine(what, verdict, minus_log10(chance), threshold, note, ", or ".join(seen))
