"""`specx bench`: time the ways to generate in turns on this machine."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from hf_specx.bench.cells import Cell
from hf_specx.bench.checks import check_out, check_runs
from hf_specx.bench.ways import in_words, way

from .console import Output, errors_in_one_line, figure, imports, print_figures, progress
from .options import (
    LARGEST_SEED,
    Chat,
    Device,
    DraftName,
    Dtype,
    Messages,
    Named,
    PairName,
    PromptFile,
    Revision,
    TargetName,
    Token,
    Trust,
    hub_options,
    typed,
)
from .prompts import prompts_of_file


COLUMNS = {  # with what is in them
    "contender": "",
    "tokens/s": "all rows together, the median over turns",
    "times plain": "tokens/s over those of plain",
    "within turns": "the least and the largest of these ratios within one turn",
    "accepted": "α, the chance that a candidate is accepted",
    "tokens a round": "of each row",
    "limit": "times plain, if both took nothing but their forwards; steps of plain take longer, so more is possible",
    "Theorem 3.8": "the same, if a forward over all candidates took as long as one over a token",
}
HELP_CONTENDER = (
    "plain, plain-compiled, stock, stock-5, stock:2, lookup-10, block-auto, token-5, coupled-5-compiled, suffix-auto, "
    "several-auto, exit:2-auto, ..., once for each; else the ways of this pair, and transformers' own beside them."
)


def bench(
    pair: PairName = None,
    target: TargetName = None,
    draft: DraftName = None,
    batch: Annotated[list[int] | None, typer.Option(help="Rows, once for each size; else 1 and 8.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens a row.")] = 64,
    temperature: Annotated[float, typer.Option(help="Of sampling, 0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1 is off.")] = 1.0,
    contender: Annotated[list[str] | None, typer.Option(help=HELP_CONTENDER, show_default=False)] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each contender.")] = 3,
    dtype: Dtype = "auto",
    device: Device = None,
    file: PromptFile = None,
    chat: Chat = False,
    seed: Annotated[int, typer.Option(help="Of all random numbers.", min=0, max=LARGEST_SEED)] = 0,
    revision: Revision = None,
    token: Token = None,
    trust_remote_code: Trust = False,
    out: Annotated[Path | None, typer.Option(help="File of results; those of other settings stay in it.")] = None,
) -> None:
    """Time plain, assisted and speculative generation in turns.

    Without options it takes one or two minutes, on the pair in the package.
    """
    with errors_in_one_line():
        named = Named(pair, target, draft, dtype, device, hub_options(revision, token, trust_remote_code))
        batches, contenders = batch or [1, 8], tuple(contender or ())
        check_runs(batches, repeats)
        for name in contenders:
            way(name)
        sizes = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "repeats": repeats}
        how: dict[str, Any] = sizes | {"temperature": temperature, "top_p": top_p, "dtype": dtype, "seed": seed}
        cells = [Cell(named.name, contenders, size, **how) for size in batches]
        check_out(out)
        prompts = prompts_of_file(file, chat)
        made = measure(cells, named, prompts, chat, out)
        console = Output()
        for cell, measured in zip(cells, made, strict=True):
            show_cell(cell, measured["contenders"], console)
        console.print(Text(f"\n{legend_of(made)}", "dim"), soft_wrap=True)


def measure(
    cells: list[Cell], named: Named, prompts: list[str | Messages], chat: bool, out: Path | None
) -> list[dict[str, Any]]:
    """Measure cells of the models that are named; `prompts` are in place of theirs, `out` is the file of results."""
    with imports():
        from hf_specx.bench.store import Store
        from hf_specx.bench.turns import measure_cell, usual_contenders

        from .loading import load_named, texts_of
    store, pair = Store(out, "schema", {}), load_named(named)
    if pair.tokenizer is None:
        raise ValueError(f"{named.name!r} has no tokenizer, so it cannot read prompts.")
    pair.config.prompts = texts_of(prompts, pair.tokenizer, chat, named.name) or pair.prompts
    made, contenders = [], cells[0].contenders or usual_contenders(pair)
    with progress("contenders in turns", sum(cell.runs for cell in cells) * len(contenders)) as advance:
        for cell in cells:
            made.append(measure_cell(cell, pair, typed(), advance))
            store.add(made[-1])
    return made


def show_cell(cell: Cell, contenders: dict[str, Any], console: Output) -> None:
    """Print a table, and why some contenders are not in it."""
    console.print(Text(f"\n{cell}", "bold"), soft_wrap=True)
    print_figures(console, list(COLUMNS), rows_of(contenders))
    for name, noted in contenders.items():
        if "unavailable" in noted:
            console.print(Text(f"{name} did not run: {noted['unavailable']}", "yellow"), soft_wrap=True)


def legend_of(made: list[dict[str, Any]]) -> str:
    """What contenders and columns mean, a line for each."""
    names = dict.fromkeys(name for measured in made for name in measured["contenders"])
    meanings = {name: in_words(name) for name in names} | {head: said for head, said in COLUMNS.items() if said}
    return "\n".join(f"{name}: {said}" for name, said in meanings.items())


def rows_of(contenders: dict[str, Any]) -> list[tuple[str, ...]]:
    """One for each contender, as `COLUMNS` says; those that could not run have no figures."""
    rows: list[tuple[str, ...]] = []
    for name, noted in contenders.items():
        rate, speedup = noted.get("tokens_per_second"), noted.get("speedup")
        cells = (
            "-" if rate is None else f"{rate['median']:.0f}",
            figure(noted.get("times_plain")),
            "-" if speedup is None else f"{speedup['min']:.2f}-{speedup['max']:.2f}",
            figure(noted.get("alpha")),
            figure(noted.get("tokens_per_round")),
            figure(noted.get("forward_limited_speedup")),
            figure(noted.get("expected_speedup")),
        )
        rows.append((name, *cells))
    return rows
