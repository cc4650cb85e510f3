"""`specx check`: compare speculative with plain text in tokens, distribution and quality, on your pair and prompts."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hf_specx.drafting.draft_length import FIXED_DRAFT_TOKENS
from hf_specx.hub.folders import check_out
from hf_specx.metrics.page import check_can_write, write_report
from hf_specx.metrics.result import CHECK_LEGEND, FAILED, PASSED, UNTOLD, CheckResult, summary
from hf_specx.metrics.settings import CHECKED, Settings, check_packages

from .console import Output, going_on_with, imports, steps
from .options import Batches, Chat, Named, PromptFile, Seed, Warping, command, typed
from .prompts import prompts_of_file


COLOURS = {PASSED: "green", FAILED: "red", UNTOLD: "yellow"}
HELP_VERIFICATION = f"{', '.join(CHECKED)}, once for each; else all."
HELP_SAMPLES = "PromptTexts for each sampled verification and batch size; else 8 batches, "
HELP_SAMPLES += "at the largest size at least 16 texts and one for each prompt."
HELP_RESUME = "File of partial results; an interrupted check continues from it."
HELP_REPORT = "Page (.html) for people, which has all of it."


@command
def check(
    named: Named,
    warping: Warping,
    file: PromptFile = None,
    chat: Chat = False,
    batch: Batches = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens of a text, at most.")] = 64,
    verification: Annotated[list[str] | None, typer.Option(help=HELP_VERIFICATION)] = None,
    samples: Annotated[int | None, typer.Option(help=HELP_SAMPLES, show_default=False)] = None,
    num_draft_tokens: Annotated[int, typer.Option(help="Candidates per round.")] = FIXED_DRAFT_TOKENS,
    level: Annotated[float, typer.Option(help="Chance of a false alarm, at most, of the whole check.")] = 0.001,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="File for all figures, as JSON.", dir_okay=False)] = None,
    resume: Annotated[Path | None, typer.Option(help=HELP_RESUME, dir_okay=False)] = None,
    report: Annotated[Path | None, typer.Option(help=HELP_REPORT)] = None,
) -> None:
    """Test that speculative text is plain text: equal greedy and coupled tokens, the same distribution and quality.

    Prompts come from --file, else from the pair. The exit code is 0 if all passed, 1 if not, and 2 for an error.
    It needs the extra quality.
    """
    check_packages()
    check_out(out)
    check_can_write(report)
    how = warping.temperature, warping.top_p, warping.top_k, tuple(verification or CHECKED)
    settings = Settings(tuple(batch or (1, 8)), new_tokens, *how, samples, num_draft_tokens, seed, level)
    prompts = prompts_of_file(file, chat)
    with going_on_with(resume):
        with imports():
            from hf_specx.bench.store import read_cells
            from hf_specx.metrics.check import run_check, subject_of

            from .loading import PromptTexts, load_named
        read_cells(resume, "check")  # raises for another file
        pair = load_named(named)
        texts = list(PromptTexts(prompts, pair.tokenizer, chat, named.name))
        subject = subject_of(pair, texts or pair.prompts, settings)
        with steps("plain and speculative, and both compared", settings.steps) as bar:
            result = run_check(subject, bar.update, resume)
    result.pair, result.command = named.name, typed()
    show_result(result)
    try:
        for path, write in ((out, result.save), (report, partial(write_report, result))):
            if path is not None:
                Output().text(f"wrote {write(path)}")
    except OSError:  # what took minutes is not lost
        typer.echo(json.dumps(result.to_dict()))
        raise
    if not result.passed:
        raise typer.Exit(1)


def show_result(result: CheckResult) -> None:
    console, rows = Output(), []
    for line in result.lines:
        seen = "-" if line.figure is None else f"{line.figure:.3g}"
        verdict = Text(line.verdict, COLOURS[line.verdict])
        rows.append((line.what, verdict, seen, f"{line.threshold:.3g}", line.note))
    console.table(("what", "verdict", "figure", "at most", "seen"), rows)
    console.print(Text(CHECK_LEGEND, "dim"))
    console.text(summary(result), COLOURS[PASSED if result.passed else FAILED])
