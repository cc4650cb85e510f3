"""`specx distill`: train a draft for a target on prompts of yours."""

import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from hf_specx.hub.folders import check_folder, check_writable
from hf_specx.training.recipe import LOSS_NAMES, TrainingRecipe, first_layers_wanted

from .console import Output, errors_in_one_line, imports, lines_now_and_then
from .options import (
    LARGEST_SEED,
    AsJson,
    Chat,
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
    typed,
)
from .prompts import check_messages


if TYPE_CHECKING:  # torch is imported after the options were checked
    from hf_specx.training.result import Distilled
    from hf_specx.training.trainer import Tell


DEFAULTS = TrainingRecipe()
INSIDE_TOO = "Learn what the target says inside the prompts too."
HELP_LOSS = f"{', '.join(LOSS_NAMES)}; see hf_specx/training/README.md."
HELP_HELD_OUT = "Share of the prompts that is not trained on, 256 at most; half of them decide when to stop."
HELP_PASSES = "Texts trained on in a phase, for each new one; the others are earlier ones."
HELP_PATIENCE = "Stop after so many phases without a new best α (acceptance on held-out prompts)."
HELP_FOLDER = "Of texts and checkpoints, from which the same command goes on; else OUT.training."
HELP_RATE = "The largest; else by the draft's width and what it starts from."
LearnFromPrompts = Annotated[bool, typer.Option("--learn-from-prompts", help=INSIDE_TOO)]


def distill(
    target: Annotated[str, typer.Argument(help="Id or folder of the target.")],
    draft: Annotated[str, typer.Argument(help="Id or folder of a draft, or layers:N, the target's first N layers.")],
    out: Annotated[Path, typer.Option(help="Save the pair in this folder.")],
    file: PromptFile = None,
    loss: Annotated[str, typer.Option(help=HELP_LOSS)] = DEFAULTS.loss,
    max_new_tokens: MaxNewTokens = DEFAULTS.max_new_tokens,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    greedy: Greedy = False,
    chat: Chat = False,
    held_out: Annotated[float, typer.Option(help=HELP_HELD_OUT)] = 0.2,
    phases: Annotated[int, typer.Option(help="How often the target writes new texts, at most.")] = DEFAULTS.phases,
    texts: Annotated[int, typer.Option(help="New texts in each phase.")] = DEFAULTS.texts_per_phase,
    passes: Annotated[int, typer.Option(help=HELP_PASSES)] = DEFAULTS.passes,
    patience: Annotated[int, typer.Option(help=HELP_PATIENCE)] = DEFAULTS.patience,
    learn_from_prompts: LearnFromPrompts = False,
    batch_size: Annotated[int, typer.Option(help="Texts in a step, on each device.")] = DEFAULTS.batch_size,
    learning_rate: Annotated[float | None, typer.Option(help=HELP_RATE)] = None,
    lora: Annotated[int | None, typer.Option(help="Train adapters of this rank only; needs peft.")] = None,
    seed: Annotated[int, typer.Option(help="Of all random numbers.", min=0, max=LARGEST_SEED)] = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    revision: Revision = None,
    draft_revision: Annotated[str | None, typer.Option(help="The same for the draft.")] = None,
    token: Token = None,
    trust_remote_code: Trust = False,
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
    with errors_in_one_line(kept=folder):
        options = sampling_options(greedy, temperature, top_p, top_k, max_new_tokens)
        options |= {"loss": loss, "phases": phases, "texts_per_phase": texts, "passes": passes, "patience": patience}
        options |= {"learn_from_prompts": learn_from_prompts, "learning_rate": learning_rate, "lora": lora}
        options |= {"batch_size": batch_size, "seed": seed}
        check_given(target, draft, dtype, options, (out, folder), overwrite)
        check_messages(prompts := read_prompts([], file, "with --file, or on standard input"), chat)
        options |= {"held_out": held_out, "folder": folder}
        loading = {"dtype": dtype, "hub": hub_options(None, token), "trust_remote_code": trust_remote_code}
        result = train((target, revision), (draft, draft_revision), prompts, chat, loading, device, options)
        keep_pair(result, out, inside, overwrite, not no_measure, as_json, folder)


def check_given(
    target: str, draft: str, dtype: str, options: dict[str, Any], folders: tuple[Path, Path], overwrite: bool
) -> None:
    """Raise a ValueError for what cannot be, before torch is imported; folders are of the pair and of the training."""
    check_dtype(dtype)
    check_model_name("TARGET", target)
    if first_layers_wanted(draft) is None:
        check_model_name("DRAFT", draft)
    TrainingRecipe.of(options)
    check_folder(folders[0], overwrite)
    check_writable(folders[1].absolute(), folders[1])


def train(
    target: tuple[str, str | None],
    draft: tuple[str, str | None],
    prompts: list[str | Messages],
    chat: bool,
    loading: dict[str, Any],
    device: str | None,
    options: dict[str, Any],
) -> "Distilled | None":
    """Load the models and train.

    Args:
        target, draft: names and revisions.
        prompts, chat: as in `texts_of`.
        loading: of `Study`, to load models by.
        device: as typed.
        options: of `distill`.

    Returns:
        None on other processes than the first one.
    """
    with imports():
        from hf_specx.bench.study import Study
        from hf_specx.bench.tune import load
        from hf_specx.common.devices import last_device
        from hf_specx.pairs.shares import processes
        from hf_specx.training.distill import distill as train_draft

        from .loading import device_map, texts_of
    study = Study(device_map=device_map(device), **loading)
    with lines_now_and_then(lambda: f"loading {target[0]} and {draft[0]}"):
        loaded, own = load(*target, study, study.device_map), None
        if first_layers_wanted(draft[0]) is None:
            own = load(*draft, study, {"": last_device(loaded.model)})
    with shown_progress() if processes().is_main_process else nullcontext(lambda *_: None) as tell:
        result = train_draft(
            loaded.model,
            draft[0] if own is None else own.model,
            texts_of(prompts, loaded.tokenizer, chat, target[0]),
            tokenizer=loaded.tokenizer,
            draft_tokenizer=None if own is None else own.tokenizer,
            progress=tell,
            command=typed(),
            **options,
        )
    result.pair.sources["target"] = loaded.facts
    return result if processes().is_main_process else None


def keep_pair(
    result: "Distilled | None", out: Path, inside: bool, overwrite: bool, measured: bool, as_json: bool, folder: Path
) -> None:
    """Time the pair if asked to, save it, and print what came of it; on the first process alone, which has it."""
    if result is None:
        return
    from hf_specx.hub.folders import INSIDE

    from .loading import saved_as

    console, source = Output(stderr=as_json), result.pair.sources["target"]
    console.print(Text(str(result)), soft_wrap=True)
    try:
        if measured:
            with shown_progress() as tell:
                result.measure((1, 8), typed(), tell)
    except RuntimeError as error:  # memory, most likely; what was trained is saved all the same
        first = str(error).partition("\n")[0]
        console.print(Text(f"the pair is saved without all figures, as timing failed: {first}", "yellow"))
    assert source is not None
    result.pair.save_pretrained(out, target=saved_as(source, inside), draft=INSIDE, overwrite=overwrite)
    for m in result.pair.config.measurements:
        console.print(f"batch {m.batch}: {m.measured_speedup:.2f} times as fast as plain generate")
    console.print(Text(f"saved in {out}; texts and checkpoints in {folder} are no longer needed"), soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(result.to_dict()))


@contextmanager
def shown_progress() -> "Iterator[Tell]":
    """On stderr a line for each new α; between them a bar if that is a terminal, else lines now and then."""
    from hf_specx.training.trainer import Bar

    doing = ["preparing"]
    lines = nullcontext() if sys.stderr.isatty() else lines_now_and_then(lambda: doing[0])
    with closing(Bar()) as bar, lines:

        def tell(what: str, done: int, total: int) -> None:
            doing[0] = f"{what}: {done} of {total}" if total else what
            with suppress(OSError):  # nobody reads it
                bar(what, done, total)

        yield tell
