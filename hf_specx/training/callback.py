"""A callback for trainers whose model samples while it trains, as those of TRL, which is not imported here."""

import warnings
from contextlib import ExitStack
from typing import Any, NamedTuple

from transformers import TrainerCallback

from hf_specx.common.errors import is_int, require
from hf_specx.engine.report import SpeculationReport
from hf_specx.engine.strategy import SpeculativeDecoding


MIN_JUDGED = 1000  # candidates of each mean; that of so many independent ones is off by less than 0.016


class CallAcceptance(NamedTuple):
    """What one call of `generate` showed of the draft: the overlap of all candidates that were judged, added up."""

    overlap: float
    judged: int


class SpeculationCallback(TrainerCallback):
    """Attaches a draft to the model while a trainer trains it, and warns once the draft fits it no more.

    Training moves the target and leaves the draft, so that α falls. What is sampled has the target's distribution all
    the same, and takes longer.

    Args:
        strategy: a `SpeculativeDecoding`, or a draft for one.
        window: means are over so many calls of `generate` that drafted: the first ones, and the last ones.
        stale_below: the draft is stale once the mean α of the last calls is below this share of that of the first.

    Attributes:
        strategy: the `SpeculativeDecoding`; its `report` is that of the last call.
        history: what each call showed, in order; of several calls in one step of the trainer, the last one.
        start_alpha, alpha: the mean α over the first and over the last `window` calls; None before there are so many,
            or as long as these judged fewer than 1000 candidates.
        is_stale: whether α has fallen below `stale_below` times its start.

    Raises:
        ValueError: an option is out of range.

    The model is as it was once training ends; after an error in it call `detach()`.

    Example:
        >>> from hf_specx import SpeculationCallback
        >>> callback = SpeculationCallback(draft_model)  # GRPOTrainer(..., callbacks=[callback])
    """

    def __init__(self, strategy: Any, window: int = 8, stale_below: float = 0.8):
        is_strategy = isinstance(strategy, SpeculativeDecoding)
        self.strategy: SpeculativeDecoding = strategy if is_strategy else SpeculativeDecoding(strategy)
        require(is_int(window) and window >= 1, f"window={window!r} is no number of calls; give an int of 1 or more.")
        is_share = isinstance(stale_below, int | float) and 0 < stale_below < 1
        require(is_share, f"stale_below={stale_below!r} is no share; give a number between 0 and 1, like 0.8.")
        self.window, self.stale_below = window, stale_below
        self.history: list[CallAcceptance] = []
        self.is_stale = False
        self._attached = ExitStack()
        self._last_report: SpeculationReport | None = None

    @property
    def start_alpha(self) -> float | None:
        """The mean α over the first `window` calls."""
        return self._mean(self.history[: self.window])

    @property
    def alpha(self) -> float | None:
        """The mean α over the last `window` calls."""
        return self._mean(self.history[-self.window :])

    def _mean(self, calls: list[CallAcceptance]) -> float | None:
        """The mean α over these calls; None where they are too few to tell."""
        judged = sum(call.judged for call in calls)
        if len(calls) < self.window or judged < MIN_JUDGED:
            return None
        return sum(call.overlap for call in calls) / judged

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Attach the strategy to the trainer's model."""
        self.detach()
        self._attached.enter_context(self.strategy.attached(model))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as it was."""
        self.detach()

    def detach(self) -> None:
        """Leave the model as it was before `on_train_begin`; nothing happens where that was done."""
        self._attached.close()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As `on_step_end`, inside of a step that adds up gradients."""
        self._note_last_call()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note what the last call showed, and warn once if the draft has gone stale."""
        self._note_last_call()
        start, now = self.start_alpha, self.alpha
        if self.is_stale or start is None or now is None or len(self.history) < 2 * self.window:
            return
        if now < self.stale_below * start:
            self.is_stale = True
            message = (
                f"the draft has gone stale by step {state.global_step}: α was {start:.2f} over the first "
                f"{self.window} calls of generate and is {now:.2f} over the last {self.window}. Texts have the "
                "model's distribution all the same, and take longer; train the draft on the model as it is now, as "
                "hf_specx.distill does."
            )
            warnings.warn(message, UserWarning, stacklevel=2)

    def _note_last_call(self) -> None:
        """Add the last call to the history, if it is new and drafted."""
        report = self.strategy.report
        if report is None or report is self._last_report:
            return
        self._last_report = report
        if report.judged:
            self.history.append(CallAcceptance(report.overlap, report.judged))
