"""What a check has found: a verdict in lines, and all figures that it rests on."""

import json
import math
import sys
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from .settings import UNITS, Settings


PASSED, FAILED, UNTOLD = "passed", "failed", "not told"
LEAST_CHANCE = 1e-300  # a p-value of 0 has no logarithm
CHECK_LEGEND = (
    "figure: how far off; larger is worse, and a test fails above its threshold. Of equal tokens it is the largest "
    "logit gap of a difference in units of rounding; of a distribution and of texts alike it is -log10 of the p-value "
    "(3 is one in a thousand); of quality it is how far the measure that is furthest off is on the way out of its "
    "interval, where 1 is the end"
)
TOO_FEW = "too few texts for this level; ask for more samples"
NO_LAW = "the draft has no distribution over the target's tokens"


class CheckLine(NamedTuple):
    """One thing that was looked at.

    Attributes:
        what: in words.
        verdict: "passed", "failed", or "not told" where too little was generated.
        figure: how far off, larger is worse: units of rounding, -log10 of a p-value, or how far the measure that is
            furthest off is on its way to the end of its interval (1 is there); None where there is none.
        threshold: a figure above it fails.
        note: what was seen.
    """

    what: str
    verdict: str
    figure: float | None
    threshold: float
    note: str


@dataclass
class CheckResult:
    """The outcome of `check`.

    Attributes:
        passed: whether no line has failed.
        lines: what was looked at, in words.
        level: chance that a check of correct code fails, at most, over all tests of this check together.
        comparisons: how many share it; each has level / comparisons.
        settings: of the check, as plain values.
        provenance: versions, device, precision, code.
        prompts: as given.
        cells: by "verification, batch N" what was found there: "acceptance", and "equality" or "law" and "draft" (None
            where it has no distribution over the target's tokens); by verification alone "two_samples" and "quality",
            None where there were too few texts.
        texts: by way to generate a few texts, as strings, each with the index of its prompt.
        trace: how one text came about; see `hf_specx.bench.trace.trace`.
        speed: as `hf_specx.equivalence.speed.measure_speed` has it; {} where no report was asked for.
        power: for each kind of test the smallest deviation that it would have rejected with probability 0.9; see
            `hf_specx.equivalence.power.power_of`.
        pair: what the pair is called; "" if that is not known.
        command: the command, or the call in Python, that made the check; "" if that is not known.
    """

    lines: list[CheckLine]
    settings: dict[str, Any]
    provenance: dict[str, Any]
    prompts: list[str]
    cells: dict[str, dict[str, Any]]
    texts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    trace: dict[str, Any] = field(default_factory=dict)
    speed: dict[str, Any] = field(default_factory=dict)
    power: list[dict[str, Any]] = field(default_factory=list)
    pair: str = ""
    command: str = ""

    @property
    def passed(self) -> bool:
        return all(line.verdict != FAILED for line in self.lines)

    @property
    def level(self) -> float:
        return float(self.settings["level"])

    @property
    def comparisons(self) -> int:
        return Settings(**self.settings).comparisons

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, which JSON takes."""
        known = {name: getattr(self, name) for name in ("passed", "level", "comparisons")}
        return known | vars(self) | {"lines": [line._asdict() for line in self.lines]}

    def save(self, path: str | Path) -> Path:
        """Write JSON in the form of `evaluate.save`, which cannot be used where git is not installed.

        Args:
            path: of a file, or of a folder that is there, in which the file is named by the time.
        """
        now, path = datetime.now(), Path(path)
        file = path / now.strftime("result-%Y_%m_%d-%H_%M_%S.json") if path.is_dir() else path
        file.parent.mkdir(parents=True, exist_ok=True)
        where = {"_evaluate_version": version("evaluate"), "_python_version": sys.version}
        file.write_text(json.dumps(self.to_dict() | {"_timestamp": now.isoformat()} | where), encoding="utf-8")
        return file

    def __str__(self) -> str:
        lines = [f"{line.verdict}: {line.what} ({line.note})" for line in self.lines]
        return "\n".join([*lines, summary(self)])


def summary(result: CheckResult) -> str:
    """The verdict in a sentence."""
    rate = f"a correct one fails in at most {result.level:g} of such checks"
    if result.passed:
        rounded = any(cell.get("equality", {}).get("differences") for cell in result.cells.values())
        but = " but what rounding explains" if rounded else ""
        return f"passed: no difference to plain generate was found{but}; {rate}"
    failed = [line.what for line in result.lines if line.verdict == FAILED]
    return f"failed: {'; '.join(failed)}; {rate}"


def lines_of(settings: Settings, cells: dict[str, dict[str, Any]]) -> list[CheckLine]:
    """A line for each thing that was looked at."""
    found = []
    for name, cell in cells.items():
        if "equality" in cell:
            found.append(equality_line(name, cell["equality"]))
        if "law" in cell:
            found += [distribution_line(name, cell["law"]), draft_line(name, cell["draft"], settings.share)]
        if "quality" in cell:
            found.append(texts_line(name, cell["two_samples"], settings.share))
            found.append(quality_line(name, cell["quality"]))
    return found


def equality_line(name: str, cell: dict[str, Any]) -> CheckLine:
    """Of `judge_equality`."""
    what, differences = f"{name}: the same tokens as plain generate", cell["differences"]
    if not differences:
        return CheckLine(what, PASSED, 0.0, UNITS, f"all {cell['rows']} rows are equal")
    note, limit = f"{len(differences)} of {cell['rows']} rows differ", f"where {cell['tolerance']:.2g} may be rounding"
    wrong = [difference for difference in differences if not difference["explained"]]
    if not wrong:
        figure = max(difference["units"] for difference in differences)
        gap = max(difference["gap"] for difference in differences)
        return CheckLine(
            what, PASSED, figure, UNITS, f"{note}, all by rounding: logit gaps of at most {gap:.2g} {limit}"
        )
    first, known = wrong[0], [difference["units"] for difference in wrong]
    gap = "no gap that could explain it" if first["gap"] is None else f"a logit gap of {first['gap']:.2g} {limit}"
    seen = f"row {first['row']} at token {first['position']}: {first['plain']} became {first['ours']}, {gap}"
    figure = None if None in known else max(known)
    return CheckLine(what, FAILED, figure, UNITS, f"{note}, {len(wrong)} not by rounding; {seen}")


def unlikely(chance: float) -> float:
    """A p-value as a figure of which more is worse: -log10 of it."""
    return 0.0 - math.log10(max(chance, LEAST_CHANCE))  # 0 for 1, and not -0


def seen_with(chance: float) -> str:
    """A p-value for people."""
    return f"p = {chance:.2g}"


def distribution_line(name: str, cell: dict[str, Any]) -> CheckLine:
    """Of `judge_distribution`."""
    note = f"{seen_with(cell['p_value'])}; {cell['positions']} tokens, {cell['comparisons']} statistics"
    if cell["impossible"]:
        note += f"; {cell['impossible']} tokens have probability 0, and not by rounding"
    elif cell["statistics"]:
        furthest = min(cell["statistics"], key=lambda key: cell["statistics"][key]["p_value"])
        note += f"; furthest off is {furthest}, z = {cell['statistics'][furthest]['z']:.1f}"
    if cell.get("on_the_edge"):
        note += f"; {cell['on_the_edge']} on the edge of what is kept, by rounding"
    verdict, figures = PASSED if cell["passed"] else FAILED, (unlikely(cell["p_value"]), unlikely(cell["level"]))
    return CheckLine(f"{name}: sampled from the target's distribution", verdict, *figures, note)


def draft_line(name: str, cell: dict[str, Any] | None, share: float) -> CheckLine:
    """Of `judge_draft`."""
    what = f"{name}: tokens that the draft overrates are as frequent as they should be"
    threshold = unlikely(share)
    if cell is None:
        return CheckLine(what, UNTOLD, None, threshold, NO_LAW)
    if cell["p_value"] is None:
        return CheckLine(what, UNTOLD, None, threshold, "it overrates none that could come, or nothing else could")
    note = f"{cell['observed']:.0f} of {cell['positions']}, expected {cell['expected']:.0f}, z = {cell['z']:.1f}"
    verdict = PASSED if cell["passed"] else FAILED
    return CheckLine(what, verdict, unlikely(cell["p_value"]), threshold, f"{seen_with(cell['p_value'])}; {note}")


def texts_line(name: str, cell: dict[str, Any] | None, share: float) -> CheckLine:
    """Of `judge_texts`."""
    what = f"{name}: texts alike those of plain generate"
    if cell is None:
        return CheckLine(what, UNTOLD, None, unlikely(share), TOO_FEW)
    note = f"{seen_with(cell['p_value'])}; {cell['comparisons']} permutation tests"
    figures = unlikely(cell["p_value"]), unlikely(cell["level"])
    return CheckLine(what, PASSED if cell["passed"] else FAILED, *figures, note)


def quality_line(name: str, cell: dict[str, Any] | None) -> CheckLine:
    """Of `judge_quality`."""
    what = f"{name}: quality of plain text"
    if cell is None:
        return CheckLine(what, UNTOLD, None, 1.0, TOO_FEW)
    furthest = max(cell, key=lambda key: reach(cell[key]))
    measured = cell[furthest]
    low, high = measured["interval"]
    seen = f"{furthest} {measured['prediction']:.3g}, plain {measured['reference']:.3g}"
    note = f"of {len(cell)} measures furthest off: {seen}, 95 % interval of the difference {low:.2g} to {high:.2g}"
    verdict = PASSED if all(each["within"] for each in cell.values()) else FAILED
    return CheckLine(what, verdict, reach(measured), 1.0, note)


def reach(measured: dict[str, Any]) -> float:
    """How far a difference is on its way to the end of its widened interval around 0: above 1 it does not hold 0."""
    difference, (low, high) = measured["difference"], measured["widened"]
    room = difference - low if difference > 0 else high - difference
    if difference == 0:
        return 0.0
    return abs(difference) / room if room > 0 else float("inf")
