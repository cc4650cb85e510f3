"""`specx generate --out`: many prompts to a file, which the same command goes on with after an interruption."""

import warnings
from collections.abc import Iterable, Sized
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from hf_specx.common.errors import require
from hf_specx.pairs.pair import DraftTargetPair
from hf_specx.pairs.results_file import check_results_path


DEFAULT_BATCH = 8
DEFAULT_SEED = 0
INTERRUPTED = 130  # what shells call a program that was ended by SIGINT


def check_out_options(out: Path | None, batch_size: int | None, demo: bool) -> None:
    """Check --out and the options that go with it, or do not."""
    require(
        batch_size is None or out is not None, "--batch-size goes with --out; without it all prompts are one batch."
    )
    require(
        out is None or not demo, "--demo shows texts and writes none; give --out prompts of yours, as with --file."
    )
    if out is not None:
        check_results_path(out)


def complete_prompts(
    pair: DraftTargetPair,
    prompts: Iterable[str],
    out: Path,
    batch_size: int | None,
    seed: int | None,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Complete prompts to a file; returns what was done, as plain values.

    Raises:
        typer.Exit: it was interrupted.
    """
    seed, console = DEFAULT_SEED if seed is None else seed, Console(stderr=True)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            made = pair.complete(prompts, batch_size=batch_size or DEFAULT_BATCH, seed=seed, out=out, **arguments)
    except KeyboardInterrupt as stop:
        console.print(f"interrupted; the same command goes on with {out}", soft_wrap=True, markup=False)
        raise typer.Exit(INTERRUPTED) from stop
    for warning in said:
        console.print(f"warning: {warning.message}", style="yellow", soft_wrap=True, markup=False)
    done = {"out": str(made), "seed": seed}
    return done | ({"prompts": len(prompts)} if isinstance(prompts, Sized) else {})
