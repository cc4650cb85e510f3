"""Measure the pair in the package on its own prompts, and write the figures into its config and its model card.

No cost table is saved: it would hold for this machine only, and the first call on any machine makes one.

    python scripts/measure_pair.py hf_specx/hub/embedded/draft  # the draft model beside the head, and sharper text
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hf_specx.bench.study import Study
from hf_specx.bench.tune import tune
from hf_specx.hub.cards import write_cards
from hf_specx.hub.pair_config import CONFIG_NAME, PairConfig


FOLDER = Path("hf_specx/hub/embedded")
DTYPES = ("float32", "bfloat16")
SHARPER = {"temperature": 0.7, "top_p": 0.9}
console = Console()


def main(
    others: Annotated[list[str] | None, typer.Argument(help="drafts that are shown beside its own")] = None,
    repeats: int = 5,
) -> None:
    config = PairConfig.from_file(FOLDER / CONFIG_NAME)
    own = str(FOLDER / config.draft.subfolder)
    config.measurements = []
    for dtype in DTYPES:
        study = Study(config.prompts, repeats=repeats, dtype=dtype, command="python scripts/measure_pair.py")
        trials = {trial.name: trial for trial in tune(str(FOLDER), [own, *(others or ())], study)}
        console.print(trials)
        config.measurements += trials[own].measurements
        if others:
            console.print(tune(str(FOLDER), [own, *others], replace(study, options=study.options | SHARPER)))
    (FOLDER / CONFIG_NAME).write_text(config.to_text(), encoding="utf-8")
    write_cards("model_cards")


if __name__ == "__main__":
    typer.run(main)
