"""Whether two trees of this project give the same text for the same seed: `python scripts/same_text.py COMMIT`.

COMMIT is laid out in a temporary folder, 200 calls are made in it and in this tree by a process each, and texts are
compared row by row. Under token and block verification a row's last candidates are left out where it has mates: how
many are drafted for a row that is nearly done is not promised. With --calls N it makes the first N calls only.
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
        ends = seed % 3 == 2
        yield {
            "kind": kind, "rows": rows, "mode": mode, "layout": layout, "number": next(numbers), "settings": settings,
            "seed": seed, "ends": ends, "seeds": seed % 11 == 5 and layout != "lockstep",
        }  # fmt: skip


def texts(number: int) -> list[list[list[int]]]:
    """The texts of the first calls, in the tree that Python finds."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))  # the helpers of this tree, for both
    import torch
    from tiny import near, prompts, tiny

    from hf_specx import SpeculativeDecoding

    torch.set_num_threads(1)
    found = []
    for call in itertools.islice(calls(), number):
        sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32} if call["kind"] == "opt" else {}
        target = tiny(call["kind"], **sizes)
        inputs, mode = prompts(call["rows"]), call["mode"]
        options = call["settings"] | {"do_sample": mode != "greedy", "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
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
        found.append(output[:, inputs["input_ids"].shape[1] :].tolist())
    return found


def in_tree(tree: Path, number: int) -> list[list[list[int]]]:
    """`texts` of another process, for which `hf_specx` is that of a tree."""
    found, _ = worker(__file__, tree, str(number)).communicate()
    texts: list[list[list[int]]] = json.loads(found.splitlines()[-1])
    return texts


def differs(call: dict[str, Any], old: list[list[int]], new: list[list[int]]) -> bool:
    """Whether what is promised of a call differs."""
    free = call["number"] if call["mode"] in ("token", "block") and (call["rows"] > 1 or call["seeds"]) else 0
    kept = NEW_TOKENS - free
    return [row[:kept] for row in old] != [row[:kept] for row in new]


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
    found = list(zip(calls(), old, new, strict=False))
    bad = [call for call, before, now in found if differs(call, before, now)]
    for call in bad:
        print("differs:", call)
    whole = sum(before == now for _, before, now in found)
    print(f"{len(found)} calls: {len(found) - len(bad)} as promised, {whole} the same to the last token")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
