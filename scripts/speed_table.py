"""Measure the README's table of speed once more, add the run to those of earlier hours, and write the table.

Each row of it compares three ways to generate in turns, on the pair in the package: plain `generate`, what a user of
transformers would take instead, and this package with its defaults, or with compiled forwards. The table shows for
each row the least and the largest median over the runs of the file by the same machine and versions, so that it says
how much hours differ.
"""

import inspect
import json
import statistics
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
from hf_specx.bench.contenders import Contender
from hf_specx.bench.inputs import Inputs, encode
from hf_specx.bench.store import provenance
from hf_specx.bench.timer import Timer, Timing, speedups
from hf_specx.hub.known_pairs import DRAFT_MODEL, embedded_folder


OURS = "ours"
BEGIN, END = "<!-- speed_table.py begins -->", "<!-- speed_table.py ends -->"
PROPERTIES: dict[str, Any] = {
    "name": {"type": "string", "maxLength": 12},
    "size": {"enum": ["small", "medium", "large"]},
    "temperature_in_degrees_celsius": {"type": "integer"},
    "measured": {"type": "boolean"},
}
OBJECT = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES), "additionalProperties": False}
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")  # that change these figures
COPIED, BEGUN = 160, 32  # tokens of a prompt, of which the last ones repeat the first


# of each text: what a user of transformers would take instead, ours at its defaults, and options of `generate`
SAMPLED, COMPILED, JSON = "sampled code", "sampled code, `compile=True`", "JSON of a schema, greedily"
COPY = "a file written once more, greedily, without a draft model"
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    SAMPLED: ("assisted", "block-auto", {"do_sample": True, "top_k": 0}),
    COMPILED: ("assisted", "block-5-compiled", {"do_sample": True, "top_k": 0}),
    COPY: ("lookup-10", "suffix-auto", {}),
    JSON: ("assisted", "block-auto", {}),
}


class Case(NamedTuple):
    """A row of the table: what is generated, the precision of both models, and the batch size."""

    kind: str
    dtype: str
    batch: int


CASES = [Case(kind, t, rows) for kind in (SAMPLED, COMPILED) for t in ("float32", "bfloat16") for rows in (1, 8)]
CASES += [Case(kind, "float32", batch) for kind in (COPY, JSON) for batch in (1, 8)]


class WithSchema(Contender):
    """A contender whose text is JSON; each call has a new processor, as each text needs one."""

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


def timings(case: Case, pair: Any, model: Any, repeats: int, new_tokens: int) -> dict[str, Timing]:
    """Those of the contenders of a row; transformers itself takes one row alone, and a draft model, not a head."""
    rival, ours, options = KINDS[case.kind]
    names = {"plain": "plain"} | ({} if case.batch > 1 else {rival: rival}) | {OURS: ours}

    def make(name: str) -> Contender:
        draft = model if name == rival else pair.draft
        return (
            WithSchema(names[name], pair, draft) if case.kind == JSON else Contender(names[name], pair.target, draft)
        )

    chosen = [[pair.prompts[(first + i) % len(pair.prompts)] for i in range(case.batch)] for first in range(repeats)]
    batches = [encode(pair.tokenizer, pair.target, texts, new_tokens) for texts in chosen]
    if case.kind == COPY:
        batches = [copied_prompts(pair, case.batch)]
    options = options | {"max_new_tokens": new_tokens}
    found = Timer(make, batches, options, range(repeats), may_fail=names).time(tuple(names))
    for name in ("plain", OURS):
        if found[name].error is not None:
            raise RuntimeError(f"{case}: {name} failed with {found[name].error}")
    return found


def measure(repeats: int, new_tokens: int) -> dict[str, Any]:
    """One run: what is known of each row, and of the run."""
    pair, found = DraftTargetPair.embedded(), []
    model: Any = DraftTargetPair.embedded(draft=str(embedded_folder() / DRAFT_MODEL)).draft
    for case in track(CASES, description="measuring"):
        for each in (pair.target, model):  # the head stays as it was saved
            each.to(getattr(torch, case.dtype))
        by_name = timings(case, pair, model, repeats, new_tokens)
        rates = by_name.pop("plain").rates
        times = {name: None if x.error else statistics.median(speedups(x.rates, rates)) for name, x in by_name.items()}
        row = {"label": f"{case.kind}, {case.dtype}", "batch": case.batch}
        found.append(row | {"plain": statistics.median(rates), "times": times})
    return {"made": made_by(pair.target), "rows": found}


def made_by(target: Any) -> dict[str, Any]:
    """When, where and by what a run was made."""
    told, date = Path("/proc/cpuinfo"), datetime.now(timezone.utc).isoformat(timespec="minutes")
    words = set(told.read_text().split()) if told.exists() else set()
    return provenance(target) | {"date": date, "instructions": [name for name in INSTRUCTIONS if name in words]}


def span(values: list[float], digits: int) -> str:
    """The least and the largest."""
    low, high = (f"{end:.{digits}f}" for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def table(runs: list[dict[str, Any]]) -> str:
    """The rows of the last run, with all runs that were made as it was."""
    made = runs[-1]["made"]
    alike = made.keys() - {"date", "dtype"}
    shown = [run for run in runs if all(run["made"].get(name) == made[name] for name in alike)]
    dates = sorted(run["made"]["date"].replace("T", " ").replace("+00:00", "") for run in shown)
    lines = [
        f"The pair in the package, {made['device']} ({', '.join(made['instructions'])}), torch {made['torch']}, "
        f"transformers {made['transformers']}: the least and the largest of {len(shown)} runs, "
        f"{' to '.join(dict.fromkeys([dates[0], dates[-1]]))} UTC. Assisted means transformers' own assisted "
        "generation by the draft model in the package, or its prompt lookup for the copy; it refuses batches.",
        "",
        "| text | batch | plain, tokens/s | assisted, times plain | ours, times plain |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for last in runs[-1]["rows"]:
        row = last["label"], last["batch"]
        same = [each for run in shown for each in run["rows"] if (each["label"], each["batch"]) == row]
        rivals = [name for name in last["times"] if name != OURS]
        known = [each["times"][name] for each in same for name in rivals if each["times"].get(name) is not None]
        instead = span(known, 2) if known else ("fails" if rivals else "refused")
        ours = span([each["times"][OURS] for each in same], 2)
        lines.append(f"| {row[0]} | {row[1]} | {span([x['plain'] for x in same], 0)} | {instead} | **{ours}** |")
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
    runs.append(measure(repeats, new_tokens))
    out.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")
    readme.write_bytes(replaced(readme.read_bytes().decode(), table(runs)).encode())
    print(table(runs))


if __name__ == "__main__":
    typer.run(main)
