"""The table of `quality_table.py` as markdown, and its insertion into a page."""

from collections.abc import Sequence
from typing import Any

from train_pair import HELD_OUT

from hf_specx.bench.ways import PLAIN_NAME
from hf_specx.hub.markdown import row


MEASURES = {"perplexity": ("perplexity", 2), "rougeL": ("ROUGE-L", 3), "distinct_2": ("distinct-2", 3)}  # digits
HEADINGS = [heading for heading, _ in MEASURES.values()]


def caption(found: dict[str, Any]) -> str:
    """A paragraph on how the figures were made."""
    made, files, settings = found["made"], found["files"], found["settings"]
    return (
        f"{settings['prompts']} prompts, the first {settings['prompt_tokens']} tokens of functions in {files['used']} "
        f"of the {files['held_out']} held-out files (one in {HELD_OUT} by a hash, of {files['all']}) of Python "
        f"{made['python']}; at most {settings['new_tokens']} new tokens. Nucleus: T = {settings['temperature']}, "
        f"top-p {settings['top_p']}. {made['dtype']} on {made['device']}, torch {made['torch']}, transformers "
        f"{made['transformers']}. In brackets 95 % intervals: "
        "bootstraps over prompts; exact ones of shares."
    )


def shown(value: float, interval: Sequence[float], form: str) -> str:
    low, high = (format(end, form) for end in interval)
    return f"{format(value, form)} [{low}, {high}]"


def tables(found: dict[str, Any]) -> str:
    """Tables of quality, and of the differences between speculative and plain text, by batch size."""
    lines, differences = [], []
    for each in found["rows"]:
        first = [each["way"], str(each["batch"])]
        measured = [(each["quality"][name], digits) for name, (_, digits) in MEASURES.items()]
        means = [shown(m["prediction"], m["prediction_interval"], f".{digits}f") for m, digits in measured]
        equal = ""
        if each["contender"] != PLAIN_NAME:
            equal = shown(**each["equal"], form=".0%")
            apart = [shown(m["difference"], m["interval"], f"+.{digits}f") for m, digits in measured]
            differences.append(row([*first, *apart]))
        lines.append(row([*first, *means, equal]))
    above = headed("text", "batch", *HEADINGS, "equal to plain")
    below = headed("minus plain", "batch", *HEADINGS)
    return "\n".join([caption(found), "", *above, *lines, "", *below, *differences])


def headed(*names: str) -> list[str]:
    """The first two lines of a table; all columns except the first hold numbers."""
    return [row(names), row(["---"] + ["---:"] * (len(names) - 1))]


def replaced(page: str, text: str, script: str = "quality_table.py") -> str:
    """The page with its text between the two markers of a script replaced.

    Raises:
        ValueError: the page does not have one of each marker, in their order.
    """
    first, last = (f"<!-- {script} {end} -->" for end in ("begins", "ends"))
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end) or page.count(first) + page.count(last) > 2:
        raise ValueError(f"the page must have one {first} and after it one {last}; write them into it.")
    return f"{before}{first}\n{text}\n{last}{after}"
