"""Every architecture that transformers registers, each compared with its row of the table of architectures."""

from collections import Counter
from pathlib import Path

import pytest
import zoo
from sweep import Outcome, examine


TABLE = Path(__file__).parents[2] / ".github" / "ARCHITECTURES.md"


def rows() -> dict[tuple[str, str], Outcome]:
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE.read_text().splitlines()]
    return {(row[0], row[1]): Outcome(row[2], row[3]) for row in cells if len(row) == 4 and row[0] in zoo.KINDS}


WRITTEN = rows()
EVERY = 4  # one type in so many is in the default run, all of them with `-m "slow or not slow"`
TYPES = [pytest.param(*each, marks=pytest.mark.slow if n % EVERY else ()) for n, each in enumerate(zoo.model_types())]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "model_type"), TYPES)
def test_each_is_exact_or_plain(kind: str, model_type: str):
    """No text differs from stock's; what is decoded plainly, or cannot be compared, is what the table says."""
    outcome = examine(kind, model_type)
    assert outcome.result == WRITTEN[kind, model_type].result
    if outcome.result in ("exact", "plain"):  # what is not self-consistent differs by machine
        assert outcome.note == WRITTEN[kind, model_type].note


def test_nearly_all_are_exact():
    counts = Counter(outcome.result for outcome in WRITTEN.values())
    assert set(WRITTEN) == set(zoo.model_types())
    built = {model_type for (_, model_type), outcome in WRITTEN.items() if outcome.result != "not built"}
    assert len(built) >= 200
    assert counts["exact"] >= 0.95 * (counts["exact"] + counts["plain"])
    assert all(outcome.note for outcome in WRITTEN.values())
