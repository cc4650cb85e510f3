"""`specx tune`: which of some drafts fits a target, how fast it makes it, and how many tokens to draft."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from hf_specx.bench.checks import check_runs
from hf_specx.bench.ways import SEVERAL_EXITS
from hf_specx.common.errors import require
from hf_specx.engine.check_options import check_choices
from hf_specx.hub.folders import check_folder

from .console import Output, error_line, figure, imports, steps
from .options import AsJson, Batches, Loading, Overwrite, PromptFile, Sampling, Seed, command, typed
from .prompts import read_prompts


if TYPE_CHECKING:  # torch is imported after the options were checked
    from hf_specx.bench.study import DraftTrial


VERDICTS = {"ok": "green", "note": "yellow", "error": "red"}
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
HELP_DRAFTS = (
    "Ids or folders of drafts to try; and without a second model: suffix (what followed the same tokens before), "
    "exit:4 (the target's first 4 layers), exits (several numbers of them)."
)


@command
def tune(
    target: Annotated[str, typer.Argument(help="Id or folder of the target.")],
    drafts: Annotated[list[str] | None, typer.Argument(help=HELP_DRAFTS, show_default="suffix exits")] = None,
    file: PromptFile = None,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Only check; no prompts are needed.")] = False,
    batch: Batches = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of plain and of speculative generation.")] = 3,
    verification: Annotated[str | None, typer.Option(help="token, block or coupled; else the default.")] = None,
    seed: Seed = 0,
    draft_revision: Annotated[list[str] | None, typer.Option(help="The same for the drafts, once for each.")] = None,
    out: Annotated[Path | None, typer.Option(help="Save the pair with the best draft in this folder.")] = None,
    inside: Annotated[bool, typer.Option("--inside", help="Save weights of models from the Hub, not ids.")] = False,
    overwrite: Overwrite = False,
    save_prompts: Annotated[bool, typer.Option("--save-prompts", help="Save the prompts with the pair.")] = False,
    as_json: AsJson = False,
    *,
    sampling: Sampling,
    loading: Loading,
) -> None:
    """Check whether drafts fit a target, time them on your prompts, and recommend one.

    With a target alone: which of its layers drafts best, or whether its text repeats enough to do without any.
    Prompts come from --file or standard input. Models from the Hub are saved by id and commit, others with weights.
    """
    drafts = drafts or []
    check_runs(batches := batch or [1, 8], repeats)
    told = "--overwrite and --inside are for saving; name a folder with --out."
    require(out is not None or not (overwrite or inside), told)
    if out is not None:
        check_folder(out, overwrite)
    told = "--out saves the best draft, which --no-measure cannot tell; give one draft, or measure."
    require(out is None or not no_measure or (len(drafts) == 1 and drafts != [SEVERAL_EXITS]), told)
    check_choices("auto", verification)
    how: dict[str, Any] = {"batches": batches, "repeats": repeats, "seed": seed, "options": sampling.call}
    how |= {"verification": verification, "command": typed(), "keep_prompts": save_prompts}
    how["prompts"] = [] if no_measure else read_texts(file)
    with imports():
        from hf_specx.bench import tune as tuning

        from .loading import save_best, study_of
    study = study_of(loading, **how)
    names = tuning.drafts_to_try(target, drafts, study, loading.revision)
    with steps("drafts, each in turns with plain generate", len(names) * (1 + study.runs)) as bar:
        found = tuning.tune(target, names, study, loading.revision, draft_revision or [], bar.update)
    show_drafts(target, found, Output(quiet=as_json))
    if as_json:
        typer.echo(json.dumps({"target": target, "drafts": [trial.to_dict() for trial in found]}))
    require(found[0].error is None, f"no draft can be used; of {found[0].name}: {found[0].error}")
    if out is not None:
        Output(stderr=as_json).text(save_best(found[0], out, inside, overwrite))


def read_texts(file: Path | None) -> list[str]:
    """The prompts of --file or standard input, which are texts."""
    prompts = read_prompts(file, True, "with --file, on standard input, or use --no-measure")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    told = "specx tune takes texts, and a prompt is a list of messages; write its text as the model reads it."
    require(len(texts) == len(prompts), told)
    return texts


def show_drafts(target: str, trials: "list[DraftTrial]", console: Output) -> None:
    """Print how each draft fits, the figures of all below their names, which may be long, and the recommended one."""
    for trial in trials:
        if trial.findings:
            console.text(f"\n{target} with {trial.name}", "bold")
            rows = [
                (x.subject, x.target, x.draft, Text(x.verdict, VERDICTS[x.verdict]), x.follows) for x in trial.findings
            ]
            console.table(("", "target", "draft", "", "what follows"), rows)
        if trial.error is not None:
            console.text(f"{trial.name}: {error_line(trial.error)}", VERDICTS["error"])
    measured, best = [trial for trial in trials if trial.measurements], trials[0]
    for trial in measured:
        console.text(f"\n{trial.name}", "bold")
        figures = []
        for m in trial.measurements:
            ratios = m.tokens_per_round, m.expected_speedup, m.predicted_speedup, m.measured_speedup
            known = figure(m.alpha), figure(m.cost_coefficient), str(m.num_draft_tokens)
            figures.append((str(m.batch), *known, *map(figure, ratios)))
        console.figures(list(TUNE_COLUMNS), figures)
        console.text("\n".join(trial.config.speeds() if trial.config else []))
    if measured:
        console.text("\n".join(f"{head}: {said}" for head, said in TUNE_COLUMNS.items()), "dim")
        numbers = ", ".join(f"{m.num_draft_tokens} at batch {m.batch}" for m in best.measurements)
        says = "best" if best.speedup > 1 else "none is faster than plain generate here; the best"
        times = f"{best.speedup:.2f} times as fast as plain generate"
        console.text(f"{says}: {best.name}, num_draft_tokens {numbers}, {times}")
