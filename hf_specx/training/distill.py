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
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from hf_specx.common.errors import brief, require
from hf_specx.common.wrappers import unwrapped
from hf_specx.hub.markdown import code
from hf_specx.measure.checks import check_runs
from hf_specx.pair_files.facts import model_facts
from hf_specx.pair_files.pair_config import PairConfig
from hf_specx.pairs.complete import processes
from hf_specx.pairs.pair import DraftTargetPair
from hf_specx.validation.models import check_pair, check_target

from .checkpoints import (
    TEXTS,
    check_same_training,
    check_space,
    discard_broken,
    enough_room,
    last_checkpoint,
    state_of,
)
from .first_draft import draft_of_first_layers, first_layers_wanted, merged, trainable_copy
from .held_out import alpha, estimate, measure_alpha
from .progress import EVALUATED, Bar, Tell
from .prompts import SHARE, Prompts, Split, check_fit, encode_prompts, split_prompts
from .recipe import Recipe
from .result import Distilled, card_notes
from .run import Run
from .speed import measure_pair
from .texts import Phases, Writer, fingerprint_of


def distill(
    target: PreTrainedModel,
    draft: PreTrainedModel | str,
    prompts: Prompts,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
    held_out: float | Prompts = SHARE,
    folder: str | Path | None = None,
    batches: Sequence[int] = (1, 8),
    progress: Tell | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    command: str = "hf_specx.distill(...)",
    **options: Any,
) -> Distilled:
    """Train a draft so that the target accepts more of what it proposes.

    The target writes texts for the prompts, by speculative decoding with the draft of the moment; the draft is trained
    on what the target says of them, by transformers' `Trainer`; and so on in phases (on-policy data as in DistillSpec,
    arXiv 2310.08461, with the target as the writer). It stops when α on held-out prompts no longer rises, and takes
    the weights of the best phase. Neither model is changed: what is trained is a copy of the draft, in float32.

    Under `torchrun` each process trains on its share of a step's texts, and writes its share of them.

    Args:
        target: a decoder-only model in evaluation mode, where it is, in its own precision.
        draft: a smaller model with the same tokens, or "layers:N" to start from the target's first N layers.
        prompts: what the target will be used for: texts, or lists of token ids.
        tokenizer: of the target, to read texts with; saved with the pair.
        draft_tokenizer: the draft's own, to be compared with it token by token; without it only sizes are compared.
        held_out: a share of the prompts, or other prompts; half of these decide when to stop, and on the others α is
            reported.
        folder: texts and checkpoints are kept there; started again with the same arguments, an interrupted training
            goes on from the last phase, to the same weights. None keeps nothing.
        batches: sizes of the batches that are timed with the new pair, in turns with plain `generate`; () times none.
        progress: is called with a `Progress` as work is done; None shows a bar on stderr.
        callbacks: further ones for the Trainer.
        command: what the card of the pair says that it was made by.
        **options: of `Recipe`.

    Returns:
        The pair, ready to be saved, with α before and after.

    Raises:
        ValueError: before any training, for what cannot work; and where memory or the disk is full.

    Example:
        >>> result = distill(model, "layers:2", prompts, tokenizer=tokenizer, folder="build/my-draft")
        >>> result.pair.save_pretrained("my-pair")
    """
    recipe = Recipe.of(options)
    check_runs(batches or (1,))
    target, layers = unwrapped(target), first_layers_wanted(draft)
    told = f"draft={brief(draft)} is no model; load one (adapters of peft merged into it), or give 'layers:N'."
    require(layers is not None or isinstance(unwrapped(draft), PreTrainedModel), told)
    check_target(target, 0)
    told = f"{type(target).__name__} is an encoder-decoder; drafts are trained for decoder-only targets."
    require(not target.config.is_encoder_decoder, told)
    told = "several processes need folder=, one that all of them can read."
    require(folder is not None or processes().num_processes == 1, told)
    first = unwrapped(draft) if layers is None else draft_of_first_layers(target, layers)
    check_pair(target, first, tokenizer, draft_tokenizer if layers is None else tokenizer)
    split = prepare_prompts(prompts, held_out, tokenizer, [target, first], recipe.max_new_tokens)
    with ExitStack() as stack:
        stack.enter_context(random_state_kept())
        where = Path(folder or stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(enough_room(where, recipe.batch_size))
        prepare_folder(where, recipe, target, first, split)
        shown = progress if progress is not None else stack.enter_context(Bar())
        run = Run(target, recipe, shown if processes().is_main_process else lambda _: None, layers is not None)
        made = _train(run, first, split, where, list(callbacks))
        config = PairConfig(model_facts(target), replace(model_facts(made.draft), name=None, subfolder="draft"))
        pair = DraftTargetPair(target, made.draft, tokenizer, config)
        figures = estimate(made.before), estimate(made.after), estimate(made.after, made.before)
        result = Distilled(pair, *figures, made.alphas, made.steps, recipe)
        config.notes = card_notes(result, split, described(first, layers), command)
        if batches and processes().is_main_process:
            run.tell("timing")
            measure_pair(pair, split.test, batches, recipe, command)
        processes().wait_for_everyone()
    return result


class _Made(NamedTuple):
    """A trained draft, α of each text before and after, and how it came about; see `Distilled`."""

    draft: PreTrainedModel
    before: torch.Tensor
    after: torch.Tensor
    alphas: list[float]
    steps: int


def _train(run: Run, first: PreTrainedModel, split: Split, folder: Path, callbacks: list[TrainerCallback]) -> _Made:
    """Write the held-out texts, train from the last checkpoint on, and measure."""
    from .trainer import DistillationTrainer, alphas_of, training_arguments  # takes a second to import

    recipe, rows = run.recipe, run.recipe.batch_size
    trained = trainable_copy(first, recipe.lora, recipe.seed)
    writer = Writer(run.target, trained, recipe, folder / TEXTS)
    run.costs = writer.costs(split.training[0])
    run.validation = writer.write("validation", split.validation, run.writing)
    test = writer.write("test", split.test, run.writing)
    before = measure_alpha(run.target, first, test, recipe, rows)
    run.start = alpha(measure_alpha(run.target, first, run.validation, recipe, rows))
    checkpoint = last_checkpoint(folder)
    alphas = [] if checkpoint is None else alphas_of(state_of(checkpoint))
    for value in (run.start, *alphas):
        run.note(value)
    run.tell(EVALUATED)
    phases = len(alphas) if run.has_stopped(alphas) else recipe.phases
    args = training_arguments(recipe, folder, recipe.rate(hidden_size(first), run.from_layers), phases)
    trainer = DistillationTrainer(trained, run, args, Phases(writer, split.training), callbacks)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    alphas = alphas_of(trainer.state)
    if max(alphas) <= run.start:
        return _Made(first, before, before, [run.start, *alphas], 0)
    made = merged(trainer.plain_draft(), first)
    after = measure_alpha(run.target, made, test, recipe, rows)
    return _Made(made, before, after, [run.start, *alphas], int(trainer.state.best_global_step or 0))


def prepare_prompts(
    prompts: Prompts,
    held_out: float | Prompts,
    tokenizer: PreTrainedTokenizerBase | None,
    models: list[PreTrainedModel],
    max_new_tokens: int,
) -> Split:
    """The prompts as token ids that all models can read, some of them held out."""
    encoded = encode_prompts(prompts, tokenizer, "prompts")
    check_fit(encoded, models, max_new_tokens, "prompts")
    if isinstance(held_out, float | int):
        return split_prompts(encoded, held_out)
    apart = encode_prompts(held_out, tokenizer, "held_out")
    check_fit(apart, models, max_new_tokens, "held_out")
    return split_prompts(encoded, apart)


def prepare_folder(
    folder: Path, recipe: Recipe, target: PreTrainedModel, first: PreTrainedModel, split: Split
) -> None:
    """Check that a folder has room, and nothing but what an interrupted training of this kind has left."""
    if processes().is_main_process:
        check_space(folder, first.num_parameters(), first.dtype.itemsize)
        models = {"target": fingerprint_of(target), "draft": fingerprint_of(first)}
        prompts = hashlib.sha256(json.dumps(split).encode()).hexdigest()
        check_same_training(folder, recipe.to_dict() | models | {"prompts": prompts})
        discard_broken(folder)
    processes().wait_for_everyone()


def described(first: PreTrainedModel, layers: int | None) -> str:
    """What a draft was before, in words."""
    if layers is not None:
        return f"the first {layers} layers of the target, with its embedding and head"
    return code(str(first.name_or_path)) or "a draft that was made here"


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
