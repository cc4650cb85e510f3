"""transformers' `Trainer` with the texts, the loss and the α of a draft that is trained for a target."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_specx.common.errors import brief
from hf_specx.hub.secrets import without_secrets

from .draft import Learner
from .folder import CHECKPOINTS, COMPLETE, write_whole
from .losses import losses_of
from .target_outputs import TargetOutputCache, collate
from .texts import Phases, seed_of


ALPHA = "eval_alpha"
WARM_UP_SHARE = 0.05  # of all steps
NEXT_LINE_AFTER = 10.0  # seconds between lines of progress, where there is no terminal
ProgressCallback = Callable[
    [str, int, int], object
]  # an activity, how much of it is done, and of how much (0: a message)


class Bar(tqdm):
    """A progress bar on stderr, where that is no terminal a line now and then, and a line for each message."""

    def __init__(self) -> None:
        super().__init__(leave=False, delay=1e-3, disable=None)  # None: where there is no terminal
        self.activity = ""
        self.next_line = time.monotonic() + NEXT_LINE_AFTER

    def __call__(self, activity: str, done: int, total: int) -> None:
        """Show how far an activity is; if `total` is 0, print a message."""
        if not total:
            self.write(activity, file=sys.stderr)
            return
        if (activity, total) != (self.activity, self.total):
            self.activity = activity
            self.set_description(activity, refresh=False)
            self.reset(total)
        self.update(done - self.n)
        if self.disable and time.monotonic() >= self.next_line:
            self.write(f"{activity}: {done} of {total}", file=sys.stderr)
            self.next_line = time.monotonic() + NEXT_LINE_AFTER


def training_arguments(learner: Learner, folder: Path, phases: int) -> TrainingArguments:
    """The `TrainingArguments` of a recipe: a phase is an epoch, which ends with an evaluation and a checkpoint.

    A draft on the CPU is trained there, also where there is an accelerator.
    """
    recipe, device = learner.recipe, learner.device
    accelerated = device.type == "cuda"
    fixed: dict[str, Any] = {
        "output_dir": str(folder / CHECKPOINTS),
        "num_train_epochs": phases,
        "per_device_train_batch_size": recipe.batch_size,
        "learning_rate": learner.learning_rate,
        "seed": recipe.seed,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": ALPHA,
        "restore_callback_states_from_checkpoint": True,
        "train_sampling_strategy": "sequential",  # texts come in an order that follows from the seed
        "remove_unused_columns": False,
    }
    defaults: dict[str, Any] = {
        "warmup_steps": WARM_UP_SHARE,
        "logging_strategy": "epoch",
        "report_to": "none",
        "disable_tqdm": True,
        "save_total_limit": 2,
        "bf16": accelerated and torch.cuda.is_bf16_supported(),
        "use_cpu": device.type == "cpu",  # without it bf16 is refused there
        "dataloader_pin_memory": accelerated,
        "ddp_find_unused_parameters": False,
    }
    try:
        args = TrainingArguments(**defaults | recipe.training | fixed)
    except (TypeError, ValueError, ImportError) as error:
        reason = str(error).removeprefix("TrainingArguments.__init__() ")
        shown = brief(without_secrets(recipe.training))
        raise ValueError(f"training={shown} is refused by TrainingArguments: {reason}") from error
    args._n_gpu = min(args.n_gpu, 1)  # one device a process: more are used by torchrun
    return args


def with_plain_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """The options of `distill`, with a `TrainingArguments` as a dict of its arguments that are not the defaults.

    Its output folder is left out.
    """
    training = options.get("training")
    if not isinstance(training, TrainingArguments):
        return options
    default = _as_dict(TrainingArguments(output_dir=training.output_dir))
    changed = {name: value for name, value in _as_dict(training).items() if value != default[name]}
    return options | {"training": changed}


def _as_dict(args: TrainingArguments) -> dict[str, Any]:
    """All arguments by name, also the values of tokens, which `to_dict` hides."""
    values = args.to_dict()
    return values | {name: getattr(args, name) for name in values if name.endswith("_token")}


class DistillationTrainer(Trainer):
    """Trains a draft on the outputs of a target for its own texts.

    The target is not a part of the trained model: it is neither moved, saved nor given to an optimizer.

    Args:
        phases: the texts.
        target_outputs: for these.
        validation_alpha: α of a model on the held-out prompts by which training stops.
        initial_alpha: that of the draft before the training.
        show_progress: called with what is being done, see `ProgressCallback`.
    """

    def __init__(
        self,
        learner: Learner,
        args: TrainingArguments,
        phases: Phases,
        target_outputs: TargetOutputCache,
        validation_alpha: Callable[[Any], float],
        initial_alpha: float,
        show_progress: ProgressCallback,
        callbacks: Sequence[TrainerCallback],
    ):
        self.learner, self.recipe, self.show_progress = learner, learner.recipe, show_progress
        self.phases, self.target_outputs = phases, target_outputs
        self.validation_alpha, self.initial_alpha = validation_alpha, initial_alpha
        self.news = ""
        super().__init__(
            learner.trained,
            args,
            data_collator=self.collate,
            train_dataset=self.phases,
            eval_dataset=self.phases,  # of which nothing is read
            callbacks=[_EachPhase(self), EarlyStoppingCallback(self.recipe.patience), *callbacks],
        )
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True  # see `compute_loss`

    def collate(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        """The texts of these numbers as a batch."""
        batch = collate([self.phases.texts[number] for number in numbers])
        return batch | {"numbers": torch.tensor(numbers, device="cpu")}

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean loss over all tokens of a step, those of other processes and of accumulated batches included."""
        numbers = inputs["numbers"].tolist()
        texts = [self.phases.texts[number] for number in numbers]
        outputs = self.target_outputs.outputs(texts, numbers)
        draws = [seed_of(self.recipe.seed, f"step {self.state.global_step}", number) for number in numbers]
        predicted = self.learner.predict(model, texts, outputs, draws)
        losses = losses_of(self.recipe, outputs.logits.to(predicted.logits.device), predicted)
        num_tokens = len(outputs.logits) if num_items_in_batch is None else num_items_in_batch
        loss = (losses * predicted.share).sum() / num_tokens
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # whose gradients are averaged
        return (loss, {}) if return_outputs else loss

    def _save(self, *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint, without the token that `TrainingArguments` may have."""
        token, self.args.hub_token = self.args.hub_token, None
        try:
            super()._save(*args, **kwargs)
        finally:
            self.args.hub_token = token

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """α on the held-out prompts as a metric, 0 if weights became infinite; each process computes all of it."""
        assert self.model is not None
        alpha = self.validation_alpha(self.model.eval())
        metrics = {ALPHA: 0.0 if math.isnan(alpha) else alpha}
        losses = [f", loss {entry['loss']:.3f}" for entry in self.state.log_history if "loss" in entry]
        phase = f"phase {round(self.state.epoch or 0)} of {self.args.num_train_epochs}"
        self.log(metrics)
        self.news = f"{phase}, α {metrics[ALPHA]:.3f}{''.join(losses[-1:])}"
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class _EachPhase(TrainerCallback):
    """A callback that lets the target write the texts of a phase before it begins, and shows progress."""

    def __init__(self, trainer: DistillationTrainer):
        self.trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.best_metric is None:
            state.best_metric = self.trainer.initial_alpha  # weights that are not better are not taken
        best = Path(str(args.output_dir)) / f"checkpoint-{state.best_global_step}"
        if best.is_dir():
            state.best_model_checkpoint = str(best)  # the folder may have been moved

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        phase = round(state.epoch or 0)
        self.trainer.phases.start(
            phase, lambda *done: self.trainer.show_progress(f"phase {phase + 1}, writing", *done)
        )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        phase, step = divmod(state.global_step - 1, state.max_steps // int(args.num_train_epochs))
        self.trainer.show_progress(
            f"phase {phase + 1}, training", step + 1, state.max_steps // int(args.num_train_epochs)
        )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self.trainer.news:  # saved by a user's own callback, in the middle of a phase
            return
        if state.is_world_process_zero:
            write_whole(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / COMPLETE, "")
        self.trainer.show_progress(self.trainer.news, 0, 0)  # only now does an interrupted training go on from it
        self.trainer.news = ""


def alphas_of(state: TrainerState) -> list[float]:
    """α after each phase so far."""
    return [entry[ALPHA] for entry in state.log_history if ALPHA in entry]
