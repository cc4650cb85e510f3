"""Train a draft for a target on texts that the target writes for the user's own prompts."""

import hashlib
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from accelerate.utils import parse_flag_from_env
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from hf_specx.common.devices import execution_device
from hf_specx.common.errors import require
from hf_specx.pair_files.facts import model_facts
from hf_specx.pair_files.pair_config import PairConfig
from hf_specx.pairs.pair import DraftTargetPair
from hf_specx.pairs.shares import processes

from .checkpoints import (
    TEXTS,
    check_same_training,
    check_space,
    discard_broken,
    enough_room,
    last_checkpoint,
    state_of,
)
from .first_draft import merged, trainable_copy
from .held_out import alpha, estimate, measure_alpha
from .progress import EVALUATED, Bar, Tell
from .prompts import HELD_OUT_SHARE, GivenPrompts
from .reading import Reader
from .recipe import TrainingRecipe
from .result import Distilled, card_notes
from .run import TrainingRun
from .start import TrainingStart, check_start
from .texts import Phases, Writer, fingerprint_of


SHARDED_BY_LAUNCH = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")  # set by `accelerate launch`


def distill(
    target: PreTrainedModel,
    draft: PreTrainedModel | str,
    prompts: GivenPrompts,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
    held_out: float | GivenPrompts = HELD_OUT_SHARE,
    folder: str | Path | None = None,
    progress: Tell | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    command: str = "hf_specx.distill(...)",
    **options: Any,
) -> Distilled:
    """Train a draft so that the target accepts more of what it proposes.

    The target writes texts for the prompts, the draft is trained on what the target says of them, and so on in phases,
    until α on held-out prompts no longer rises (the data of DistillSpec, arXiv 2310.08461). A float32 copy is trained.

    Args:
        target: a decoder-only model in evaluation mode; it stays on its device and in its precision.
        draft: a smaller model, trained where it is, or "layers:N" to start from the target's first N layers.
        prompts: what the target will be used for: texts, or lists of token ids.
        tokenizer: of the target; needed for texts, and saved with the pair.
        draft_tokenizer: the draft's own; without it only sizes are compared. The tokens that both have are proposed.
        held_out: a share of the prompts, or others; half decide when to stop, and α is reported on the other half.
        folder: of texts and checkpoints: the same call goes on with an interrupted training. None keeps nothing.
        progress: called with a `TrainingProgress` as work is done; None shows a bar on stderr.
        callbacks, command: further ones of the Trainer; what the card says that the draft was made by.
        **options: any attribute of `hf_specx.training.recipe.TrainingRecipe`, such as `loss`, `temperature`, `phases`.

    Returns:
        A `Distilled`: `pair`, α `before` and `after`, and `measure()`; the draft is as it was if no phase was better.

    Raises:
        ValueError: before any training, for what cannot work; and where memory or the disk is full.

    Example:
        >>> prompts = [f"def name_{number}(" for number in range(40)]
        >>> result = distill(model, "layers:2", prompts, tokenizer=tokenizer, phases=1, texts_per_phase=8)
    """
    from .trainer import check_training  # takes a second to import

    recipe = TrainingRecipe.of(options)
    _check_launch()
    with random_state_kept():  # also while a draft of first layers is made
        start = check_start(target, draft, prompts, held_out, (tokenizer, draft_tokenizer), recipe)
        check_training(recipe, execution_device(start.draft))
        with _working(start, recipe, folder, progress) as (run, where):
            return _result(_train(run, start, where, list(callbacks)), run, start, command)


def _check_launch() -> None:
    """Refuse sharding before transformers sees it: without DeepSpeed its arguments leave half a setting behind."""
    sharded = any(map(parse_flag_from_env, SHARDED_BY_LAUNCH))
    told = "accelerate launch was told to shard models, by FSDP or DeepSpeed; a draft is trained whole on each "
    require(not sharded, told + "device, so launch without that.")


@contextmanager
def _working(
    start: TrainingStart, recipe: TrainingRecipe, folder: str | Path | None, progress: Tell | None
) -> Iterator[tuple[TrainingRun, Path]]:
    """A training that can begin, and its folder."""
    told = "several processes need folder=, one that all of them can read."
    require(folder is not None or processes().num_processes == 1, told)
    with ExitStack() as stack:
        where = Path(folder or stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(enough_room(where, recipe.batch_size))
        prepare_folder(where, recipe, start)
        shown = progress if progress is not None else stack.enter_context(Bar())
        tell = shown if processes().is_main_process else lambda _: None
        reader = Reader(start.vocabularies, recipe.learn_from_prompts)
        yield TrainingRun(start.target, recipe, tell, reader, start.layers is not None), where


class _Made(NamedTuple):
    """A trained draft, α of each text before and after, and how it came about; see `Distilled`."""

    draft: PreTrainedModel
    before: torch.Tensor
    after: torch.Tensor
    alphas: list[float]
    steps: int


def _train(run: TrainingRun, start: TrainingStart, folder: Path, callbacks: list[TrainerCallback]) -> _Made:
    """Write the held-out texts, train from the last checkpoint on, and measure."""
    from .trainer import DistillationTrainer, alphas_of, training_arguments

    recipe, rows, first, split = run.recipe, run.recipe.batch_size, start.draft, start.split
    trained = trainable_copy(first, recipe.lora, recipe.seed)
    writer = Writer(run.target, trained, recipe, folder / TEXTS, start.tokenizers)
    run.costs = writer.costs(split.training[0])
    run.validation = writer.write("validation", split.validation, run.writing)
    test = writer.write("test", split.test, run.writing)
    before = measure_alpha(run.target, first, test, recipe, rows, run.reader)
    run.start = alpha(measure_alpha(run.target, first, run.validation, recipe, rows, run.reader))
    checkpoint = last_checkpoint(folder)
    alphas = [] if checkpoint is None else alphas_of(state_of(checkpoint))
    for value in (run.start, *alphas):
        run.note(value)
    run.progress.phase = len(alphas)
    run.tell(EVALUATED)
    phases = len(alphas) if run.has_stopped(alphas) else recipe.phases
    rate = recipe.rate(hidden_size(first), run.from_layers)
    args = training_arguments(recipe, folder, rate, phases, execution_device(first))
    trainer = DistillationTrainer(trained, run, args, Phases(writer, split.training), callbacks)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    alphas = alphas_of(trainer.state)
    if max(alphas) <= run.start:
        return _Made(first, before, before, [run.start, *alphas], 0)
    made = merged(trainer.plain_draft(), first)
    after = measure_alpha(run.target, made, test, recipe, rows, run.reader)
    return _Made(made, before, after, [run.start, *alphas], int(trainer.state.best_global_step or 0))


def _result(made: _Made, run: TrainingRun, start: TrainingStart, command: str) -> Distilled:
    """The pair, and α before and after; the card says how it came about."""
    config = PairConfig(model_facts(start.target), replace(model_facts(made.draft), name=None, subfolder="draft"))
    pair = DraftTargetPair(start.target, made.draft, start.tokenizers[0], config, start.tokenizers[1])
    figures = estimate(made.before), estimate(made.after), estimate(made.after, made.before)
    result = Distilled(pair, *figures, made.alphas, made.steps, run.recipe, start.split)
    config.notes = card_notes(result, start.in_words, command)
    return result


def prepare_folder(folder: Path, recipe: TrainingRecipe, start: TrainingStart) -> None:
    """Check that a folder has room, and nothing but what an interrupted training of this kind has left."""
    if processes().is_main_process:
        weights = start.draft.num_parameters()
        trained = 0 if recipe.lora else weights  # adapters take next to nothing
        discard_broken(folder)
        check_space(folder, trained, weights * start.draft.dtype.itemsize)
        parts = {"target": fingerprint_of(start.target), "draft": fingerprint_of(start.draft)}
        parts["prompts"] = hashed(start.split)
        if start.vocabularies is not None:
            parts["draft's tokenizer"] = hashed(start.vocabularies.to_target)
        check_same_training(folder, recipe.to_dict(), parts)
    processes().wait_for_everyone()


def hashed(values: Any) -> str:
    """A hash of plain values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def hidden_size(model: PreTrainedModel) -> int:
    """The width of a model, by which the learning rate is chosen."""
    return int(getattr(model.config.get_text_config(decoder=True), "hidden_size", 1024))


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave the generators of Python, NumPy and torch as they were; the Trainer seeds them."""
    states = random.getstate(), numpy.random.get_state()
    accelerators = range(torch.cuda.device_count())
    try:
        with torch.random.fork_rng(devices=accelerators):
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
