"""Measure the pair in the package on its own prompts, and write the figures into its config and its model card.

No cost table is saved: it would hold for this machine only, and the first call on any machine makes one.
"""

from pathlib import Path

import typer
from rich.console import Console

from hf_specx.bench.study import Study
from hf_specx.bench.tune import tune
from hf_specx.hub.cards import write_cards
from hf_specx.hub.pair_config import CONFIG_NAME, PairConfig


FOLDER = Path("hf_specx/hub/embedded")
DTYPES = ("float32", "bfloat16")


def main(repeats: int = 5) -> None:
    config = PairConfig.from_file(FOLDER / CONFIG_NAME)
    config.measurements = []
    for dtype in DTYPES:
        study = Study(config.prompts, repeats=repeats, dtype=dtype, command="python scripts/measure_pair.py")
        (trial,) = tune(str(FOLDER), [str(FOLDER / "draft")], study)
        config.measurements += trial.measurements
        Console().print(*trial.measurements, sep="\n")
    (FOLDER / CONFIG_NAME).write_text(config.to_text(), encoding="utf-8")
    write_cards("model_cards")


if __name__ == "__main__":
    typer.run(main)
