"""What came of a training, and what the card of its pair says about it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_specx.bench.checks import check_runs
from hf_specx.common.tokenizers import same_tokens
from hf_specx.hub.markdown import fence, row
from hf_specx.pairs.pair import DraftTargetPair

from .held_out import Estimate
from .losses import LOSSES
from .prompts import Split
from .recipe import TrainingRecipe
from .speed import measure_pair


@dataclass
class Distilled:
    """What `distill` returns.

    Attributes:
        pair: the target with the trained draft, in the precision of the one that was given.
        before, after, gain: α on held-out prompts that had no part in the training, and the difference text by text,
            each with its 95% interval; under temperature, top-p and top-k alone, whatever else its config has.
        alphas: α on the held-out prompts by which training stops, before it and after each phase.
        steps: of the optimizer, up to the weights that were taken.
        recipe: how the draft was trained.
        split: the prompts.
    """

    pair: DraftTargetPair
    before: Estimate
    after: Estimate
    gain: Estimate
    alphas: list[float]
    steps: int
    recipe: TrainingRecipe
    split: Split

    def __str__(self) -> str:
        best = max(range(len(self.alphas)), key=self.alphas.__getitem__)
        taken = f"taken after phase {best} of {len(self.alphas) - 1}, {self.steps} steps"
        taken = taken if best else "no phase was better than the start, so the draft is as it was"
        return f"α on held-out prompts: {self.before} before, {self.after} after, gain {self.gain}; {taken}"

    def measure(
        self,
        batches: Sequence[int] = (1, 8),
        command: str = "hf_specx.distill(...)",
        advance: Callable[[int], object] = lambda total: None,
    ) -> None:
        """Time the pair on the held-out prompts, in turns with plain `generate`, and put the figures into its config.

        Args:
            batches: their sizes.
            command: what the card says that the figures were made by.
            advance: called after each generation with how many there are in all.

        Raises:
            ValueError: for sizes below 1, or one given twice.
        """
        check_runs(batches)
        measure_pair(self.pair, self.split.test, batches, self.recipe, command, advance)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        estimates = {name: getattr(self, name)._asdict() for name in ("before", "after", "gain")}
        return estimates | {"alphas": self.alphas, "steps": self.steps, "recipe": self.recipe.to_dict()}


def card_notes(result: Distilled, start: str, command: str) -> str:
    """Markdown for the model card: how the draft was made.

    Args:
        result: of the training.
        start: what the draft was before, in words.
        command: what was typed.
    """
    phases, split = len(result.alphas) - 1, result.split
    alphas = [("before", result.before), ("after", result.after), ("gain, text by text", result.gain)]
    table = [row(("α on held-out prompts", "mean, 95% interval")), row(("---", "---"))]
    table += [row(map(str, each)) for each in alphas]
    lines = [
        "## How the draft was made",
        f"It started as {start}. {_training(result, len(split.training), phases)}",
        "\n".join(table),
        f"α is the mean of Σ min(p, q) over the texts that the target writes after {len(split.test)} prompts that "
        f"had no part in the training; the interval is a bootstrap over these prompts. {len(split.validation)} others "
        f"decided when to stop: on them α was {', '.join(f'{value:.3f}' for value in result.alphas)} before training "
        "and after each phase.",
        fence(command, "bash"),
    ]
    if result.recipe.training:
        lines.append("Further arguments of the Trainer:\n\n" + fence(json.dumps(result.recipe.training), "json"))
    return "\n\n".join(lines)


def _training(result: Distilled, prompts: int, phases: int) -> str:
    recipe = result.recipe
    options = {"temperature": recipe.temperature, "top_p": recipe.top_p, "top_k": recipe.top_k}
    drawn = ", ".join(f"{name} {value}" for name, value in options.items()) if recipe.do_sample else "no sampling"
    adapters = "" if recipe.lora is None else f" by LoRA of rank {recipe.lora}, merged into it"
    doc = (LOSSES[recipe.loss].__doc__ or "").splitlines()[0].removesuffix(": [N].")
    same = same_tokens(result.pair.tokenizer, result.pair.draft_tokenizer)
    learned = "" if same else " It has another tokenizer, and learned to propose the tokens that both have."
    inside = ", and on what it says inside these prompts," if recipe.learn_from_prompts else ""
    taken = (
        f"The weights are those after {result.steps:,} steps." if result.steps else "No phase was better than that."
    )
    return (
        f"It was trained{adapters} on texts that the target wrote after {prompts:,} prompts{inside} ({drawn}), "
        f"{recipe.texts_per_phase} of at most {recipe.max_new_tokens} tokens in each of {phases} phases, each used "
        f"{recipe.passes} times on average, with the loss `{recipe.loss}`: {doc}.{learned} {taken}"
    )
