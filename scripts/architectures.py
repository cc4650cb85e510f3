"""Test every architecture that transformers registers, and write the results into ARCHITECTURES.md.

`--discover` instead tries every layout on every architecture, and prints `GROUPS` of hf_specx/common/architectures.py.
"""

import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.progress import track


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))
TABLE = ROOT / ".github" / "ARCHITECTURES.md"
HEAD = """# Architectures

Every type that transformers {version} lists for causal, sequence-to-sequence and speech-to-text generation, as a tiny
random model in float32, three rows of unequal length; `python scripts/architectures.py` writes this table and
`tests/generate/test_sweep.py` checks every row of it. *exact* means: in each layout named (`layout="auto"` takes the
first), the tokens of plain `generate`, greedily and sampled under one seed, with drafts that are rejected, accepted in
full and accepted unequally, and with the fewest forwards possible when draft and target are equal. A model for which
plain `generate` itself gives a row another text in a batch than alone has nothing to be compared with. *plain* means:
transformers' own sampler decodes it under the same call, with the same text and no speed-up.

{counts}

| kind | model type | result | layouts, or why not |
| --- | --- | --- | --- |
"""


def main(
    only: Annotated[list[str] | None, typer.Argument(help="Model types to discover; all if none is given.")] = None,
    discover: Annotated[bool, typer.Option(help="Print in which layouts each type is exact.")] = False,
) -> None:
    """Write .github/ARCHITECTURES.md."""
    import sweep  # type: ignore[import-not-found]
    import zoo  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    types = track(zoo.model_types(), description="architectures", disable=not sys.stderr.isatty())
    if discover:
        groups = defaultdict(list)
        for kind, model_type in types:
            able = None if only and model_type not in only else sweep.discover(kind, model_type)
            if able is not None:
                groups[able].append(model_type)
        for able, names in sorted(groups.items()):
            print(f"{able or 'none'!r}: {' '.join(dict.fromkeys(names))}")
        return
    rows = []
    for kind, model_type in types:
        try:
            rows.append((kind, model_type, *sweep.examine(kind, model_type)))
        except AssertionError as error:
            sys.exit(f"{kind}/{model_type} is wrong: {error}")
    counts = ", ".join(f"{number} {result}" for result, number in Counter(row[2] for row in rows).most_common())
    lines = ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
    head = HEAD.format(version=transformers.__version__, counts=f"{len(rows)} in all: {counts}.")
    TABLE.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
