"""What stays the same while a draft is trained, and how far it is."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from hf_specx.scheduling.costs import Costs

from .held_out import predicted_speedup
from .progress import Tell, TrainingProgress
from .reading import Reader
from .recipe import TrainingRecipe
from .texts import Text


@dataclass
class TrainingRun:
    """One training.

    Attributes:
        target: in evaluation mode.
        recipe: how the draft is trained.
        listener: is told how far the training is.
        reader: of the draft.
        from_layers: whether the draft started as layers of the target.
        validation: texts after held-out prompts, by which training stops.
        start: α on these before training.
        costs: times of forwards, for predictions.
        progress: what it is told.
    """

    target: PreTrainedModel
    recipe: TrainingRecipe
    listener: Tell
    reader: Reader = field(default_factory=Reader)
    from_layers: bool = False
    validation: Sequence[Text] = ()
    start: float = 0.0
    costs: Costs = field(default_factory=Costs)
    progress: TrainingProgress = field(init=False)

    def __post_init__(self) -> None:
        self.progress = TrainingProgress(self.recipe.phases)

    def tell(self, doing: str, done: int = 0, total: int = 0) -> None:
        """Tell the listener what is being done, and how much of it is."""
        self.progress.doing, self.progress.done, self.progress.total = doing, done, total
        self.listener(self.progress)

    def writing(self, done: int, total: int) -> None:
        """Tell that texts are being written."""
        self.tell("writing" if self.progress.phase else "writing held-out texts", done, total)

    def note(self, alpha: float) -> None:
        """Note a new α on the held-out prompts."""
        known: Any = self.progress.best
        self.progress.alpha, self.progress.best = alpha, alpha if known is None else max(known, alpha)
        self.progress.predicted_speedup = predicted_speedup(self.costs, alpha)

    def has_stopped(self, alphas: Sequence[float]) -> bool:
        """Whether α no longer rises, or all phases are over.

        Args:
            alphas: after each phase so far.
        """
        every = [self.start, *alphas]
        since_best = len(every) - 1 - every.index(max(every))
        return since_best >= self.recipe.patience or len(alphas) >= self.recipe.phases
