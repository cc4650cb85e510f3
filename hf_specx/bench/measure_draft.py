"""Measure a pair on prompts: how fast it is at each batch size, and what its config recommends for that reason."""

import hashlib
import json
import operator
import random
import statistics
import warnings
from dataclasses import replace
from functools import reduce
from typing import Any

from transformers import PreTrainedModel

from hf_specx.common.devices import execution_device, hardware
from hf_specx.common.drafts import FIXED_DRAFT_TOKENS
from hf_specx.drafting.candidates import make_drafter
from hf_specx.drafting.suffix import SuffixDraft
from hf_specx.engine.report import SpeculationReport
from hf_specx.engine.strategy import SpeculativeDecoding
from hf_specx.hub.pair_config import Measurement, SavedCosts
from hf_specx.pairs.pair import DraftTargetPair

from .inputs import Inputs, batches_of
from .sequential_test import Interval
from .store import provenance
from .timed_methods import TimedMethod
from .timer import Advance, Comparison, compare, time_call
from .tune_settings import TuneSettings


SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # that a measurement names
MAX_TURNS = 2**20  # never reached: time is up before
VERSIONS = ("hf_specx", "torch", "transformers", "python")


def measure_draft(pair: DraftTargetPair, ids: list[list[int]], settings: TuneSettings, advance: Advance) -> str:
    """Measure a pair on prompts, and write figures and recommendations into its config, in place of earlier ones.

    First its acceptance is learned. The number of candidates that follows from it is then timed, at each batch size,
    in turns with plain `generate`. Prompts are shuffled by the seed, so that those that come before the time is up are
    like the others. End tokens are ignored, so that all texts are equally long.

    Returns:
        A reason if the draft's files look as if they were misread, else "".
    """
    shuffled = random.Random(settings.seed).sample(ids, len(ids))
    batches = {rows: batches_of(pair.target, pair.tokenizer, shuffled, rows) for rows in settings.batches}
    settings = replace(settings, options=settings.options | {"eos_token_id": None})
    strategy = strategy_to_measure(pair)
    learned = learn_acceptance(pair.target, strategy, batches[max(settings.batches)], settings, advance)
    if has_fixed_number(pair):
        for batches_of_size in batches.values():
            strategy.calibrate(pair.target, batches_of_size[0]["input_ids"])
    measurements = []
    for rows in settings.batches:
        if has_fixed_number(pair):
            most = make_drafter(pair.draft, pair.target).max_candidates
            number = strategy.costs.best_fixed_num_draft_tokens(rows, learned.verification, most)
            strategy.num_draft_tokens = number
        comparison, interval = compare_until_clear(pair.target, strategy, batches[rows], settings, advance)
        measurements.append(_measurement(rows, pair.target, strategy, comparison, interval, shuffled, settings))
    config = pair.config
    config.measurements = measurements
    config.num_draft_tokens = recommended_number(pair, learned.verification)
    config.costs = SavedCosts(measurements[-1].hardware, measurements[-1].dtype, **strategy.costs.to_dict())
    pair.strategy = pair._strategy()
    return str(learned.misread_reason)


def has_fixed_number(pair: DraftTargetPair) -> bool:
    """Whether a pair is measured with one number of candidates; a `SuffixDraft` chooses it for each row and round."""
    return not isinstance(pair.draft, SuffixDraft)


def strategy_to_measure(pair: DraftTargetPair) -> SpeculativeDecoding:
    """A strategy with the pair's draft and tokenizers, and nothing that was learned or recommended before."""
    return SpeculativeDecoding(
        pair.draft,
        num_draft_tokens=FIXED_DRAFT_TOKENS if has_fixed_number(pair) else "auto",
        tokenizer=pair.tokenizer,
        draft_tokenizer=pair.draft_tokenizer,
    )


def learn_acceptance(
    target: PreTrainedModel,
    strategy: SpeculativeDecoding,
    batches: list[Inputs],
    settings: TuneSettings,
    advance: Advance,
) -> SpeculationReport:
    """Generate for a few batches, so that `strategy.costs` has their acceptance; returns the report of all."""
    method = TimedMethod("ours", target, strategy=strategy)
    reports: list[Any] = []
    for run, inputs in enumerate(batches[: settings.num_learning_batches]):
        reports.append(time_call(method, inputs, settings.options, settings.seed + run).report)
        advance()
    report: SpeculationReport = reduce(operator.add, reports)
    if not report.rounds and strategy.num_draft_tokens != "auto":
        warnings.warn(f"nothing was drafted ({report.layout_reason}), so its speed tells nothing.", stacklevel=3)
    if report.acceptance_sums[1]:  # as seen here, without what calls add to it by assumption
        strategy.costs.alpha[report.verification] = report.conditional_acceptance
    return report


def compare_until_clear(
    target: PreTrainedModel,
    strategy: SpeculativeDecoding,
    batches: list[Inputs],
    settings: TuneSettings,
    advance: Advance,
) -> tuple[Comparison, Interval]:
    """Time a strategy in turns with plain `generate`, until it is clear which is faster or time is up.

    Returns:
        The timings, and the interval of the speed-up.
    """
    test = settings.sequential_test(len(batches))
    comparison = compare(
        target,
        strategy,
        batches,
        settings.options,
        MAX_TURNS,
        settings.seed,
        advance,
        rng=random.Random(settings.seed),
        should_stop=lambda plain, ours: test.should_stop(plain.seconds, ours.seconds),
    )
    return comparison, test.interval


def recommended_number(pair: DraftTargetPair, verification: str) -> int | str:
    """The `num_draft_tokens` that the measurements of a pair speak for: 0, one number, or "auto".

    It is 0, plain decoding, if all batch sizes were shown to be slower. A number is recommended only where "auto"
    would gain little by learning: several batch sizes were shown to be faster, all with the same number, and texts
    were sampled, so that "auto" may not go by the clock.
    """
    config = pair.config
    if not config.pays:
        return 0
    numbers = {measured.num_draft_tokens for measured in config.measurements}
    all_faster = all(measured.is_faster for measured in config.measurements)
    if len(config.measurements) < 2 or len(numbers) > 1 or not all_faster:
        return "auto"
    is_greedy = verification == "greedy"  # "auto" then goes by the clock
    return "auto" if is_greedy or not has_fixed_number(pair) else numbers.pop()


def _measurement(
    rows: int,
    target: PreTrainedModel,
    strategy: SpeculativeDecoding,
    comparison: Comparison,
    interval: Interval,
    ids: list[list[int]],
    settings: TuneSettings,
) -> Measurement:
    """The figures of one batch size over all turns; the speed-up compares tokens of all turns over their seconds."""
    plain, ours = comparison.plain, comparison.ours
    report = reduce(operator.add, ours.reports)
    where = provenance(target)
    draft, turns = strategy.draft_model, len(ours.runs)
    sampling: dict[str, Any] = {name: settings.options.get(name) for name in SAMPLING}
    return Measurement(
        batch=rows,
        dtype=where["dtype"],
        verification=report.verification,
        num_draft_tokens=draft.max_candidates if isinstance(draft, SuffixDraft) else int(strategy.num_draft_tokens),
        layout=report.layout,
        alpha=report.alpha,
        cost_coefficient=strategy.costs.cost_coefficient(rows) or None,  # 0 where a draft runs no forwards
        tokens_per_round=report.mean_acceptance_length,
        expected_speedup=report.expected_speedup,
        forward_limited_speedup=report.forward_limited_speedup,
        measured_speedup=ours.pooled_rate / plain.pooled_rate,
        hardware=hardware(execution_device(target)),
        versions={name: where[name] for name in VERSIONS},
        command=settings.command,
        plain_tokens_per_second=plain.pooled_rate,
        interval_low=interval.low,
        interval_high=interval.high,
        turns=turns,
        turn_spread=statistics.stdev(ours.speedups(plain)) if turns > 1 else None,
        **sampling,
        max_new_tokens=settings.options["max_new_tokens"],
        prompts=min(turns * rows, len(ids)),
        prompt_tokens=statistics.fmean(map(len, ids)),
        prompts_digest=hashlib.sha256(json.dumps(sorted(ids)).encode()).hexdigest(),
        seed=settings.seed,
    )
