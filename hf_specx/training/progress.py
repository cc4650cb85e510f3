"""What is told while a draft is trained."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm


@dataclass
class TrainingProgress:
    """How far a training is.

    Attributes:
        doing: "writing held-out texts", "writing" or "training"; "evaluated" when α is known, with done and total 0.
        phase: counted from 1; 0 before the first.
        phases: at most.
        done, total: texts written, or steps trained, of this phase.
        alpha: on held-out prompts, the last; None before the first.
        best: the highest so far.
        predicted_speedup: at batch size 1, by this α and the times of the forwards.
        loss: mean of the last phase; None before its end.
        speed: tokens a second with which the texts of the phase were written; None if they were there already.
    """

    phases: int
    doing: str = ""
    phase: int = 0
    done: int = 0
    total: int = 0
    alpha: float | None = None
    best: float | None = None
    predicted_speedup: float | None = None
    loss: float | None = None
    speed: float | None = None

    def __str__(self) -> str:
        parts = [f"phase {self.phase} of {self.phases}" if self.phase else "before training"]
        if self.alpha is not None:
            parts.append(f"α {self.alpha:.3f}")
        if self.predicted_speedup is not None:
            parts.append(f"predicts {self.predicted_speedup:.2f} times as fast")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
        if self.speed is not None:
            parts.append(f"texts written at {self.speed:.0f} tokens/s")
        return ", ".join(parts)


Tell = Callable[[TrainingProgress], object]
EVALUATED = "evaluated"  # `doing`, when a new α is known


class Bar:
    """Shows it on stderr: a bar for what is being done, and a line for each new α."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.shown: tuple[int, str] | None = None

    def __call__(self, progress: TrainingProgress) -> None:
        """Show how far the training is."""
        if progress.doing == EVALUATED:
            self.close()
            print(progress, file=sys.stderr)
            return
        if self.shown != (progress.phase, progress.doing):
            self.close()
            self.shown = progress.phase, progress.doing
            self.bar = tqdm(total=progress.total, desc=progress.doing, leave=False)
        self.bar.update(progress.done - self.bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.close()
        self.bar = self.shown = None

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
