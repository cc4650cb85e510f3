"""`specx bench`: time contenders in turns on one machine, and compare them with what the forwards allow."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hf_specx.bench.cells import EXPERIMENTS, Cell, cpu_grid, gpu_grid, quick_cells
from hf_specx.bench.checks import check_out, check_plots, check_runs
from hf_specx.bench.points import Claim, claims
from hf_specx.bench.recipes import PREFIX, check_grafted
from hf_specx.bench.ways import in_words, way
from hf_specx.common.errors import require

from .console import Output, errors_in_one_line, figure, imports, print_figures, progress
from .options import (
    LARGEST_SEED,
    Chat,
    Device,
    DraftName,
    Messages,
    Named,
    PromptFile,
    Revision,
    TargetName,
    Token,
    Trust,
    check_dtype,
    hub_options,
    typed,
)
from .prompts import prompts_of_file


GRID_FILE = Path("specx-bench.json")
COLUMNS = {  # with what is in them
    "contender": "",
    "tokens/s": "all rows together, the median over turns",
    "times plain": "tokens/s over those of plain",
    "within turns": "the least and the largest of these ratios within one turn",
    "accepted": "α, the chance that a candidate is accepted",
    "tokens a round": "of each row",
    "time over forwards": "a round's time over that of its forwards alone",
    "limit": "times plain, if both took nothing but their forwards",
    "Theorem 3.8": "the same, if a forward over all candidates took as long as one over a token",
}
ABOVE = "*"  # what was measured is above the limit
SYNTHETIC = "grafted pairs are synthetic: random weights whose acceptance was set"
HELP_PAIR = f"Id or folder of a pair; or {PREFIX}30M and the like."
HELP_OUT = f"File of results, taken up where it ended; of a grid {GRID_FILE}."
HELP_ONLY = f"Of a grid, --grid unless given: {', '.join(list(EXPERIMENTS)[1:])}."
HELP_CONTENDER = "plain, plain-compiled, stock, stock-5, block-auto, token-5, coupled-5-compiled, ..., once for each."


def bench(
    pair: Annotated[str | None, typer.Argument(help=HELP_PAIR, show_default="embedded")] = None,
    target: TargetName = None,
    draft: DraftName = None,
    batch: Annotated[list[int] | None, typer.Option(help="Rows, once for each size; else 1 and 8.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Tokens of each prompt; else 64.")] = None,
    new_tokens: Annotated[int | None, typer.Option(help="Tokens a row; else 64.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of sampling, 0 is greedy; else 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus; else 1, which is off.")] = None,
    contender: Annotated[list[str] | None, typer.Option(help=HELP_CONTENDER)] = None,
    repeats: Annotated[int | None, typer.Option(help="Timed runs of each contender; else 3.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16; else as saved.")] = None,
    device: Device = None,
    file: PromptFile = None,
    chat: Chat = False,
    seed: Annotated[int | None, typer.Option(help="Of all random numbers; else 0.", min=0, max=LARGEST_SEED)] = None,
    revision: Revision = None,
    token: Token = None,
    trust_remote_code: Trust = False,
    grid: Annotated[bool, typer.Option("--grid", help="All experiments, which takes long.")] = False,
    full: Annotated[bool, typer.Option("--full", help="The same with models of 1B and 7B, on a GPU.")] = False,
    only: Annotated[list[str] | None, typer.Option(help=HELP_ONLY)] = None,
    out: Annotated[Path | None, typer.Option(help=HELP_OUT)] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for figures; needs the extra plots.")] = None,
) -> None:
    """Time plain, stock assisted and speculative generation in turns, and their bare forwards.

    Without options it takes one or two minutes, on the pair in the package. A grid says which claims of the project
    hold on this machine.
    """
    kept = out or (GRID_FILE if grid or full or only else None)
    with errors_in_one_line(kept):
        sizes = {"batch": batch, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "repeats": repeats}
        how = {"temperature": temperature, "top_p": top_p, "dtype": dtype, "seed": seed}
        given = {name: value for name, value in (sizes | how).items() if value not in (None, [])}
        others: dict[str, Any] = {"PAIR": pair, "--target": target, "--draft": draft, "--device": device}
        others = {name: x for name, x in (others | {"--contender": contender, "--file": file}).items() if x}
        hub, grafted = hub_options(revision, token, trust_remote_code), (pair or "").startswith(PREFIX)
        named = Named(None if grafted else pair, target, draft, dtype or "auto", device, hub)
        cells = choose_cells(grid, full, only or [], given, others, pair if pair and grafted else named.name)
        check_out(out)
        check_plots(plots)
        prompts = prompts_of_file(file, chat)
        made = measure(cells, named, prompts, chat, kept, full)
        show_cells(made)
        if grid or full or only:
            show_claims(claims(made))
        if plots is not None:
            show_plots(made, plots)


def measure(
    cells: list[Cell], named: Named, prompts: list[str | Messages], chat: bool, out: Path | None, full: bool
) -> list[dict[str, Any]]:
    """Measure cells; `out` is the file of results, and `full` whether they need a GPU."""
    with imports():
        from hf_specx.bench.grid import results, run_grid
        from hf_specx.pairs.fingerprint import digest_of

        from .loading import bench_loader, check_full, device_map, models_digest
    check_full(full)
    models = models_digest(named)
    cells = [replace(cell, models=models) if cell.pair == named.name else cell for cell in cells]
    if prompts:
        digest = digest_of([json.dumps([prompts, chat]).encode()])
        cells = [replace(cell, prompts=digest) for cell in cells]
    store = results(out, device_map(named.device))
    with progress("contenders in turns", sum(cell.turns for cell in cells)) as advance:
        return run_grid(cells, store, typed(), bench_loader(named, prompts, chat), advance)


def show_plots(made: list[dict[str, Any]], folder: Path) -> None:
    """Write figures, and print where they are."""
    from hf_specx.bench.plots import plot

    for path in plot(made, folder):
        Output().print(Text(f"wrote {path}"), soft_wrap=True)


def choose_cells(
    grid: bool, full: bool, only: list[str], given: dict[str, Any], others: dict[str, Any], pair: str = "embedded"
) -> list[Cell]:
    """The cells to measure; wrong options raise an error here, before anything is loaded.

    Args:
        grid, full, only: which grid, and which of its experiments; else a single study.
        given: settings of a cell, and batch sizes.
        others: models, device, contenders and prompts, by the name of their option.
        pair: what results call the models.

    Raises:
        ValueError: options contradict each other, or cannot be measured.
    """
    grid = grid or bool(only and not full)
    if grid or full:
        check_grid(grid, full, only, [*(f"--{name.replace('_', '-')}" for name in given), *others])
        return [cell for cell in (gpu_grid() if full else cpu_grid()) if not only or cell.experiment in only]
    asked: dict[str, Any] = {"batch": (1, 8), "dtype": "auto"} | given
    batches, contenders = asked.pop("batch"), others.get("--contender", [])
    check_runs(batches)
    check_dtype(asked["dtype"])
    check_grafted(pair)
    own = sorted(others.keys() & {"--target", "--draft", "--device", "--file"}) if pair.startswith(PREFIX) else []
    told = f"{pair} has its own models, made where an accelerator is, and random tokens; leave {', '.join(own)} out."
    require(not own, told)
    for name in contenders:
        way(name)
    return quick_cells(pair, batches, contenders, **asked)


def check_grid(grid: bool, full: bool, only: list[str], given: list[str]) -> None:
    """Whether it is clear which cells of a grid are meant.

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


def show_cells(made: list[dict[str, Any]]) -> None:
    """Print a table for each cell."""
    console = Output()
    for measured in made:
        known = dict(measured["cell"], contenders=tuple(measured["cell"]["contenders"]))
        console.print(Text(f"\n{Cell(**known)}", "bold"), soft_wrap=True)
        if "failed" in measured:
            console.print(Text(f"failed: {measured['failed']}", "red"), soft_wrap=True)
        elif measured["cell"]["experiment"] in ("context", "memory"):
            for name, noted in measured["contenders"].items():
                console.print(Text(f"{name}: {_probe(noted)}"), soft_wrap=True)
        else:
            print_figures(console, list(COLUMNS), rows_of(measured["contenders"]))
            for name, noted in measured["contenders"].items():
                if "unavailable" in noted:
                    console.print(Text(f"{name} did not run: {noted['unavailable']}", "yellow"), soft_wrap=True)
                if "above_limit" in noted:
                    console.print(Text(f"{ABOVE} {name}: {noted['above_limit']}"), soft_wrap=True)
    console.print(Text(f"\n{legend_of(made)}", "dim"), soft_wrap=True)
    if any(measured.get("pair", {}).get("synthetic") for measured in made):
        console.print(Text(SYNTHETIC, "dim"))


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
            figure(noted.get("round_over_bare")),
            figure(noted.get("forward_limited_speedup")) + (ABOVE if "above_limit" in noted else ""),
            figure(noted.get("expected_speedup")),
        )
        rows.append((name, *cells))
    return rows


def show_claims(found: list[Claim]) -> None:
    """Print which claims hold."""
    table = Table("point", "claim", "wanted", "found", "", "", show_edge=False)
    outcomes = {True: Text("holds", "green"), False: Text("fails", "red"), None: Text("not told", "yellow")}
    for each in found:
        table.add_row(str(each.point), each.what, each.wanted, figure(each.found), outcomes[each.holds], each.note)
    Output().print(Text("\nWhat it must show", "bold"))
    Output().print(table)


def _probe(noted: dict[str, Any]) -> str:
    if "ratio" in noted:
        short, long = (1000 * noted[name]["median"] for name in ("outside_short", "outside_long"))
        return f"{short:.2f} ms a round outside of forwards, {long:.2f} after the long prompt"
    return f"{noted['beyond'] / 1e6:.2f} million floats beyond models and KV, {noted['limit'] / 1e6:.2f} allowed"
