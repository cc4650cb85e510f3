"""Count the lines of the house, and what one call of `generate` runs through: `python scripts/count.py`.

The call is one of the target and the draft model in the package: two rows, sampled, three candidates a round. Files,
functions and calls are those of Python code of the package; calls are those of a further round, without what a call
takes at its ends.
"""

import sys
from collections import Counter
from pathlib import Path

import torch

from hf_specx import DraftTargetPair, SpeculativeDecoding
from hf_specx.hub.flatten import PACKAGE
from hf_specx.hub.known_pairs import DRAFT_MODEL, embedded_folder


ROOT = PACKAGE.parent
ROOMS_OF_A_CALL = ("common", "sampling", "models", "drafting", "engine")
HEADS = "drafting/heads"  # a room within a room, counted by itself
FUNCTION = "pairs/generate.py"  # the function `generate`


def lines_in(folder: Path, pattern: str = "*.py") -> int:
    """Lines of all files below a folder."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sorted(folder.rglob(pattern)))


def count_lines() -> dict[str, int]:
    """Lines by room, then those of a call, of the package, the tests and the scripts."""
    rooms = {path.name: lines_in(path) for path in sorted(PACKAGE.iterdir()) if (path / "__init__.py").exists()}
    rooms["heads"] = lines_in(PACKAGE / HEADS)
    rooms["drafting"] -= rooms["heads"]
    counts = rooms | {"call": sum(rooms[name] for name in ROOMS_OF_A_CALL) + lines_in(PACKAGE, FUNCTION)}
    scripts = lines_in(ROOT / "scripts") + lines_in(ROOT / "scripts", "*.sh")
    return counts | {"package": lines_in(PACKAGE), "tests": lines_in(ROOT / "tests"), "scripts": scripts}


def count_call() -> dict[str, float]:
    """Files and functions that a call runs through, and calls of a round."""
    pair = DraftTargetPair.embedded(draft=str(embedded_folder() / DRAFT_MODEL))
    target, tokenizer, strategy = pair.target, pair.tokenizer, SpeculativeDecoding(pair.draft, num_draft_tokens=3)
    assert tokenizer is not None
    inputs = tokenizer(pair.prompts[:2], return_tensors="pt", padding=True)
    seen: Counter[tuple[str, str]] = Counter()

    def note(frame, event, _) -> None:  # type: ignore[no-untyped-def]
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            seen[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    def call(new_tokens: int) -> tuple[int, int]:
        """Calls of functions, and rounds."""
        torch.manual_seed(0)
        seen.clear()
        sys.setprofile(note)
        options = {"do_sample": True, "max_new_tokens": new_tokens, "custom_generate": strategy}
        target.generate(**inputs, **options)  # type: ignore[operator]
        sys.setprofile(None)
        assert strategy.report is not None
        return seen.total(), strategy.report.rounds

    call(8)
    (few, first), (many, last) = call(24), call(72)
    return {"files": len({file for file, _ in seen}), "functions": len(seen), "calls": (many - few) / (last - first)}


if __name__ == "__main__":
    print(*(f"{name:10} {number:8,.0f}" for name, number in (count_lines() | count_call()).items()), sep="\n")
