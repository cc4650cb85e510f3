"""A cell is measured: its contenders in turns, and the figures that follow from their times."""

import datetime
import hashlib
import json
import statistics
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.tokenizers import same_tokens
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.pairs.pair import DraftTargetPair

from .cell import Cell
from .contenders import Contender
from .decoding_methods import PLAIN_NAME
from .inputs import Inputs, prompts_of_length, whole_prompts
from .store import provenance
from .timer import Advance, Timer, Timing, spread


REPORTED_FIGURES = ("alpha", "tokens_per_round", "num_draft_tokens", "forward_limited_speedup", "expected_speedup")


def usual_contenders(pair: DraftTargetPair, do_sample: bool = True) -> tuple[str, ...]:
    """Plain `generate`, the methods by which this pair can draft, and what transformers has in place of each."""
    draft, early_exit = draft_parts(pair)
    names = [PLAIN_NAME]
    if draft in pair.models:
        names.append("assisted")
    if draft is not None:
        names.append("block-auto")
        if do_sample:
            names.append("coupled-auto")
    if isinstance(pair.draft, list):
        names.append("several-auto")
    if early_exit is not None:
        names += [f"assisted:{early_exit.exit_layer}", f"exit:{early_exit.exit_layer}-auto"]
    return (*names, "lookup-10", "suffix-auto")


def draft_parts(pair: DraftTargetPair) -> tuple[PreTrainedModel | None, EarlyExitDraft | None]:
    """The model or head and the first layers that draft, where they do."""
    draft = next((draft for draft in pair.drafts if isinstance(draft, PreTrainedModel)), None)
    early_exit = next((draft for draft in pair.drafts if isinstance(draft, EarlyExitDraft)), None)
    return draft, early_exit


def measure_cell(cell: Cell, pair: DraftTargetPair, command: str, advance: Advance = lambda: None) -> dict[str, Any]:
    """Time the contenders of a cell in turns; one that fails is noted, and the others go on.

    Returns:
        Plain values: "cell", "pair" (parameters), "prompts" (`facts_of`), "provenance" with the command as typed,
        and "contenders" by name: runs and their medians, or under "unavailable" why there are none.
    """
    names = cell.contenders or usual_contenders(pair, cell.do_sample)
    draft, early_exit = draft_parts(pair)
    if cell.prompt_tokens:
        batches = [  # each turn has other prompts
            prompts_of_length(
                pair, cell.batch, cell.prompt_tokens, cell.max_new_tokens, turn * cell.batch, cell.seed + turn
            )
            for turn in range(cell.repeats)
        ]
    else:
        batches = whole_prompts(pair, cell.batch, cell.repeats, cell.max_new_tokens)
    tokenizers: Any = None
    if draft is not None and not same_tokens(pair.tokenizer, pair.draft_tokenizer):
        tokenizers = pair.tokenizer, pair.draft_tokenizer

    def make_contender(name: str) -> Contender:
        contender = Contender(name, pair.target, draft, tokenizers=tokenizers, early_exit=early_exit)
        contender.prepare(batches[0])
        return contender

    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    seeds = range(cell.seed, cell.seed + cell.repeats)
    timer = Timer(make_contender, batches, cell.options, seeds, advance, may_fail=names, notes_arrivals=True)
    timings = timer.time(names)
    torch.compiler.reset()
    parameters = {"target_parameters": pair.target.num_parameters()}
    if draft is not None:
        parameters["draft_parameters"] = draft.num_parameters()
    return {
        "cell": asdict(cell) | {"contenders": list(names)},
        "pair": parameters,
        "prompts": facts_of(batches),
        "provenance": provenance(pair.target) | {"seed": cell.seed, "command": command, "date": date},
        "contenders": {name: figures(timing, timings.get(PLAIN_NAME)) for name, timing in timings.items()},
    }


def facts_of(batches: list[Inputs]) -> dict[str, Any]:
    """What others need to know of prompts to compare with: how many, their tokens, and a digest of all their ids."""
    rows = []
    for inputs in batches:
        for ids, mask in zip(inputs["input_ids"].tolist(), inputs["attention_mask"].tolist(), strict=True):
            rows.append([token for token, is_seen in zip(ids, mask, strict=True) if is_seen])
    different = sorted(set(map(tuple, rows)))
    digest = hashlib.sha256(json.dumps(different).encode()).hexdigest()
    return {"count": len(different), "tokens": spread(list(map(len, rows))), "digest": digest}


def figures(timing: Timing, plain: Timing | None) -> dict[str, Any]:
    """The runs of a contender with their medians; `plain` are those of plain `generate` in the same turns.

    "speedup" is the measured one. "times_plain", the ratio of both medians, stays for those who read it in files.
    """
    if timing.error is not None:
        return {"runs": [], "unavailable": timing.error}
    values: dict[str, Any] = {"runs": [{"seconds": run.seconds, "tokens": run.tokens} for run in timing.runs]}
    values |= {"first_seconds": timing.first_seconds, "tokens_per_second": spread(timing.rates)}
    values |= {"latency": timing.latency}
    if plain is not None and plain.runs:
        values["times_plain"] = timing.tokens_per_second / plain.tokens_per_second
        speedups = timing.speedups(plain)
        values["speedup"] = spread(speedups)
        if len(speedups) > 1:
            values["speedup"]["stdev"] = statistics.stdev(speedups)
    for name in REPORTED_FIGURES:
        median = timing.median_of(name)
        if median is not None:
            values[name] = median
    return values
