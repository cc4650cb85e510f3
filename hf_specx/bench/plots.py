"""Figures of measured cells: speed-ups by batch, α, γ and temperature, and where the time of a round goes."""

from collections.abc import Iterable
from math import nan
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

from .cells import AUTO_NUMBERS, FIXED, GAMMA, Measured, median_of


matplotlib.use("Agg")  # there may be no screen
BY_BATCH = (f"{FIXED}-compiled", FIXED, f"coupled-{GAMMA}", "block-auto", "coupled-auto", f"stock-{GAMMA}", "stock")
FIGURE_SIZE = (7.0, 4.2)  # inches of a figure


def plot(cells: Iterable[Measured], folder: Path) -> list[Path]:
    """Write the figures that these cells have data for.

    Args:
        cells: measured, as results have them.
        folder: made if it is not there.

    Returns:
        The files, SVG.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = [cell for cell in cells if "failed" not in cell]
    figures = {
        "batch": _by_batch(known),
        "alpha": _by_alpha(known),
        "gamma": _by_gamma(known),
        "temperature": _by_temperature(known),
        "rounds": _of_rounds(known),
    }
    written = []
    for name, figure in figures.items():
        if figure is not None:
            written.append(folder / f"{name}.svg")
            figure.tight_layout()
            figure.savefig(written[-1], metadata={"Date": None}, bbox_inches="tight")
            pyplot.close(figure)
    return written


def _label(cell: Measured) -> str:
    own = cell["cell"]
    kind = " (synthetic)" if cell.get("pair", {}).get("synthetic") else ""
    return f"{own['pair']}{kind} {own['dtype']}"


def _axes(x: str, y: str, title: str) -> Any:
    axes = pyplot.figure(figsize=FIGURE_SIZE).add_subplot()
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.3)
    return axes


def _finish(axes: Any) -> Any:
    """The figure, with a legend and a line at plain's speed; None where nothing was drawn."""
    if not axes.has_data():
        pyplot.close(axes.figure)
        return None
    axes.axhline(1.0, color="grey", linestyle=":", linewidth=1)
    axes.legend(fontsize="x-small")
    return axes.figure


def _by_batch(cells: list[Measured]) -> Any:
    axes = _axes("batch", "times as fast as plain generate", "Speed-up by batch")
    chosen = [cell for cell in cells if cell["cell"]["experiment"] in ("speed", "quick", "defaults", "compiled")]
    for label, experiment in sorted({(_label(c), c["cell"]["experiment"]) for c in chosen}):
        own = [c for c in chosen if (_label(c), c["cell"]["experiment"]) == (label, experiment)]
        own.sort(key=lambda c: c["cell"]["batch"])
        for contender in BY_BATCH:
            points = [(c["cell"]["batch"], y) for c in own if (y := median_of(c, contender, "speedup")) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=f"{label}: {contender}")
    return _finish(axes)


def _by_alpha(cells: list[Measured]) -> Any:
    """Every cell of ours by the acceptance that it met, measured and as the forwards allow."""
    axes = _axes("α", "times as fast as plain generate", "Speed-up by acceptance")
    points = [
        (alpha, speedup, median_of(cell, name, "forward_limited_speedup"))
        for cell in cells
        for name in cell["contenders"]
        if (alpha := median_of(cell, name, "alpha")) is not None
        and (speedup := median_of(cell, name, "speedup")) is not None
    ]
    if points:
        axes.scatter([x for x, _, _ in points], [y for _, y, _ in points], label="measured")
    limits = [(x, y) for x, _, y in points if y is not None]
    if limits:
        axes.scatter(*zip(*limits, strict=True), marker="_", label="limited by the forwards")
    return _finish(axes)


def _by_gamma(cells: list[Measured]) -> Any:
    axes = _axes("γ", "times as fast as plain generate", "Speed-up by candidates a round; lines across: auto")
    for cell in cells:
        if cell["cell"]["experiment"] != "auto":
            continue
        known = [(g, y) for g in AUTO_NUMBERS if (y := median_of(cell, f"block-{g}", "speedup")) is not None]
        automatic = median_of(cell, "block-auto", "speedup")
        if known:
            (line,) = axes.plot(*zip(*known, strict=True), marker="o", label=_row(cell))
            if automatic is not None:
                axes.axhline(automatic, color=line.get_color(), linestyle="--", linewidth=1)
    return _finish(axes)


def _by_temperature(cells: list[Measured]) -> Any:
    """Acceptance and speed-up in one picture, latency in another one next to it."""
    chosen = [cell for cell in cells if cell["cell"]["experiment"] == "temperature"]
    if not chosen:
        return None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(1.6 * FIGURE_SIZE[0], FIGURE_SIZE[1]))
    left.set(xlabel="temperature (0 is greedy)", title="α, and times as fast as plain generate")
    right.set(xlabel="temperature (0 is greedy)", ylabel="ms a token and row", title="Latency")
    for label in sorted({_row(cell) for cell in chosen}):
        own = sorted((c for c in chosen if _row(c) == label), key=lambda c: c["cell"]["temperature"])
        temperatures = [c["cell"]["temperature"] for c in own]
        for key in ("alpha", "speedup"):
            values = [median_of(c, "block-auto", key) for c in own]
            left.plot(temperatures, [nan if v is None else v for v in values], marker="o", label=f"{label}: {key}")
        for contender in ("plain", "block-auto"):
            rates = [median_of(c, contender, "tokens_per_second") for c in own]
            latencies = [1000 * c["cell"]["batch"] / r if r else nan for c, r in zip(own, rates, strict=True)]
            right.plot(temperatures, latencies, marker="o", label=f"{label}: {contender}")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    return figure


def _row(cell: Measured) -> str:
    return f"{_label(cell)}, batch {cell['cell']['batch']}"


def _of_rounds(cells: list[Measured]) -> Any:
    """A bar for each cell: its phases one after another, as times of the bare forwards."""
    own = [
        (f"{_label(c)}\nbatch {c['cell']['batch']}, {name}", c["contenders"][name])
        for c in cells
        if c["cell"]["experiment"] in ("speed", "quick", "long")
        for name in (*BY_BATCH[1:3], f"token-{GAMMA}", *BY_BATCH[3:5])
        if "phases_per_round" in c["contenders"].get(name, {}) and "bare" in c["contenders"][name]
    ]
    if not own:
        return None
    figure, axes = pyplot.subplots(figsize=(FIGURE_SIZE[0], 1.5 + 0.4 * len(own)))
    axes.set(xlabel="times the bare forwards of a round", title="Where a round's time goes")
    scales = [noted["round_over_bare"]["median"] / noted["seconds_per_round"]["median"] for _, noted in own]
    left = [0.0] * len(own)
    for phase in dict.fromkeys(name for _, noted in own for name in noted["phases_per_round"]):
        widths = [noted["phases_per_round"].get(phase, 0.0) * s for (_, noted), s in zip(own, scales, strict=True)]
        axes.barh([label for label, _ in own], widths, left=left, label=phase)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.axvline(1.0, color="grey", linestyle=":", label="bare forwards")
    axes.tick_params(axis="y", labelsize="x-small")
    axes.invert_yaxis()
    axes.legend(fontsize="x-small", ncol=5, loc="lower right", bbox_to_anchor=(1.0, 1.12), borderaxespad=0.0)
    return figure
