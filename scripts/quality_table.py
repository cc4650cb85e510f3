"""Measure quality and speed of plain and speculative text, and write them into the README of the room `equivalence`.

The table has the form of Table 1 of Chen et al. 2023. A prompt is the beginning of a function in a file that
`train_pair.py` held out; ROUGE compares with what really follows. Another version of Python has other files, so the
table names the version and the number of files.

At each batch size all ways to generate take turns on the same batches, in an order that rotates, after one run of each
that is not counted. Nucleus sampling is that of the paper's HumanEval column; speculative ways use
`num_draft_tokens="auto"`. Batch i starts from `torch.manual_seed(seed + i)` in each way. So plain, coupled and greedy
texts are the same in every run on one machine; texts of block verification are not, as "auto" goes by measured times.
Intervals assume that prompts, or batches of them, are independent, though several may be of one file.

    python scripts/quality_table.py
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from held_out import Prompt, held_out_prompts
from quality_page import replaced, tables
from scipy import stats
from train_pair import source_files

from hf_specx import DraftTargetPair
from hf_specx.cli.console import progress
from hf_specx.equivalence.cells import CONFIDENCE, metric, stretch
from hf_specx.equivalence.check import generator_untouched
from hf_specx.measure.checks import check_out
from hf_specx.measure.contenders import Contender
from hf_specx.measure.inputs import Inputs, encode
from hf_specx.measure.store import provenance
from hf_specx.measure.timer import Advance, Timer, Timing
from hf_specx.measure.ways import PLAIN_NAME


NUCLEUS = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
GREEDY = {"do_sample": False}
OUT = Path("scripts/results/quality.json")
RESAMPLES = 2000


class Way(NamedTuple):
    """A way to generate, and the contender of `hf_specx.measure.contenders` that does it."""

    name: str
    contender: str
    options: dict[str, Any]
    baseline: str  # the plain way that it is compared with


WAYS = (
    Way("plain, nucleus", PLAIN_NAME, NUCLEUS, "plain, nucleus"),
    Way("speculative, nucleus", "block-auto", NUCLEUS, "plain, nucleus"),
    Way("coupled, nucleus", "coupled-auto", NUCLEUS, "plain, nucleus"),
    Way("plain, greedy", PLAIN_NAME, GREEDY, "plain, greedy"),
    Way("speculative, greedy", "block-auto", GREEDY, "plain, greedy"),
)


class WayContender(Contender):
    """A contender that samples as its way does."""

    def __init__(self, way: Way, pair: DraftTargetPair):
        super().__init__(way.contender, pair.target, pair.models[-1])
        self.sampling = way.options

    def __call__(self, inputs: Inputs, options: dict[str, Any]) -> torch.Tensor:
        return super().__call__(inputs, options | self.sampling)


def take_turns(
    pair: DraftTargetPair, batches: Sequence[Inputs], new_tokens: int, seed: int, advance: Advance
) -> dict[str, Timing]:
    """The runs of each way, one a batch, by its name; `advance` is called after each run, warm-ups too."""
    contenders = {way.name: WayContender(way, pair) for way in WAYS}
    seeds = range(seed, seed + len(batches))
    timer = Timer(contenders.__getitem__, batches, {"max_new_tokens": new_tokens}, seeds, advance)
    return timer.time(list(contenders))


def milliseconds(seconds: np.ndarray, tokens: np.ndarray, axis: int = -1) -> np.ndarray:
    """Mean milliseconds per token; runs are along the axis."""
    return 1000 * seconds.sum(axis) / tokens.sum(axis)


def speedup(
    seconds: np.ndarray, tokens: np.ndarray, plain_seconds: np.ndarray, plain_tokens: np.ndarray, axis: int = -1
) -> np.ndarray:
    """The mean time per token of plain generation over that of this way."""
    return milliseconds(plain_seconds, plain_tokens, axis) / milliseconds(seconds, tokens, axis)


def figure(statistic: Callable[..., np.ndarray], seed: int, *runs: Timing) -> dict[str, Any]:
    """A statistic of times with a percentile bootstrap over batches; the runs on one batch are resampled together.

    It is widened as Student's t says, in proportion, since there may be few batches.
    """
    columns = [np.array(values, dtype=np.float64) for each in runs for values in (each.seconds, each.tokens)]
    settings = {"n_resamples": RESAMPLES, "confidence_level": CONFIDENCE, "method": "percentile"}
    found = stats.bootstrap(columns, statistic, paired=True, random_state=seed, **settings)
    value, wider = float(statistic(*columns)), stretch(1 - CONFIDENCE, len(columns[0]))
    return {"value": value, "interval": [value * float(end / value) ** wider for end in found.confidence_interval]}


def agreement(ours: Timing, plain: Timing) -> dict[str, Any]:
    """The share of rows with the same tokens as plain text, with its exact interval (Clopper and Pearson)."""
    share = metric("sequence_equality").compute(predictions=ours.texts, references=plain.texts)["exact_match"]
    rows = len(ours.texts)
    interval = stats.binomtest(round(share * rows), rows).proportion_ci(CONFIDENCE)
    return {"value": share, "interval": [float(end) for end in interval]}


def row_of(
    pair: DraftTargetPair, prompts: list[Prompt], way: Way, ours: Timing, plain: Timing, seed: int
) -> dict[str, Any]:
    """All figures of one way at one batch size, compared with plain generation at the same size."""
    assert pair.tokenizer is not None
    texts = [pair.tokenizer.batch_decode(each.texts, skip_special_tokens=True) for each in (ours, plain)]
    quality = metric("text_quality").compute(
        predictions=texts[0],
        references=texts[1],
        prompts=[prompt.text for prompt in prompts],
        targets=[prompt.follows for prompt in prompts],
        model=pair.target,
        tokenizer=pair.tokenizer,
        level=1 - CONFIDENCE,
        seed=seed,
    )
    return {
        "way": way.name,
        "contender": way.contender,
        "options": way.options,
        "batch": len(ours.texts) // len(ours.seconds),
        "quality": quality,
        "equal": agreement(ours, plain),
        "milliseconds": figure(milliseconds, seed, ours),
        "speedup": figure(speedup, seed, ours, plain),
        "runs": ours.to_dict(),
    }


def check_rows(prompts: int, sizes: Sequence[int]) -> None:
    for size in sizes:
        if size < 1 or prompts % size or prompts < 2 * size:
            raise ValueError(f"prompts={prompts} are not two or more whole batches of {size}; give a multiple of it.")


def measure(
    pair: DraftTargetPair, prompts: list[Prompt], sizes: Sequence[int], new_tokens: int, seed: int
) -> list[dict[str, Any]]:
    """The figures of each way at each batch size; the state of the global generators is restored."""
    assert pair.tokenizer is not None
    rows = []
    steps = sum(len(WAYS) * (len(prompts) // size + 2) for size in sizes)  # a run to warm up, and one to be judged
    with generator_untouched(pair), progress("plain and speculative in turns", steps) as advance:
        for size in sizes:
            texts = [[prompt.text for prompt in prompts[i : i + size]] for i in range(0, len(prompts), size)]
            batches = [encode(pair.tokenizer, pair.target, each, new_tokens) for each in texts]
            runs = take_turns(pair, batches, new_tokens, seed, advance)
            for way in WAYS:
                rows.append(row_of(pair, prompts, way, runs[way.name], runs[way.baseline], seed))
                advance()
    return rows


def main(
    pair: Annotated[str, typer.Option(help="Id or folder; these files are unseen by the default only.")] = "embedded",
    readme: Annotated[Path, typer.Option(help="Page that has both markers.", dir_okay=False)] = Path(
        "hf_specx/equivalence/README.md"
    ),
    out: Annotated[Path, typer.Option(help="File for all figures, as JSON.", dir_okay=False)] = OUT,
    prompts: Annotated[int, typer.Option(help="How many, in two or more whole batches.")] = 96,
    batch: Annotated[list[int] | None, typer.Option(help="Rows, once for each size; else 1 and 8.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 64,
    new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    seed: int = 0,
) -> None:
    """Measure, and write the table between the markers of the page: about twelve minutes on two cores."""
    sizes = batch or [1, 8]
    replaced(readme.read_bytes().decode(), "")  # refused before any work
    check_out(out)
    check_rows(prompts, sizes)
    loaded = DraftTargetPair.from_pretrained(pair)
    assert loaded.tokenizer is not None
    chosen = held_out_prompts(loaded.tokenizer, prompts, prompt_tokens, new_tokens)
    trained_on, held_out = source_files()
    used = {prompt.place.rpartition(":")[0] for prompt in chosen}
    found = {
        "command": "python scripts/quality_table.py",
        "settings": {
            "pair": pair,
            "prompts": prompts,
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "temperature": NUCLEUS["temperature"],
            "top_p": NUCLEUS["top_p"],
            "seed": seed,
        },
        "made": provenance(loaded.target),
        "files": {"all": len(trained_on) + len(held_out), "held_out": len(held_out), "used": len(used)},
        "prompts": [prompt.place for prompt in chosen],
        "rows": measure(loaded, chosen, sizes, new_tokens, seed),
    }
    out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    readme.write_bytes(replaced(readme.read_bytes().decode(), tables(found)).encode())


if __name__ == "__main__":
    typer.run(main)
