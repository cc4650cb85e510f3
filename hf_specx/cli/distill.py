"""`specx distill`: train a draft for a target on prompts of yours."""

import inspect
import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specx.hub.folders import check_folder, check_writable
from hf_specx.training.recipe import HEAD, LOSS_NAMES, TrainingRecipe, first_layers_wanted

from .console import Output, going_on_with, imports, waiting_for
from .options import AsJson, Chat, Loading, Overwrite, PromptFile, Sampling, Seed, command, typed
from .prompts import Prompts, read_prompts


if TYPE_CHECKING:  # torch is imported after the options were checked
    from hf_specx.training.result import Distilled


DEFAULTS = TrainingRecipe()
INSIDE_TOO = "Learn what the target says inside the prompts too."
HELP_DRAFT = "Id or folder of a draft, layers:N, the target's first N layers, or eagle3, a new head for it."
HELP_LOSS = f"{', '.join(LOSS_NAMES)}; see hf_specx/training/README.md."
HELP_HELD_OUT = "Share of the prompts that is not trained on, 256 at most; half of them decide when to stop."
HELP_PASSES = "Texts trained on in a phase, for each new one; the others are earlier ones."
HELP_PATIENCE = "Stop after so many phases without a new best α (acceptance on held-out prompts)."
HELP_FOLDER = "Of texts and checkpoints, from which the same command goes on; else OUT.training."
HELP_NUMBER = "Candidates of a round: a head learns so many, and tokens a round are told for them."
HELP_VOCABULARY = "Tokens that a new head scores, the most frequent ones."
HELP_RATE = "The largest; else by the draft's width and what it starts from."


@dataclass(frozen=True)
class Recipe(Sampling):
    """How the draft is trained, by the names of `TrainingRecipe`."""

    loss: Annotated[str, typer.Option(help=HELP_LOSS)] = DEFAULTS.loss
    phases: Annotated[int, typer.Option(help="How often the target writes new texts, at most.")] = DEFAULTS.phases
    texts_per_phase: Annotated[int, typer.Option("--texts", help="New texts in each phase.")] = 64
    passes: Annotated[int, typer.Option(help=HELP_PASSES)] = DEFAULTS.passes
    patience: Annotated[int, typer.Option(help=HELP_PATIENCE)] = DEFAULTS.patience
    learn_from_prompts: Annotated[bool, typer.Option("--learn-from-prompts", help=INSIDE_TOO)] = False
    batch_size: Annotated[int, typer.Option(help="Texts in a step, on each device.")] = DEFAULTS.batch_size
    learning_rate: Annotated[float | None, typer.Option(help=HELP_RATE)] = None
    num_draft_tokens: Annotated[int, typer.Option(help=HELP_NUMBER)] = DEFAULTS.num_draft_tokens
    draft_vocab_size: Annotated[int, typer.Option(help=HELP_VOCABULARY)] = DEFAULTS.draft_vocab_size
    lora: Annotated[int | None, typer.Option(help="Train adapters of this rank only; needs peft.")] = None
    seed: Seed = 0

    @property
    def options(self) -> dict[str, Any]:
        """The options of `distill`."""
        return self.call | {name: getattr(self, name) for name in inspect.get_annotations(Recipe)}


@command
def distill(
    target: Annotated[str, typer.Argument(help="Id or folder of the target.")],
    draft: Annotated[str, typer.Argument(help=HELP_DRAFT)],
    out: Annotated[Path, typer.Option(help="Save the pair in this folder.")],
    recipe: Recipe,
    loading: Loading,
    file: PromptFile = None,
    chat: Chat = False,
    held_out: Annotated[float, typer.Option(help=HELP_HELD_OUT)] = 0.2,
    draft_revision: Annotated[str | None, typer.Option(help="The same for the draft.")] = None,
    folder: Annotated[Path | None, typer.Option(help=HELP_FOLDER)] = None,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Do not time the new pair.")] = False,
    inside: Annotated[bool, typer.Option("--inside", help="Save the weights of the target, not its id.")] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Train a draft on what the target writes for your prompts, so that more of its candidates are accepted.

    Prompts come from --file or standard input. Give --temperature and the like as you will generate with the pair.
    """
    folder = folder or Path(f"{out if out.name else out.absolute()}.training")
    first_layers_wanted(draft)
    TrainingRecipe.of(recipe.options)
    check_folder(out, overwrite)
    check_writable(folder.absolute(), folder)
    prompts = list(read_prompts(file, chat, "with --file, or on standard input"))
    options = {"held_out": held_out, "folder": folder, **recipe.options}
    with going_on_with(folder):
        result = train((target, loading.revision), (draft, draft_revision), loading, prompts, chat, options)
        if result is None:
            return
        console = Output(stderr=as_json)
        console.text(result)
        if not no_measure:
            measure_pair(result, console)
        from .loading import saved_as

        result.pair.save_pretrained(out, target=saved_as(result.pair.sources["target"], inside), overwrite=overwrite)
        console.text(f"saved in {out}; texts and checkpoints in {folder} are no longer needed")
        if as_json:
            typer.echo(json.dumps(result.to_dict()))


def train(
    target: tuple[str, str | None],
    draft: tuple[str, str | None],
    loading: Loading,
    prompts: Prompts,
    chat: bool,
    options: dict[str, Any],
) -> "Distilled | None":
    """Load the models, of names and revisions, and train; None on other processes than the first one."""
    with imports():
        from hf_specx.bench.tune import load
        from hf_specx.common.devices import last_device
        from hf_specx.pairs.shares import processes
        from hf_specx.training.distill import distill as train_draft

        from .loading import PromptTexts, study_of
    study, own = study_of(loading), None
    with waiting_for(f"loading {target[0]} and {draft[0]}"):
        loaded = load(*target, study, study.device_map)
        if draft[0] != HEAD and first_layers_wanted(draft[0]) is None:
            own = load(*draft, study, {"": last_device(loaded.model)}, loaded)
    result = train_draft(
        loaded.model,
        draft[0] if own is None else own.model,
        list(PromptTexts(prompts, loaded.tokenizer, chat, target[0])),
        tokenizer=loaded.tokenizer,
        draft_tokenizer=None if own is None else own.tokenizer,
        command=typed(),
        **options,
    )
    result.pair.sources["target"] = loaded.facts
    return result if processes().is_main_process else None


def measure_pair(result: "Distilled", console: Output) -> None:
    """Time the pair and print its speed; without enough memory for that it is saved all the same."""
    from hf_specx.training.trainer import Bar

    try:
        with closing(Bar()) as bar:
            result.measure((1, 8), typed(), bar)
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        console.text(f"the pair is saved without all figures, as timing failed: {first}", "yellow")
    for line in result.pair.config.speeds():
        console.text(line)
