"""Figures of a check as PNG, with what they show in words: acceptance by position, accepted lengths, speed by γ."""

import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple


PNG_SIZE, DPI = (4.4, 3.5), 200  # inches, so that text can be read where a phone shows the whole width
Z = 1.96  # of 95 % intervals
VERIFICATION_STYLES = {  # by verification: colour, marker, hatch; colours alone tell nothing
    "greedy": ("#0072b2", "o", ""),
    "coupled": ("#b85c00", "s", "///"),
    "token": ("#00795a", "^", "..."),
    "block": ("#a0308a", "D", "xxx"),
}
MEASURED, LIMIT, THEOREM = "measured", "limited by the forwards", "Theorem 3.8"


class Plot(NamedTuple):
    """A figure.

    Attributes:
        name: of its file, without .png.
        alt: what it shows, for those who do not see it.
        caption: how to read it.
        header, rows: the numbers in it, as text.
        png: the picture, `PNG_SIZE` times `DPI` pixels.
    """

    name: str
    alt: str
    caption: str
    header: list[str]
    rows: list[list[str]]
    png: bytes


def plots(found: dict[str, Any]) -> list[Plot]:
    """The figures that there is data for.

    Args:
        found: `CheckResult.to_dict()`.

    Raises:
        ImportError: without matplotlib.
    """
    cells = {name: cell["acceptance"] for name, cell in found["cells"].items() if "acceptance" in cell}
    made = []
    if any(cell["rounds"] for cell in cells.values()):
        made += [acceptance_plot(cells), lengths_plot(cells)]
    if found["speed"]:
        made.append(speed_plot(found["speed"]))
    return made


def acceptance_plot(cells: dict[str, dict[str, Any]]) -> Plot:
    """How often a candidate is kept whose predecessors were, by position and verification."""
    figure, axes = _figure("Acceptance by position", "candidate of a round", "kept, of those judged there")
    shares_shown = []
    pooled = by_verification(cells)
    for index, (name, counts) in enumerate(pooled.items()):
        colour, marker, _ = VERIFICATION_STYLES[name]
        kept = list(zip(counts["accepted_per_position"], counts["judged_per_position"], strict=True))
        known = [(i, *interval(k, n)) for i, (k, n) in enumerate(kept, 1) if n]
        if not known:
            continue
        aside = 0.07 * (index - (len(pooled) - 1) / 2)
        x, shares = [i + aside for i, *_ in known], [share for _, share, _, _ in known]
        ends = [[share - low for _, share, low, _ in known], [high - share for _, share, _, high in known]]
        axes.errorbar(x, shares, ends, color=colour, marker=marker, markersize=4, linewidth=1, label=name)
        shares_shown.append(f"{name} {shares[0]:.2f} at the first position and {shares[-1]:.2f} at the last")
    axes.set_ylim(0, 1.02)
    axes.set_xticks(range(1, _longest(cells) + 1))
    return Plot(
        "acceptance",
        f"Share of judged candidates that were kept, by position in the round: {'; '.join(shares_shown)}.",
        "How often a candidate was kept of those that were judged at its position, all batch sizes together; bars are "
        "95 % intervals, as if rounds did not depend on each other. α is the mean of the sum of min(p, q) over the "
        "vocabulary; of greedy text it is the share of matches.",
        ["", "α", "tokens a round", *(f"kept at {i}" for i in range(1, _longest(cells) + 1))],
        [_acceptance_row(name, cell) for name, cell in cells.items()],
        _png(figure),
    )


def _acceptance_row(name: str, cell: dict[str, Any]) -> list[str]:
    shares = zip(cell["accepted_per_position"], cell["judged_per_position"], strict=True)
    kept = [f"{k / n:.3f} of {n}" if n else "-" for k, n in shares]
    return [name, f"{cell['alpha']:.3f}", f"{cell['tokens_per_round']:.2f}", *kept]


def lengths_plot(cells: dict[str, dict[str, Any]]) -> Plot:
    """How many candidates rounds kept, by verification."""
    figure, axes = _figure("Accepted candidates of a round", "candidates kept", "share of the rounds")
    pooled, shares_shown = by_verification(cells), []
    width = 0.8 / len(pooled)
    for index, (name, counts) in enumerate(pooled.items()):
        colour, _, hatch = VERIFICATION_STYLES[name]
        lengths, left = counts["accepted_lengths"], (index - (len(pooled) - 1) / 2) * width
        shares = [number / max(1, sum(lengths)) for number in lengths]
        x = [n + left for n in range(len(lengths))]
        axes.bar(x, shares, width, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5, label=name)
        shares_shown.append(f"{name} none in {shares[0]:.0%} and {len(shares) - 1} in {shares[-1]:.0%}")
    longest = _longest(cells)
    axes.set_xticks(range(longest + 1))
    return Plot(
        "lengths",
        f"Share of rounds by the number of candidates that were kept: {'; '.join(shares_shown)}.",
        "How many candidates of a round were kept, all batch sizes together. The last rounds of a text may have had "
        "fewer than the others.",
        ["rounds that kept", *map(str, range(longest + 1))],
        [[name, *map(str, cell["accepted_lengths"])] for name, cell in cells.items()],
        _png(figure),
    )


def speed_plot(speed: dict[str, Any]) -> Plot:
    """Predicted and measured speed-up over γ."""
    figure, axes = _figure("Speed-up by candidates a round", "γ, candidates a round", "times as fast as plain")
    numbers = [each["num_draft_tokens"] for each in speed["numbers"]]
    measured = [each["speedup"] for each in speed["numbers"]]
    medians = [each["times_plain"] for each in speed["numbers"]]
    both = list(zip(medians, measured, strict=True))
    # a ratio of medians may lie outside of the ratios within turns
    ends = [[max(0.0, x - each["min"]) for x, each in both], [max(0.0, each["max"] - x) for x, each in both]]
    limits = [each["forward_limited"] for each in speed["numbers"]]
    theorem = [each["expected"] for each in speed["numbers"]]
    axes.errorbar(numbers, medians, ends, color="#a0308a", marker="D", markersize=4, label=MEASURED)
    axes.plot(numbers, limits, color="#0072b2", marker="o", markersize=3, linestyle="--", label=LIMIT)
    axes.plot(numbers, theorem, color="#555555", linestyle=":", label=THEOREM)
    axes.axhline(1.0, color="#555555", linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.set_xticks(numbers)
    best = numbers[medians.index(max(medians))]
    return Plot(
        "speed",
        f"Speed as times that of plain generate, for 1 to {numbers[-1]} candidates a round: measured "
        f"{min(medians):.2f} to {max(medians):.2f}, best at {best}; limited by the forwards {min(limits):.2f} to "
        f"{max(limits):.2f}; by Theorem 3.8 {min(theorem):.2f} to {max(theorem):.2f}.",
        _speed_caption(speed),
        ["γ", MEASURED, "least in a turn", "largest in a turn", LIMIT, THEOREM, "tokens a round", "tokens/s"],
        [_speed_row(each) for each in speed["numbers"]],
        _png(figure),
    )


def _speed_caption(speed: dict[str, Any]) -> str:
    rows = "1 row" if speed["batch"] == 1 else f"{speed['batch']} rows"
    return (
        f"A measurement, and no part of the verdict: {speed['repeats']} runs of each number and of plain generate in "
        f"turns, {rows} of at most {speed['new_tokens']} new tokens on the prompts of this check, "
        f"{speed['verification']} verification. Points compare medians of tokens a second, bars are the least and the "
        "largest ratio within a turn. Theorem 3.8 has "
        f"α = {speed['alpha']:.3f} and c = {speed['cost_coefficient']:.3f}, and takes a forward over γ + 1 tokens to "
        "be as long as one over a single token; the limit has the forwards as they were timed before these runs, and "
        "the tokens a round that were met: it counts no time but the forwards', in plain generate as well, so that "
        f"what is measured may be above it. Plain generate: {speed['plain']['median']:.1f} tokens a second."
    )


def _speed_row(each: dict[str, Any]) -> list[str]:
    ratios = [each["times_plain"], each["speedup"]["min"], each["speedup"]["max"]]
    ratios += [each["forward_limited"], each["expected"], each["tokens_per_round"]]
    rate = each["tokens_per_second"]["median"]
    return [str(each["num_draft_tokens"]), *(f"{x:.2f}" for x in ratios), f"{rate:.1f}"]


def by_verification(cells: dict[str, dict[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """The counts of rounds of each verification over all batch sizes."""
    pooled: dict[str, dict[str, list[int]]] = {}
    for name, cell in cells.items():
        known = pooled.setdefault(name.split(",")[0], {})
        for key in ("accepted_lengths", "judged_per_position", "accepted_per_position"):
            known[key] = _sums(known.get(key, []), cell[key])
    return pooled


def interval(kept: int, judged: int) -> tuple[float, float, float]:
    """A share and the ends of Wilson's interval of 95 %, which are within 0 and 1."""
    middle, weight = (kept + Z**2 / 2) / (judged + Z**2), Z / (judged + Z**2)
    half = weight * math.sqrt(kept * (judged - kept) / judged + Z**2 / 4)
    share = kept / judged
    return share, max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def _sums(left: Sequence[int], right: Sequence[int]) -> list[int]:
    longest = max(len(left), len(right))
    return [sum(each[i] for each in (left, right) if i < len(each)) for i in range(longest)]


def _longest(cells: dict[str, dict[str, Any]]) -> int:
    return max(len(cell["accepted_per_position"]) for cell in cells.values())


def _figure(title: str, x: str, y: str) -> tuple[Any, Any]:
    """A figure of its own; pyplot, which keeps those that it has made, is left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=PNG_SIZE, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x, fontsize=10)
    axes.set_ylabel(y, fontsize=10)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _png(figure: Any) -> bytes:
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()
