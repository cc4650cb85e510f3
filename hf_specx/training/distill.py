"""Train a draft for a target on texts that the target writes for the user's own prompts."""

import hashlib
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate.utils import parse_flag_from_env
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from hf_specx.bench.inputs import settings_of
from hf_specx.common.drafts import NEW_HEADS, read_draft
from hf_specx.common.errors import brief, require
from hf_specx.common.wrappers import unwrapped
from hf_specx.drafting.heads.head import DraftHead
from hf_specx.engine.check_models import check_pair, check_target, why_model_plain
from hf_specx.engine.entry import check_entry
from hf_specx.hub.facts import model_facts
from hf_specx.hub.pair_config import PairConfig
from hf_specx.hub.secrets import without_secrets
from hf_specx.pairs.pair import DraftTargetPair
from hf_specx.pairs.shares import processes

from .draft import Learner, ModelDraft, Tokenizers, draft_of_first_layers
from .folder import TEXTS, enough_room, held_folder, last_checkpoint, prepare_folder
from .head import HeadDraft
from .losses import alpha, estimate, measure
from .prompts import HELD_OUT_SHARE, GivenPrompts, Reader, Split, split_prompts
from .reading import REMEMBERED_BYTES, Remembered
from .recipe import TrainingRecipe
from .result import COMMAND, Distilled, card_notes
from .texts import Phases, Writer, writer_digest
from .trainer import Bar, DistillationTrainer, Tell, alphas_of, training_arguments, with_plain_arguments


OF_GENERATION = ("do_sample", "temperature", "top_p", "top_k", "max_new_tokens")
PASSES_OF_HEADS = 32  # of a new head, of whose drafts a step has one in eight
SHARDED_BY_LAUNCH = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")  # set by `accelerate launch`


def distill(
    target: PreTrainedModel,
    draft: PreTrainedModel | DraftHead | str,
    prompts: GivenPrompts,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
    held_out: float | GivenPrompts = HELD_OUT_SHARE,
    folder: str | Path | None = None,
    progress: Tell | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    command: str = COMMAND,
    **options: Any,
) -> Distilled:
    """Train a draft so that the target accepts more of what it proposes.

    The target writes texts for the prompts, the draft is trained on what the target says of them, and so on in phases,
    until α on held-out prompts no longer rises (the data of DistillSpec, arXiv 2310.08461). A float32 copy is trained.

    Args:
        target: a decoder-only model in evaluation mode; it stays on its device and in its precision.
        draft: a smaller model, trained where it is, "layers:N" to start from the target's first N layers, or "eagle3"
            or "dspark" for a new head that reads the target's states, or such a `DraftHead`, which is trained further.
        prompts: what the target will be used for: texts, or lists of token ids.
        tokenizer: of the target; needed for texts, and saved with the pair.
        draft_tokenizer: the draft's own, which must have the same tokens; without it only sizes are compared.
        held_out: a share of the prompts, or others; half decide when to stop, and α is reported on the other half.
        folder: of texts and checkpoints: the same call goes on with an interrupted training. None keeps nothing.
        progress: called with what is being done, how much is, and of how much (0 for news); None shows it on stderr.
        callbacks, command: further ones of the Trainer; what the card says that the draft was made by.
        **options: attributes of `training.recipe.TrainingRecipe`; how to generate, else by the target's own config.

    Returns:
        A `Distilled`: `pair`, α `before` and `after`, and `measure()`; the draft is as it was if no phase was better.

    Raises:
        ValueError: before any training, for what cannot work; and where memory or the disk is full.

    Example:
        >>> prompts = [f"def name_{number}(" for number in range(40)]
        >>> result = distill(model, "layers:2", prompts, tokenizer=tokenizer, phases=1, texts_per_phase=8)
    """
    recipe = TrainingRecipe.of(with_settings(target := unwrapped(target), draft, with_plain_arguments(options)))
    with left_alone(target), ExitStack() as stack:
        learner = draft_to_train(target, draft, recipe, (tokenizer, draft_tokenizer))
        split = split_prompts(prompts, held_out, Reader(tokenizer, learner.models, recipe.max_new_tokens))
        where = stack.enter_context(working(target, learner, split, folder))
        result = _train(target, learner, split, where, progress or stack.enter_context(closing(Bar())), callbacks)
    result.pair.config.notes = card_notes(result, learner.in_words, command)
    return result


def with_settings(target: PreTrainedModel, draft: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Options of a training, and how to generate as the target's own generation config says where they do not.

    A ValueError for a target that cannot have a training.
    """
    check_entry(target)
    check_target(target)
    for why in filter(None, why_model_plain(target)):
        raise ValueError(f"{why}.")
    given = {name: value for name, value in given.items() if name not in OF_GENERATION or value is not None}
    drawn = {name: given[name] for name in OF_GENERATION if name in given}
    usual = {"passes": PASSES_OF_HEADS} if draft in NEW_HEADS else {}
    return usual | given | settings_of(target, drawn)


def draft_to_train(target: PreTrainedModel, draft: Any, recipe: TrainingRecipe, tokenizers: Tokenizers) -> Learner:
    """What is trained, by what the user has named; a ValueError for what cannot be."""
    told = f"{type(target).__name__} is an encoder-decoder; drafts are trained for decoder-only targets."
    require(not target.config.is_encoder_decoder, told)
    draft = unwrapped(draft)
    if draft in NEW_HEADS or isinstance(draft, DraftHead):
        return HeadDraft(target, draft, recipe, tokenizers)
    layers = read_draft(draft).layers if isinstance(draft, str) else None
    if layers is not None:
        first = draft_of_first_layers(target, layers)
        return ModelDraft(target, first, recipe, (tokenizers[0], tokenizers[0]), layers)
    told = f"draft={brief(draft)} is no model; load one (adapters of peft merged into it), or give 'layers:N', "
    told += f"{' or '.join(map(repr, NEW_HEADS))}."
    require(isinstance(draft, PreTrainedModel), told)
    check_pair(target, draft, *tokenizers)
    return ModelDraft(target, draft, recipe, tokenizers)


@contextmanager
def working(target: PreTrainedModel, learner: Learner, split: Split, folder: str | Path | None) -> Iterator[Path]:
    """The folder of a training that can begin as this process was launched, or go on with what it finds there."""
    sharded = any(map(parse_flag_from_env, SHARDED_BY_LAUNCH))
    told = "accelerate launch was told to shard models, by FSDP or DeepSpeed; a draft is trained whole on each "
    require(not sharded, told + "device, so launch without that.")  # before transformers sees it, which keeps some
    training_arguments(learner, Path(), learner.recipe.phases)  # or they are refused
    with ExitStack() as stack:
        where = Path(folder or stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(enough_room(where, learner.recipe.batch_size))
        if processes().is_main_process:
            stack.enter_context(held_folder(where))
            digest = hashlib.sha256(json.dumps(split).encode()).hexdigest()
            made_from = learner.made_from
            start = made_from if isinstance(made_from, str) else writer_digest(made_from)
            models = {"target": writer_digest(target), "draft": start}
            prepare_folder(where, without_secrets(asdict(learner.recipe)) | models | {"prompts": digest})
        processes().wait_for_everyone()
        yield where


def _train(
    target: PreTrainedModel,
    learner: Learner,
    split: Split,
    folder: Path,
    progress: Tell,
    callbacks: Sequence[TrainerCallback],
) -> Distilled:
    """Write the held-out texts, train from the last checkpoint on, and measure."""
    tell: Tell = progress if processes().is_main_process else lambda *_: None
    recipe, writer = learner.recipe, Writer(target, learner, folder / TEXTS)
    validation, test = (
        [text.cut(learner.most) for text in writer.write(name, getattr(split, name), partial(tell, "held-out texts"))]
        for name in ("validation", "test")
    )
    # with many processes each would read more texts than without it, not fewer
    room = REMEMBERED_BYTES * (processes().num_processes < recipe.passes)
    remembered = Remembered(target, learner.hidden_state_taps, recipe.batch_size, room)
    phases = Phases(writer, split.training, remembered.add)
    phases.begin(0, partial(tell, "phase 1, writing"))
    learner.begin(split.training, phases.texts)
    measured = partial(measure, remembered, learner)

    def judge(module: Any) -> float:
        return alpha(measured(module, validation)[:, 0])

    first = learner.module(learner.first)
    before, start = measured(first, test), judge(first)
    checkpoint, count = going_on(folder, recipe.phases, start, tell)
    args = training_arguments(learner, folder, count)
    trainer = DistillationTrainer(learner, args, phases, remembered, judge, start, tell, callbacks)
    trainer.train(resume_from_checkpoint=checkpoint)

    alphas, steps = [start, *alphas_of(trainer.state)], trainer.state.best_global_step
    made = learner.first if steps is None else learner.finished(trainer.model)
    after = before if steps is None else measured(learner.module(made), test)
    config = PairConfig(model_facts(target), replace(model_facts(made), name=None, subfolder="draft"))
    pair = DraftTargetPair(target, made, learner.tokenizers[0], config, learner.tokenizers[1])
    figures = estimate(before[:, 0]), estimate(after[:, 0]), estimate(after[:, 0], before[:, 0])
    tokens = estimate(before[:, 1]), estimate(after[:, 1])
    return Distilled(pair, *figures, *tokens, alphas, steps or 0, recipe, split)


def going_on(folder: Path, phases: int, start: float, tell: Tell) -> tuple[str | None, int]:
    """The checkpoint that a training goes on from, if there is one, and how many phases it has in all."""
    checkpoint = last_checkpoint(folder)
    if checkpoint is None:
        tell(f"before training, α {start:.3f}", 0, 0)
        return None, phases
    state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    known = alphas_of(state)
    tell(f"phase {len(known)} of {phases}, α {known[-1]:.3f}", 0, 0)
    ended = state.stateful_callbacks["TrainerControl"]["args"]["should_training_stop"]
    return str(checkpoint), len(known) if ended else phases


@contextmanager
def left_alone(target: PreTrainedModel) -> Iterator[None]:
    """No gradients reach a target whose tables a head reads, and generators that the Trainer seeds are as before."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(numpy.random.set_state, numpy.random.get_state())
        for weight in target.parameters():
            stack.callback(weight.requires_grad_, weight.requires_grad)
        target.requires_grad_(False)
        yield
