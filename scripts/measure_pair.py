"""Measure the pair in the package on its own prompts, and write the figures into its config and its model card.

No cost table is saved: it would hold for this machine only, and the first call on any machine makes one.
"""

from pathlib import Path

from hf_specx.bench.tune import tune
from hf_specx.bench.tune_settings import TuneSettings
from hf_specx.common.drafts import PAIR_CONFIG_NAME
from hf_specx.hub.cards import write_embedded_card
from hf_specx.hub.pair_config import PairConfig


FOLDER = Path("hf_specx/hub/embedded")
DTYPES = ("float32", "bfloat16")


def main() -> None:
    """Measure it with its own draft."""
    config = PairConfig.from_file(FOLDER / PAIR_CONFIG_NAME)
    draft = str(FOLDER / config.draft.subfolder)
    config.measurements = []
    for dtype in DTYPES:
        settings = TuneSettings(config.prompts, repeats=5, dtype=dtype, command="python scripts/measure_pair.py")
        (trial,) = tune(str(FOLDER), [draft], settings)
        print(trial)
        config.measurements += trial.measurements
    (FOLDER / PAIR_CONFIG_NAME).write_text(config.to_text(), encoding="utf-8")
    write_embedded_card("model_cards")


if __name__ == "__main__":
    main()
