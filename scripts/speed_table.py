"""Measure the README's table of speed once more, add the run to those of earlier hours, and write the table.

Each row of it compares three ways to generate in turns, on the pair in the package: plain `generate`, what a user of
transformers would take instead, and this package with its defaults. The table shows for each row the least and the
largest median over the runs of the file by the same machine and versions, so that it says how much hours differ.
"""

import json
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from outlines import from_transformers
from outlines.backends import get_json_schema_logits_processor
from quality_page import headed, replaced
from rich.progress import track

from hf_specx import DraftTargetPair
from hf_specx.bench.contenders import Contender
from hf_specx.bench.copying import copying_prompts
from hf_specx.bench.inputs import Inputs, encode
from hf_specx.bench.timer import Timer, Timing, speedups
from hf_specx.common.devices import hardware
from hf_specx.hub.markdown import row


OURS = "ours"
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "size": {"enum": ["small", "medium", "large"]},
            "temperature_in_degrees_celsius": {"type": "integer"},
            "measured": {"type": "boolean"},
        },
        "required": ["name", "size", "temperature_in_degrees_celsius", "measured"],
        "additionalProperties": False,
    }
)
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")  # that change these figures


@dataclass
class Case:
    """A row of the table.

    Attributes:
        name: what is generated.
        batch: rows.
        dtype: of both models.
        rival: contender that a user of transformers would take, where it takes this batch.
        ours: contender of this package, at its defaults.
        options: of `generate`.
        copied: whether the text repeats its prompt.
        schema: whether the text is JSON of `SCHEMA`.
    """

    name: str
    batch: int
    dtype: str = "float32"
    rival: str = "stock"
    ours: str = "block-auto"
    options: dict[str, Any] = field(default_factory=lambda: {"do_sample": True, "top_k": 0})
    copied: bool = False
    schema: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}, {self.dtype}"


COPYING: dict[str, Any] = {"rival": "lookup-10", "ours": "suffix-auto", "options": {}, "copied": True}
CASES = [
    *(Case("sampled code", batch, dtype) for dtype in ("float32", "bfloat16") for batch in (1, 8)),
    *(Case("a file written once more, greedily, without a draft model", batch, **COPYING) for batch in (1, 8)),
    *(Case("JSON of a schema, greedily", batch, options={}, schema=True) for batch in (1, 8)),
]


class WithSchema(Contender):
    """A contender whose text is JSON; each call has a new processor, as each text needs one."""

    def __init__(self, name: str, pair: DraftTargetPair):
        super().__init__(name, pair.target, pair.models[-1])
        self.outlines = from_transformers(pair.target, pair.tokenizer)  # type: ignore[arg-type]

    def __call__(self, inputs: Inputs, options: dict[str, Any]) -> torch.Tensor:
        processor = get_json_schema_logits_processor("outlines_core", self.outlines, SCHEMA)
        return super().__call__(inputs, options | {"logits_processor": [processor]})


def timings(case: Case, pair: DraftTargetPair, repeats: int, new_tokens: int) -> dict[str, Timing]:
    """Those of the contenders of a row."""
    assert pair.tokenizer is not None
    names = {"plain": "plain", case.rival: case.rival, OURS: case.ours}
    if case.batch > 1:
        del names[case.rival]  # transformers refuses it

    def make(name: str) -> Contender:
        kind = names[name]
        return WithSchema(kind, pair) if case.schema else Contender(kind, pair.target, pair.models[-1])

    if case.copied:
        ids = copying_prompts("rewrite", pair.tokenizer, case.batch, 160)
        batches: list[Inputs] = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    else:
        texts = pair.prompts
        chosen = [[texts[(first + i) % len(texts)] for i in range(case.batch)] for first in range(repeats)]
        batches = [encode(pair.tokenizer, pair.target, texts, new_tokens) for texts in chosen]
    options = case.options | {"max_new_tokens": new_tokens}
    found = Timer(make, batches, options, range(repeats), keep_going=True).time(tuple(names))
    for name in ("plain", OURS):
        if found[name].error is not None:
            raise RuntimeError(f"{case.label}, batch {case.batch}: {name} failed with {found[name].error}")
    return found


def measure(repeats: int, new_tokens: int) -> list[dict[str, Any]]:
    """What is known of each row after one run."""
    pair = DraftTargetPair.embedded()
    found = []
    for case in track(CASES, description="measuring"):
        for model in pair.models:
            model.to(getattr(torch, case.dtype))
        by_name = timings(case, pair, repeats, new_tokens)
        plain = by_name.pop("plain")
        ratios = {
            name: None if each.error else statistics.median(speedups(each.rates, plain.rates))
            for name, each in by_name.items()
        }
        found.append({"label": case.label, "batch": case.batch, "plain": plain.tokens_per_second, "times": ratios})
    return found


def instructions() -> list[str]:
    """Those of the processor that change the figures, as far as the system tells."""
    told = Path("/proc/cpuinfo")
    words = set(told.read_text().split()) if told.exists() else set()
    return [name for name in INSTRUCTIONS if name in words]


def provenance() -> dict[str, Any]:
    """When, where and by what a run was made."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "commit": commit.stdout.strip(),
        "hardware": hardware(torch.device("cpu")),
        "instructions": instructions(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def span(values: list[float], digits: int) -> str:
    """The least and the largest."""
    low, high = (f"{end:.{digits}f}" for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def made_alike(run: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether machine and versions were the same."""
    facts = [{name: x for name, x in each["made"].items() if name not in ("date", "commit")} for each in (run, other)]
    return facts[0] == facts[1]


def table(runs: list[dict[str, Any]]) -> str:
    """The rows of the last run, with all runs that were made as it was."""
    made, shown = runs[-1]["made"], [run for run in runs if made_alike(run, runs[-1])]
    known_rows = [each for run in shown for each in run["rows"]]

    def rows() -> Iterator[str]:
        for last in runs[-1]["rows"]:
            same = [each for each in known_rows if (each["label"], each["batch"]) == (last["label"], last["batch"])]
            rivals = [name for name in last["times"] if name != OURS]
            known = [each["times"][name] for each in same for name in rivals if each["times"].get(name) is not None]
            instead = span(known, 2) if known else ("fails" if rivals else "refused")
            ours = span([each["times"][OURS] for each in same], 2)
            plain = span([each["plain"] for each in same], 0)
            yield row([last["label"], str(last["batch"]), plain, instead, f"**{ours}**"])

    dates = span_of_dates([run["made"]["date"] for run in shown])
    caption = (
        f"The pair in the package, {made['hardware']} ({', '.join(made['instructions'])}), torch {made['torch']}, "
        f"transformers {made['transformers']}: the least and the largest of {len(shown)} runs, {dates}. transformers "
        "itself means its assisted generation, or its prompt lookup where there is no draft model; it "
        "refuses batches, and fails with processors that keep a state."
    )
    heads = headed("text", "batch", "plain, tokens/s", "transformers itself, times plain", "ours, times plain")
    return "\n".join([caption, "", *heads, *rows()])


def span_of_dates(dates: list[str]) -> str:
    first, last = (date.replace("T", " ").replace("+00:00", "") for date in (min(dates), max(dates)))
    return f"{first} UTC" if first == last else f"{first} to {last} UTC"


def main(
    repeats: Annotated[int, typer.Option(help="Turns of each row.", min=1)] = 5,
    new_tokens: Annotated[int, typer.Option(help="New tokens of each call.", min=1)] = 64,
    out: Annotated[Path, typer.Option(help="File of runs.", dir_okay=False)] = Path("scripts/results/speed.json"),
    readme: Annotated[Path, typer.Option(help="Page with both markers.", dir_okay=False)] = Path("README.md"),
    anew: Annotated[bool, typer.Option("--anew", help="Forget the runs of the file.")] = False,
) -> None:
    replaced(readme.read_bytes().decode(), "", "speed_table.py")  # refused before any work
    runs = [] if anew or not out.exists() else json.loads(out.read_text(encoding="utf-8"))["runs"]
    runs.append({"made": provenance(), "rows": measure(repeats, new_tokens)})
    out.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")
    readme.write_bytes(replaced(readme.read_bytes().decode(), table(runs), "speed_table.py").encode())
    print(table(runs))


if __name__ == "__main__":
    typer.run(main)
