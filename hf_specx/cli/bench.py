"""`specx bench`: time contenders in turns on one machine, and compare them with what the forwards allow."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_specx.common.errors import require
from hf_specx.measure.cells import EXPERIMENTS, Cell, cpu_grid, gpu_grid, quick_cells
from hf_specx.measure.checks import check_out, check_runs
from hf_specx.measure.contenders import way
from hf_specx.measure.grafted import PREFIX, check_grafted
from hf_specx.measure.grid import results, run_grid
from hf_specx.measure.inputs import load_bench_pair
from hf_specx.measure.plots import check_can_plot, plot
from hf_specx.measure.points import Claim, claims

from .console import errors_in_one_line, figure, progress
from .options import (
    LARGEST_SEED,
    Revision,
    Token,
    Trust,
    check_dtype,
    hub_options,
    load_given_pair,
    typed,
)
from .prompts import PromptFile, read_prompts


GRID_FILE = Path("specx-bench.json")
COLUMNS = ("contender", "tokens/s", "x plain", "spread", "α", "tokens", "ms", "/bare", "limit", "3.8")
BENCH_LEGEND = (
    "medians; x plain: speed over that of plain in the same turn, spread: the least and the largest; tokens: per row "
    "and round; ms: of a round; /bare: a round over its bare forwards; limit: the speed-up if there were nothing but "
    "forwards; 3.8: that of Theorem 3.8, where a target step over all candidates costs as much as one over a token"
)
SYNTHETIC = "grafted pairs are synthetic: random weights whose acceptance was set"
HELP_ONLY = f"Of a grid, --grid unless given: {', '.join(list(EXPERIMENTS)[1:])}."
HELP_CONTENDER = "plain, plain-compiled, stock, stock-5, block-auto, token-5, coupled-5-compiled, ..., once for each."


def bench(
    pair: Annotated[
        str | None,
        typer.Argument(help=f"Id or folder of a pair; or {PREFIX}30M and the like.", show_default="embedded"),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Rows, once for each size; else 1 and 8.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Tokens of each prompt; else 64.")] = None,
    new_tokens: Annotated[int | None, typer.Option(help="Tokens a row; else 64.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of sampling, 0 is greedy; else 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus; else 1, which is off.")] = None,
    contender: Annotated[list[str] | None, typer.Option(help=HELP_CONTENDER)] = None,
    repeats: Annotated[int | None, typer.Option(help="Timed runs of each contender; else 3.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16; else as saved.")] = None,
    file: PromptFile = None,
    seed: Annotated[int | None, typer.Option(help="Of all random numbers; else 0.", min=0, max=LARGEST_SEED)] = None,
    revision: Revision = None,
    token: Token = None,
    trust_remote_code: Trust = False,
    grid: Annotated[bool, typer.Option("--grid", help="All experiments, which takes long.")] = False,
    full: Annotated[bool, typer.Option("--full", help="The same with models of 1B and 7B, on a GPU.")] = False,
    only: Annotated[list[str] | None, typer.Option(help=HELP_ONLY)] = None,
    out: Annotated[
        Path | None, typer.Option(help=f"File of results, taken up where it ended; of a grid {GRID_FILE}.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for figures.")] = None,
) -> None:
    """Time plain, stock assisted and speculative generation in turns, and their bare forwards.

    Without options it takes one or two minutes, on the pair in the package. A grid says which claims of the project
    hold on this machine.
    """
    with errors_in_one_line():
        sizes = {"batch": batch, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "repeats": repeats}
        how = {"temperature": temperature, "top_p": top_p, "dtype": dtype, "seed": seed}
        given = {name: value for name, value in (sizes | how).items() if value not in (None, [])}
        others = {"PAIR": pair, "--contender": contender, "--file": file}
        cells = choose_cells(grid, full, only or [], given, {name: value for name, value in others.items() if value})
        check_out(out)
        if plots is not None:
            check_can_plot()
        prompts = [] if file is None else read_prompts([], file, "")
        load = partial(load_given_pair, **hub_options(revision, token, trust_remote_code))
        store = results(out or (GRID_FILE if grid or full or only else None))
        with progress("contenders in turns", sum(cell.turns for cell in cells)) as advance:
            made = run_grid(cells, store, typed(), partial(load_bench_pair, prompts=prompts, load=load), advance)
        show_cells(made)
        if grid or full or only:
            show_claims(claims(made))
        for path in plot(made, plots) if plots is not None else ():
            Console().print(Text(f"wrote {path}"), soft_wrap=True)


def choose_cells(grid: bool, full: bool, only: list[str], given: dict[str, Any], others: dict[str, Any]) -> list[Cell]:
    """The cells to measure; wrong options raise an error here, before anything is loaded.

    Args:
        grid, full, only: which grid, and which of its experiments; else a single study.
        given: settings of a cell, and batch sizes.
        others: the pair, contenders and prompts, by the name of their option.

    Raises:
        ValueError: options contradict each other, or cannot be measured.
    """
    grid = grid or bool(only and not full)
    if grid or full:
        check_grid(grid, full, only, [*(f"--{name.replace('_', '-')}" for name in given), *others])
        return [cell for cell in (gpu_grid() if full else cpu_grid()) if not only or cell.experiment in only]
    asked: dict[str, Any] = {"batch": (1, 8), "dtype": "auto"} | given
    batches, pair, contenders = asked.pop("batch"), others.get("PAIR", "embedded"), others.get("--contender", [])
    check_runs(batches)
    check_dtype(asked["dtype"])
    check_grafted(pair)
    for name in contenders:
        way(name)
    return quick_cells(pair, batches, contenders, **asked)


def check_grid(grid: bool, full: bool, only: list[str], given: list[str]) -> None:
    """Whether it is clear which cells of a grid are meant, and whether this machine can run them.

    Args:
        grid, full, only: as in `choose_cells`.
        given: other options, which a grid does not take.
    """
    require(not (grid and full), "--grid and --full are two grids; choose one.")
    told = f"has its own pairs and sizes; leave {', '.join(given)} out, or choose with --only."
    require(not given, f"{'--full' if full else '--grid'} {told}")
    known = list(EXPERIMENTS)[1:]
    unknown = next((name for name in only if name not in known), None)
    require(unknown is None, f"--only {unknown} is unknown; choose among {', '.join(known)}.")
    possible = not full or torch.cuda.is_available()
    require(possible, "--full has models of 1B and 7B parameters and there is no GPU here; use --grid.")


def show_cells(made: list[dict[str, Any]]) -> None:
    """Print a table for each cell."""
    console = Console()
    for measured in made:
        known = dict(measured["cell"], contenders=tuple(measured["cell"]["contenders"]))
        console.print(Text(f"\n{Cell(**known)}", "bold"), soft_wrap=True)
        if "failed" in measured:
            console.print(Text(f"failed: {measured['failed']}", "red"), soft_wrap=True)
        elif measured["cell"]["experiment"] in ("context", "memory"):
            for name, noted in measured["contenders"].items():
                console.print(Text(f"{name}: {_probe(noted)}"), soft_wrap=True)
        else:
            console.print(contenders_table(measured["contenders"]))
            for name, noted in measured["contenders"].items():
                if "unavailable" in noted:
                    console.print(Text(f"{name} is not available: {noted['unavailable']}", "yellow"), soft_wrap=True)
    console.print(Text(BENCH_LEGEND, "dim"))
    if any(measured.get("pair", {}).get("synthetic") for measured in made):
        console.print(Text(SYNTHETIC, "dim"))


def contenders_table(contenders: dict[str, Any]) -> Table:
    """One row for each contender that ran."""
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for heading in COLUMNS:
        named = heading == COLUMNS[0]
        table.add_column(heading, justify="left" if named else "right", no_wrap=named)
    for name, noted in contenders.items():
        if "tokens_per_second" not in noted:
            continue
        speedup, round_time = noted.get("speedup"), noted.get("seconds_per_round", {}).get("median")
        cells = (
            f"{noted['tokens_per_second']['median']:.0f}",
            figure(speedup),
            "-" if speedup is None else f"{speedup['min']:.2f}-{speedup['max']:.2f}",
            figure(noted.get("alpha")),
            figure(noted.get("tokens_per_round")),
            "-" if round_time is None else f"{1000 * round_time:.1f}",
            figure(noted.get("round_over_bare")),
            figure(noted.get("forward_limited_speedup")),
            figure(noted.get("expected_speedup")),
        )
        table.add_row(name, *cells)
    return table


def show_claims(found: list[Claim]) -> None:
    """Print which claims hold."""
    table = Table("point", "claim", "wanted", "found", "", "", show_edge=False)
    outcomes = {True: Text("holds", "green"), False: Text("fails", "red"), None: Text("not told", "yellow")}
    for each in found:
        table.add_row(str(each.point), each.what, each.wanted, figure(each.found), outcomes[each.holds], each.note)
    Console().print(Text("\nWhat it must show", "bold"))
    Console().print(table)


def _probe(noted: dict[str, Any]) -> str:
    if "ratio" in noted:
        short, long = (1000 * noted[name]["median"] for name in ("outside_short", "outside_long"))
        return f"{short:.2f} ms a round outside of forwards, {long:.2f} after the long prompt"
    return f"{noted['beyond'] / 1e6:.2f} million floats beyond models and KV, {noted['limit'] / 1e6:.2f} allowed"
