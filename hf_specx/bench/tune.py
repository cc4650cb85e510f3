"""Try drafts for a target: which of them fit, how fast each is, how many tokens to draft. Nothing is printed."""

import hashlib
import itertools
import json
import operator
import random
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.devices import execution_device, hardware, last_device
from hf_specx.common.drafts import (
    EXIT,
    FIXED_DRAFT_TOKENS,
    SEVERAL_EXITS,
    SUFFIX,
    check_head,
    read_draft,
    split_revision,
)
from hf_specx.common.errors import require
from hf_specx.drafting.candidates import make_drafter
from hf_specx.drafting.heads.draft_names import weightless_draft
from hf_specx.drafting.suffix import SuffixDraft
from hf_specx.engine.strategy import SpeculativeDecoding
from hf_specx.hub.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, base_of, is_adapter, merged
from hf_specx.hub.facts import model_facts, tokenizer_facts
from hf_specx.hub.fetch import (
    SMALL_FILES,
    find_draft_files,
    find_files,
    fingerprint,
    get_files,
    get_model,
    get_settings,
    get_tokenizer,
)
from hf_specx.hub.known_pairs import DRAFT_MODEL, folder_of, is_embedded
from hf_specx.hub.load_model import load_config, load_model
from hf_specx.hub.pair_config import Measurement, ModelSource, PairConfig, SavedCosts, WeightlessDraft
from hf_specx.hub.quantize import quantization_config
from hf_specx.pairs.pair import DraftTargetPair

from .compatibility import ERROR, describe_draft, find_fit
from .inputs import batches_of, prompt_rows, settings_of
from .sequential_test import Interval
from .store import provenance
from .timed_methods import TimedMethod
from .timer import Advance, Comparison, compare, time_call
from .tune_settings import DraftTrial, TuneSettings


TRIED_SHARES = (1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2)  # of the target's layers; beyond a half nothing is gained
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # that a measurement names
MAX_TURNS = 2**20  # never reached: time is up before
VERSIONS = ("hf_specx", "torch", "transformers", "python")


class Loaded(NamedTuple):
    """A model, or a draft without weights; its tokenizer, and what a config says of it."""

    model: Any
    tokenizer: PreTrainedTokenizerBase | None = None
    facts: ModelSource = ModelSource()


def drafts_to_try(target: str, drafts: Sequence[str], settings: TuneSettings) -> list[str]:
    """The names of drafts for `tune`, with one "exit:N" for each number N of layers worth trying in place of "exits".

    Without `drafts`, all those that need no second model. At most the config of the target is read.
    """
    if drafts and SEVERAL_EXITS not in drafts:
        return list(drafts)
    trust = settings.trust_remote_code
    files = find_files(folder_of(target))
    if is_adapter(files):
        files = find_files(folder_of(base_of(files)))
    config = load_config(get_settings(files, ModelSource(), trust), trust)
    exits = [f"{EXIT}{number}" for number in exit_layers(config)]
    names = [exits if name == SEVERAL_EXITS else [name] for name in drafts or (SUFFIX, SEVERAL_EXITS)]
    return list(dict.fromkeys(itertools.chain.from_iterable(names)))


def exit_layers(config: PreTrainedConfig) -> list[int]:
    """The numbers of first layers worth trying as a draft for a target with this config."""
    if config.is_encoder_decoder:
        return []
    layers = config.get_text_config(decoder=True).num_hidden_layers
    numbers = {round(share * layers) for share in TRIED_SHARES}
    return sorted(number for number in numbers if 1 <= number < layers)


def tune(
    target: str, drafts: Sequence[str], settings: TuneSettings, advance: Advance = lambda: None
) -> list[DraftTrial]:
    """Check whether each draft fits a target, measure those that fit, and put the best one first.

    The target is an id on the Hub, perhaps with "@" and a commit, branch or tag behind it, a folder, or "embedded",
    that of the pair in the package; drafts are named as in `read_draft`. `advance` is called after each run and each
    draft. Those that were shown to be faster than plain `generate` come first, by measured speed-up, then those that
    were not, then others, with their `error`.

    Raises:
        ValueError: for no draft or one given twice, and for a target that cannot be loaded or read the prompts.
    """
    require(
        bool(drafts) and len(set(drafts)) == len(drafts), f"drafts={list(drafts)!r}: give at least one, and each once."
    )
    loaded = load(target, settings, settings.device_map)
    settings = replace(settings, options=settings_of(loaded.model, settings.options), drafts=len(drafts))
    ids = read_prompts(target, loaded, settings)
    trials: list[DraftTrial] = []
    for name in drafts:
        trials.append(try_draft(loaded, name, ids, settings, advance))
        trials.sort(key=lambda trial: (trial.error is not None, not trial.recommended, -trial.speedup))
        for other in trials[1:]:
            other.pair = None  # its weights are no longer needed
        advance()
    return trials


def load(name: str, settings: TuneSettings, device_map: Any, target: Loaded | None = None) -> Loaded:
    """Load a model from an id or a folder, with its tokenizer if it has one; for a `target` it may be a draft head."""
    require(
        target is None or not is_embedded(name),
        f"{name} is a pair, and no draft; name the draft in it, as {name}/{DRAFT_MODEL}.",
    )
    name = folder_of(name)
    trust = settings.trust_remote_code
    files = find_files(name) if target is None else find_draft_files(name)
    if target is None and is_adapter(files):
        return load_adapter(name, settings, device_map)
    files = get_model(files, ModelSource(), trust_remote_code=trust, use_safetensors=True)
    target_model = None if target is None else target.model
    quantized: dict[str, Any] = {}
    if target is None and settings.quantize is not None:
        quantized["quantization_config"] = quantization_config(settings.quantize)
    model = load_model(files, trust, target_model, dtype=settings.dtype, device_map=device_map, **quantized)
    facts = replace(model_facts(model), fingerprint=fingerprint(files.root))
    if settings.dtype != "auto" and facts.name is not None:
        facts.dtype = None  # of the files, which the loaded weights no longer tell
    if target is not None and not model.can_generate():  # a head, whose tokens are the target's
        return Loaded(model, target.tokenizer, facts)
    return Loaded(model, get_tokenizer(files, None, trust), facts)


def load_adapter(name: str, settings: TuneSettings, device_map: Any) -> Loaded:
    """The model that an adapter of PEFT was trained on, with the adapter merged into it, and its tokenizer."""
    require(
        settings.quantize is None,
        f"{name} is an adapter, which is merged into its model, and weights of few bits cannot take it up; leave "
        "--quantize out, or merge it by peft and save the model.",
    )
    files = get_files(*split_revision(name), (*SMALL_FILES, ADAPTER_WEIGHTS))
    base_name = base_of(files)
    try:
        base = load(base_name, settings, device_map)
    except (OSError, ValueError) as error:
        path = files.root / ADAPTER_CONFIG
        message = (
            f"{path} has base_model_name_or_path={base_name!r}, which cannot be loaded ({error}); write there the "
        )
        raise ValueError(f"{message}id or folder of the model that the adapter was trained on.") from error
    model = merged(base.model, files)
    tokenizer = get_tokenizer(files, None, settings.trust_remote_code) or base.tokenizer
    return Loaded(model, tokenizer, replace(model_facts(model), name=None, revision=None))


def read_prompts(name: str, target: Loaded, settings: TuneSettings) -> list[list[int]]:
    """The token ids of the prompts; a ValueError if the target of this name cannot read or continue them."""
    if not settings.prompts:
        return []
    if target.tokenizer is None:
        raise ValueError(f"the target {name!r} has no tokenizer, so it cannot read prompts.")
    new_tokens = settings.options["max_new_tokens"]
    require(new_tokens >= 3, f"max_new_tokens={new_tokens} leaves no round to time; give 3 or more.")
    return prompt_rows(target.tokenizer, target.model, settings.prompts, new_tokens)


def try_draft(target: Loaded, name: str, ids: list[list[int]], settings: TuneSettings, advance: Advance) -> DraftTrial:
    """Check one draft, and measure it if it fits."""
    trial = DraftTrial(name)
    try:
        draft = Loaded(weightless_draft(name))
        if draft.model is None:
            draft = load(read_draft(name).model or name, settings, {"": last_device(target.model)}, target)
            check_head(name, draft.model)
        if isinstance(draft.model, PreTrainedModel) and draft.model.can_generate():
            trial.findings = find_fit(target.model, draft.model, target.tokenizer, draft.tokenizer)
        else:
            trial.findings = describe_draft(target.model, draft.model)
        for finding in trial.findings:
            require(finding.verdict != ERROR, finding.follows)
        tokenizers = None
        if target.tokenizer is not None and draft.tokenizer is not None:
            tokenizers = tokenizer_facts(target.tokenizer, draft.tokenizer)
        config = PairConfig(
            target=target.facts,
            draft=replace(draft.facts, subfolder="draft" if draft.facts.name is None else ""),
            tokenizers=tokenizers,
        )
        config.set_draft(draft.model if isinstance(draft.model, WeightlessDraft) else None)
        pair = DraftTargetPair(target.model, draft.model, target.tokenizer, config, draft.tokenizer)
        pair.sources = {"target": target.facts, "draft": draft.facts}
        if ids:
            trial.misread = measure_draft(pair, ids, settings, advance)
    except (ValueError, OSError, RuntimeError) as error:  # the last is also for memory that is not enough
        trial.error = str(error)
    else:
        trial.pair, trial.config = pair, config
    return trial


def measure_draft(pair: DraftTargetPair, ids: list[list[int]], settings: TuneSettings, advance: Advance) -> str:
    """Measure a pair on prompts, and write figures and recommendations into its config, in place of earlier ones.

    The acceptance is learned first; from it follows the number of candidates for each batch size, which is then timed.
    Prompts are shuffled by the seed, so that those that come before the time is up are like the others. End tokens are
    ignored, so that all texts are equally long.

    Returns a reason if the draft's files look as if they were read in a wrong way, else "".
    """
    target, config = pair.target, pair.config
    shuffled = random.Random(settings.seed).sample(ids, len(ids))
    batches = {rows: batches_of(target, pair.tokenizer, shuffled, rows) for rows in settings.batches}
    options = settings.options | {"eos_token_id": None}
    chooses_number = isinstance(pair.draft, SuffixDraft)  # itself, for each row
    strategy = SpeculativeDecoding(
        pair.draft,
        num_draft_tokens="auto" if chooses_number else FIXED_DRAFT_TOKENS,
        tokenizer=pair.tokenizer,
        draft_tokenizer=pair.draft_tokenizer,
    )
    method, reports = TimedMethod("ours", target, strategy=strategy), list[Any]()
    for run, inputs in enumerate(batches[max(settings.batches)][: settings.num_learning_batches]):
        reports.append(time_call(method, inputs, options, settings.seed + run).report)
        advance()
    learned: Any = reduce(operator.add, reports)
    if not learned.rounds and not chooses_number:
        warnings.warn(f"nothing was drafted ({learned.layout_reason}), so its speed tells nothing.", stacklevel=2)
    if learned.acceptance_sums[1]:
        strategy.costs.alpha[learned.verification] = learned.conditional_acceptance
    if not chooses_number:
        for rows in settings.batches:
            strategy.calibrate(target, batches[rows][0]["input_ids"])
    max_candidates = make_drafter(pair.draft, target).max_candidates
    measurements = []
    for rows in settings.batches:
        if not chooses_number:
            number = strategy.costs.best_num_draft_tokens(rows, learned.verification, max_candidates)
            strategy.num_draft_tokens = number
        test = settings.sequential_test(len(batches[rows]))
        comparison = compare(
            target,
            strategy,
            batches[rows],
            options,
            MAX_TURNS,
            settings.seed,
            advance,
            rng=random.Random(settings.seed),
            should_stop=lambda plain, ours: test.should_stop(plain.seconds, ours.seconds),  # noqa: B023
        )
        measurements.append(_measurement(rows, target, strategy, comparison, test.interval, shuffled, settings))
    config.measurements = measurements
    config.num_draft_tokens = "auto"
    if not config.pays:
        config.num_draft_tokens = 0
    elif len(settings.batches) > 1 and learned.verification != "greedy" and not chooses_number:
        numbers = {m.num_draft_tokens for m in measurements}
        if len(numbers) == 1 and all(m.is_faster for m in measurements):
            config.num_draft_tokens = numbers.pop()
    last = measurements[-1]
    config.costs = SavedCosts(last.hardware, last.dtype, **strategy.costs.to_dict())
    pair.strategy = pair._strategy()
    return str(learned.misread_reason)


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
