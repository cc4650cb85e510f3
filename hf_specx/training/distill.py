"""Train a draft for a target on texts that the target writes for the user's own prompts."""

import hashlib
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from hf_specx.common.errors import brief, require
from hf_specx.common.wrappers import unwrapped
from hf_specx.pair_files.facts import model_facts
from hf_specx.pair_files.pair_config import PairConfig
from hf_specx.pairs.complete import processes
from hf_specx.pairs.pair import DraftTargetPair
from hf_specx.validation.models import check_pair, check_target

from .checkpoints import (
    check_same_training,
    check_space,
    discard_broken,
    enough_room,
    fingerprint_of,
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
from .texts import Phases, Writer


def distill(
    target: PreTrainedModel,
    draft: PreTrainedModel | str,
    prompts: Prompts,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
    held_out: float | Prompts = SHARE,
    folder: str | Path | None = None,
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
    target, layers = unwrapped(target), first_layers_wanted(draft)
    told = f"draft={brief(draft)} is no model; load one, or give 'layers:N'."
    require(layers is not None or isinstance(unwrapped(draft, adapters=True), PreTrainedModel), told)
    check_target(target, 0)
    told = f"{type(target).__name__} is an encoder-decoder; drafts are trained for decoder-only targets."
    require(not target.config.is_encoder_decoder, told)
    first = draft_of_first_layers(target, layers) if layers is not None else unwrapped(draft, adapters=True)
    check_pair(target, first, tokenizer, tokenizer if layers is not None else draft_tokenizer)
    split = prepare_prompts(prompts, held_out, tokenizer, [target, first], recipe.max_new_tokens)
    start = (
        first.name_or_path or "the draft that was given" if layers is None else f"the target's first {layers} layers"
    )
    with ExitStack() as stack:
        stack.enter_context(random_state_kept())
        where = Path(folder or stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(enough_room(where, recipe.batch_size))
        trained = trainable_copy(first, recipe.lora, recipe.seed)
        weights = sum(weight.numel() for weight in trained.parameters() if weight.requires_grad)
        prepare_folder(where, recipe, target, first, split, weights)
        shown = progress if progress is not None else stack.enter_context(Bar())
        run = Run(target, recipe, shown if processes().is_main_process else lambda _: None)
        result = _train(run, first, trained, split, where, list(callbacks))
    pair = result.pair
    pair.tokenizer = pair.draft_tokenizer = tokenizer
    pair.strategy = pair._strategy()
    pair.config.notes = card_notes(result, split, start, weights, command)
    return result


def _train(
    run: Run, first: PreTrainedModel, trained: Any, split: Split, folder: Path, callbacks: list[TrainerCallback]
) -> Distilled:
    """Write the held-out texts, train from the last checkpoint on, and measure.

    Args:
        run: of this training.
        first: the draft before it.
        trained: its copy.
        split: the prompts.
        folder: has the texts and checkpoints.
        callbacks: for the Trainer.
    """
    from .trainer import DistillationTrainer, alphas_of, training_arguments  # takes a second to import

    recipe, rows = run.recipe, run.recipe.batch_size
    writer = Writer(run.target, trained, recipe, folder)
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
    args = training_arguments(recipe, folder, hidden_size(first), phases)
    trainer = DistillationTrainer(trained, run, args, Phases(writer, split.training), callbacks)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    alphas = [run.start, *alphas_of(trainer.state)]
    better = max(alphas) > run.start
    made = merged(trainer.plain_draft(), first) if better else first
    after = measure_alpha(run.target, made, test, recipe, rows)
    steps = trainer.state.best_global_step or 0
    config = PairConfig(model_facts(run.target), replace(model_facts(made), name=None, subfolder="draft"))
    pair = DraftTargetPair(run.target, made, None, config)
    figures = estimate(before), estimate(after), estimate(after, before)
    return Distilled(pair, *figures, alphas, steps if better else 0, recipe)


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
    folder: Path, recipe: Recipe, target: PreTrainedModel, first: PreTrainedModel, split: Split, weights: int
) -> None:
    """Check that a folder has room, and nothing but what an interrupted training of this kind has left."""
    if processes().is_main_process:
        check_space(folder, weights, first.num_parameters() * first.dtype.itemsize)
        models = {"target": fingerprint_of(target), "draft": fingerprint_of(first)}
        prompts = hashlib.sha256(json.dumps(split).encode()).hexdigest()
        check_same_training(folder, recipe.to_dict() | models | {"prompts": prompts})
        discard_broken(folder)
    processes().wait_for_everyone()


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
