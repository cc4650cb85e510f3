"""This tree beside an earlier commit: whether texts are the same, and whether it is as fast.

    python scripts/same.py text COMMIT [CALLS]
    python scripts/same.py speed COMMIT [PAIRS]      # on an idle machine

COMMIT is laid out in a temporary folder, and a process in each tree does the same work.

*text*: 200 calls with a fixed number of candidates, compared token by token.

*speed*: the pair in the package and a grafted one of 30M parameters, at batch 1 and 8, eager and compiled, with 5
candidates a round and with "auto", and with "auto" on prompts of which half are noise; queues of 24 requests,
suffixes, and JSON where xgrammar is installed. Two processes of one tree differ by some 3 % for as long as they live,
since their weights lie elsewhere in memory, so each case is measured in
PAIRS fresh pairs of processes with seeds of their own: the median of their medians of the time of a round, with the
least and the largest of these, and the rounds of all texts together.
"""

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
MODES = ("greedy", "coupled", "token", "block")
LAYOUTS = ("ragged", "padded", "packed", "lockstep")
PROCESSORS: tuple[dict[str, Any], ...] = ({"top_k": 0}, {"top_k": 8, "temperature": 0.8}, {"repetition_penalty": 1.3})
TEXT_TOKENS, CALLS = 24, 200  # new tokens of a call
PAIRS, TURNS, SPEED_TOKENS, PROMPT_TOKENS = 7, 5, 64, 32
QUEUED = 24  # requests
SCHEMA = '{"type": "object", "properties": {"names": {"type": "array", "items": {"type": "string"}, "minItems": 12}}, '
SCHEMA += '"required": ["names"], "additionalProperties": false}'
Case = dict[str, Any]
Process = subprocess.Popen[str]


@contextmanager
def laid_out(commit: str) -> Iterator[Path]:
    """The files of a commit in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        add = ["git", "worktree", "add", "--quiet", "--detach", str(tree), commit]
        subprocess.run(add, cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def worker(kind: str, tree: Path) -> Process:
    """A process for which `hf_specx` is that of a tree; it answers each case on a line of its input."""
    path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", __file__, kind, "worker"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=tree, stdin=pipe, stdout=pipe, text=True)


def answer(process: Process, case: Case) -> Any:
    """What a worker makes of a case."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps(case), file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())


def work(kind: str) -> None:
    """Answer the cases."""
    import torch

    torch.set_num_threads(1)
    models: dict[str, Any] = {}
    for line in sys.stdin:
        case = json.loads(line)
        result = text_of(case) if kind == "text" else time_of(case, models)
        print(json.dumps(result), flush=True)


def calls() -> Iterator[Case]:
    """Each call as plain values: kind of model, batch size, mode, layout, number of candidates, processors, seed."""
    kinds = itertools.cycle(("llama", "gpt2", "qwen2", "mistral", "opt"))
    numbers = itertools.cycle((1, 3, 5))
    every = itertools.product(PROCESSORS, (1, 4), LAYOUTS, MODES)
    for seed, (processors, rows, layout, mode) in enumerate(itertools.cycle(every)):
        case: Case = {"kind": next(kinds), "rows": rows, "mode": mode, "number": next(numbers), "seed": seed}
        drawn = ("top_k", "temperature") if mode == "greedy" else ()
        case["settings"] = {name: value for name, value in processors.items() if name not in drawn}
        case["layout"], case["ends"] = layout, seed % 3 == 2
        case["seeds"] = seed % 11 == 5 and layout != "lockstep"
        yield case


def text_of(call: Case) -> list[list[int]]:
    """The new tokens of each row."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))  # the helpers of this tree, for both
    import torch
    from tiny import near, prompts, tiny

    from hf_specx import SpeculativeDecoding

    target = tiny(call["kind"], **({"ffn_dim": 48, "word_embed_proj_dim": 32} if call["kind"] == "opt" else {}))
    inputs, sampled = prompts(call["rows"]), call["mode"] != "greedy"
    options = call["settings"] | {"do_sample": sampled, "max_new_tokens": TEXT_TOKENS, "pad_token_id": 0}
    options |= {"eos_token_id": [3, 7]} if call["ends"] else {}
    options |= {"seeds": list(range(call["rows"]))} if call["seeds"] else {}
    how: dict[str, Any] = {"num_draft_tokens": call["number"], "layout": call["layout"]}
    strategy = SpeculativeDecoding(near(target, 0.05), verification=call["mode"] if sampled else None, **how)
    torch.manual_seed(call["seed"])
    output = target.generate(**inputs, **options, custom_generate=strategy)
    return output[:, inputs["input_ids"].shape[1] :].tolist()


def compare_texts(tree: Path, number: int) -> bool:
    """Print what differs; whether anything does."""
    old, new = worker("text", tree), worker("text", ROOT)
    bad = 0
    for call in itertools.islice(calls(), number):
        if answer(old, call) != answer(new, call):
            bad += 1
            print("differs:", call)
    for process in (old, new):
        process.communicate()
    print(f"{number} calls: {number - bad} the same")
    return bad > 0


def cases() -> list[Case]:
    """With `compile` and "auto" all numbers would be compiled, which takes a quarter of an hour."""
    every = itertools.product((False, True), ("embedded", "30M"), (1, 8), (5, "auto"))
    all_cases = [case_of(compile=c, pair=pair, rows=rows, number=n) for c, pair, rows, n in every]
    for pair in ("embedded", "30M"):
        all_cases.append(case_of(pair=pair, rows=8, number="auto", mixed=True))
        all_cases.append(case_of(pair=pair, rows=8, work="queue"))
    kinds = ["suffix", "JSON"] if importlib.util.find_spec("xgrammar") else ["suffix"]
    all_cases += [case_of(rows=rows, work=kind, mixed=kind == "suffix") for kind in kinds for rows in (1, 8)]
    return [case for case in all_cases if not (case["compile"] and case["number"] == "auto")]


def case_of(**settings: Any) -> Case:
    """A case of speed, by what it has besides this."""
    usual = {"pair": "embedded", "rows": 1, "number": 5, "compile": False, "mixed": False, "work": "generate"}
    return usual | settings


def time_of(case: Case, models: dict[str, Any]) -> tuple[float, int, int]:
    """Seconds, rounds and compilations of a call; models and strategies are kept in `models`."""
    import torch
    from grafted import RECIPES, graft

    from hf_specx import DraftTargetPair, SpeculativeDecoding, SuffixDraft

    pair, work = case["pair"], case["work"]
    if pair not in models:
        models[pair] = DraftTargetPair.embedded() if pair == "embedded" else graft(RECIPES[pair])
    target = models[pair].target
    key = json.dumps({name: value for name, value in case.items() if name != "seed"})
    if key not in models:
        draft = SuffixDraft() if work == "suffix" else models[pair].draft
        models[key] = SpeculativeDecoding(draft, num_draft_tokens=case["number"], compile=case["compile"])
    strategy = models[key]
    ids = prompts_of(case, target.config.vocab_size)
    options: Any = {"pad_token_id": 0, "eos_token_id": None, "do_sample": True, "top_k": 0}
    options["max_new_tokens"] = SPEED_TOKENS
    if work == "JSON":
        options["logits_processor"] = [json_processor(models)]
    torch.manual_seed(case["seed"])
    started = time.perf_counter()
    if work == "queue":
        list(strategy.generate_many(target, list(ids), batch_size=case["rows"], **options))
    else:
        target.generate(ids, attention_mask=torch.ones_like(ids), **options, custom_generate=strategy)
    seconds, report = time.perf_counter() - started, strategy.report
    return seconds, report.rounds + report.plain_steps, report.compilations


def prompts_of(case: Case, vocab_size: int) -> Any:
    """Random tokens [B, PROMPT_TOKENS]; the same in all rows, or, mixed, such that every other row repeats itself."""
    import torch

    generator = torch.Generator().manual_seed(7)
    count = QUEUED if case["work"] == "queue" else case["rows"]
    ids = torch.randint(3, vocab_size, (count, PROMPT_TOKENS), generator=generator)
    if case["mixed"]:
        ids[::2] = ids[:1, :4].repeat(1, PROMPT_TOKENS // 4)
        return ids
    return ids[:1].expand(count, -1).clone()


def json_processor(models: dict[str, Any]) -> Any:
    """A new one of xgrammar's, for texts of the pair in the package; its compiled grammar is kept in `models`."""
    import xgrammar

    if "grammar" not in models:
        pair = models["embedded"]
        info = xgrammar.TokenizerInfo.from_huggingface(pair.tokenizer, vocab_size=pair.target.config.vocab_size)
        models["grammar"] = xgrammar.GrammarCompiler(info).compile_json_schema(SCHEMA, any_whitespace=False)
    return xgrammar.contrib.hf.LogitsProcessor(models["grammar"])


def timed(process: Process, case: Case) -> tuple[float, int]:
    """Seconds of a worker's round, and its rounds; tried again where something was compiled on the way."""
    while True:
        seconds, rounds, compilations = answer(process, case)
        if not compilations:
            return seconds / rounds, rounds


def compare_pair(tree: Path, cases: list[Case], first_seed: int) -> list[tuple[float, int, int]]:
    """In one pair of processes, case by case: the time of this tree's rounds over the other's, and their numbers."""
    old, new = worker("speed", tree), worker("speed", ROOT)
    results = []
    for case in cases:
        turns = []
        for turn in range(-2, TURNS):  # two turns warm up
            order = (old, new) if turn % 2 else (new, old)
            seeded = case | {"seed": first_seed + max(turn, 0)}
            turns.append({process.pid: timed(process, seeded) for process in order})
        times = [turn[new.pid][0] / turn[old.pid][0] for turn in turns[2:]]
        rounds = [sum(turn[process.pid][1] for turn in turns[2:]) for process in (new, old)]
        results.append((statistics.median(times), rounds[0], rounds[1]))
    for process in (old, new):
        process.communicate()
    return results


def compare_speed(tree: Path, pairs: int) -> None:
    """Print each case."""
    all_cases, results = cases(), []
    for pair in range(pairs):
        results.append(compare_pair(tree, all_cases, pair * TURNS))
        print(f"pair {pair + 1} of {pairs}", [round(each[0], 3) for each in results[-1]], file=sys.stderr, flush=True)
    for case, of_pairs in zip(all_cases, zip(*results, strict=True), strict=True):
        ratios, new, old = zip(*of_pairs, strict=True)
        figure = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"a round {figure} of the time before, {sum(new)} rounds, {sum(old)} before: {json.dumps(case)}")


def main() -> None:
    """Compare, and exit with 1 where a text differs."""
    if sys.argv[2:] == ["worker"]:
        work(sys.argv[1])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["text", "speed"])
    parser.add_argument("commit")
    parser.add_argument("number", type=int, nargs="?", help="of calls, or of pairs of processes")
    arguments = parser.parse_args()
    with laid_out(arguments.commit) as tree:
        if arguments.kind == "text":
            sys.exit(compare_texts(tree, arguments.number or CALLS))
        compare_speed(tree, arguments.number or PAIRS)


if __name__ == "__main__":
    main()
