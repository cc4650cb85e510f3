"""Measure the README's table of speed once more, add the run to those of earlier hours, and write the table.

Each row of it compares three ways to generate in turns, on the pair in the package: plain `generate`, what a user of
transformers would take instead, and this package with its defaults. The table shows for each row the least and the
largest median over the runs of the file by the same machine and versions, so that it says how much hours differ.
"""

import inspect
import json
import statistics
import subprocess
import textwrap
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import transformers
import typer
from outlines import from_transformers
from outlines.backends import get_json_schema_logits_processor
from rich.progress import track

from hf_specx import DraftHead, DraftTargetPair
from hf_specx.bench.contenders import Contender
from hf_specx.bench.inputs import Inputs, encode
from hf_specx.bench.timer import Timer, Timing, speedups
from hf_specx.common.devices import hardware


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
SAMPLED, JSON = "sampled code", "JSON of a schema, greedily"
WITH_HEAD = "sampled code, by a head"
COPY = "a file written once more, greedily, without a draft model"
KINDS: dict[str, tuple[str | None, str, dict[str, Any]]] = {
    SAMPLED: ("assisted", "block-auto", {"do_sample": True, "top_k": 0}),
    WITH_HEAD: (None, "block-auto", {"do_sample": True, "top_k": 0}),
    COPY: ("lookup-10", "suffix-auto", {}),
    JSON: ("assisted", "block-auto", {}),
}


class Case(NamedTuple):
    """A row of the table: what is generated, the precision of both models, and the batch size."""

    kind: str
    dtype: str
    batch: int


CASES = [Case(SAMPLED, dtype, batch) for dtype in ("float32", "bfloat16") for batch in (1, 8)]
CASES += [Case(kind, "float32", batch) for kind in (COPY, JSON, WITH_HEAD) for batch in (1, 8)]


class WithSchema(Contender):
    """A contender whose text is JSON; each call has a new processor, as each text needs one."""

    def __init__(self, name: str, pair: DraftTargetPair):
        super().__init__(name, pair.target, pair.models[-1])
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


def timings(
    case: Case, pair: DraftTargetPair, head: DraftHead | None, repeats: int, new_tokens: int
) -> dict[str, Timing]:
    """Those of the contenders of a row; assisted generation takes one row alone, and no head."""
    assert pair.tokenizer is not None
    rival, ours, options = KINDS[case.kind]
    names = {"plain": "plain"} | ({} if rival is None or case.batch > 1 else {rival: rival}) | {OURS: ours}
    draft = head if case.kind == WITH_HEAD else pair.models[-1]

    def make(name: str) -> Contender:
        if case.kind == JSON:
            return WithSchema(names[name], pair)
        return Contender(names[name], pair.target, draft)

    chosen = [[pair.prompts[(first + i) % len(pair.prompts)] for i in range(case.batch)] for first in range(repeats)]
    batches = [encode(pair.tokenizer, pair.target, texts, new_tokens) for texts in chosen]
    if case.kind == COPY:
        batches = [copied_prompts(pair, case.batch)]
    options = options | {"max_new_tokens": new_tokens}
    found = Timer(make, batches, options, range(repeats), keep_going=True).time(tuple(names))
    for name in ("plain", OURS):
        if found[name].error is not None:
            raise RuntimeError(f"{case}: {name} failed with {found[name].error}")
    return found


def measure(folder: Path | None, repeats: int, new_tokens: int) -> list[dict[str, Any]]:
    """What is known of each row after one run; `folder` is that of a head, for the rows with one."""
    pair, found = DraftTargetPair.embedded(), []
    head = None if folder is None else DraftHead.from_pretrained(folder, target=pair.target)
    cases = [case for case in CASES if head is not None or case.kind != WITH_HEAD]
    for case in track(cases, description="measuring"):
        for model in (*pair.models, *([] if head is None else [head])):
            model.to(getattr(torch, case.dtype))
        by_name = timings(case, pair, head, repeats, new_tokens)
        rates = by_name.pop("plain").rates
        times = {name: None if x.error else statistics.median(speedups(x.rates, rates)) for name, x in by_name.items()}
        row = {"label": f"{case.kind}, {case.dtype}", "batch": case.batch}
        found.append(row | {"plain": statistics.median(rates), "times": times})
    return found


def provenance() -> dict[str, Any]:
    """When, where and by what a run was made."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    told = Path("/proc/cpuinfo")
    words = set(told.read_text().split()) if told.exists() else set()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "commit": commit.stdout.strip(),
        "hardware": hardware(torch.device("cpu")),
        "instructions": [name for name in INSTRUCTIONS if name in words],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def span(values: list[float], digits: int) -> str:
    """The least and the largest."""
    low, high = (f"{end:.{digits}f}" for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def table(runs: list[dict[str, Any]]) -> str:
    """The rows of the last run, with all runs that were made as it was."""
    made = runs[-1]["made"]
    alike = made.keys() - {"date", "commit"}
    shown = [run for run in runs if all(run["made"].get(name) == made[name] for name in alike)]
    dates = sorted(run["made"]["date"].replace("T", " ").replace("+00:00", "") for run in shown)
    lines = [
        f"The pair in the package, {made['hardware']} ({', '.join(made['instructions'])}), torch {made['torch']}, "
        f"transformers {made['transformers']}: the least and the largest of {len(shown)} runs, "
        f"{' to '.join(dict.fromkeys([dates[0], dates[-1]]))} UTC. *Assisted*: transformers' assisted generation, or "
        "its prompt lookup where there is no draft model. It refuses batches, and fails with processors that keep "
        "a state.",
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
    """The page with its text between the two markers replaced.

    Raises:
        ValueError: the page does not have one of each marker, in their order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page must have one {BEGIN} and after it one {END}; write them into it.")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main(
    repeats: Annotated[int, typer.Option(help="Turns of each row.", min=1)] = 5,
    new_tokens: Annotated[int, typer.Option(help="New tokens of each call.", min=1)] = 64,
    head: Annotated[Path | None, typer.Option(help="A head of the target, for rows with it.", file_okay=False)] = None,
    out: Annotated[Path, typer.Option(help="File of runs.", dir_okay=False)] = Path("scripts/results/speed.json"),
    readme: Annotated[Path, typer.Option(help="Page with both markers.", dir_okay=False)] = Path("README.md"),
) -> None:
    replaced(readme.read_bytes().decode(), "")  # refused before any work
    runs = [] if not out.exists() else json.loads(out.read_text(encoding="utf-8"))["runs"]
    runs.append({"made": provenance(), "rows": measure(head, repeats, new_tokens)})
    out.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")
    readme.write_bytes(replaced(readme.read_bytes().decode(), table(runs)).encode())
    print(table(runs))


if __name__ == "__main__":
    typer.run(main)
