"""Whether this tree is as fast as an earlier one: `python scripts/same_speed.py COMMIT [PAIRS [eager|compiled]]`.

Two processes, one in each tree, generate in turns, on an idle machine: the pair in the package and a grafted one of
30M parameters, at batch 1 and 8, eager and compiled, with 5 candidates a round and with "auto" (not compiled, where it
would take a quarter of an hour to compile all its numbers), and with "auto" at batch 8 on prompts of which half are
noise. Two processes of one tree differ by some 3 % for as long as they live, since their weights lie elsewhere in
memory, and how many rounds a text takes is chance; so each case is measured in PAIRS fresh pairs of processes, each
with seeds of its own. Its figures are the median of the pairs' medians of the time of a round, with the least and the
largest of these, and the rounds of all texts together.
"""

import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from trees import ROOT, laid_out, worker


PAIRS, TURNS, NEW_TOKENS, PROMPT_TOKENS = 7, 5, 64, 32
CASES: list[dict[str, Any]] = [
    {"pair": pair, "rows": 8, "compile": False, "number": "auto", "mixed": True} for pair in ("embedded", "30M")
]
CASES += [
    {"pair": pair, "rows": rows, "compile": compile, "number": number, "mixed": False}
    for compile, pair, rows, number in itertools.product((False, True), ("embedded", "30M"), (1, 8), (5, "auto"))
    if not (compile and number == "auto")
]


def load(name: str) -> tuple[Any, Any]:
    """Target and draft."""
    if name == "embedded":
        from hf_specx import DraftTargetPair

        pair = DraftTargetPair.embedded()
        return pair.target, pair.draft
    try:
        from hf_specx.bench.grafted import graft
        from hf_specx.bench.recipes import RECIPES
    except ImportError:  # before there were rooms
        from hf_specx.grafted import RECIPES, graft  # type: ignore[import-not-found, no-redef]
    grafted = graft(RECIPES[name])
    return grafted[0], grafted[1]


def work() -> None:
    """Answer each case on a line of standard input with its seconds."""
    import torch

    from hf_specx import SpeculativeDecoding

    torch.set_num_threads(1)
    pairs: dict[str, tuple[Any, Any]] = {}
    strategies: dict[str, Any] = {}
    for line in sys.stdin:
        case = json.loads(line)
        if case["pair"] not in pairs:
            pairs[case["pair"]] = load(case["pair"])
        target, draft = pairs[case["pair"]]
        key = json.dumps({name: value for name, value in case.items() if name != "seed"})
        if key not in strategies:
            options = {"num_draft_tokens": case["number"], "compile": case["compile"]}
            strategies[key] = SpeculativeDecoding(draft, **options)
        made = torch.Generator().manual_seed(7)
        ids = torch.randint(3, target.config.vocab_size, (case["rows"], PROMPT_TOKENS), generator=made)
        if not case["mixed"]:
            ids = ids[:1].expand(case["rows"], -1).clone()
        else:
            ids[::2] = ids[:1, :4].repeat(1, PROMPT_TOKENS // 4)  # every other row repeats itself
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": None}
        torch.manual_seed(case["seed"])
        started = time.perf_counter()
        target.generate(**given, do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, custom_generate=strategies[key])
        seconds = time.perf_counter() - started
        report = strategies[key].report
        print(json.dumps([seconds, report.rounds + report.plain_steps, report.compilations]), flush=True)


def answer(process: "subprocess.Popen[str]", case: dict[str, Any]) -> tuple[float, int]:
    """Seconds of a worker's round in a case, and its rounds; tried again where something was compiled on the way."""
    assert process.stdin is not None
    assert process.stdout is not None
    taken, rounds, compilations = 0.0, 1, 1
    while compilations:
        print(json.dumps(case), file=process.stdin, flush=True)
        taken, rounds, compilations = json.loads(process.stdout.readline())
    return taken / rounds, rounds


def compare(tree: Path, cases: list[dict[str, Any]], first_seed: int) -> list[tuple[float, int, int]]:
    """In one pair of processes, case by case: the time of this tree's rounds over the other's, and their numbers."""
    old, new = worker(__file__, tree), worker(__file__, ROOT)
    found = []
    for case in cases:
        turns = []
        for turn in range(-2, TURNS):  # two turns warm up
            asked = case | {"seed": first_seed + max(turn, 0)}
            order = (old, new) if turn % 2 else (new, old)
            turns.append({process.pid: answer(process, asked) for process in order})
        times = [turn[new.pid][0] / turn[old.pid][0] for turn in turns[2:]]
        rounds = [sum(turn[process.pid][1] for turn in turns[2:]) for process in (new, old)]
        found.append((statistics.median(times), rounds[0], rounds[1]))
    for process in (old, new):
        process.communicate()
    return found


def main() -> None:
    """Compare, pair by pair, and print each case."""
    if sys.argv[1:2] == ["worker"]:
        work()
        return
    pairs = int(sys.argv[2]) if len(sys.argv) > 2 else PAIRS
    only = sys.argv[3] if len(sys.argv) > 3 else ""
    cases = [case for case in CASES if only != ("eager" if case["compile"] else "compiled")]
    with laid_out(sys.argv[1]) as tree:
        found = []
        for pair in range(pairs):
            found.append(compare(tree, cases, pair * TURNS))
            print(
                f"pair {pair + 1} of {pairs}", [round(case[0], 3) for case in found[-1]], file=sys.stderr, flush=True
            )
    for case, every in zip(cases, zip(*found, strict=True), strict=True):
        ratios, new, old = zip(*every, strict=True)
        figure = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"a round {figure} of the time before, {sum(new)} rounds, {sum(old)} before: {json.dumps(case)}")


if __name__ == "__main__":
    main()
