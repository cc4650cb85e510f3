"""Trees beside chains and beside plain `generate`, in turns, for the pair in the package.

    OMP_NUM_THREADS=1 python scripts/trees.py               # 36 cases; on an idle machine
    OMP_NUM_THREADS=1 python scripts/trees.py --compiled    # the same with compiled forwards, also of plain text

The draft model has chains with next best choices beside them (combs), the head has full trees. Each case times
`METHODS` of `specx bench` in turns, with the same seeds and therefore the same texts. The columns have medians over
turns: times plain (tokens a round), and a tree's speed over that of the chain in the same turn.
"""

import statistics
from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any

import torch
import typer

from hf_specx import DraftTargetPair
from hf_specx.bench.bench_settings import BenchSettings
from hf_specx.bench.run_bench import run_bench
from hf_specx.hub.known_pairs import DRAFT_MODEL, embedded_folder


METHODS = ("coupled-4", "coupled-4-tree-16", "coupled-auto", "coupled-auto-tree-auto")
TEMPERATURES, BATCH_SIZES = (0.0, 0.7, 1.0), (1, 4, 8)
NEW_TOKENS = 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DRAFTS = {"draft model": embedded_folder() / DRAFT_MODEL, "head": None}  # None is the draft of the pair
HEADER = (
    "| draft | precision | T | batch | plain, tokens/s | 4 in a chain | 16 in a tree | tree over chain "
    "| auto | auto with trees | trees over auto |"
)


def pairs(dtypes: list[str], drafts: list[str]) -> Iterator[tuple[str, str, DraftTargetPair]]:
    """The pair in the package, by its draft and precision."""
    for draft, dtype in product(drafts, dtypes):
        pair = DraftTargetPair.from_pretrained("embedded", dtype=DTYPES[dtype])
        if DRAFTS[draft] is not None:
            prompts = pair.prompts
            pair = DraftTargetPair(pair.target, str(DRAFTS[draft]), pair.tokenizer)
            draft_model: Any = pair.models[1]
            draft_model.to(DTYPES[dtype])
            pair.config.prompts = prompts
        yield draft, dtype, pair


def ratio(record: dict[str, Any], faster: str, slower: str) -> float:
    """The median over turns of how many times as fast a method was as another."""
    turns = zip(record["methods"][faster]["runs"], record["methods"][slower]["runs"], strict=True)
    return statistics.median(other["seconds"] / own["seconds"] for own, other in turns)


def line(draft: str, dtype: str, settings: BenchSettings, record: dict[str, Any], names: list[str]) -> str:
    """A row of the table."""
    plain, *_ = names
    chain, tree, auto, auto_tree = (
        f"{ratio(record, name, plain):.2f} ({record['methods'][name]['tokens_per_round']:.2f})" for name in names[1:]
    )
    rate = record["methods"][plain]["tokens_per_second"]["median"]
    temperature = settings.temperature if settings.do_sample else 0
    first = f"| {draft} | {dtype} | {temperature:g} | {settings.batch} | {rate:.0f}"
    gained, chosen = ratio(record, names[2], names[1]), ratio(record, names[4], names[3])
    return f"{first} | {chain} | {tree} | {gained:.2f} | {auto} | {auto_tree} | {chosen:.2f} |"


def main(
    compiled: Annotated[bool, typer.Option(help="compile forwards, also those of plain generate")] = False,
    repeats: Annotated[int, typer.Option(help="turns of each case")] = 5,
    dtype: Annotated[list[str], typer.Option(help="precisions")] = list(DTYPES),  # noqa: B006
    draft: Annotated[list[str], typer.Option(help="drafts")] = list(DRAFTS),  # noqa: B006
    temperature: Annotated[list[float], typer.Option(help="0 is greedy")] = list(TEMPERATURES),  # noqa: B006
    batch: Annotated[list[int], typer.Option(help="batch sizes")] = list(BATCH_SIZES),  # noqa: B006
) -> None:
    names = [name + "-compiled" * compiled for name in ("plain", *METHODS)]
    print(HEADER)
    print(f"|{' --- |' * (HEADER.count('|') - 1)}", flush=True)
    for draft_name, dtype_name, pair in pairs(dtype, draft):
        for degree, rows in product(temperature, batch):
            settings = BenchSettings(
                pair="embedded",
                methods=tuple(names),
                batch=rows,
                prompt_tokens=64,
                max_new_tokens=NEW_TOKENS,
                do_sample=degree > 0,
                temperature=degree or 1.0,
                repeats=repeats,
                dtype=dtype_name,
                ignore_eos=True,
            )
            record = run_bench(settings, pair, "python scripts/trees.py")
            print(line(draft_name, dtype_name, settings, record, names), flush=True)


if __name__ == "__main__":
    typer.run(main)
