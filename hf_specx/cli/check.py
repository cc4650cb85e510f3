"""`specx check`: compare speculative with plain text in tokens, distribution and quality, on your pair and prompts."""

from pathlib import Path
from typing import Annotated

import typer

from hf_specx.common.drafts import FIXED_DRAFT_TOKENS
from hf_specx.hub.folders import check_out
from hf_specx.metrics.page import PAGE_MARKER, PAGES, page
from hf_specx.metrics.result import FAILED, PASSED, RESULT_MARKER, CheckResult, note_of, summary
from hf_specx.metrics.settings import CHECKED, Settings, check_packages

from .console import VERDICTS, Output, going_on_with, imports, say, steps
from .options import (
    SAMPLING_OPTIONS,
    Batches,
    LoadingOptions,
    PairOptions,
    ProcessorOptions,
    PromptOptions,
    SamplingOptions,
    Seed,
    command,
    typed,
)
from .prompts import prompts_of_file


UNFINISHED = "unfinished"  # ending of the file from which an interrupted check goes on
HELP_VERIFICATION = f"{', '.join(CHECKED)}, once for each; else all."
HELP_SAMPLES = "Texts for each sampled verification and batch size. By default 8 batches of each size; at the largest "
HELP_SAMPLES += "size no fewer than 16 texts, and no fewer than there are prompts."
HELP_OUT = (
    "File that the result is written to: a page (.html), or all figures as JSON; once for each. With it the same "
)
HELP_OUT += "command goes on where it was interrupted."


@command
def check(
    named: PairOptions,
    source: PromptOptions,
    sampling: SamplingOptions,
    processing: ProcessorOptions,
    loading: LoadingOptions,
    batch_size: Batches = None,
    verification: Annotated[list[str] | None, typer.Option(help=HELP_VERIFICATION)] = None,
    samples: Annotated[int | None, typer.Option(help=HELP_SAMPLES, show_default=False)] = None,
    num_draft_tokens: Annotated[int, typer.Option(help="Candidates a round.")] = FIXED_DRAFT_TOKENS,
    compile: Annotated[bool, typer.Option("--compile", help="Check what compiled forwards generate.")] = False,
    seed: Seed = 0,
    out: Annotated[list[Path] | None, typer.Option(metavar="FILE", help=HELP_OUT, dir_okay=False)] = None,
) -> None:
    """Test that speculative text is plain text: equal greedy and coupled tokens, the same distribution and quality.

    Prompts come from --prompts or --dataset, else from the pair. The exit code is 0 if all passed, 1 if not, and
    another one for an error. It needs pip install ".[quality]".
    """
    check_packages()
    for path in out or ():
        check_out(path, PAGE_MARKER if path.suffix.lower() in PAGES else RESULT_MARKER)
    verifications = tuple(verification or CHECKED)
    options = {"samples": samples, "num_draft_tokens": num_draft_tokens, "seed": seed} | sampling.options
    more = processing.options
    settings = Settings(tuple(batch_size or (1, 8)), verifications=verifications, options=more, **options)
    prompts = prompts_of_file(source)
    unfinished = None if not out else out[0].with_name(f"{out[0].name}.{UNFINISHED}")
    with going_on_with(unfinished):
        with imports():
            from hf_specx.bench.store import read_records
            from hf_specx.metrics.check import run_check, subject_of

            from .loading import load_named, say_what_runs, texts_for
            from .setting_sources import naming_files
        read_records(unfinished, "check")  # raises for another file
        pair = load_named(named, loading, source.chat)
        pair.strategy.compile = compile
        texts = texts_for(pair, prompts, named.name, source.template_options)
        with naming_files(pair, options | more):
            subject = subject_of(pair, texts, settings, sampling.options)
            shown = {"verification": ", ".join(verifications)}
            shown |= {name: getattr(subject.settings, name) for name in ("max_new_tokens", *SAMPLING_OPTIONS)}
            say_what_runs(pair, shown | more | {"seed": seed})
            with steps("plain and speculative, and both compared", settings.steps) as bar:
                result = run_check(subject, bar.update, unfinished)
    result.pair, result.command = named.name, typed()
    console = Output()
    for line in result.lines:
        console.verdict(line.verdict, line.what, note_of(line))
    console.text(f"\n{summary(result)}", VERDICTS[PASSED if result.passed else FAILED])
    for path in out or ():
        write(result, path)
    if unfinished is not None:
        unfinished.unlink()
    if not result.passed:
        raise typer.Exit(1)


def write(result: CheckResult, path: Path) -> None:
    """Write a result as a page or as JSON, by the end of the file's name."""
    if path.suffix.lower() in PAGES:
        path.write_text(page(result), encoding="utf-8")
    else:
        result.save(path)
    say(f"wrote {path}")
