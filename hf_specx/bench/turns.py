"""A cell is measured: its contenders in turns, and the figures that follow from their times."""

import datetime
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.tokenizers import same_tokens
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.pairs.pair import DraftTargetPair

from .contenders import Contender
from .inputs import prompts_of_length, whole_prompts
from .store import provenance
from .timer import Advance, Timer, Timing, speedups, spread
from .ways import PLAIN_NAME, Cell


FIGURES = ("alpha", "tokens_per_round", "num_draft_tokens", "forward_limited_speedup", "expected_speedup")


def usual_contenders(pair: DraftTargetPair, do_sample: bool = True) -> tuple[str, ...]:
    """Plain `generate`, the ways in which this pair can draft, and what transformers has in place of each."""
    draft, own = draft_parts(pair)
    names = [PLAIN_NAME]
    if draft is not None:
        names += ["assisted"] * (draft in pair.models) + ["block-auto", *["coupled-auto"] * do_sample]
    if isinstance(pair.draft, list):
        names.append("several-auto")
    if own is not None:
        names += [f"assisted:{own.exit_layer}", f"exit:{own.exit_layer}-auto"]
    return (*names, "lookup-10", "suffix-auto")


def draft_parts(pair: DraftTargetPair) -> tuple[PreTrainedModel | None, EarlyExitDraft | None]:
    """The model or head and the first layers that draft, where they do."""
    own = next((draft for draft in pair.drafts if isinstance(draft, EarlyExitDraft)), None)
    return next((draft for draft in pair.drafts if isinstance(draft, PreTrainedModel)), None), own


def measure_cell(cell: Cell, pair: DraftTargetPair, command: str, advance: Advance = lambda: None) -> dict[str, Any]:
    """Time the contenders of a cell in turns; one that fails is noted, and the others go on.

    Returns:
        Plain values: "cell", "pair" (parameters), "provenance" with the command that was typed, and "contenders" by
        name: runs and their medians, or under "unavailable" why there are none.
    """
    names, (draft, early_exit) = cell.contenders or usual_contenders(pair, cell.do_sample), draft_parts(pair)
    if cell.prompt_tokens:
        sizes = cell.batch, cell.prompt_tokens, cell.max_new_tokens
        turns = range(cell.repeats)  # each with other prompts
        batches = [prompts_of_length(pair, *sizes, turn * cell.batch, cell.seed + turn) for turn in turns]
    else:
        batches = whole_prompts(pair, cell.batch, cell.repeats, cell.max_new_tokens)
    both: Any = pair.tokenizer, pair.draft_tokenizer
    tokenizers = None if draft is None or same_tokens(*both) else both

    def make(name: str) -> Contender:
        contender = Contender(name, pair.target, draft, tokenizers=tokenizers, early_exit=early_exit)
        contender.prepare(batches[0])
        return contender

    made = provenance(pair.target) | {"seed": cell.seed, "command": command}
    made["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    seeds = range(cell.seed, cell.seed + cell.repeats)
    timings = Timer(make, batches, cell.options, seeds, advance, may_fail=names).time(names)
    torch.compiler.reset()
    parameters = [model.num_parameters() for model in (pair.target, draft) if model is not None]
    return {
        "cell": asdict(cell) | {"contenders": list(names)},
        "pair": dict(zip(("target_parameters", "draft_parameters"), parameters, strict=False)),
        "provenance": made,
        "contenders": {name: figures(timing, timings.get(PLAIN_NAME)) for name, timing in timings.items()},
    }


def figures(timing: Timing, plain: Timing | None) -> dict[str, Any]:
    """The runs of a contender with their medians; `plain` are those of plain `generate` in the same turns."""
    if timing.error is not None:
        return {"runs": [], "unavailable": timing.error}
    found: dict[str, Any] = {"runs": [{"seconds": run.seconds, "tokens": run.tokens} for run in timing.runs]}
    found |= {"first_seconds": timing.first_seconds, "tokens_per_second": spread(timing.rates)}
    if plain is not None and plain.runs:
        found |= {"times_plain": timing.times(plain), "speedup": spread(speedups(timing.rates, plain.rates))}
    known = {name: timing.median_of(name) for name in FIGURES}
    return found | {name: value for name, value in known.items() if value is not None}
