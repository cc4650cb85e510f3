"""Whether two trees of this project give the same text for the same seed: `python scripts/same_text.py COMMIT`.

COMMIT is laid out in a temporary folder, 200 calls are made in it and in this tree by a process each, and texts are
compared row by row. Under token and block verification rows share their noise, so they are compared up to the round in
which one of them is nearly done and therefore drafts less than its mates: until there were numbers for each row it
drafted as many. With --calls N it makes the first N calls only.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trees import ROOT, laid_out, worker


MODES = ("greedy", "coupled", "token", "block")
LAYOUTS = ("ragged", "padded", "packed", "lockstep")
PROCESSORS: tuple[dict[str, Any], ...] = ({"top_k": 0}, {"top_k": 8, "temperature": 0.8}, {"repetition_penalty": 1.3})
NEW_TOKENS, CALLS = 24, 200


def calls() -> Iterator[dict[str, Any]]:
    """Each call as plain values: kind of model, batch size, mode, layout, number of candidates, processors, seed."""
    kinds = itertools.cycle(("llama", "gpt2", "qwen2", "mistral", "opt"))
    numbers = itertools.cycle((1, 3, 5))
    every = itertools.product(PROCESSORS, (1, 4), LAYOUTS, MODES)
    for seed, (processors, rows, layout, mode) in enumerate(itertools.cycle(every)):
        kind = next(kinds)
        settings = processors if mode != "greedy" else {k: v for k, v in processors.items() if "top" not in k}
        settings = {name: value for name, value in settings.items() if mode != "greedy" or name != "temperature"}
        ends, late = seed % 3 == 2, seed % 5 == 3 and mode != "block"  # which is refused in order
        layout = "auto" if late else layout
        yield {
            "kind": kind, "rows": rows, "mode": mode, "layout": layout, "number": next(numbers), "settings": settings,
            "seed": seed, "ends": ends, "late": late,
            "seeds": seed % 11 == 5 and layout != "lockstep" and not late,
        }  # fmt: skip


def texts(number: int) -> list[tuple[list[list[int]], list[int]]]:
    """The texts of the first calls, in the tree that Python finds, and how much of each row is compared."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))  # the helpers of this tree, for both
    import torch
    from tiny import near, prompts, tiny
    from transformers import LogitsProcessor

    from hf_specx import SpeculativeDecoding

    class Late(LogitsProcessor):
        """May keep state for all that is known of it, so that positions are judged in order."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.roll(input_ids.shape[1] % 2, -1)

    torch.set_num_threads(1)
    found = []
    for call in itertools.islice(calls(), number):
        sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32} if call["kind"] == "opt" else {}
        target = tiny(call["kind"], **sizes)
        inputs, mode = prompts(call["rows"]), call["mode"]
        options = call["settings"] | {"do_sample": mode != "greedy", "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
        if call["late"]:
            options["logits_processor"] = [Late()]
        if call["ends"]:
            options["eos_token_id"] = [3, 7]
        strategy = SpeculativeDecoding(
            near(target, 0.05),
            num_draft_tokens=call["number"],
            verification=None if mode == "greedy" else mode,
            layout=call["layout"],
        )
        if call["seeds"]:
            options["seeds"] = list(range(call["rows"]))
        torch.manual_seed(call["seed"])
        output = target.generate(**inputs, **options, custom_generate=strategy)
        kept = [NEW_TOKENS] * call["rows"]
        if mode in ("token", "block"):
            assert strategy.report is not None
            kept = common(strategy.report.history, call["number"], alone=call["seeds"])
        found.append((output[:, inputs["input_ids"].shape[1] :].tolist(), kept))
    return found


def common(history: list[list[Any]], number: int, alone: bool) -> list[int]:
    """Tokens that each row had emitted when it, or one of its mates unless rows stand alone, was nearly done."""
    emitted = [0] * len(history)
    ended = [False] * len(history)
    for step in range(max(map(len, history))):
        ended = [over or NEW_TOKENS - count <= number for over, count in zip(ended, emitted, strict=True)]
        live = [row for row, records in enumerate(history) if step < len(records)]
        if not alone and len(history) > 1 and any(ended[row] for row in live):
            break
        for row in live:
            if not ended[row] or len(history) == 1:
                emitted[row] += history[row][step].emitted
    return emitted


def in_tree(tree: Path, number: int) -> list[tuple[list[list[int]], list[int]]]:
    """`texts` of another process, for which `hf_specx` is that of a tree."""
    process = worker(__file__, tree, str(number))
    found, _ = process.communicate()
    if process.returncode:
        sys.exit(process.returncode)
    texts: list[tuple[list[list[int]], list[int]]] = json.loads(found.splitlines()[-1])
    return texts


def main() -> None:
    """Compare, and exit with 1 where something differs."""
    if sys.argv[1:2] == ["worker"]:
        print(json.dumps(texts(int(sys.argv[2]))))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--calls", type=int, default=CALLS)
    asked = parser.parse_args()
    with laid_out(asked.commit) as tree:
        old, new = in_tree(tree, asked.calls), in_tree(ROOT, asked.calls)
    bad = whole = compared = 0
    for call, (before, _), (now, kept) in zip(itertools.islice(calls(), asked.calls), old, new, strict=True):
        parts = [(a[:end], b[:end]) for a, b, end in zip(before, now, kept, strict=True)]
        whole += before == now
        compared += sum(kept)
        if any(a != b for a, b in parts):
            bad += 1
            print("differs:", call)
    print(f"{len(old)} calls: {len(old) - bad} the same in {compared} tokens, {whole} of them to the last token")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
