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

from hf_specx.bench.inputs import generation_settings
from hf_specx.common.drafts import DRAFT_FOLDER, NEW_HEADS, read_draft
from hf_specx.common.errors import brief, require
from hf_specx.common.wrappers import unwrapped
from hf_specx.drafting.heads.head import DraftHead
from hf_specx.engine.check_arguments import check_entry
from hf_specx.engine.check_models import check_pair, check_target
from hf_specx.engine.reasons import reasons_in_model
from hf_specx.hub.facts import model_facts
from hf_specx.hub.pair_config import PairConfig
from hf_specx.hub.secrets import without_secrets
from hf_specx.pairs.pair import DraftTargetPair
from hf_specx.pairs.shares import processes

from .draft import Learner, ModelDraft, Tokenizers, draft_of_first_layers
from .folder import TEXTS, explained_lack_of_room, last_checkpoint, locked_folder, prepare_folder
from .head import HeadDraft
from .losses import alpha, estimate, measure
from .prompts import HELD_OUT_SHARE, GivenPrompts, PromptReader, Split, split_prompts
from .recipe import TrainingRecipe
from .result import COMMAND, Distilled, card_notes
from .target_outputs import CACHE_BYTES, TargetOutputCache, Text
from .texts import Phases, Writer, writer_digest
from .trainer import Bar, DistillationTrainer, ProgressCallback, alphas_of, training_arguments, with_plain_arguments


GENERATION_OPTIONS = ("do_sample", "temperature", "top_p", "top_k", "max_new_tokens")
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
    progress: ProgressCallback | None = None,
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
        progress: called with an activity, how much of it is done, and of how much (0 if the first is a message);
            None shows both on stderr.
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
    target = unwrapped(target)
    options = with_generation_settings(target, draft, with_plain_arguments(options))
    recipe = TrainingRecipe.of(options)
    with target_unchanged(target), ExitStack() as stack:
        learner = make_learner(target, draft, recipe, (tokenizer, draft_tokenizer))
        split = split_prompts(prompts, held_out, PromptReader(tokenizer, learner.models, recipe.max_new_tokens))
        path = stack.enter_context(training_folder(target, learner, split, folder))
        show_progress = progress or stack.enter_context(closing(Bar()))
        result = _train(target, learner, split, path, show_progress, callbacks)
    result.pair.config.notes = card_notes(result, learner.description, command)
    return result


def with_generation_settings(target: PreTrainedModel, draft: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a training, with settings of generation that they leave out as the target's config has them.

    Raises ValueError for a target that no draft can be trained for.
    """
    check_entry(target)
    check_target(target)
    for reason in filter(None, reasons_in_model(target)):
        raise ValueError(f"{reason}.")
    options = {name: value for name, value in options.items() if name not in GENERATION_OPTIONS or value is not None}
    generation_options = {name: options[name] for name in GENERATION_OPTIONS if name in options}
    defaults = {"passes": PASSES_OF_HEADS} if draft in NEW_HEADS else {}
    return defaults | options | generation_settings(target, generation_options)


def make_learner(target: PreTrainedModel, draft: Any, recipe: TrainingRecipe, tokenizers: Tokenizers) -> Learner:
    """The `Learner` of a draft, as the user has named it; raises ValueError for what cannot be trained."""
    require(
        not target.config.is_encoder_decoder,
        f"{type(target).__name__} is an encoder-decoder; drafts are trained for decoder-only targets.",
    )
    draft = unwrapped(draft)
    if draft in NEW_HEADS or isinstance(draft, DraftHead):
        return HeadDraft(target, draft, recipe, tokenizers)
    layers = read_draft(draft).layers if isinstance(draft, str) else None
    if layers is not None:
        initial = draft_of_first_layers(target, layers)
        return ModelDraft(target, initial, recipe, (tokenizers[0], tokenizers[0]), layers)
    require(
        isinstance(draft, PreTrainedModel),
        f"draft={brief(draft)} is no model; load one (adapters of peft merged into it), or give 'layers:N', "
        f"{' or '.join(map(repr, NEW_HEADS))}.",
    )
    check_pair(target, draft, *tokenizers)
    return ModelDraft(target, draft, recipe, tokenizers)


@contextmanager
def training_folder(
    target: PreTrainedModel, learner: Learner, split: Split, folder: str | Path | None
) -> Iterator[Path]:
    """A context with the folder of a training, which is locked; without a folder it is a temporary one.

    Raises ValueError for the folder of another training, or if a training cannot run in these processes.
    """
    require(
        not any(map(parse_flag_from_env, SHARDED_BY_LAUNCH)),
        "accelerate launch was told to shard models, by FSDP or DeepSpeed; a draft is trained whole on each device, "
        "so launch without that.",
    )  # before transformers sees it, which keeps some
    training_arguments(learner, Path(), learner.recipe.phases)  # or they are refused
    with ExitStack() as stack:
        path = Path(folder or stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(explained_lack_of_room(path, learner.recipe.batch_size))
        if processes().is_main_process:
            stack.enter_context(locked_folder(path))
            prepare_folder(path, _training_settings(target, learner, split))
        processes().wait_for_everyone()
        yield path


def _training_settings(target: PreTrainedModel, learner: Learner, split: Split) -> dict[str, Any]:
    """All that the result of a training depends on, as values in JSON."""
    source = learner.source
    return {
        **without_secrets(asdict(learner.recipe)),
        "target": writer_digest(target),
        "draft": source if isinstance(source, str) else writer_digest(source),
        "prompts": hashlib.sha256(json.dumps(split).encode()).hexdigest(),
    }


def _train(
    target: PreTrainedModel,
    learner: Learner,
    split: Split,
    folder: Path,
    progress: ProgressCallback,
    callbacks: Sequence[TrainerCallback],
) -> Distilled:
    """Write the held-out texts, train from the last checkpoint on, and measure; returns the result."""
    show_progress: ProgressCallback = progress if processes().is_main_process else lambda *_: None
    recipe, writer = learner.recipe, Writer(target, learner, folder / TEXTS)

    def held_out_texts(name: str, prompts: list[list[int]]) -> list[Text]:
        texts = writer.write(name, prompts, partial(show_progress, "held-out texts"))
        return [text.cut(learner.max_learned_tokens) for text in texts]

    validation = held_out_texts("validation", split.validation)
    test = held_out_texts("test", split.test)
    # with many processes each would read more texts than without it, not fewer
    max_bytes = CACHE_BYTES if processes().num_processes < recipe.passes else 0
    target_outputs = TargetOutputCache(target, learner.hidden_state_taps, recipe.batch_size, max_bytes)
    phases = Phases(writer, split.training, target_outputs.add)
    phases.start(0, partial(show_progress, "phase 1, writing"))
    learner.prepare(split.training, phases.texts)
    acceptance_sums = partial(measure, target_outputs, learner)

    def validation_alpha(module: Any) -> float:
        return alpha(acceptance_sums(module, validation)[:, 0])

    initial = learner.module(learner.initial)
    before = acceptance_sums(initial, test)
    initial_alpha = validation_alpha(initial)
    checkpoint, num_phases = resumption(folder, recipe.phases, initial_alpha, show_progress)
    args = training_arguments(learner, folder, num_phases)
    trainer = DistillationTrainer(
        learner, args, phases, target_outputs, validation_alpha, initial_alpha, show_progress, callbacks
    )
    trainer.train(resume_from_checkpoint=checkpoint)

    alphas, best_step = [initial_alpha, *alphas_of(trainer.state)], trainer.state.best_global_step
    draft, after = learner.initial, before
    if best_step is not None:
        draft = learner.finished(trainer.model)
        after = acceptance_sums(learner.module(draft), test)
    draft_facts = replace(model_facts(draft), name=None, subfolder=DRAFT_FOLDER)
    config = PairConfig(model_facts(target), draft_facts)
    target_tokenizer, draft_tokenizer = learner.tokenizers
    return Distilled(
        pair=DraftTargetPair(target, draft, target_tokenizer, config, draft_tokenizer),
        before=estimate(before[:, 0]),
        after=estimate(after[:, 0]),
        gain=estimate(after[:, 0], before[:, 0]),
        tokens_before=estimate(before[:, 1]),
        tokens_after=estimate(after[:, 1]),
        alphas=alphas,
        steps=best_step or 0,
        recipe=recipe,
        split=split,
    )


def resumption(
    folder: Path, phases: int, initial_alpha: float, show_progress: ProgressCallback
) -> tuple[str | None, int]:
    """The last checkpoint of an interrupted training, None without one, and the number of its phases."""
    checkpoint = last_checkpoint(folder)
    if checkpoint is None:
        show_progress(f"before training, α {initial_alpha:.3f}", 0, 0)
        return None, phases
    state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    alphas = alphas_of(state)
    show_progress(f"phase {len(alphas)} of {phases}, α {alphas[-1]:.3f}", 0, 0)
    has_ended = state.stateful_callbacks["TrainerControl"]["args"]["should_training_stop"]
    return str(checkpoint), len(alphas) if has_ended else phases


@contextmanager
def target_unchanged(target: PreTrainedModel) -> Iterator[None]:
    """A context that leaves the target's weights without gradients, and random generators as they were before."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(numpy.random.set_state, numpy.random.get_state())
        for weight in target.parameters():
            stack.callback(weight.requires_grad_, weight.requires_grad)
        target.requires_grad_(False)
        yield
