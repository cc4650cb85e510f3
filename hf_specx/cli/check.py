"""`specx check`: compare speculative with plain text in tokens, distribution and quality, on your pair and prompts."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from hf_specx.bench.checks import check_out
from hf_specx.drafting.draft_length import FIXED_DRAFT_TOKENS
from hf_specx.metrics.page import check_can_write, write_report
from hf_specx.metrics.result import CHECK_LEGEND, FAILED, PASSED, UNTOLD, CheckResult, summary
from hf_specx.metrics.settings import CHECKED, Settings, check_packages

from .console import Output, errors_in_one_line, imports, progress
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
    Temperature,
    Token,
    TopK,
    TopP,
    Trust,
    hub_options,
    typed,
)
from .prompts import prompts_of_file


COLOURS = {PASSED: "green", FAILED: "red", UNTOLD: "yellow"}
HELP_VERIFICATION = f"{', '.join(CHECKED)}, once for each; else all."
HELP_SAMPLES = "Texts for each sampled verification and batch size; else 8 batches, "
HELP_SAMPLES += "at the largest size at least 16 texts and one for each prompt."
HELP_RESUME = "File of partial results; an interrupted check continues from it."
HELP_REPORT = "Page (.html) for people, which has all of it; measures speed too."


def check(
    pair: PairName = None,
    target: TargetName = None,
    draft: DraftName = None,
    file: PromptFile = None,
    chat: Chat = False,
    batch: Annotated[list[int] | None, typer.Option(help="Rows, once for each size; else 1 and 8.")] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens of a text, at most.")] = 64,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    verification: Annotated[list[str] | None, typer.Option(help=HELP_VERIFICATION)] = None,
    samples: Annotated[int | None, typer.Option(help=HELP_SAMPLES, show_default=False)] = None,
    num_draft_tokens: Annotated[int, typer.Option(help="Candidates per round.")] = FIXED_DRAFT_TOKENS,
    level: Annotated[float, typer.Option(help="Chance of a false alarm, at most, of the whole check.")] = 0.001,
    seed: Annotated[int, typer.Option(help="Of all random numbers.", min=0, max=LARGEST_SEED)] = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    revision: Revision = None,
    token: Token = None,
    trust_remote_code: Trust = False,
    out: Annotated[Path | None, typer.Option(help="File for all figures, as JSON.", dir_okay=False)] = None,
    resume: Annotated[Path | None, typer.Option(help=HELP_RESUME, dir_okay=False)] = None,
    report: Annotated[Path | None, typer.Option(help=HELP_REPORT)] = None,
) -> None:
    """Test that speculative text is plain text: equal greedy and coupled tokens, the same distribution and quality.

    Prompts come from --file, else from the pair. The exit code is 0 if all passed, 1 if not, and 2 for an error.
    It needs the extra quality.
    """
    with errors_in_one_line(kept=resume):
        named = Named(pair, target, draft, dtype, device, hub_options(revision, token, trust_remote_code))
        check_packages()
        check_out(out)
        check_out(resume)
        check_can_write(report)
        how = temperature, top_p, top_k, tuple(verification or CHECKED)
        settings = Settings(tuple(batch or (1, 8)), new_tokens, *how, samples, num_draft_tokens, seed, level)
        prompts = prompts_of_file(file, chat)
        result = run_named(named, settings, prompts, chat, resume, timed=report is not None)
        show_result(result)
        for path, write in ((out, result.save), (report, partial(write_report, result))):
            if path is not None:
                keep(path, write, result)
    if not result.passed:
        raise typer.Exit(1)


def run_named(
    named: Named,
    settings: Settings,
    given: list[str | Messages],
    chat: bool,
    resume: Path | None,
    timed: bool,
) -> CheckResult:
    """Load the models and check them.

    Args:
        named, settings, resume: what is checked, how, and the file of partial results.
        given: prompts in place of the pair's own, [] for these; `chat` is as in `texts_of`.
        timed: whether speed is measured for a report.
    """
    with imports():
        from hf_specx.bench.store import read_cells
        from hf_specx.metrics.check import run_check, subject_of

        from .loading import load_named, texts_of
    read_cells(resume, "check")  # raises for another file
    loaded = load_named(named)
    prompts = texts_of(given, loaded.tokenizer, chat, named.name)
    subject = subject_of(loaded, prompts or loaded.prompts, settings)
    with progress("plain and speculative, and both compared", settings.steps(timed)) as advance:
        result = run_check(subject, advance, resume, timed=timed)
    result.pair, result.command = named.name, typed()
    return result


def keep(path: Path, write: Callable[[Path], Path], result: CheckResult) -> None:
    """Write a file of a result; where that has become impossible, print all figures, since they took minutes.

    Raises:
        OSError: it could not be written.
    """
    try:
        Output().print(Text(f"wrote {write(path)}"), soft_wrap=True)
    except OSError:
        typer.echo(json.dumps(result.to_dict()))
        raise


def show_result(result: CheckResult) -> None:
    """Print the results of all tests, and the verdict."""
    console = Output()
    console.print(lines_table(result))
    console.print(Text(CHECK_LEGEND, "dim"))
    console.print(Text(summary(result), COLOURS[PASSED if result.passed else FAILED]), soft_wrap=True)


def lines_table(result: CheckResult) -> Table:
    """A row for each test."""
    table = Table(show_edge=False)
    for heading in ("what", "verdict", "figure", "at most", "seen"):
        number = heading in ("figure", "at most")
        table.add_column(heading, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for line in result.lines:
        figure = "-" if line.figure is None else f"{line.figure:.3g}"
        verdict = Text(line.verdict, COLOURS[line.verdict])
        table.add_row(Text(line.what), verdict, figure, f"{line.threshold:.3g}", Text(line.note))
    return table
