"""`specx tune`: which of some drafts fits a target, how fast it makes it, and how many tokens to draft."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_specx.common.errors import require
from hf_specx.hub.saving import check_folder
from hf_specx.measure.compatibility import ERROR, NOTE, OK, Finding
from hf_specx.measure.drafts import EXITS
from hf_specx.measure.study import BATCHES, DraftTrial, Study
from hf_specx.measure.tune import drafts_to_try
from hf_specx.measure.tune import tune as try_drafts

from .console import error_line, errors_in_one_line, figure, progress
from .options import (
    LARGEST_SEED,
    AsJson,
    Dtype,
    Greedy,
    MaxNewTokens,
    Overwrite,
    PromptFile,
    Revision,
    Temperature,
    Token,
    TopK,
    TopP,
    Trust,
    check_dtype,
    default_device_map,
    hub_options,
    read_prompts,
    sampling_options,
    saved_as,
    strategy_options,
    typed,
)


VERDICTS = {OK: "green", NOTE: "yellow", ERROR: "red"}
MEASURED_TABLE = (
    ("draft", "batch", "α", "c", "drafts", "tokens", "expected", "limited", "measured"),
    "alpha; c, a draft step over a target step; the recommended number of drafts; tokens a row and round; speed-ups: "
    "expected by Theorem 3.8, limited by the forwards, and measured",
)


HELP_DRAFTS = (
    "Ids or folders of drafts to try; and without a second model: suffix (what followed the same tokens before), "
    "exit:4 (the target's first 4 layers), exits (several numbers of them)."
)


def tune(
    target: Annotated[str, typer.Argument(help="Id or folder of the target.")],
    drafts: Annotated[list[str] | None, typer.Argument(help=HELP_DRAFTS, show_default="suffix exits")] = None,
    file: PromptFile = None,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Only check; no prompts are needed.")] = False,
    batch: Annotated[list[int] | None, typer.Option(help="Rows timed, once for each size; else 1 and 8.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of plain and of speculative generation.")] = 3,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    greedy: Greedy = False,
    verification: Annotated[str | None, typer.Option(help="token, block or coupled; else the default.")] = None,
    seed: Annotated[int, typer.Option(help="Of all random numbers.", min=0, max=LARGEST_SEED)] = 0,
    dtype: Dtype = "auto",
    revision: Revision = None,
    draft_revision: Annotated[list[str] | None, typer.Option(help="The same for the drafts, once for each.")] = None,
    token: Token = None,
    trust_remote_code: Trust = False,
    out: Annotated[Path | None, typer.Option(help="Save the pair with the best draft in this folder.")] = None,
    inside: Annotated[bool, typer.Option("--inside", help="Save weights of models from the Hub, not ids.")] = False,
    overwrite: Overwrite = False,
    save_prompts: Annotated[bool, typer.Option("--save-prompts", help="Save the prompts with the pair.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check whether drafts fit a target, time them on your prompts, and recommend one.

    With a target alone: which of its layers drafts best, or whether its text repeats enough to do without any.
    Prompts come from --file or standard input. Models from the Hub are saved by id and commit, others with weights.
    """
    with errors_in_one_line():
        check_dtype(dtype)
        check_saved(out, overwrite, inside, told_apart=not no_measure or is_one(drafts))
        ways = "with --file, on standard input, or use --no-measure"
        prompts = [] if no_measure else read_prompts([], file, ways)
        options = sampling_options(greedy, temperature, top_p, top_k, max_new_tokens)
        how: dict[str, Any] = {"repeats": repeats, "seed": seed, **strategy_options(None, verification)}
        loading: dict[str, Any] = {"dtype": dtype, "device_map": default_device_map(), "hub": hub_options(None, token)}
        study = Study(prompts, batch or BATCHES, options, **how, **loading, trust_remote_code=trust_remote_code)
        study.command, study.keep_prompts = typed(), save_prompts
        names = drafts_to_try(target, drafts or [], study, revision)
        with progress("drafts, each in turns with plain generate", len(names) * (1 + study.runs)) as advance:
            found = try_drafts(target, names, study, revision, draft_revision or [], advance)
        show_drafts(target, found)
        recommend(found[0])
        if as_json:
            typer.echo(json.dumps({"target": target, "drafts": [trial.to_dict() for trial in found]}))
        require(found[0].error is None, f"no draft can be used; of {found[0].name}: {found[0].error}")
        if out is not None:
            line = save_best(found[0], out, inside, overwrite)
            Console(stderr=as_json).print(Text(line), soft_wrap=True)  # stdout ends with the document


def is_one(drafts: list[str] | None) -> bool:
    """Whether these names stand for a single draft."""
    return drafts is not None and len(drafts) == 1 and drafts != [EXITS]


def check_saved(out: Path | None, overwrite: bool, inside: bool, told_apart: bool) -> None:
    """Raise a ValueError, before anything is measured, if no pair could be saved then, or it is not known which."""
    if out is None:
        option = "--overwrite" if overwrite else "--inside"
        require(not overwrite and not inside, f"{option} is for saving; name a folder with --out.")
        return
    check_folder(out, overwrite)
    near = next(folder for folder in out.resolve().parents if folder.exists())
    writable = near.is_dir() and os.access(near, os.W_OK | os.X_OK)
    require(writable, f"--out {out}: nothing can be written in {near}; name another folder.")
    require(told_apart, "--out saves the best draft, which --no-measure cannot tell; give one draft, or measure.")


def show_drafts(target: str, trials: list[DraftTrial]) -> None:
    """Print each draft compared with the target, then the measurements of all drafts."""
    console = Console()
    for trial in trials:
        if trial.findings:
            console.print(Text(f"\n{target} with {trial.name}", "bold"), soft_wrap=True)
            console.print(findings_table(trial.findings))
        if trial.error is not None:
            console.print(Text(f"{trial.name}: {error_line(trial.error)}", VERDICTS[ERROR]), soft_wrap=True)
    if any(trial.speedup for trial in trials):
        console.print()
        console.print(measured_table(trials))
        console.print(Text(MEASURED_TABLE[1], "dim"))


def findings_table(findings: list[Finding]) -> Table:
    """A row for each property that was compared."""
    table = Table(show_edge=False)
    for heading in ("", "target", "draft", "", "what follows"):
        table.add_column(heading)
    for finding in findings:
        cells = (finding.subject, finding.target, finding.draft)
        verdict = Text(finding.verdict, VERDICTS[finding.verdict])
        table.add_row(*map(Text, cells), verdict, Text(finding.follows))
    return table


def measured_table(trials: list[DraftTrial]) -> Table:
    """A row for each draft and batch size, the best draft first."""
    table = Table(show_edge=False)
    for heading in MEASURED_TABLE[0]:
        named = heading == "draft"
        table.add_column(heading, justify="left" if named else "right", no_wrap=not named, overflow="fold")
    for trial in trials:
        for m in trial.measurements:
            ratios = (m.tokens_per_round, m.expected_speedup, m.forward_limited_speedup, m.measured_speedup)
            cells = (trial.name, m.batch, figure(m.alpha), figure(m.cost_coefficient), m.num_draft_tokens)
            table.add_row(*(Text(str(cell)) for cell in cells), *map(figure, ratios))
    return table


def recommend(best: DraftTrial) -> None:
    """Print which draft is recommended, if any was measured."""
    if best.speedup:
        numbers = ", ".join(f"{m.num_draft_tokens} at batch {m.batch}" for m in best.measurements)
        says = "best" if best.speedup > 1 else "none is faster than plain generate here; the best"
        line = f"{says}: {best.name}, num_draft_tokens {numbers}, {best.speedup:.2f} times as fast as plain generate"
        Console().print(Text(line), soft_wrap=True)


def save_best(best: DraftTrial, out: Path, inside: bool, overwrite: bool) -> str:
    """Save the pair with the best draft; returns a line that says where its models are."""
    assert best.pair is not None
    assert best.config is not None
    target, draft = (saved_as(source, inside) for source in (best.config.target, best.config.draft))
    best.pair.save_pretrained(out, target=target, draft=draft, overwrite=overwrite)
    return f"saved in {out}: target {target}, draft {draft if best.config.weightless_draft() is None else best.name}"
