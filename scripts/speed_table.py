"""Measure the README's table of speed once more, add the run to those of earlier hours, and write the table.

Each case compares methods to generate in turns, on the target in the package: plain `generate`, transformers' assisted
generation, and this package. Like stands beside like: assisted generation and ours have the same draft, and compiled
rounds of ours stand beside compiled plain text. What assisted generation does not take, our head, has its own row.
The table shows for each row the least and the largest median over the runs of the file by the same machine and
versions, so that it says how much hours differ.
"""

import inspect
import json
import textwrap
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from outlines import from_transformers
from outlines.backends import get_json_schema_logits_processor
from rich.progress import track

from hf_specx import DraftTargetPair
from hf_specx.bench.inputs import Inputs, encode, prompts_of_length
from hf_specx.bench.store import provenance
from hf_specx.bench.timed_methods import TimedMethod
from hf_specx.bench.timer import Timer, Timing
from hf_specx.hub.known_pairs import DRAFT_MODEL, embedded_folder


MODEL, HEAD, TEXT = "a draft model", "a head", "the text itself"  # who drafts
BEGIN, END = "<!-- speed_table.py begins -->", "<!-- speed_table.py ends -->"
PROPERTIES: dict[str, Any] = {
    "name": {"type": "string", "maxLength": 12},
    "size": {"enum": ["small", "medium", "large"]},
    "temperature_in_degrees_celsius": {"type": "integer"},
    "measured": {"type": "boolean"},
}
OBJECT = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES), "additionalProperties": False}
OF_A_ROW = ("label", "draft", "batch")
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")  # that change these figures
COPIED, BEGUN = 160, 32  # tokens of a prompt, of which the last ones repeat the first
WIDTH = 32  # tokens of a prompt where forwards are compiled: for each other width plain text compiles anew


class Kind(NamedTuple):
    """A text: plain `generate` for it; by who drafts, transformers' method and ours; options of `generate`."""

    plain: str
    methods: dict[str, tuple[str | None, str]]
    options: dict[str, Any]


SAMPLED, COMPILED, JSON = "sampled code", "sampled code, compiled beside compiled plain", "JSON of a schema, greedily"
COPY = "a file written once more, greedily"
DRAWN = {"do_sample": True, "top_k": 0}
DRAFTED = {MODEL: ("assisted", "block-auto"), HEAD: (None, "block-auto")}
KINDS = {
    SAMPLED: Kind("plain", DRAFTED, DRAWN),
    COMPILED: Kind("plain-compiled", dict.fromkeys(DRAFTED, (None, "block-5-compiled")), DRAWN),
    COPY: Kind("plain", {TEXT: ("lookup-10", "suffix-auto")}, {}),
    JSON: Kind("plain", DRAFTED, {}),
}


class Case(NamedTuple):
    """What is generated, the precision of both models, and the batch size: a row of the table for each draft."""

    kind: str
    dtype: str
    batch: int


CASES = [Case(kind, t, rows) for kind in (SAMPLED, COMPILED) for t in ("float32", "bfloat16") for rows in (1, 8)]
CASES += [Case(kind, "float32", batch) for kind in (COPY, JSON) for batch in (1, 8)]


class WithSchema(TimedMethod):
    """A method whose text is JSON; each call has a new processor, as each text needs one."""

    def __init__(self, name: str, pair: DraftTargetPair, draft: Any):
        super().__init__(name, pair.target, draft)
        self.outlines = from_transformers(pair.target, pair.tokenizer)  # type: ignore[arg-type]

    def __call__(self, inputs: Inputs, options: dict[str, Any]) -> torch.Tensor:
        processor = get_json_schema_logits_processor("outlines_core", self.outlines, json.dumps(OBJECT))
        return super().__call__(inputs, options | {"logits_processor": [processor]})


def copied_prompts(pair: DraftTargetPair, rows: int) -> Inputs:
    """The beginning of a file of the standard library, and of it once more, in every row."""
    assert pair.tokenizer is not None
    source = pair.tokenizer(inspect.getsource(textwrap))["input_ids"]
    ids = torch.tensor([source[: COPIED - BEGUN] + source[:BEGUN]] * rows)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def timings(case: Case, pair: Any, model: Any, repeats: int, new_tokens: int) -> dict[tuple[str, str], Timing]:
    """Those of plain text, ("", name), and of each method, (who drafts, name); assisted takes one row alone."""
    kind, drafts = KINDS[case.kind], {MODEL: model, HEAD: pair.draft, TEXT: None, "": None}
    methods = [("", kind.plain)]
    for who, (assisted, ours) in kind.methods.items():
        if assisted is not None and case.batch == 1:
            methods.append((who, assisted))
        methods.append((who, ours))

    def make_method(number: str) -> TimedMethod:
        who, name = methods[int(number)]
        if case.kind == JSON:
            return WithSchema(name, pair, drafts[who])
        return TimedMethod(name, pair.target, drafts[who])

    numbers = [str(number) for number in range(len(methods))]
    options = kind.options | {"max_new_tokens": new_tokens}
    batches = batches_for(case, pair, repeats, new_tokens)
    timer = Timer(make_method, batches, options, range(repeats), may_fail=numbers)
    timed = {methods[int(number)]: timing for number, timing in timer.time(numbers).items()}
    for (who, name), timing in timed.items():
        if timing.error is not None and not name.startswith("assisted"):
            raise RuntimeError(f"{case}: {name} with {who} failed with {timing.error}")
    return timed


def batches_for(case: Case, pair: DraftTargetPair, repeats: int, new_tokens: int) -> list[Inputs]:
    """Prompts of each turn: as they are, where nothing is compiled for their width."""
    if case.kind == COPY:
        return [copied_prompts(pair, case.batch)]
    if case.kind == COMPILED:
        return [prompts_of_length(pair, case.batch, WIDTH, new_tokens, first) for first in range(repeats)]
    chosen = [[pair.prompts[(first + i) % len(pair.prompts)] for i in range(case.batch)] for first in range(repeats)]
    return [encode(pair.tokenizer, pair.target, texts, new_tokens) for texts in chosen]  # type: ignore[arg-type]


def measure(repeats: int, new_tokens: int) -> dict[str, Any]:
    """One run: the figures of each row, and where the run was made."""
    pair, rows = DraftTargetPair.embedded(), []
    model: Any = DraftTargetPair.embedded(draft=str(embedded_folder() / DRAFT_MODEL)).draft
    for case in track(CASES, description="measuring"):
        pair.target.to(getattr(torch, case.dtype))
        model.to(getattr(torch, case.dtype))  # the head stays as it was saved
        timed = timings(case, pair, model, repeats, new_tokens)
        plain = timed["", KINDS[case.kind].plain]
        speedups = {
            method: None if timing.error else timing.measured_speedup(plain) for method, timing in timed.items()
        }
        for who, (assisted, ours) in KINDS[case.kind].methods.items():
            row = {"label": f"{case.kind}, {case.dtype}", "draft": who, "batch": case.batch}
            row |= {"plain": plain.tokens_per_second, "assisted": speedups.get((who, assisted or ""))}
            refused = "" if assisted is None else "refused" if case.batch > 1 else "fails"
            rows.append(row | {"ours": speedups[who, ours], "no_assisted": refused})
        torch.compiler.reset()
    return {"made": made_by(pair.target), "rows": rows}


def made_by(target: Any) -> dict[str, Any]:
    """When, where and by what a run was made."""
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    date = datetime.now(timezone.utc).isoformat(timespec="minutes")
    return provenance(target) | {"date": date, "instructions": [name for name in INSTRUCTIONS if name in words]}


def span(values: list[float], digits: int) -> str:
    """The least and the largest."""
    low, high = (f"{end:.{digits}f}" for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def table(runs: list[dict[str, Any]]) -> str:
    """The rows of the last run, with all runs by the same machine and versions."""
    where = runs[-1]["made"]
    same_in_all = where.keys() - {"date", "dtype"}
    shown = [run for run in runs if all(run["made"].get(name) == where[name] for name in same_in_all)]
    dates = sorted(run["made"]["date"].replace("T", " ").replace("+00:00", "") for run in shown)
    lines = [
        f"The target in the package, {where['device']} ({', '.join(where['instructions'])}), "
        f"torch {where['torch']}, transformers {where['transformers']}: the least and the largest of "
        f"{len(shown)} runs, "
        f"{' to '.join(dict.fromkeys([dates[0], dates[-1]]))} UTC. Assisted is transformers' own assisted generation "
        "by the same draft model, or its prompt lookup; it refuses batches and takes no head. The head is the pair's "
        "own draft. Compiled rounds stand beside plain text that is compiled too, after prompts of "
        f"{WIDTH} tokens, since transformers compiles for each width.",
        "",
        "| text | who drafts | batch | plain, tokens/s | assisted, times plain | ours, times plain |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for last in runs[-1]["rows"]:
        same = [each for run in shown for each in run["rows"] if all(each[name] == last[name] for name in OF_A_ROW)]
        assisted = [each["assisted"] for each in same if each["assisted"] is not None]
        instead, speedups = span(assisted, 2) if assisted else last["no_assisted"], [x["ours"] for x in same]
        ours = f"**{span(speedups, 2)}**" if min(speedups) >= 1 else span(speedups, 2)
        first = f"| {last['label']} | {last['draft']} | {last['batch']} | {span([x['plain'] for x in same], 0)}"
        lines.append(f"{first} | {instead} | {ours} |")
    return "\n".join(lines)


def replaced(page: str, text: str) -> str:
    """The page with its text between the two markers replaced; a ValueError unless it has both in their order."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page must have one {BEGIN} and after it one {END}; write them into it.")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main(
    repeats: Annotated[int, typer.Option(help="Turns of each row.", min=1)] = 10,
    new_tokens: Annotated[int, typer.Option(help="New tokens of each call.", min=1)] = 64,
    out: Annotated[Path, typer.Option(help="File of runs.", dir_okay=False)] = Path("scripts/results/speed.json"),
    readme: Annotated[Path, typer.Option(help="Page with both markers.", dir_okay=False)] = Path("README.md"),
) -> None:
    replaced(readme.read_bytes().decode(), "")  # refused before any work
    runs = [] if not out.exists() else json.loads(out.read_text(encoding="utf-8"))["runs"]
    runs = [run for run in runs if all("draft" in row for row in run["rows"])]  # others compared other things
    runs.append(measure(repeats, new_tokens))
    out.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")
    readme.write_bytes(replaced(readme.read_bytes().decode(), table(runs)).encode())
    print(table(runs))


if __name__ == "__main__":
    typer.run(main)
