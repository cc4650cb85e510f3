"""`specx distill`: train a draft for a target on prompts of yours."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from hf_specx.common.devices import last_device
from hf_specx.hub.saving import INSIDE
from hf_specx.measure.study import BATCHES, Study
from hf_specx.measure.tune import load
from hf_specx.pairs.complete import processes
from hf_specx.training import progress as training_progress
from hf_specx.training.distill import distill as train
from hf_specx.training.first_draft import first_layers_wanted
from hf_specx.training.losses import LOSSES
from hf_specx.training.recipe import Recipe

from .console import errors_in_one_line
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
    typed,
)
from .tune import check_saved


DEFAULTS = Recipe()


def distill(
    target: Annotated[str, typer.Argument(help="Id or folder of the target.")],
    draft: Annotated[str, typer.Argument(help="Id or folder of a draft, or layers:N, the target's first N layers.")],
    out: Annotated[Path, typer.Option(help="Save the pair in this folder.")],
    file: PromptFile = None,
    loss: Annotated[str, typer.Option(help=f"{', '.join(LOSSES)}.")] = DEFAULTS.loss,
    max_new_tokens: MaxNewTokens = DEFAULTS.max_new_tokens,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    greedy: Greedy = False,
    held_out: Annotated[float, typer.Option(help="Share of the prompts that is not trained on.")] = 0.2,
    phases: Annotated[int, typer.Option(help="How often the target writes new texts, at most.")] = DEFAULTS.phases,
    texts: Annotated[int, typer.Option(help="New texts in each phase.")] = DEFAULTS.texts_per_phase,
    passes: Annotated[int, typer.Option(help="How often a text is trained on.")] = DEFAULTS.passes,
    patience: Annotated[int, typer.Option(help="Stop after so many phases without a rise.")] = DEFAULTS.patience,
    batch_size: Annotated[int, typer.Option(help="Texts in a step.")] = DEFAULTS.batch_size,
    learning_rate: Annotated[float | None, typer.Option(help="The largest; else by the draft's width.")] = None,
    lora: Annotated[int | None, typer.Option(help="Train adapters of this rank only; needs peft.")] = None,
    seed: Annotated[int, typer.Option(help="Of all random numbers.", min=0, max=LARGEST_SEED)] = 0,
    dtype: Dtype = "auto",
    revision: Revision = None,
    draft_revision: Annotated[str | None, typer.Option(help="The same for the draft.")] = None,
    token: Token = None,
    trust_remote_code: Trust = False,
    folder: Annotated[Path | None, typer.Option(help="Of checkpoints; else OUT.training.")] = None,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Do not time the new pair.")] = False,
    inside: Annotated[bool, typer.Option("--inside", help="Save the weights of the target, not its id.")] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Train a draft on what the target writes for your prompts, so that more of its candidates are accepted.

    Prompts come from --file or standard input. Sampling options are those that you will generate with. The same
    command goes on with a training that was interrupted.
    """
    with errors_in_one_line():
        check_dtype(dtype)
        check_saved(out, overwrite, inside, told_apart=True)
        prompts = read_prompts([], file, "with --file, or on standard input")
        options = sampling_options(greedy, temperature, top_p, top_k, max_new_tokens) | {
            "loss": loss,
            "phases": phases,
            "texts_per_phase": texts,
            "passes": passes,
            "patience": patience,
            "batch_size": batch_size,
            "learning_rate": learning_rate,
            "lora": lora,
            "seed": seed,
        }
        Recipe.of(options)  # refuses before a model is loaded
        layers = first_layers_wanted(draft)
        hub = hub_options(None, token)
        study = Study(dtype=dtype, hub=hub, trust_remote_code=trust_remote_code, device_map=default_device_map())
        loaded = load(target, revision, study, study.device_map)
        own = None if layers is not None else load(draft, draft_revision, study, {"": last_device(loaded.model)})
        with shown_progress() as tell:
            result = train(
                loaded.model,
                draft if own is None else own.model,
                prompts,
                tokenizer=loaded.tokenizer,
                draft_tokenizer=None if own is None else own.tokenizer,
                held_out=held_out,
                folder=folder or out.with_name(f"{out.name}.training"),
                batches=() if no_measure else BATCHES,
                progress=tell,
                command=typed(),
                **options,
            )
        if processes().is_main_process:
            result.pair.sources["target"] = loaded.facts
            saved = saved_as(loaded.facts, inside)
            result.pair.save_pretrained(out, target=saved, draft=INSIDE, overwrite=overwrite)
            console = Console(stderr=as_json)
            console.print(Text(str(result)), soft_wrap=True)
            for m in result.pair.config.measurements:
                console.print(f"batch {m.batch}: {m.measured_speedup:.2f} times as fast as plain generate")
            console.print(Text(f"saved in {out}; the folder of its training may be deleted"), soft_wrap=True)
            if as_json:
                typer.echo(json.dumps(result.to_dict()))


@contextmanager
def shown_progress() -> Iterator[training_progress.Tell]:
    """A bar on stderr, if that is a terminal, and a line for each phase."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=None)

        def tell(now: training_progress.Progress) -> None:
            if now.doing == training_progress.EVALUATED:
                console.print(Text(str(now)), soft_wrap=True)
            else:
                what = f"phase {now.phase}, {now.doing}" if now.phase else now.doing
                bars.update(task, description=what, completed=now.done, total=now.total or None)

        yield tell
