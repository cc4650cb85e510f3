"""A grid is measured cell by cell: contenders in turns and their bare forwards, kept in a file of results."""

import datetime
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_specx.common.devices import execution_device
from hf_specx.drafting.candidates import make_drafter
from hf_specx.engine.report import SpeculationReport
from hf_specx.hub.flatten import core_modules
from hf_specx.scheduling.draft_length import expected_speedup

from .bare import bandwidth, plain_history, replay, round_bytes
from .cells import Cell
from .contenders import Contender
from .copying import copying_prompts
from .inputs import BenchPair, LoadBenchPair
from .probes import compare_contexts, measure_memory, round_seconds
from .store import StepCounter, Store, code_digest, provenance
from .timer import Advance, TimedCall, Timer, Timing, median_known, speedups, spread
from .ways import PLAIN_NAME


MACHINE = ("hf_specx", "torch", "transformers", "python", "device", "threads", "code")
BARE = ("target_step", "draft_step", "prompt", "decoding")
LIMITS = (  # what the forwards say, and by how much plain `generate` takes longer than its own
    "forward_limited_speedup",
    "expected_speedup",
    "bare_speedup",
    "steady_speedup",
    "cost_coefficient",
    "plain_step_over_bare",
)
COUNTED = ("alpha", "tokens_per_round", "num_draft_tokens", "rounds", "layout")


def results(path: Path | None, device: str | None = None) -> Store:
    """Measured cells, as a file has them; those of the same settings, machine, versions and code are not made again.

    Args:
        path: of the file.
        device: where pairs are; None and "auto" are where accelerators are, if there are any.

    Raises:
        ValueError: for a file that is something else.
    """
    if device is None or device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    made = provenance(torch.device(device)) | {"code": measuring_code()}
    return Store(path, "schema", {name: made[name] for name in MACHINE})


def measuring_code() -> str:
    """The digest of the files that a call and its measurement run."""
    return code_digest([*(module.path for module in core_modules()), *sorted(Path(__file__).parent.glob("*.py"))])


def run_grid(
    cells: Sequence[Cell],
    store: Store,
    command: str,
    load: LoadBenchPair,
    advance: Advance = lambda: None,
) -> list[dict[str, Any]]:
    """Measure the cells that the store does not have.

    Args:
        cells: cells of the same pair in sequence are measured on one copy of it.
        store: of `results`; gets each cell as soon as it is measured.
        command: what the measurements say that they were made by.
        load: makes a pair from its name and a dtype.
        advance: called `sum(cell.turns for cell in cells)` times, as work is done.

    Returns:
        What was measured of each cell, now or before; where a pair or a cell failed as a whole, {"failed": why}.
    """
    found = []
    loaded: tuple[tuple[str, str], BenchPair] | None = None
    for cell in cells:
        known, steps = store.find(cell.to_dict()), StepCounter(cell.turns, advance)
        if known is None:
            try:
                if loaded is None or loaded[0] != (cell.pair, cell.dtype):
                    loaded = None  # so that its memory is free before the next takes its own
                    loaded = (cell.pair, cell.dtype), load(cell.pair, cell.dtype)
                known = measure_cell(cell, loaded[1], command, steps)
            except (RuntimeError, OSError) as error:  # memory, most likely; the others can still be measured
                known = {"cell": cell.to_dict(), "failed": f"{type(error).__name__}: {error}", "contenders": {}}
            else:
                store.add(known)
        steps.finish()
        found.append(known)
    return found


def measure_cell(cell: Cell, pair: BenchPair, command: str, advance: Advance) -> dict[str, Any]:
    """One cell, with where and how it was made."""
    started = datetime.datetime.now(datetime.timezone.utc)
    probes = {"context": compare_contexts, "memory": measure_memory}
    measured = probes.get(cell.experiment, take_turns)(cell, pair, advance)
    torch.compiler.reset()
    made = provenance(pair.target) | {"code": measuring_code(), "seed": cell.seed, "command": command}
    made["date"] = started.isoformat(timespec="seconds")
    made["seconds"] = round((datetime.datetime.now(datetime.timezone.utc) - started).total_seconds(), 1)
    return {"cell": cell.to_dict(), "pair": pair.facts, "provenance": made} | measured


def take_turns(cell: Cell, pair: BenchPair, advance: Advance) -> dict[str, Any]:
    """Time every contender of a cell; one that fails is noted, and the others go on.

    Args:
        cell: what is measured.
        pair: the one that the cell names.
        advance: called after each run, `cell.turns` times.

    Returns:
        "contenders", by name: the runs and their medians, or why there are none; "bandwidth" in bytes per second.
    """
    inputs = pair.inputs(cell.batch, cell.prompt_tokens, cell.new_tokens, cell.seed)
    if cell.texts:
        ids = copying_prompts(cell.texts, pair.tokenizer, cell.batch, cell.prompt_tokens)
        inputs["input_ids"] = ids.to(inputs["input_ids"])

    def make(name: str) -> Contender:
        contender = Contender(name, pair.target, pair.draft, tokenizers=pair.tokenizers)
        if cell.experiment == "compiled":  # no other is held to what its forwards predict
            contender.prepare(inputs)
        return contender

    def note(contender: Contender, run: TimedCall) -> dict[str, Any]:
        # a draft with another tokenizer reads a text of its own, whose lengths the target's do not tell
        replayed = contender.name in cell.bare and (run.report is None or run.report.tokenizer_match is None)
        bare = {"bare": bare_forwards(pair, contender, inputs["input_ids"], run)} if replayed else {}
        return ({} if run.report is None else counts(run.report)) | bare

    seeds = range(cell.seed, cell.seed + cell.repeats)
    timer = Timer(make, [inputs], cell.options, seeds, advance, note, keep_going=True)
    timings = {name: noted(timing) for name, timing in timer.time(cell.contenders).items()}
    speed = bandwidth(execution_device(pair.target)) if cell.bare else None
    found = {name: summarise(known, timings.get(PLAIN_NAME), speed) for name, known in timings.items()}
    return {"contenders": found, "bandwidth": speed}


def noted(timing: Timing) -> dict[str, Any]:
    """The runs of a contender as plain values, or why there are none."""
    if timing.error is not None:
        return {"runs": [], "unavailable": timing.error}
    runs = [
        {"seconds": run.seconds, "tokens": run.tokens, "longest": max(map(len, run.texts))} | run.notes
        for run in timing.runs
    ]
    return {"runs": runs, "first_seconds": timing.first_seconds}


def bare_forwards(pair: BenchPair, contender: Contender, input_ids: torch.Tensor, run: TimedCall) -> dict[str, Any]:
    """What the forwards of a run that was just made take on their own; of plain `generate` or of ours."""
    target, rows, report = pair.target, len(input_ids), run.report
    draft = None if contender.strategy is None else make_drafter(contender.strategy.draft_model, target).model
    if report is None:
        bare = replay(target, None, input_ids, plain_history(rows, max(map(len, run.texts))))
    else:
        bare = replay(target, draft, input_ids, report.history)
    full = bare.full(rows) or bare.rounds
    drafted = full[0].drafted if full else 0
    found: dict[str, Any] = {"prompt": bare.prompt, "decoding": bare.decoding, "drafted": drafted}
    if report is not None and bare.rounds:
        pairs = zip(round_seconds(report), bare.rounds, strict=True)
        found["round_ratio"] = statistics.median(own / (each.draft + each.target) for own, each in pairs)
    if full:
        found["round"] = bare.mean_round(rows)
        found["target_step"] = statistics.median(each.target for each in full)
    if drafted:
        found["draft_step"] = statistics.median(each.draft / drafted for each in full)
        found["round_bytes"] = round_bytes(target, draft, bare)
    return found


def counts(report: SpeculationReport) -> dict[str, Any]:
    """What results say of a call: ratios, its steps (rounds, and plain ones between them) and their median times.

    "expected_tokens" are those that such rounds emit on average, given what was drafted: they vary less by chance.
    "full_round" is the median over the steps in which all rows took part.
    """
    seconds, full = round_seconds(report), min(map(len, report.history)) - 1
    return {
        **{name: getattr(report, name) for name in COUNTED},
        "steps": max(map(len, report.history)) - 1,
        "expected_tokens": sum(map(len, report.history)) + report.survival[0],
        "decoding": sum(report.seconds[phase] for phase in report.laps),
        "round": statistics.median(seconds or [0.0]),
        "full_round": statistics.median(seconds[:full] or [0.0]),
        "phases": {phase: statistics.median(laps[-len(seconds) :] or [0.0]) for phase, laps in report.laps.items()},
        "predicted": report.forward_limited_speedup,
    }


def summarise(noted: dict[str, Any], plain: dict[str, Any] | None, speed: float | None) -> dict[str, Any]:
    """The runs of a contender, with their medians.

    Args:
        noted: the runs.
        plain: those of plain `generate`, in the same turns.
        speed: bytes that the machine reads per second.
    """
    runs, plain_runs = noted["runs"], (plain or {}).get("runs", [])
    if not runs:
        return noted
    rates = [run["tokens"] / run["seconds"] for run in runs]
    found: dict[str, Any] = {"tokens_per_second": spread(rates)}
    if len(plain_runs) == len(runs):
        plain_rates = [run["tokens"] / run["seconds"] for run in plain_runs]
        found["times_plain"] = statistics.median(rates) / statistics.median(plain_rates)
        found["speedup"] = spread(speedups(rates, plain_rates))
    if "steps" in runs[0]:
        found |= _of_rounds(runs, speed)
    if "bare" in runs[0]:
        found |= _over_bare(runs, plain_runs)
    return noted | found | above_limit(found)


def above_limit(found: dict[str, Any]) -> dict[str, str]:
    """Why a contender was faster than its forwards seem to allow: {"above_limit": why}, {} where it was not."""
    if found.get("times_plain", 0.0) <= found.get("forward_limited_speedup", math.inf):
        return {}
    plain, own = found["plain_step_over_bare"], found["round_over_bare"]["median"]
    told = f"the limit counts forwards alone: a step of plain generate took {plain:.2f} times its bare forward, "
    told += f"a round of this {own:.2f} times its own"
    return {"above_limit": told if plain > own else f"{told}; the rest is noise, as forwards are timed after the runs"}


def _of_rounds(runs: list[dict[str, Any]], speed: float | None) -> dict[str, Any]:
    steps = [max(1, run["steps"]) for run in runs]
    found = {name: statistics.median(run[name] for run in runs) for name in COUNTED if name != "layout"}
    found["expected_tokens_per_second"] = spread([run["expected_tokens"] / run["seconds"] for run in runs])
    found["seconds_per_round"] = spread([run["round"] for run in runs])
    found["phases_per_round"] = {
        phase: statistics.median(run["phases"][phase] for run in runs) for phase in runs[0]["phases"]
    }
    if "bare" in runs[0]:  # preparations of a call, and what its prompts took beyond their forwards
        rest = [(r["seconds"] - r["decoding"] - r["bare"]["prompt"]) / n for r, n in zip(runs, steps, strict=True)]
        found["phases_per_round"]["rest"] = max(0.0, statistics.median(rest))
    found["predicted_speedup"] = median_known(run["predicted"] for run in runs)
    sizes = [run["bare"]["round_bytes"] for run in runs if "round_bytes" in run.get("bare", {})]
    if speed is not None and sizes:
        found["bandwidth_seconds_per_round"] = statistics.median(sizes) / speed
    return found


def _over_bare(runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """What the forwards alone took, and what they would allow."""
    found: dict[str, Any] = {
        "bare": {name: statistics.median(known) for name in BARE if (known := _known(runs, name))},
        "call_over_bare": spread([r["seconds"] / (r["bare"]["prompt"] + r["bare"]["decoding"]) for r in runs]),
    }
    if "steps" not in runs[0]:
        return found
    found["round_over_bare"] = spread(_known(runs, "round_ratio") or [1.0])
    if len(plain) != len(runs):
        return found
    limits = []
    for run, other in zip(runs, plain, strict=True):
        if "round" not in run["bare"] or "target_step" not in other.get("bare", {}):
            continue  # all rows ended at their first token
        bare, step, drafted = run["bare"], other["bare"]["target_step"], run["bare"]["drafted"]
        theorem = expected_speedup(run["alpha"], drafted, bare.get("draft_step", 0.0) / step)
        whole = (other["bare"]["prompt"] + other["bare"]["decoding"]) / (bare["prompt"] + bare["decoding"])
        own_step = (other["seconds"] - other["bare"]["prompt"]) / max(1, other["longest"] - 1)
        steady = run["tokens_per_round"] * own_step / (run["full_round"] or run["round"])
        limit = run["tokens_per_round"] * step / bare["round"]
        limits.append((limit, theorem, whole, steady, bare.get("draft_step", 0.0) / step, own_step / step))
    medians = [statistics.median(known) for known in zip(*limits, strict=True)]
    return found | dict(zip(LIMITS, medians, strict=False))  # none without a limit


def _known(runs: list[dict[str, Any]], name: str) -> list[float]:
    return [run["bare"][name] for run in runs if name in run.get("bare", {})]
