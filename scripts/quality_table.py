"""Measure the quality of plain and speculative text, and write them into the README of the room `equivalence`.

The table has the form of Table 1 of Chen et al. 2023. A prompt is the beginning of a function in a file that
`train_pair.py` held out; ROUGE compares with what really follows. Another version of Python has other files, so the
table names the version and the number of files.

At each batch size all ways generate from the same batches. Nucleus sampling is that of the paper's HumanEval column;
speculative ways use `num_draft_tokens="auto"`. Batch i starts from `torch.manual_seed(seed + i)` in each way. So
plain, coupled and greedy texts are the same in every run on one machine; texts of block verification are not, as
"auto" goes by measured times. Intervals assume that prompts are independent, though several may be of one file.

    python scripts/quality_table.py
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from held_out import Prompt, held_out_prompts
from quality_page import replaced, tables
from scipy import stats
from train_pair import source_files

from hf_specx import DraftTargetPair
from hf_specx.bench.checks import check_out
from hf_specx.bench.contenders import Contender
from hf_specx.bench.inputs import Inputs, emitted, encode
from hf_specx.bench.store import provenance
from hf_specx.bench.ways import PLAIN_NAME
from hf_specx.cli.console import progress
from hf_specx.equivalence.cells import CONFIDENCE, metric
from hf_specx.equivalence.check import generator_untouched


NUCLEUS = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
GREEDY = {"do_sample": False}
OUT = Path("scripts/results/quality.json")


class Way(NamedTuple):
    """A way to generate, and the contender of `hf_specx.bench.contenders` that does it."""

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


def generate_all(
    pair: DraftTargetPair, way: Way, batches: Sequence[Inputs], new_tokens: int, seed: int
) -> list[list[int]]:
    """The emitted ids of each row, batch after batch."""
    contender, texts = Contender(way.contender, pair.target, pair.models[-1]), []
    options = way.options | {"max_new_tokens": new_tokens}
    for number, inputs in enumerate(batches):
        torch.manual_seed(seed + number)
        texts += emitted(pair.target, inputs, contender(inputs, options), options)
    return texts


def agreement(ours: list[list[int]], plain: list[list[int]]) -> dict[str, Any]:
    """The share of rows with the same tokens as plain text, with its exact interval (Clopper and Pearson)."""
    share = metric("sequence_equality").compute(predictions=ours, references=plain)["exact_match"]
    rows = len(ours)
    interval = stats.binomtest(round(share * rows), rows).proportion_ci(CONFIDENCE)
    return {"value": share, "interval": [float(end) for end in interval]}


def row_of(
    pair: DraftTargetPair, prompts: list[Prompt], way: Way, ours: list[list[int]], plain: list[list[int]], seed: int
) -> dict[str, Any]:
    """All figures of one way at one batch size, compared with plain text of the same size."""
    assert pair.tokenizer is not None
    texts = [pair.tokenizer.batch_decode(each, skip_special_tokens=True) for each in (ours, plain)]
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
        "quality": quality,
        "equal": agreement(ours, plain),
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
    with generator_untouched(), progress("plain and speculative", len(WAYS) * len(sizes)) as advance:
        for size in sizes:
            texts = [[prompt.text for prompt in prompts[i : i + size]] for i in range(0, len(prompts), size)]
            batches = [encode(pair.tokenizer, pair.target, each, new_tokens) for each in texts]
            found: dict[str, list[list[int]]] = {}
            for way in WAYS:
                ours = found[way.name] = generate_all(pair, way, batches, new_tokens, seed)
                rows.append({"batch": size} | row_of(pair, prompts, way, ours, found[way.baseline], seed))
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
