"""transformers' `Trainer` with the loss, the texts and the α of a draft that is trained for a target."""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_specx.common.errors import brief

from .checkpoints import mark_complete
from .distributions import losses_of
from .held_out import alpha, measure_alpha
from .progress import EVALUATED
from .recipe import TrainingRecipe
from .remembered import REMEMBERED_BYTES, Remembered
from .run import TrainingRun
from .texts import Phases


ALPHA = "eval_alpha"
WARM_UP_SHARE = 0.05  # of all steps


def training_arguments(
    recipe: TrainingRecipe, folder: Path, learning_rate: float, phases: int, device: torch.device
) -> TrainingArguments:
    """The recipe as transformers knows it: a phase is an epoch, which ends with an evaluation and a checkpoint.

    Args:
        recipe: how the draft is trained.
        folder: of the checkpoints.
        learning_rate: the largest.
        phases: as many as the recipe has; of a training that has stopped those that it had, so that none is added.
        device: where the draft is: on a CPU it is trained there, also where there is an accelerator.
    """
    accelerated = device.type == "cuda"
    own: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": phases,
        "per_device_train_batch_size": recipe.batch_size,
        "learning_rate": learning_rate,
        "seed": recipe.seed,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": ALPHA,
        "remove_unused_columns": False,
        "eval_on_start": False,
        "eval_delay": 0,
        "dataloader_persistent_workers": False,  # they would keep the texts of the first phase
    }
    given: dict[str, Any] = {
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
    args = TrainingArguments(**given | recipe.training | own)
    args._n_gpu = min(args.n_gpu, 1)  # one device a process: more are used by torchrun
    return args


def check_training(recipe: TrainingRecipe, device: torch.device) -> None:
    """Check the arguments that go to transformers; nothing is written.

    Raises:
        ValueError: transformers does not know them, or cannot do what they ask for.
    """
    try:
        training_arguments(recipe, Path(), 1.0, 1, device)
    except (TypeError, ValueError, ImportError) as error:
        told = str(error).removeprefix("TrainingArguments.__init__() ")
        raise ValueError(f"training={brief(recipe.training)} is refused by TrainingArguments: {told}") from error


class DistillationTrainer(Trainer):
    """Trains a draft on what a target says of its own texts.

    The target is not a part of the trained model: it is neither moved, saved nor given to an optimizer.

    Args:
        draft: in float32, or with adapters.
        run: all that stays the same from phase to phase.
        args: of `training_arguments`.
        phases: the texts.
        callbacks: further ones.
    """

    def __init__(
        self, draft: Any, run: TrainingRun, args: TrainingArguments, phases: Phases, callbacks: list[TrainerCallback]
    ):
        every = [_EachPhase(self), *callbacks]
        super().__init__(
            draft, args, data_collator=self.collate, train_dataset=phases, eval_dataset=phases, callbacks=every
        )
        self.remove_callback(PrinterCallback)  # progress is told by `run`
        self.run, self.target, self.recipe = run, run.target, run.recipe
        pays = args.world_size < self.recipe.passes  # else each process would read more texts, not fewer
        self.phases, self.remembered = phases, Remembered(run.target, phases, run.reader, REMEMBERED_BYTES * pays)
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True  # see `compute_loss`

    def collate(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        """The texts of these numbers as a batch."""
        batch = self.run.reader.collate([self.phases.text(number) for number in numbers])
        return batch | {"numbers": torch.tensor(numbers)}

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.phases)  # they come in an order that follows from the seed

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The mean loss over all tokens of a step, those of other processes and of accumulated batches included."""
        of_target = self.remembered.logits(inputs)
        of_draft = self.run.reader.draft_logits(model, inputs["input_ids"].device, inputs)
        losses = losses_of(self.recipe, of_target.to(of_draft.device), of_draft, self.run.reader.common)
        count = len(losses) if num_items_in_batch is None else num_items_in_batch
        loss = losses.sum() / count
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # whose gradients are averaged
        return (loss, {}) if return_outputs else loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """α on the held-out prompts by which training stops, 0 if the weights have become infinite.

        Every process takes all of them.
        """
        draft = self.accelerator.unwrap_model(self.model)
        trains = draft.training
        draft.eval()
        rows, reader = self.recipe.batch_size, self.run.reader
        found = alpha(measure_alpha(self.target, draft, self.run.validation, self.recipe, rows, reader))
        draft.train(trains)
        metrics = {ALPHA: 0.0 if math.isnan(found) else found}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def plain_draft(self) -> Any:
        """The trained draft without what the Trainer has put around it and its forward."""
        return self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)


class _EachPhase(TrainerCallback):
    """Has the texts of each phase written before it, tells how far the training is, and ends it."""

    def __init__(self, trainer: DistillationTrainer):
        self.trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        best = Path(str(args.output_dir)) / f"checkpoint-{state.best_global_step}"
        if best.is_dir():
            state.best_model_checkpoint = str(best)  # the folder may have been moved

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        run, phase = self.trainer.run, round(state.epoch or 0)
        run.progress.phase = phase + 1
        self.trainer.phases.begin(phase, run.writing)
        run.progress.speed = self.trainer.phases.writer.speed

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        steps = max(1, state.max_steps // int(args.num_train_epochs))
        self.trainer.run.tell("training", (state.global_step - 1) % steps + 1, steps)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        if "loss" in (logs or {}):
            self.trainer.run.progress.loss = logs["loss"]

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **_: Any
    ) -> None:
        run = self.trainer.run
        run.note(metrics[ALPHA])
        run.tell(EVALUATED)
        control.should_training_stop |= run.has_stopped(alphas_of(state))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            mark_complete(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")


def alphas_of(state: TrainerState) -> list[float]:
    """α after each phase so far."""
    return [entry[ALPHA] for entry in state.log_history if ALPHA in entry]
