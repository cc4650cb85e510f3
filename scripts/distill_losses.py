"""Train the same draft with each loss on the same texts, and print a table of α: the default should be the best.

All have the same steps, which cost nearly the same: the losses differ by less than a percent of a step. The intervals
of differences are text by text, so they are narrower than those of α.

    python scripts/distill_losses.py --folder build/losses                      # from the target's first two layers
    python scripts/distill_losses.py --folder build/losses --draft embedded     # from the shipped draft
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from distill_topics import train
from rich.console import Console

from hf_specx import DraftTargetPair
from hf_specx.training.folder import TEXTS
from hf_specx.training.held_out import estimate, measure_alpha
from hf_specx.training.losses import LOSSES
from hf_specx.training.recipe import TrainingRecipe
from hf_specx.training.texts import Writer


console = Console()


def main(
    folder: Annotated[Path, typer.Option(help="texts and checkpoints")],
    draft: Annotated[str, typer.Option(help="embedded, or layers:N")] = "layers:2",
    loss: Annotated[list[str] | None, typer.Option(help="some of them; all if not given")] = None,
    phases: int = 4,
    texts_per_phase: int = 64,
    passes: int = 4,
) -> None:
    pair, default = DraftTargetPair.embedded(), TrainingRecipe().loss
    sums: dict[str, torch.Tensor] = {}
    for name in loss or LOSSES:
        own = folder / f"{draft.replace(':', '-')}-{name}"
        how = {"phases": phases, "texts_per_phase": texts_per_phase, "passes": passes, "patience": phases}
        result = train(pair, draft, own, loss=name, **how)
        console.print(f"{name}: {result}")
        made = result.pair.models[1]
        texts = Writer(pair.target, made, result.recipe, folder / TEXTS).write("test", result.split.test)
        sums[name] = measure_alpha(pair.target, made, texts, result.recipe, result.recipe.batch_size)
    steps = phases * texts_per_phase * passes // TrainingRecipe().batch_size
    console.print(f"\n| loss | α after {steps} steps | less {default} |", soft_wrap=True)
    console.print("| --- | --- | --- |")
    for name in sorted(sums, key=lambda each: -estimate(sums[each]).value):
        less = str(estimate(sums[name], sums[default])) if default in sums else "-"
        console.print(f"| `{name}` | {estimate(sums[name])} | {less} |", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
