"""A callback for trainers whose model samples while it trains, as those of TRL, which is not imported here."""

import math
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, NamedTuple

from transformers import TrainerCallback

from hf_specx.bench.sequential_test import student_quantile
from hf_specx.common.errors import is_int, require
from hf_specx.engine.report import SpeculationReport
from hf_specx.engine.strategy import SpeculativeDecoding


MIN_JUDGED = 200  # candidates of each mean; fewer are not near enough to a normal distribution
PATIENCE = 8  # windows of calls in which no mean was complete, until that is said
STALE = (
    "the draft has gone stale by step {step}: α was {start:.2f} over the first {first} calls of generate that "
    "drafted, and over the last {last} it is {now:.2f}, below {share} of that. Texts have the model's distribution "
    "all the same, and take longer; train the draft on the model as it is now, as hf_specx.distill does."
)
TOO_FEW = (
    "of the last {calls} calls of generate {drafted} drafted, and {judged} candidates were judged, too few to tell "
    "whether the draft fits the model; 'auto' does not draft where that does not pay, and a call that is decoded "
    "plainly has the reason in strategy.report.layout_reason. A fixed num_draft_tokens drafts in each call."
)


class CallAcceptance(NamedTuple):
    """What one call of `generate` showed of the draft: the overlap of all candidates that were judged, added up."""

    overlap: float
    judged: int


class MeanAlpha(NamedTuple):
    """The mean α of all candidates of some calls.

    Attributes:
        alpha: the mean.
        variance: of that mean, by how much calls differ from the next ones: a trend among them is no noise.
        freedom: degrees of freedom of the variance.
        num_calls: how many calls there were.
    """

    alpha: float
    variance: float
    freedom: float
    num_calls: int

    @classmethod
    def of(cls, calls: Sequence[CallAcceptance]) -> "MeanAlpha":
        """Of two or more calls, in which something was judged.

        The variance is that of von Neumann, half of the mean square of successive differences, for the ratio of sums.
        """
        count, judged = len(calls), sum(call.judged for call in calls)
        alpha = sum(call.overlap for call in calls) / judged
        residuals = [call.overlap - alpha * call.judged for call in calls]
        squares = sum((after - before) ** 2 for before, after in pairwise(residuals))
        variance = count * squares / (2 * (count - 1)) / judged**2
        return cls(alpha, variance, 2 * (count - 1) ** 2 / (3 * count - 4), count)


class StaleTest:
    """Tells whether α has fallen below a share of its start, from calls that come one by one.

    The start is the mean over the first `window` calls that drafted, and over further ones until `MIN_JUDGED`
    candidates were judged. It is compared with each later window of that kind, the next beginning where the last one
    ended: a one-sided Welch's t-test, in which calls are the samples. Comparison k has false_alarm / (k (k + 1)) of
    the false alarms; these add up to `false_alarm`, however long the training is.

    Args:
        window: calls of a mean, at least.
        stale_below: the share.
        false_alarm: the chance that α is ever called stale in a training where it never falls below that share.

    Attributes:
        start, last: the mean of the first and of the last complete window; None before there is one.
        pending: the calls since then.
    """

    def __init__(self, window: int, stale_below: float, false_alarm: float):
        self.window, self.stale_below, self.false_alarm = window, stale_below, false_alarm
        self.start: MeanAlpha | None = None
        self.last: MeanAlpha | None = None
        self.pending: list[CallAcceptance] = []
        self.num_comparisons = 0

    def add(self, call: CallAcceptance) -> bool:
        """Count a call; whether α is shown to have fallen, which is decided where a window is complete."""
        self.pending.append(call)
        drafted = [each for each in self.pending if each.judged]
        if len(drafted) < self.window or sum(each.judged for each in drafted) < MIN_JUDGED:
            return False
        self.last, self.pending = MeanAlpha.of(drafted), []
        if self.start is None:
            self.start = self.last
            return False
        self.num_comparisons += 1
        return self._is_below(self.start, self.last)

    def _is_below(self, start: MeanAlpha, now: MeanAlpha) -> bool:
        """Whether `now` is below the share of `start`, with the false alarms of this comparison."""
        difference = self.stale_below * start.alpha - now.alpha
        of_start = self.stale_below**2 * start.variance
        variance = of_start + now.variance
        if variance == 0:  # of calls that are all alike
            return difference > 0
        freedom = variance**2 / (of_start**2 / start.freedom + now.variance**2 / now.freedom)
        tail = self.false_alarm / (self.num_comparisons * (self.num_comparisons + 1))
        return difference > student_quantile(tail, math.floor(freedom)) * math.sqrt(variance)


class SpeculationCallback(TrainerCallback):
    """Attaches a draft to the model while a trainer trains it, and warns once the draft fits it no more.

    Training moves the target and leaves the draft, so that α falls. What is sampled has the target's distribution all
    the same, and takes longer. Where almost nothing was judged, so that this cannot be told, it warns of that, once.

    Args:
        strategy: a `SpeculativeDecoding`, or a draft for one.
        window: means of α are over so many calls of `generate` that drafted, or more, until 200 candidates were
            judged.
        stale_below: the draft is stale once α is below this share of what it was over the first window.
        false_alarm: the chance that it is called stale in a training, however long, in which α never falls below
            that share.

    Attributes:
        strategy: the `SpeculativeDecoding`; its `report` is that of the last call.
        history: what each call showed, in order; of several calls in one step of the trainer, the last one.
        num_calls: how many calls there were, also such that did not draft.
        start_alpha, alpha: the mean α over the first and over the last complete window; None before there is one.
        is_stale: whether α has been shown to be below `stale_below` times its start.

    Raises:
        ValueError: an option is out of range.

    The model is as it was once training ends; after an error in it call `detach()`.

    Example:
        >>> from hf_specx import SpeculationCallback
        >>> callback = SpeculationCallback(draft_model)  # GRPOTrainer(..., callbacks=[callback])
    """

    def __init__(self, strategy: Any, window: int = 16, stale_below: float = 0.8, false_alarm: float = 0.01):
        is_strategy = isinstance(strategy, SpeculativeDecoding)
        self.strategy: SpeculativeDecoding = strategy if is_strategy else SpeculativeDecoding(strategy)
        require(
            is_int(window) and window >= 2,
            f"window={window!r} is no number of calls that differ; give an int of 2 or more.",
        )
        for name, share in {"stale_below": stale_below, "false_alarm": false_alarm}.items():
            is_share = isinstance(share, int | float) and 0 < share < 1
            require(is_share, f"{name}={share!r} is no share; give a number between 0 and 1, like 0.8 or 0.01.")
        require(false_alarm < 0.5, f"false_alarm={false_alarm} is no small chance; give one below 0.5, like 0.01.")
        self.window = window
        self.test = StaleTest(window, stale_below, false_alarm)
        self.history: list[CallAcceptance] = []
        self.num_calls = 0
        self.is_stale = False
        self._said_too_few = False
        self._attached = ExitStack()
        self._last_report: SpeculationReport | None = None

    @property
    def start_alpha(self) -> float | None:
        """The mean α over the first window."""
        return None if self.test.start is None else self.test.start.alpha

    @property
    def alpha(self) -> float | None:
        """The mean α over the last complete window."""
        return None if self.test.last is None else self.test.last.alpha

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Attach the strategy to the trainer's model."""
        self.detach()
        self._attached.enter_context(self.strategy.attached(model))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as it was; say it where nothing could be told in a training of two windows or more."""
        self.detach()
        if self.num_calls >= 2 * self.window and self.test.num_comparisons == 0:
            self._say_too_few()

    def detach(self) -> None:
        """Leave the model as it was before `on_train_begin`; nothing happens where that was done."""
        self._attached.close()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As `on_step_end`, inside of a step that adds up gradients."""
        self._note_last_call(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note what the last call showed; warn once if the draft has gone stale, or if that cannot be told."""
        self._note_last_call(state.global_step)

    def _note_last_call(self, step: int) -> None:
        """Count the last call, if it is new, and say what follows."""
        report = self.strategy.report
        if report is None or report is self._last_report:
            return
        self._last_report = report
        self.num_calls += 1
        call = CallAcceptance(report.overlap, report.judged)
        if call.judged:
            self.history.append(call)
        has_fallen = self.test.add(call)
        if has_fallen and not self.is_stale:
            self._say_stale(step)
        if len(self.test.pending) >= PATIENCE * self.window:
            self._say_too_few()

    def _say_stale(self, step: int) -> None:
        """Warn that the draft has gone stale."""
        self.is_stale = True
        start, last = self.test.start, self.test.last
        assert start is not None
        assert last is not None
        calls = {"first": start.num_calls, "last": last.num_calls}
        alphas = {"start": start.alpha, "now": last.alpha, "share": self.test.stale_below}
        warnings.warn(STALE.format(step=step, **calls, **alphas), UserWarning, stacklevel=2)

    def _say_too_few(self) -> None:
        """Warn once that the last calls tell nothing."""
        if self._said_too_few:
            return
        self._said_too_few = True
        calls = self.test.pending
        drafted, judged = sum(call.judged > 0 for call in calls), sum(call.judged for call in calls)
        warnings.warn(TOO_FEW.format(calls=len(calls), drafted=drafted, judged=judged), UserWarning, stacklevel=2)
