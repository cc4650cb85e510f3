"""A cell is measured: contenders in turns, each beside its bare forwards, and what follows from the times."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from hf_specx.common.devices import execution_device, synchronize
from hf_specx.drafting.draft_length import expected_speedup
from hf_specx.engine.report import SpeculationReport

from .bare import bandwidth, plain_history, replay, round_bytes
from .bench import emitted_per_row
from .bench_pairs import BenchPair
from .cells import Cell
from .contenders import PLAIN, Contender


Advance = Callable[[], object]
WARM_UP = 32  # new tokens of the run that is not counted
COMPILING = 5  # times that a run in which something was compiled is made again
BARE = ("target_step", "draft_step", "prompt", "decoding")
COUNTED = ("alpha", "tokens_per_round", "num_draft_tokens", "rounds", "layout")


def take_turns(cell: Cell, pair: BenchPair, advance: Advance) -> dict[str, Any]:
    """Run every contender of a cell `1 + repeats` times, in an order that rotates.

    Args:
        cell: what is measured.
        pair: of that name.
        advance: called after each run, `cell.turns` times.

    Returns:
        "contenders", by name: the runs and their medians, or why there are none; "bandwidth" in bytes a second.
    """
    device = execution_device(pair.target)
    turns = Turns(cell, pair)
    for run in range(-1, cell.repeats):
        shift = max(run, 0) % len(cell.contenders)
        for name in (*cell.contenders[shift:], *cell.contenders[:shift]):
            turns.take(name, run)
            advance()
    speed = bandwidth(device) if cell.bare else None
    found = {name: summarise(turns.runs[name], turns.runs.get(PLAIN), speed) for name in cell.contenders}
    return {"contenders": found, "bandwidth": speed}


class Turns:
    """The runs of a cell.

    Attributes:
        runs: of each contender: {"first_seconds": of the run that warms up, "runs": [...]}, or {"unavailable": why}.
    """

    def __init__(self, cell: Cell, pair: BenchPair):
        self.cell, self.pair = cell, pair
        self.inputs = pair.inputs(cell.batch, cell.prompt_tokens, cell.new_tokens, cell.seed)
        self.contenders: dict[str, Contender] = {}
        self.runs: dict[str, dict[str, Any]] = {name: {"runs": []} for name in cell.contenders}

    def take(self, name: str, run: int) -> None:
        """Run number `run` of a contender, in which nothing is compiled; -1 warms up.

        What fails is noted, and not tried again.
        """
        noted = self.runs[name]
        if "unavailable" in noted:
            return
        try:
            if name not in self.contenders:
                self.contenders[name] = Contender(name, self.pair.target, self.pair.draft)
                if self.cell.experiment == "compiled":  # no other is held to what its forwards predict
                    self.contenders[name].prepare(self.inputs)
            result = first = self._run(self.contenders[name], run)
            for _ in range(COMPILING):
                if (report := self.contenders[name].report) is None or not report.compilations:
                    break
                result = self._run(self.contenders[name], run)  # a size had not occurred before
        except Exception as error:  # compilers, memory, and options that are not there: any of them is a result
            self.runs[name] = {"runs": [], "unavailable": f"{type(error).__name__}: {_first_line(error)}"}
            return
        if run < 0:
            noted["first_seconds"] = first["seconds"]
        else:
            noted["runs"].append(result)

    def _run(self, contender: Contender, run: int) -> dict[str, Any]:
        device = execution_device(self.pair.target)
        options = self.cell.options
        if run < 0 and not contender.way.compiled:
            options["max_new_tokens"] = min(WARM_UP, self.cell.new_tokens)
        torch.manual_seed(self.cell.seed + max(run, 0))
        synchronize(device)
        started = time.perf_counter()
        output = contender(self.inputs, options)
        synchronize(device)
        seconds = time.perf_counter() - started
        eos_token_id = self.pair.target.generation_config.eos_token_id
        tokens = emitted_per_row(output, self.inputs["input_ids"].shape[1], eos_token_id)
        result: dict[str, Any] = {"seconds": seconds, "tokens": sum(tokens), "longest": max(tokens)}
        report = contender.report
        if report is not None:
            result |= counts(report)
        if run >= 0 and contender.name in self.cell.bare:
            result |= self._bare(contender, max(tokens), report)
        return result

    def _bare(self, contender: Contender, new_tokens: int, report: SpeculationReport | None) -> dict[str, Any]:
        """The forwards of the run that was just made, of plain or of ours."""
        ids, target, draft = self.inputs["input_ids"], self.pair.target, self.pair.draft
        if report is None:
            bare = replay(target, None, ids, plain_history(len(ids), new_tokens))
        else:
            bare = replay(target, draft, ids, report.history)
        full = bare.full(len(ids)) or bare.rounds
        drafted = full[0].drafted if full else 0
        noted = {"prompt": bare.prompt, "decoding": bare.decoding, "drafted": drafted}
        if report is not None and bare.rounds:
            pairs = zip(round_seconds(report), bare.rounds, strict=True)
            noted["round_ratio"] = statistics.median(own / (each.draft + each.target) for own, each in pairs)
        if full:
            noted["target_step"] = statistics.median(each.target for each in full)
        if drafted:
            noted["draft_step"] = statistics.median(each.draft / drafted for each in full)
            noted["round_bytes"] = round_bytes(target, draft, bare)
        return {"bare": noted}


def round_seconds(report: SpeculationReport) -> list[float]:
    """Of each step behind the prompts'."""
    laps = report.laps
    return [sum(phases) for phases in zip(*(laps[phase][1:] for phase in ("draft", "target", "verify")), strict=True)]


def counts(report: SpeculationReport) -> dict[str, Any]:
    """What a result says of a call: ratios, its steps (rounds, and plain ones between them) and their median times.

    "expected_tokens" are those that such rounds emit on average, given what was drafted: with less chance in them.
    "full_round" is of steps in which all rows took part.
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
    """The medians of a contender's runs, beside them.

    Args:
        noted: the runs.
        plain: those of plain `generate`, in the same turns.
        speed: bytes that the machine reads a second.
    """
    runs, beside = noted["runs"], (plain or {}).get("runs", [])
    if not runs:
        return noted
    rates = [run["tokens"] / run["seconds"] for run in runs]
    found: dict[str, Any] = {"tokens_per_second": spread(rates)}
    if len(beside) == len(runs):
        ratios = [rate * run["seconds"] / run["tokens"] for rate, run in zip(rates, beside, strict=True)]
        found["speedup"] = spread(ratios)
    if "steps" in runs[0]:
        found |= _of_rounds(runs, speed)
    if "bare" in runs[0]:
        found |= _beside_bare(runs, beside)
    return noted | found


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
    known = [run["predicted"] for run in runs if run["predicted"] is not None]
    found["predicted_speedup"] = statistics.median(known) if known else None
    sizes = [run["bare"]["round_bytes"] for run in runs if "round_bytes" in run.get("bare", {})]
    if speed is not None and sizes:
        found["bandwidth_seconds_per_round"] = statistics.median(sizes) / speed
    return found


def _beside_bare(runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """What the forwards alone took, and what they would allow."""
    found: dict[str, Any] = {
        "bare": {name: statistics.median(known) for name in BARE if (known := _known(runs, name))},
        "call_over_bare": spread([r["seconds"] / (r["bare"]["prompt"] + r["bare"]["decoding"]) for r in runs]),
    }
    if "steps" not in runs[0]:
        return found
    found["round_over_bare"] = spread(_known(runs, "round_ratio") or [1.0])
    if len(plain) != len(runs) or not _known(plain, "target_step"):
        return found
    limits = []
    for run, beside in zip(runs, plain, strict=True):
        bare, step, drafted = run["bare"], beside["bare"]["target_step"], run["bare"]["drafted"]
        round_time = bare["target_step"] + drafted * bare.get("draft_step", 0.0)
        theorem = expected_speedup(run["alpha"], drafted, bare.get("draft_step", 0.0) / step)
        whole = (beside["bare"]["prompt"] + beside["bare"]["decoding"]) / (bare["prompt"] + bare["decoding"])
        own_step = (beside["seconds"] - beside["bare"]["prompt"]) / max(1, beside["longest"] - 1)
        steady = run["tokens_per_round"] * own_step / (run["full_round"] or run["round"])
        limit = run["tokens_per_round"] * step / round_time
        limits.append((limit, theorem, whole, steady, bare.get("draft_step", 0.0) / step))
    names = ("forward_limited_speedup", "expected_speedup", "bare_speedup", "steady_speedup", "cost_coefficient")
    return found | {name: statistics.median(x) for name, x in zip(names, zip(*limits, strict=True), strict=True)}


def _known(runs: list[dict[str, Any]], name: str) -> list[float]:
    return [run["bare"][name] for run in runs if name in run.get("bare", {})]


def spread(values: list[float]) -> dict[str, float]:
    """The median, the least and the largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")
