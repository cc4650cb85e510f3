"""`specx tune`: which of some drafts fits a target, how fast it makes it, and how many tokens to draft."""

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from hf_specx.bench.checks import MIN_TURNS, SECONDS, check_runs
from hf_specx.common.drafts import HELP_DRAFT, SEVERAL_EXITS, read_draft
from hf_specx.common.errors import require
from hf_specx.hub.folders import check_folder

from .console import SPEEDUP_COLUMNS, VERDICTS, Output, error_line, figure, imports, say, steps
from .options import (
    HELP_TARGET,
    AsJson,
    Batches,
    DecodingOptions,
    LoadingOptions,
    Overwrite,
    ProcessorOptions,
    PromptOptions,
    Seed,
    command,
    typed,
)
from .prompts import Prompts, read_prompts


if TYPE_CHECKING:  # torch is imported after the options were checked
    from hf_specx.bench.tune_settings import DraftTrial
    from hf_specx.hub.pair_config import Measurement


TUNE_COLUMNS = {  # with what is in them
    "batch": "rows at a time",
    "accepted": "α, the chance that a candidate is accepted",
    "draft cost": "c, a step of the draft over one of the target",
    "candidates": "γ, the recommended number in each round",
    "tokens a round": "of each row",
    **SPEEDUP_COLUMNS,
    "interval": "of the measured speed-up; all intervals together hold in 19 of 20 runs of specx tune",
}
HELP_DRAFTS = f"To try: {HELP_DRAFT[:-1]}; exits: several numbers of first layers."
HELP_OUT = "Folder that the pair with the best draft is saved in."
HELP_REPEATS = "Turns of plain and speculative generation, at least; 0 checks whether drafts fit, without prompts."
HELP_SECONDS = "Seconds after which the turns of a draft and batch size end, once there were --repeats of them; "
HELP_SECONDS += "they end sooner where it is clear which is faster."


@command
def tune(
    source: PromptOptions,
    sampling: DecodingOptions,
    processing: ProcessorOptions,
    loading: LoadingOptions,
    target: Annotated[str, typer.Argument(help=HELP_TARGET)],
    drafts: Annotated[list[str] | None, typer.Argument(help=HELP_DRAFTS, show_default="suffix exits")] = None,
    batch_size: Batches = None,
    repeats: Annotated[int, typer.Option(help=HELP_REPEATS, min=0)] = MIN_TURNS,
    seconds: Annotated[float, typer.Option(help=HELP_SECONDS, min=0)] = SECONDS,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help=HELP_OUT)] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Check whether drafts fit a target, time them on your prompts, and recommend one.

    Where no draft is named, drafts without a second model are tried: the target's first layers, and what its text
    repeats. Prompts come from --prompts, --dataset or standard input. Models from the Hub are saved by id and commit,
    others with weights.
    """
    for name in drafts or ():
        read_draft(name, SEVERAL_EXITS)
    sizes, options = batch_size or [1, 8], processing.beside(sampling)
    check_runs(sizes)
    require(out is not None or not overwrite, "--overwrite is for saving; name a folder with --out.")
    require(
        out is None or loading.quantize is None,
        f"--out saves the target as its files have it, and --quantize {loading.quantize} measures another; leave one "
        "of them out.",
    )
    if out is not None:
        check_folder(out, overwrite, "--overwrite")
    names_one_draft = len(drafts or ()) == 1 and drafts != [SEVERAL_EXITS]
    require(
        out is None or repeats > 0 or names_one_draft,
        "--out saves the best draft, which --repeats 0 cannot tell; give one draft, or measure.",
    )
    prompts: Prompts = []
    if repeats:
        prompts = read_prompts(source, "with --prompts FILE, on standard input, or use --repeats 0")
    with imports():
        from hf_specx.bench import tune as tuning
        from hf_specx.hub.fetch import find_files, get_tokenizer
        from hf_specx.hub.known_pairs import folder_of

        from .loading import check_template, in_words, save_best, texts_of, tune_settings
    tokenizer = None
    if source.chat:
        tokenizer = get_tokenizer(find_files(folder_of(target)), None, loading.trust_remote_code)
    check_template(tokenizer, source.chat)
    texts = texts_of(prompts, tokenizer, source.template_options)
    settings = tune_settings(
        loading,
        prompts=texts,
        batches=sizes,
        options=options,
        repeats=repeats or 1,
        seconds=seconds,
        command=typed(),
        seed=seed,
    )
    names = tuning.drafts_to_try(target, drafts or [], settings)
    with steps("drafts in turns with plain generate, runs") as bar:
        trials = tuning.tune(target, names, settings, bar.update)
    best = trials[0]
    if best.pair is not None and texts:
        generation = tuning.generation_settings(best.pair.target, options)
        say(f"target {target}, drafts {', '.join(names)}: {in_words(generation)}", "dim")
    show_drafts(target, trials, Output(quiet=as_json))
    if as_json:
        typer.echo(json.dumps({"target": target, "drafts": [trial.to_dict() for trial in trials]}))
    require(best.error is None, "no draft can be used, for the reasons given with each.")
    if out is not None:
        say(save_best(best, out, overwrite))


def show_drafts(target: str, trials: "list[DraftTrial]", console: Output) -> None:
    """Print how each draft fits, the figures of all below their names, which may be long, and the recommended one."""
    for trial in trials:
        if trial.findings:
            console.text(f"\n{target} with {trial.name}", "bold")
            table = Table(box=None, pad_edge=False)
            for heading in ("", "", "target", "draft", "what follows"):
                table.add_column(heading, overflow="fold")  # no word is cut
            for finding in trial.findings:
                words = finding.subject, finding.target, finding.draft, finding.follows
                table.add_row(Text(finding.verdict, VERDICTS[finding.verdict]), *map(Text, words))
            console.print(table)
        if trial.error is not None:
            console.text(f"{trial.name}: {error_line(trial.error)}", VERDICTS["error"])
        if trial.misread:
            console.text(f"{trial.name}: {trial.misread}", VERDICTS["note"])
    measured = [trial for trial in trials if trial.measurements]
    for trial in measured:
        console.text(f"\n{trial.name}", "bold")
        console.figures(list(TUNE_COLUMNS), [row_of(measurement) for measurement in trial.measurements])
        console.text("\n".join(map(str, trial.measurements)))
    if measured:
        console.text("\n".join(f"{heading}: {meaning}" for heading, meaning in TUNE_COLUMNS.items()), "dim")
        console.text(outcome(trials))


def row_of(measurement: "Measurement") -> tuple[str, ...]:
    """The figures of `TUNE_COLUMNS`."""
    return (
        str(measurement.batch),
        figure(measurement.alpha or None),
        figure(measurement.cost_coefficient),
        str(measurement.num_draft_tokens),
        figure(measurement.tokens_per_round),
        figure(measurement.measured_speedup),
        figure(measurement.forward_limited_speedup),
        figure(measurement.expected_speedup),
        f"{figure(measurement.interval_low)} to {figure(measurement.interval_high)}",
    )


def outcome(trials: "list[DraftTrial]") -> str:
    """The result of `tune` in some lines; the first draft is the one that it put first."""
    best, *others = trials
    assert best.config is not None
    numbers = ", ".join(f"{m.num_draft_tokens} at batch {m.batch}" for m in best.measurements)
    speeds = [m.measured_speedup for m in best.measurements]
    line = f"{best.name}, num_draft_tokens {numbers}, {statistics.median(speeds):.2f} times as fast as plain generate"
    if len(speeds) > 1:
        line += f", the median over batch sizes ({min(speeds):.2f} to {max(speeds):.2f})"
    if best.recommended:
        alike = [f"{other.name} ({other.speedup:.2f})" for other in others if is_alike(best, other)]
        also = f"\nas fast, so far as these turns tell: {', '.join(alike)}" if alike else ""
        return f"best: {line}{also}"
    if best.config.pays:
        unclear = "not clear: no draft was shown to be faster than plain generate; more prompts or --seconds may tell"
        return f"{unclear}. Nearest: {line}"
    return f"none is faster than plain generate here; the best: {line}\n{best.config.speeds()[-1]}"


def is_alike(best: "DraftTrial", other: "DraftTrial") -> bool:
    """Whether another draft was shown to be faster than plain `generate` too, and not to be slower than the best."""
    return other.recommended and not other.differs_from(best)
