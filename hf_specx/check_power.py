"""What a check would have seen: for each kind of test the smallest deviation that it rejects with probability 0.9.

Each is said for the samples, the level and the variances of this very check. A test rejects beyond a limit; a mean has
to be 1.28 standard errors behind it to be there with probability 0.9.
"""

import math
from statistics import NormalDist
from typing import Any

from .check_settings import Settings


POWER = 0.9
MARGIN = NormalDist().inv_cdf(POWER)  # standard errors
CONFIDENCE = 0.95  # of the intervals that are shown
UNKNOWN = "not told"
Cell = dict[str, Any]
LAW = {
    "surprisal": ("log p of its tokens, in the mean", "{:.2g} nats a token"),
    "top_1": ("how often the likeliest token comes", "{:.1%} of tokens"),
}
FORMS = {"perplexity": "{:.3g}", "distinct_1": "{:.2g}", "distinct_2": "{:.2g}", "length": "{:.2g} tokens"}


def power_of(settings: Settings, cells: dict[str, Cell]) -> list[dict[str, Any]]:
    """The power of all tests of a check.

    Args:
        settings: of the check.
        cells: what it found, as `CheckResult` has it.

    Returns:
        For each kind of test of each verification "what" is tested, the "smallest" deviation that it would have
        rejected with probability `POWER`, a "note" on what that comes from, all in words, and its "values": the numbers
        by "batch N" or by measure, each None where it cannot be told.
    """
    found = []
    for way in (way for way in settings.ways if way in settings.verifications):
        sizes = {f"batch {batch}": cells[f"{way}, batch {batch}"] for batch in settings.batch_sizes}
        if way in settings.lawful:
            found += [law_power(way, sizes, name) for name in LAW]
            found += [draft_power(way, sizes), texts_power(way, cells[way]["two_samples"], settings.share)]
            found.append(quality_power(way, cells[way]["quality"]))
        else:
            found.append(tokens_power(way, sizes))
    return found


def tokens_power(way: str, sizes: dict[str, Cell]) -> dict[str, Any]:
    """Of equal tokens, from the cells of each batch size."""
    counts = {size: cell["equality"]["tokens"] for size, cell in sizes.items()}
    values = {size: least_share(count) for size, count in counts.items()}
    note = f"{_listed(counts.values(), '{}')} tokens compared; what rounding explains is no difference"
    return _row(f"{way}: tokens other than those of plain generate", values, "{:.2%} of tokens", note)


def law_power(way: str, sizes: dict[str, Cell], name: str) -> dict[str, Any]:
    """Of one statistic of `sampled_law`, from the cells of each batch size."""
    laws, (what, form) = {size: cell["law"] for size, cell in sizes.items()}, LAW[name]
    seen = {size: law["statistics"].get(name) for size, law in laws.items()}
    values = {size: statistic and least_mean(**_law(statistic)) for size, statistic in seen.items()}
    counts = [f"{law['comparisons']} statistics of {law['positions']} tokens" for law in laws.values()]
    return _row(f"{way}: {what}", values, form, f"one of {', '.join(counts)}")


def draft_power(way: str, sizes: dict[str, Cell]) -> dict[str, Any]:
    """Of tokens that the draft overrates, from the cells of each batch size."""
    cells = {size: cell["draft"] for size, cell in sizes.items()}
    values = {
        size: None
        if cell["p_value"] is None
        else least_mean(cell["limit"], cell["standard_error"], cell["positions"])
        for size, cell in cells.items()
    }
    shares = [cell["expected"] / cell["positions"] for cell in cells.values()]
    note = f"expected are {_listed(shares, '{:.1%}')}"
    return _row(f"{way}: how often tokens come that the draft overrates", values, "{:.1%} of tokens", note)


def texts_power(way: str, cell: Cell | None, share: float) -> dict[str, Any]:
    """Of `two_samples`, from its cell; None where there were too few texts."""
    what = f"{way}: how far its texts are from plain ones, by their frequencies"
    if cell is None:
        return {"what": what, "smallest": UNKNOWN, "note": "too few texts for this level", "values": {}}
    level, values, chance = share / max(1, cell["comparisons"]), {}, []
    for name, statistic in cell["statistics"].items():
        values[name] = least_distance(statistic["expected"], statistic["deviation"], level)
        chance.append(f"{name.replace('_', ' ')} {statistic['expected']:.2g}")
    told = ", ".join(f"{name.replace('_', ' ')} {value:.2g}" for name, value in values.items())
    note = f"by chance {', '.join(chance)}; 0 is the same, 2 (of lengths 1) nothing in common"
    return {"what": what, "smallest": told or UNKNOWN, "note": note if told else "all are alike", "values": values}


def quality_power(way: str, cell: Cell | None) -> dict[str, Any]:
    """Of `text_quality`, from its cell; None where there were too few texts."""
    what = f"{way}: quality beside plain text"
    if cell is None:
        return {"what": what, "smallest": UNKNOWN, "note": "too few texts for this level", "values": {}}
    values = {name: least_difference(measured["interval"], measured["widened"]) for name, measured in cell.items()}
    told = [f"{name} {FORMS[name].format(value)}" for name, value in values.items()]
    plain = [f"{name} {FORMS[name].format(measured['reference'])}" for name, measured in cell.items()]
    return {"what": what, "smallest": ", ".join(told), "note": f"plain has {', '.join(plain)}", "values": values}


def least_share(tokens: int) -> float | None:
    """How many of the tokens have to be wrong, each by itself, for any among so many to be, with `POWER`."""
    return 1 - (1 - POWER) ** (1 / tokens) if tokens else None


def least_mean(limit: float, standard_error: float, weight: float) -> float:
    """The deviation of a mean over tokens.

    Args:
        limit: of the deviation of the sum, beyond which a test rejects.
        standard_error: of the sum.
        weight: tokens of the sum.
    """
    return (limit + MARGIN * standard_error) / weight


def least_distance(expected: float, deviation: float, level: float) -> float:
    """The mean of a statistic that is a distance, of which exchanges give this mean and standard deviation.

    It is taken for a multiple of chi-square (Satterthwaite's approximation): the two moments give the limit, and where
    the distance is larger, it varies more.
    """
    from scipy import stats

    if deviation == 0:
        return expected
    limit = float(stats.gamma.isf(level, (expected / deviation) ** 2, scale=deviation**2 / expected))
    # the root of: mean = limit + MARGIN * deviation * sqrt(1 + 2 (mean - expected) / expected)
    over, square = limit - expected, (MARGIN * deviation) ** 2
    half = over + square / expected
    return expected + half + math.sqrt(half**2 - over**2 + square)


def least_difference(interval: list[float], widened: list[float]) -> float:
    """The difference of two means.

    Args:
        interval: of the difference, of `CONFIDENCE`.
        widened: that of the test, which rejects if 0 is outside.
    """
    standard_error = (interval[1] - interval[0]) / 2 / NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return (widened[1] - widened[0]) / 2 + MARGIN * standard_error


def _law(statistic: dict[str, float]) -> dict[str, float]:
    return {name: statistic[name] for name in ("limit", "standard_error", "weight")}


def _row(what: str, values: dict[str, float | None], form: str, note: str) -> dict[str, Any]:
    known = {size: UNKNOWN if value is None else form.format(value) for size, value in values.items()}
    smallest = "; ".join(f"{size}: {value}" for size, value in known.items())
    return {"what": what, "smallest": smallest, "note": note, "values": values}


def _listed(values: Any, form: str) -> str:
    return ", ".join(form.format(value) for value in values)
