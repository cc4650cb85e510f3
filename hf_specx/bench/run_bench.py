"""Run `specx bench`: time methods in turns, and compute figures from their times."""

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

from .bench_settings import BenchSettings
from .decoding_methods import PLAIN_NAME
from .inputs import Inputs, prompts_of_length, whole_prompts
from .store import provenance
from .timed_methods import TimedMethod
from .timer import Advance, Timer, Timing, spread


REPORTED_FIGURES = ("alpha", "tokens_per_round", "num_draft_tokens", "forward_limited_speedup", "expected_speedup")


def usual_methods(pair: DraftTargetPair, do_sample: bool = True) -> tuple[str, ...]:
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


def run_bench(
    settings: BenchSettings, pair: DraftTargetPair, command: str, advance: Advance = lambda: None
) -> dict[str, Any]:
    """Time methods in turns; one that fails is recorded with its error, and the others go on.

    Returns:
        Values of JSON: "settings", "pair" (numbers of parameters), "prompts" (`facts_of`), "provenance" with the
        `command` that was typed, and "methods" by name: the runs of each and their medians, or under "unavailable" why
        there are none.
    """
    names = settings.methods or usual_methods(pair, settings.do_sample)
    draft, early_exit = draft_parts(pair)
    if settings.prompt_tokens:
        batches = [  # each turn has other prompts
            prompts_of_length(
                pair,
                settings.batch,
                settings.prompt_tokens,
                settings.max_new_tokens,
                turn * settings.batch,
                settings.seed + turn,
            )
            for turn in range(settings.repeats)
        ]
    else:
        batches = whole_prompts(pair, settings.batch, settings.repeats, settings.max_new_tokens)
    tokenizers: Any = None
    if draft is not None and not same_tokens(pair.tokenizer, pair.draft_tokenizer):
        tokenizers = pair.tokenizer, pair.draft_tokenizer

    def make_method(name: str) -> TimedMethod:
        method = TimedMethod(name, pair.target, draft, tokenizers=tokenizers, early_exit=early_exit)
        method.prepare(batches[0])
        return method

    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    seeds = range(settings.seed, settings.seed + settings.repeats)
    timer = Timer(make_method, batches, settings.options, seeds, advance, may_fail=names, notes_arrivals=True)
    timings = timer.time(names)
    torch.compiler.reset()
    parameters = {"target_parameters": pair.target.num_parameters()}
    if draft is not None:
        parameters["draft_parameters"] = draft.num_parameters()
    return {
        "settings": asdict(settings) | {"methods": list(names)},
        "pair": parameters,
        "prompts": facts_of(batches),
        "provenance": provenance(pair.target) | {"seed": settings.seed, "command": command, "date": date},
        "methods": {name: figures(timing, timings.get(PLAIN_NAME)) for name, timing in timings.items()},
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
    """The runs of a method with their medians; `plain` are those of plain `generate` in the same turns."""
    if timing.error is not None:
        return {"runs": [], "unavailable": timing.error}
    values: dict[str, Any] = {"runs": [{"seconds": run.seconds, "tokens": run.tokens} for run in timing.runs]}
    values |= {"first_seconds": timing.first_seconds, "tokens_per_second": spread(timing.rates)}
    values |= {"latency": timing.latency}
    if plain is not None and plain.runs:
        speedups = timing.speedups(plain)
        values["speedup"] = spread(speedups)
        if len(speedups) > 1:
            values["speedup"]["stdev"] = statistics.stdev(speedups)
    for name in REPORTED_FIGURES:
        median = timing.median_of(name)
        if median is not None:
            values[name] = median
    return values
