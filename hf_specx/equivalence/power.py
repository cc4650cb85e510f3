"""What a check would have found: for each kind of test the smallest deviation that it rejects with probability 0.9.

Each is said for the samples, the level and the variances of this very check. A test rejects beyond a limit; a mean has
to be 1.28 standard errors beyond it to be there with probability 0.9.
"""

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

from .result import NO_LAW, UNTOLD
from .settings import Settings


POWER = 0.9
BEYOND_LIMIT = NormalDist().inv_cdf(POWER)  # standard errors
CONFIDENCE = 0.95  # of the intervals that are shown
JudgedCell = dict[str, Any]  # a cell of a check
STATISTICS_SHOWN = {
    "surprisal": ("log p of its tokens, in the mean", "{:.2g} nats a token"),
    "top_1": ("how often the likeliest token comes", "{:.1%} of tokens"),
}
FORMS = {"perplexity": "{:.3g}", "distinct_1": "{:.2g}", "distinct_2": "{:.2g}", "length": "{:.2g} tokens"}


def power_of(settings: Settings, cells: dict[str, JudgedCell]) -> list[dict[str, Any]]:
    """The power of all tests of a check.

    Args:
        settings: of the check.
        cells: what it found, as `CheckResult` has it.

    Returns:
        For each kind of test of each verification "what" is tested, the "smallest" deviation that it would have
        rejected with probability `POWER`, a "note" on what that comes from, all in words, and its "values": the
        numbers by "batch N" or by measure, each None where too little was generated.
    """
    found = []
    for way in (way for way in settings.ways if way in settings.verifications):
        sizes = {f"batch {batch}": cells[f"{way}, batch {batch}"] for batch in settings.batch_sizes}
        if way in settings.in_distribution:
            found += [mean_power(way, sizes, name) for name in STATISTICS_SHOWN]
            found += [draft_power(way, sizes), texts_power(way, cells[way]["two_samples"])]
            found.append(quality_power(way, cells[way]["quality"], settings.new_tokens))
        else:
            found.append(tokens_power(way, sizes))
    return found


def tokens_power(way: str, sizes: dict[str, JudgedCell]) -> dict[str, Any]:
    """Of equal tokens, from the cells of each batch size."""
    cells = {size: cell["equality"] for size, cell in sizes.items()}
    values = {size: least_share(cell["tokens"]) for size, cell in cells.items()}
    counts = [cell["tokens"] for cell in cells.values()]
    note = f"{_listed(counts, '{}')} tokens compared; what rounding explains is no difference"
    rounding = max(cell["tolerance"] for cell in cells.values())
    what = f"{way}: tokens other than those of plain generate, by a logit gap above {rounding:.2g}"
    return _row(what, values, "{:.2%} of tokens", note)


def mean_power(way: str, sizes: dict[str, JudgedCell], name: str) -> dict[str, Any]:
    """Of one statistic of `sampled_law`, from the cells of each batch size."""
    cells, (what, form) = {size: cell["law"] for size, cell in sizes.items()}, STATISTICS_SHOWN[name]
    seen = {size: cell["statistics"].get(name) for size, cell in cells.items()}
    values = {
        size: known and least_mean(known["limit"], known["standard_error"], known["weight"])
        for size, known in seen.items()
    }
    counts = [f"{cell['comparisons']} statistics of {cell['positions']} tokens" for cell in cells.values()]
    return _row(f"{way}: {what}", values, form, f"one of {', '.join(counts)}")


def draft_power(way: str, sizes: dict[str, JudgedCell]) -> dict[str, Any]:
    """Of tokens that the draft overrates, from the cells of each batch size."""
    known = {size: cell["draft"] for size, cell in sizes.items() if cell["draft"] is not None}
    values: dict[str, float | None] = dict.fromkeys(sizes)
    for size, cell in known.items():
        if cell["p_value"] is not None:
            values[size] = least_mean(cell["limit"], cell["standard_error"], cell["positions"])
    shares = [cell["expected"] / cell["positions"] for cell in known.values()]
    note = f"expected are {_listed(shares, '{:.1%}')}" if shares else NO_LAW
    return _row(f"{way}: how often tokens come that the draft overrates", values, "{:.1%} of tokens", note)


def texts_power(way: str, cell: JudgedCell | None) -> dict[str, Any]:
    """Of `two_samples`, from its cell; None where there were too few texts."""
    what = f"{way}: texts of quite other tokens among its own"
    if cell is None:
        return {"what": what, "smallest": UNTOLD, "note": "too few texts for this level", "values": {}}
    number, rows = cell["least_replaced"], cell["rows"]
    smallest = UNTOLD if number is None else f"{number} of {rows} texts"
    note = f"by how often tokens come there and in {rows} plain texts"
    return {"what": what, "smallest": smallest, "note": note, "values": {"texts": number}}


def quality_power(way: str, cell: JudgedCell | None, new_tokens: int) -> dict[str, Any]:
    """Of `text_quality`, from its cell; None where there were too few texts. No text is longer than `new_tokens`."""
    what = f"{way}: quality compared with plain text"
    if cell is None:
        return {"what": what, "smallest": UNTOLD, "note": "too few texts for this level", "values": {}}
    found = {name: least_difference(measured["interval"], measured["widened"]) for name, measured in cell.items()}
    values = {name: value or None for name, value in found.items()}  # 0 where no text differs, as of equal lengths
    told = {name: UNTOLD if value is None else FORMS[name].format(value) for name, value in values.items()}
    if cell["length"]["reference"] + found["length"] > new_tokens:
        told["length"] += f" less ({new_tokens} is the most)"
    smallest = [f"{name} {said}" for name, said in told.items()]
    plain = [f"{name} {FORMS[name].format(measured['reference'])}" for name, measured in cell.items()]
    return {"what": what, "smallest": ", ".join(smallest), "note": f"plain has {', '.join(plain)}", "values": values}


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
    return (limit + BEYOND_LIMIT * standard_error) / weight


def least_replaced(rows: int, level: float, compare: Callable[[int], dict[str, float]]) -> int | None:
    """How many texts have to be replaced by ones without a token of the others; None where all are not enough.

    Args:
        rows: texts.
        level: of the statistic.
        compare: what `two_samples` says of it where so many are replaced.
    """
    known = compare(0)
    luck = known["statistic"] - known["expected"]  # of the draw that was made

    def rejects(number: int) -> bool:
        found = compare(number)
        return found["statistic"] - luck - BEYOND_LIMIT * found["deviation"] >= limit_of(found, level)

    low, high = 0, rows + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if rejects(middle) else (middle, high)
    return high if high <= rows else None


def limit_of(found: dict[str, float], level: float) -> float:
    """What a statistic exceeds by exchanges with a probability of `level`, by Pearson's curve of their three moments.

    For sums of squares, which these are, it is near to chi-square.
    """
    from scipy import stats

    curve = stats.pearson3(max(0.0, found["skewness"]))
    return found["expected"] + found["deviation"] * float(curve.isf(level))


def least_difference(interval: list[float], widened: list[float]) -> float:
    """The difference of two means.

    Args:
        interval: of the difference, of `CONFIDENCE`.
        widened: that of the test, which rejects if 0 is outside.
    """
    standard_error = (interval[1] - interval[0]) / 2 / NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return (widened[1] - widened[0]) / 2 + BEYOND_LIMIT * standard_error


def _row(what: str, values: dict[str, float | None], form: str, note: str) -> dict[str, Any]:
    known = {size: UNTOLD if value is None else form.format(value) for size, value in values.items()}
    smallest = "; ".join(f"{size}: {value}" for size, value in known.items())
    return {"what": what, "smallest": smallest, "note": note, "values": values}


def _listed(values: Any, form: str) -> str:
    return ", ".join(form.format(value) for value in values)
