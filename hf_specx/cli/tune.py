"""`specx tune`: which of some drafts fits a target, how fast it makes it, and how many tokens to draft."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_specx.bench.checks import check_runs
from hf_specx.bench.ways import SEVERAL_EXITS, exit_layer_of
from hf_specx.common.errors import require
from hf_specx.hub.folders import check_folder

from .console import Output, error_line, errors_in_one_line, figure, imports, print_figures, progress
from .options import (
    LARGEST_SEED,
    AsJson,
    Device,
    Dtype,
    Greedy,
    MaxNewTokens,
    Messages,
    Overwrite,
    PromptFile,
    Revision,
    Temperature,
    Token,
    TopK,
    TopP,
    Trust,
    check_dtype,
    check_model_name,
    hub_options,
    read_prompts,
    sampling_options,
    strategy_options,
    typed,
)


if TYPE_CHECKING:  # torch is imported after the options were checked
    from hf_specx.bench.compatibility import Finding
    from hf_specx.bench.study import DraftTrial


VERDICTS = {"ok": "green", "note": "yellow", "error": "red"}
TUNE_COLUMNS = {  # with what is in them
    "batch": "rows at a time",
    "accepted": "α, the chance that a candidate is accepted",
    "draft cost": "c, a step of the draft over one of the target",
    "candidates": "γ, the recommended number in each round",
    "tokens a round": "of each row",
    "Theorem 3.8": "times plain, as α, c and γ say",
    "limit": "times plain, if both took nothing but their forwards",
    "times plain": "as fast as plain generate, as measured in turns",
}


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
    device: Device = None,
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
        check_models(target, drafts := drafts or [])
        check_runs(batch or (1, 8), repeats)
        check_saved(out, overwrite, inside, told_apart=not no_measure or names_one(drafts))
        ways = "with --file, on standard input, or use --no-measure"
        prompts = [] if no_measure else texts_only(read_prompts([], file, ways))
        options = sampling_options(greedy, temperature, top_p, top_k, max_new_tokens)
        study: dict[str, Any] = {"prompts": prompts, "batches": batch or (1, 8), "repeats": repeats, "seed": seed}
        study |= {"options": options, "dtype": dtype, "command": typed(), "keep_prompts": save_prompts}
        study |= {"hub": hub_options(None, token), "trust_remote_code": trust_remote_code}
        study |= strategy_options(None, verification)
        found = try_all(target, drafts, revision, draft_revision or [], device, study)
        show_drafts(target, found, Output(quiet=as_json))
        if as_json:
            typer.echo(json.dumps({"target": target, "drafts": [trial.to_dict() for trial in found]}))
        require(found[0].error is None, f"no draft can be used; of {found[0].name}: {found[0].error}")
        if out is not None:
            save_tuned(found[0], out, inside, overwrite, Output(stderr=as_json))


def try_all(
    target: str,
    drafts: list[str],
    revision: str | None,
    draft_revisions: list[str],
    device: str | None,
    options: dict[str, Any],
) -> "list[DraftTrial]":
    """Try drafts for a target, each at its revision; `options` are of `Study`."""
    with imports():
        from hf_specx.bench import tune as tuning
        from hf_specx.bench.study import Study

        from .loading import device_map
    study = Study(device_map=device_map(device), **options)
    names = tuning.drafts_to_try(target, drafts, study, revision)
    with progress("drafts, each in turns with plain generate", len(names) * (1 + study.runs)) as advance:
        return tuning.tune(target, names, study, revision, draft_revisions, advance)


def save_tuned(best: "DraftTrial", out: Path, inside: bool, overwrite: bool, console: Console) -> None:
    """Save the pair with the best draft, and say where."""
    from .loading import save_best

    console.print(Text(save_best(best, out, inside, overwrite)), soft_wrap=True)


def check_models(target: str, drafts: list[str]) -> None:
    """Raise a ValueError if models cannot have these names, or a draft is named twice."""
    for option, name in (("TARGET", target), *(("DRAFT", draft) for draft in drafts)):
        if exit_layer_of(name) is None:
            check_model_name(option, name)
    twice = next((draft for draft in drafts if drafts.count(draft) > 1), None)
    require(twice is None, f"the draft {twice} is named twice; name each once.")


def texts_only(prompts: list[str | Messages]) -> list[str]:
    """Prompts that are texts, as they are.

    Raises:
        ValueError: one is a list of messages.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    told = "specx tune takes texts, and a prompt is a list of messages; write its text as the model reads it."
    require(len(texts) == len(prompts), told)
    return texts


def names_one(drafts: list[str]) -> bool:
    """Whether drafts are one by name, and not several numbers of layers."""
    return len(drafts) == 1 and drafts != [SEVERAL_EXITS]


def check_saved(out: Path | None, overwrite: bool, inside: bool, told_apart: bool) -> None:
    """Raise a ValueError, before anything is measured, if no pair could be saved then, or it is not known which."""
    if out is None:
        option = "--overwrite" if overwrite else "--inside"
        require(not overwrite and not inside, f"{option} is for saving; name a folder with --out.")
        return
    check_folder(out, overwrite)
    require(told_apart, "--out saves the best draft, which --no-measure cannot tell; give one draft, or measure.")


def show_drafts(target: str, trials: "list[DraftTrial]", console: Console) -> None:
    """Print each draft compared with the target, the measurements of all drafts, and which one is recommended."""
    for trial in trials:
        if trial.findings:
            console.print(Text(f"\n{target} with {trial.name}", "bold"), soft_wrap=True)
            console.print(findings_table(trial.findings))
        if trial.error is not None:
            console.print(Text(f"{trial.name}: {error_line(trial.error)}", VERDICTS["error"]), soft_wrap=True)
    if any(trial.speedup for trial in trials):
        show_measured(trials, console)
        console.print(Text("\n".join(f"{head}: {said}" for head, said in TUNE_COLUMNS.items()), "dim"), soft_wrap=True)
    recommend(trials[0], console)


def findings_table(findings: "list[Finding]") -> Table:
    """A row for each property that was compared."""
    table = Table(show_edge=False)
    for heading in ("", "target", "draft", "", "what follows"):
        table.add_column(heading)
    for finding in findings:
        cells = (finding.subject, finding.target, finding.draft)
        verdict = Text(finding.verdict, VERDICTS[finding.verdict])
        table.add_row(*map(Text, cells), verdict, Text(finding.follows))
    return table


def show_measured(trials: "list[DraftTrial]", console: Console) -> None:
    """Print each draft's name, which may be long, and below it a row for each batch size; the best draft first."""
    measured = [trial for trial in trials if trial.measurements]
    for trial in measured:
        console.print(Text(f"\n{trial.name}", "bold"), soft_wrap=True)
        rows = []
        for m in trial.measurements:
            ratios = m.tokens_per_round, m.expected_speedup, m.forward_limited_speedup, m.measured_speedup
            known = m.batch, figure(m.alpha), figure(m.cost_coefficient), m.num_draft_tokens, *map(figure, ratios)
            rows.append(list(map(str, known)))
        print_figures(console, list(TUNE_COLUMNS), rows, with_head=trial is measured[0])


def recommend(best: "DraftTrial", console: Console) -> None:
    """Print which draft is recommended, if any was measured."""
    if best.speedup:
        numbers = ", ".join(f"{m.num_draft_tokens} at batch {m.batch}" for m in best.measurements)
        says = "best" if best.speedup > 1 else "none is faster than plain generate here; the best"
        line = f"{says}: {best.name}, num_draft_tokens {numbers}, {best.speedup:.2f} times as fast as plain generate"
        console.print(Text(line), soft_wrap=True)
