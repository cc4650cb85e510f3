"""`specx distill`: train a draft for a target on prompts of yours."""

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specx.bench.checks import MIN_TURNS, SECONDS
from hf_specx.common.drafts import HELP_DRAFT, NEW_HEADS, check_head, read_draft
from hf_specx.common.errors import require, similar
from hf_specx.hub.folders import check_folder, check_writable
from hf_specx.training.recipe import TrainingRecipe

from .console import going_on_with, imports, say, waiting_for
from .options import HELP_TARGET, DecodingOptions, LoadingOptions, Overwrite, PromptOptions, command, typed
from .prompts import Prompt, read_prompts


if TYPE_CHECKING:  # torch is imported after the options were checked
    from hf_specx.training.result import Distilled


DEFAULTS = TrainingRecipe()
BATCHES = (1, 8)  # of which the new pair is timed
HELP_START = f"{' or '.join(NEW_HEADS)} (a new head), or a draft of which a copy is trained, named as anywhere: "
HELP_START += HELP_DRAFT.partition("), ")[2]  # all but suffix, which has no weights
SETTABLE = """
    loss passes patience learn_from_prompts learning_rate num_draft_tokens draft_vocab_size lora seed held_out training
""".split()  # noqa: SIM905
HELP_SECONDS = f"Seconds in which the new pair is timed, at each batch size; {MIN_TURNS} turns at least."
HELP_SET = f"NAME=VALUE, any other option of hf_specx.distill, once for each: {', '.join(SETTABLE)}; see "
HELP_SET += "hf_specx/training/README.md."


@command
def distill(
    source: PromptOptions,
    sampling: DecodingOptions,
    loading: LoadingOptions,
    target: Annotated[str, typer.Argument(help=HELP_TARGET)],
    draft: Annotated[str, typer.Argument(help=HELP_START)],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder that the pair is saved in.")],
    phases: Annotated[int, typer.Option(help="How often the target writes new texts, at most.")] = DEFAULTS.phases,
    texts_per_phase: Annotated[int, typer.Option(help="New texts in each phase.")] = DEFAULTS.texts_per_phase,
    batch_size: Annotated[int, typer.Option(help="Texts in a step, on each device.")] = DEFAULTS.batch_size,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers; else 0.", min=0)] = None,
    others: Annotated[list[str] | None, typer.Option("--set", help=HELP_SET)] = None,
    seconds: Annotated[float, typer.Option(help=HELP_SECONDS, min=0)] = SECONDS,
    overwrite: Overwrite = False,
) -> None:
    """Train a draft on what the target writes for your prompts, so that more of its candidates are accepted.

    Prompts come from --prompts, --dataset or standard input. Give --temperature and the like as you will generate with
    the pair. The same command goes on with an interrupted training, from the folder OUT.training.
    """
    folder = Path(f"{out if out.name else out.absolute()}.training")
    named = read_draft(draft, *NEW_HEADS)
    require(
        draft in NEW_HEADS or named.model is not None or named.layers is not None,
        "suffix has no weights to train; give layers:2, dspark, eagle3, or a model.",
    )
    options = {"phases": phases, "texts_per_phase": texts_per_phase, "batch_size": batch_size}
    options |= settings_typed(others or []) | sampling.options | ({} if seed is None else {"seed": seed})
    require(
        loading.quantize is None,
        f"--quantize {loading.quantize} is for pairs that are used; a draft is trained on the whole target. Leave it "
        "out.",
    )
    of_recipe = {name: value for name, value in options.items() if name != "held_out"}
    TrainingRecipe.of(of_recipe)
    check_folder(out, overwrite, "--overwrite")
    check_writable(folder.absolute(), folder)
    prompts = list(read_prompts(source, "with --prompts FILE, or on standard input"))
    with going_on_with(folder):
        result = train(target, draft, loading, prompts, source, options | {"folder": folder})
        if result is None:
            return
        say(str(result))
        measure_pair(result, seconds)
        from .loading import saved_as

        result.pair.save_pretrained(out, target=saved_as(result.pair, "target"), overwrite=overwrite)
        say(f"saved in {out}; texts and checkpoints in {folder} are no longer needed")


def settings_typed(pairs: list[str]) -> dict[str, Any]:
    """Options by name, from NAME=VALUE each; a value is JSON, else a text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        require(bool(name and equals), f"--set {pair} is not NAME=VALUE; write it like --set lora=16.")
        require(
            name in SETTABLE,
            f"--set has no {name}; {similar(name, SETTABLE)}give one of {', '.join(SETTABLE)}.",
        )
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = {"True": True, "False": False, "None": None}.get(value, value)
    return options


def train(
    target: str,
    named: str,
    loading: LoadingOptions,
    prompts: list[Prompt],
    source: PromptOptions,
    options: dict[str, Any],
) -> "Distilled | None":
    """Load the models and train; None on other processes than the first one."""
    with imports():
        from hf_specx.bench.tune import load
        from hf_specx.common.devices import last_device
        from hf_specx.pairs.shares import processes
        from hf_specx.training.distill import distill as train_draft
        from hf_specx.training.distill import with_generation_settings

        from .loading import check_template, in_words, texts_of, tune_settings
    settings, draft = tune_settings(loading), read_draft(named, *NEW_HEADS)
    loaded_draft = None
    with waiting_for(f"loading {target}"):
        loaded = load(target, settings, settings.device_map)
        check_template(loaded.tokenizer, source.chat)
        if draft.model is not None:
            loaded_draft = load(draft.model, settings, {"": last_device(loaded.model)}, loaded)
            check_head(named, loaded_draft.model)
    options = with_generation_settings(loaded.model, named, options)
    start = draft.model or named
    say(f"target {target}, draft {start}: {in_words(options)}", "dim")
    result = train_draft(
        loaded.model,
        start if loaded_draft is None else loaded_draft.model,
        texts_of(prompts, loaded.tokenizer, source.template_options),
        tokenizer=loaded.tokenizer,
        draft_tokenizer=None if loaded_draft is None else loaded_draft.tokenizer,
        command=typed(),
        **options,
    )
    result.pair.sources["target"] = loaded.facts
    return result if processes().is_main_process else None


def measure_pair(result: "Distilled", seconds: float = SECONDS) -> None:
    """Time the pair and say its speed; without enough memory for that it is saved all the same."""
    from hf_specx.training.trainer import Bar

    try:
        with closing(Bar()) as bar:
            result.measure(BATCHES, typed(), bar, seconds)
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        say(f"the pair is saved without all figures, as timing failed: {first_line}", "yellow")
    for line in result.pair.config.speeds():
        say(line)
