"""The result of a training, the speed of the new pair, and the notes on its card."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import Template

from hf_specx.bench.checks import SECONDS
from hf_specx.bench.measure_draft import measure_draft
from hf_specx.bench.tune_settings import TuneSettings
from hf_specx.hub.folders import without_folders
from hf_specx.hub.secrets import without_secrets
from hf_specx.pairs.pair import DraftTargetPair

from .losses import Estimate
from .prompts import Split
from .recipe import TrainingRecipe
from .trainer import ProgressCallback


COMMAND = "hf_specx.distill(...)"  # what a card says that was typed, unless another is given


@dataclass
class Distilled:
    """The result of `distill`.

    Attributes:
        pair: the target with the trained draft, in the precision of the one that was given.
        before, after, gain: α on held-out prompts that had no part in the training, and the difference text by text,
            each with its 95% interval; under temperature, top-p and top-k alone, whatever else its config has.
        tokens_before, tokens_after: tokens a round with `num_draft_tokens` candidates on the same prompts, 1 without
            any, by these α, each with its interval.
        alphas: α on the held-out prompts by which training stops, before it and after each phase.
        steps: of the optimizer, up to the weights that were taken.
        recipe: how the draft was trained.
        split: the prompts.
    """

    pair: DraftTargetPair
    before: Estimate
    after: Estimate
    gain: Estimate
    tokens_before: Estimate
    tokens_after: Estimate
    alphas: list[float]
    steps: int
    recipe: TrainingRecipe
    split: Split

    def __str__(self) -> str:
        best = max(range(len(self.alphas)), key=self.alphas.__getitem__)
        if best:
            outcome = f"taken after phase {best} of {len(self.alphas) - 1}, {self.steps} steps"
        else:
            outcome = "no phase was better than the start, so the draft is as it was"
        return (
            f"α on held-out prompts, with 95% intervals: before training {self.before}, after it {self.after}, gain "
            f"{self.gain}; tokens a round: before {self.tokens_before}, after {self.tokens_after}; {outcome}"
        )

    def measure(
        self,
        batches: Sequence[int] = (1, 8),
        command: str = COMMAND,
        progress: ProgressCallback = lambda *_: None,
        seconds: float = SECONDS,
    ) -> None:
        """Time the pair on all held-out prompts, in turns with plain `generate`, and put the figures into its config.

        Args:
            batches: their sizes.
            command: what the card says that the figures were made by.
            progress: called after each generation, as that of `distill`.
            seconds: of timed runs at each batch size, after which no further turn begins; fewer where it is clear
                before.

        Raises:
            ValueError: for sizes below 1, or one given twice.
        """
        options = self.recipe.generate_options
        settings = TuneSettings(
            batches=batches, options=options, seed=self.recipe.seed, command=command, seconds=seconds
        )
        start, total = time.perf_counter(), math.ceil(seconds * len(batches)) or 1

        def advance() -> None:
            passed = min(int(time.perf_counter() - start), total)
            progress("seconds of the new pair in turns with plain generate", passed, total)

        measure_draft(self.pair, self.split.test, settings, advance)


def card_notes(result: Distilled, start: str, command: str) -> str:
    """Markdown for the model card: how the draft was made, from `start` in words, by the command that was typed."""
    template = Template(Path(__file__).with_name("notes.md.jinja").read_text(encoding="utf-8"))
    recipe = asdict(result.recipe)
    recipe["training"] = {
        name: without_folders(str(value)) if isinstance(value, str | Path) else value
        for name, value in without_secrets(recipe["training"]).items()
    }
    settings = json.dumps(recipe, indent=1, default=str)
    return template.render(result=result, start=start, command=without_folders(command), settings=settings)
