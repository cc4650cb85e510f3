"""`specx tune`: which of some drafts fits a target, how fast it makes it, and how many tokens to draft."""

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hf_specx.bench.checks import check_runs
from hf_specx.common.drafts import HELP_DRAFT, SEVERAL_EXITS, read_draft
from hf_specx.common.errors import require
from hf_specx.hub.folders import check_folder

from .console import VERDICTS, Output, error_line, figure, imports, say, steps
from .options import HELP_TARGET, AsJson, Batches, Loading, Overwrite, Prompted, Sampling, command, typed
from .prompts import read_prompts


if TYPE_CHECKING:  # torch is imported after the options were checked
    from hf_specx.bench.study import DraftTrial


TUNE_COLUMNS = {  # with what is in them
    "batch": "rows at a time",
    "accepted": "α, the chance that a candidate is accepted",
    "draft cost": "c, a step of the draft over one of the target",
    "candidates": "γ, the recommended number in each round",
    "tokens a round": "of each row",
    "Theorem 3.8": "times plain, as α, c and γ say",
    "predicted": "times plain, by what rounds take on this machine",
    "times plain": "as fast as plain generate, as measured in turns",
}
HELP_DRAFTS = f"To try: {HELP_DRAFT[:-1]}; exits: several numbers of first layers."
HELP_REPEATS = "Timed runs of plain and of speculative generation; 0 only checks, and needs no prompts."


@command
def tune(
    source: Prompted,
    sampling: Sampling,
    loading: Loading,
    target: Annotated[str, typer.Argument(help=HELP_TARGET)],
    drafts: Annotated[list[str] | None, typer.Argument(help=HELP_DRAFTS, show_default="suffix exits")] = None,
    batch_size: Batches = None,
    repeats: Annotated[int, typer.Option(help=HELP_REPEATS, min=0)] = 3,
    out: Annotated[Path | None, typer.Option(help="Save the pair with the best draft in this folder.")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Check whether drafts fit a target, time them on your prompts, and recommend one.

    With a target alone: which of its layers drafts best, or whether its text repeats enough to do without any.
    Prompts come from --prompts or standard input. Models from the Hub are saved by id and commit, others with weights.
    """
    for name in drafts or ():
        read_draft(name, SEVERAL_EXITS)
    check_runs(sizes := batch_size or [1, 8])
    require(out is not None or not overwrite, "--overwrite is for saving; name a folder with --out.")
    if out is not None:
        check_folder(out, overwrite)
    told = "--out saves the best draft, which --repeats 0 cannot tell; give one draft, or measure."
    require(out is None or repeats > 0 or (len(drafts or ()) == 1 and drafts != [SEVERAL_EXITS]), told)
    prompts = read_prompts(source, "with --prompts FILE, on standard input, or use --repeats 0") if repeats else []
    with imports():
        from hf_specx.bench import tune as tuning
        from hf_specx.hub.fetch import find_files, get_tokenizer

        from .loading import check_template, in_words, save_best, study_of, texts_of
    tokenizer = get_tokenizer(find_files(target), None, loading.trust_remote_code) if source.chat else None
    check_template(tokenizer, source.chat)
    texts = texts_of(prompts, tokenizer)
    how: dict[str, Any] = {"prompts": texts, "batches": sizes, "repeats": repeats or 1, "options": sampling.given}
    study = study_of(loading, command=typed(), **how)
    names = tuning.drafts_to_try(target, drafts or [], study)
    with steps("drafts, each in turns with plain generate", len(names) * (1 + study.runs)) as bar:
        found = tuning.tune(target, names, study, bar.update)
    if found[0].pair is not None and texts:
        settings = tuning.settings_of(found[0].pair.target, sampling.given)
        say(f"target {target}, drafts {', '.join(names)}: {in_words(settings)}", "dim")
    show_drafts(target, found, Output(quiet=as_json))
    if as_json:
        typer.echo(json.dumps({"target": target, "drafts": [trial.to_dict() for trial in found]}))
    require(found[0].error is None, "no draft can be used, for the reasons given with each.")
    if out is not None:
        say(save_best(found[0], out, overwrite))


def show_drafts(target: str, trials: "list[DraftTrial]", console: Output) -> None:
    """Print how each draft fits, the figures of all below their names, which may be long, and the recommended one."""
    for trial in trials:
        if trial.findings:
            console.text(f"\n{target} with {trial.name}", "bold")
            table = Table(box=None, pad_edge=False)
            for heading in ("", "", "target", "draft", "what follows"):
                table.add_column(heading, overflow="fold")  # no word is cut
            for verdict, *words in ((x.verdict, x.subject, x.target, x.draft, x.follows) for x in trial.findings):
                table.add_row(Text(verdict, VERDICTS[verdict]), *map(Text, words))
            console.print(table)
        if trial.error is not None:
            console.text(f"{trial.name}: {error_line(trial.error)}", VERDICTS["error"])
        if trial.misread:
            console.text(f"{trial.name}: {trial.misread}", VERDICTS["note"])
    measured, best = [trial for trial in trials if trial.measurements], trials[0]
    for trial in measured:
        console.text(f"\n{trial.name}", "bold")
        figures = []
        for m in trial.measurements:
            ratios = m.tokens_per_round, m.expected_speedup, m.predicted_speedup, m.measured_speedup
            known = figure(m.alpha or None), figure(m.cost_coefficient), str(m.num_draft_tokens)
            figures.append((str(m.batch), *known, *map(figure, ratios)))
        console.figures(list(TUNE_COLUMNS), figures)
        told = trial.config.speeds() if trial.config else []
        console.text("\n".join(told if trial is best else told[: len(trial.measurements)]))
    if measured:
        console.text("\n".join(f"{head}: {said}" for head, said in TUNE_COLUMNS.items()), "dim")
        numbers = ", ".join(f"{m.num_draft_tokens} at batch {m.batch}" for m in best.measurements)
        speeds = [m.measured_speedup for m in best.measurements]
        speed = statistics.median(speeds)
        says = "best" if best.config and best.config.pays else "none is faster than plain generate here; the best"
        times = f"{speed:.2f} times as fast as plain generate"
        if len(speeds) > 1:
            times += f", the median over batch sizes ({min(speeds):.2f} to {max(speeds):.2f})"
        console.text(f"{says}: {best.name}, num_draft_tokens {numbers}, {times}")
