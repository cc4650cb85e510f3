"""Try drafts for a target: which of them fit, what they bring, how many tokens to draft. It prints nothing."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.devices import execution_device, hardware, last_device
from hf_specx.common.errors import require
from hf_specx.drafting.draft_length import FIXED_DRAFT_TOKENS
from hf_specx.drafting.suffix import SuffixDraft
from hf_specx.engine.strategy import SpeculativeDecoding
from hf_specx.hub.facts import model_facts, tokenizer_facts
from hf_specx.hub.fetch import SMALL_FILES, Files, fingerprint, get_files, get_model, get_tokenizer
from hf_specx.hub.load_model import load_config, load_model
from hf_specx.hub.pair_config import Measurement, ModelSource, PairConfig, SavedCosts, WeightlessDraft
from hf_specx.hub.schema import check_place
from hf_specx.pairs.loading import LoadedPair
from hf_specx.pairs.pair import DraftTargetPair

from .checks import looking_for
from .compatibility import ERROR, find_fit, find_own
from .inputs import Inputs, encode
from .store import provenance
from .study import DraftTrial, Study, named_drafts, weightless_draft
from .timer import Advance, Comparison, compare
from .ways import SEVERAL_EXITS


VERSIONS = ("hf_specx", "torch", "transformers", "python")


class Loaded(NamedTuple):
    """A model with its tokenizer, and what a config says of it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    facts: ModelSource


class LoadedDraft(NamedTuple):
    """A model likewise, or a draft without weights, which has no tokenizer and no facts."""

    model: PreTrainedModel | WeightlessDraft
    tokenizer: PreTrainedTokenizerBase | None = None
    facts: ModelSource = ModelSource()


def drafts_to_try(target: str, drafts: Sequence[str], study: Study, revision: str | None = None) -> list[str]:
    """The drafts of `tune` by name, with those that "exits" stands for; see `named_drafts`.

    Of the target at most the config is read.
    """
    if drafts and SEVERAL_EXITS not in drafts:
        return list(drafts)
    files = find_files(target, revision, study)
    return named_drafts(drafts, load_config(files, "", study.trust_remote_code))


def tune(
    target: str,
    drafts: Sequence[str],
    study: Study,
    revision: str | None = None,
    draft_revisions: Sequence[str | None] = (),
    advance: Advance = lambda: None,
) -> list[DraftTrial]:
    """Check whether each draft fits a target, measure those that fit, and put the best one first.

    Args:
        target: an id on the Hub or a folder.
        drafts: the same, or "suffix" or "exit:4" for a draft without weights; `drafts_to_try` knows what may help.
        study: how they are tried.
        revision: commit, branch or tag of the target on the Hub.
        draft_revisions: the same for each draft that is a model, in order; None is the main one.
        advance: called `len(drafts) * (1 + study.runs)` times at most, after each draft and each generation.

    Returns:
        The drafts that can be used by their measured speed-up, then the others; the first one has its `pair`.

    Raises:
        ValueError: for no draft or one given twice, and for a target that cannot be loaded or read the prompts; what
            is wrong with a draft is its `error`.
    """
    once = drafts and len(set(drafts)) == len(drafts)
    require(bool(once), f"drafts={list(drafts)!r}: give at least one, and each once.")
    models = [name for name in drafts if weightless_draft(name) is None]
    told = f"{len(draft_revisions)} revisions were given for {len(models)} drafts; give one for each, in their order."
    require(len(draft_revisions) in (0, len(models)), told)
    revisions = dict(itertools.zip_longest(models, draft_revisions))
    loaded = load(target, revision, study, study.device_map)
    batches = encode_batches(target, loaded, study)
    trials: list[DraftTrial] = []
    for name in drafts:
        trials.append(try_draft(loaded, name, revisions.get(name), batches, study, advance))
        trials.sort(key=lambda trial: (trial.error is not None, -trial.speedup))
        for other in trials[1:]:
            other.pair = None  # its weights are no longer needed
        advance()
    return trials


def find_files(name: str, revision: str | None, study: Study) -> Files:
    """All files of a model but its weights."""
    check_place(name, revision)
    with looking_for(name):
        return get_files(name, revision, SMALL_FILES, **study.hub)


def load(name: str, revision: str | None, study: Study, device_map: Any) -> Loaded:
    """A model and its tokenizer, if it has one, from an id or a folder."""
    trust, files = study.trust_remote_code, find_files(name, revision, study)
    with looking_for(name):
        files = get_model(files, ModelSource(), trust_remote_code=trust, use_safetensors=True, **study.hub)
    model = load_model(files, "", trust, dtype=study.dtype, device_map=device_map)
    tokenizer = get_tokenizer(files, "", None, trust)
    on_hub = files.revision is not None
    facts = replace(
        model_facts(model),
        name=files.name if on_hub else None,
        revision=files.revision,
        fingerprint=fingerprint(files.root),
    )
    if study.dtype != "auto" and on_hub:
        facts.dtype = None  # of the files, which the loaded weights no longer tell
    return Loaded(model, tokenizer, facts)


def encode_batches(name: str, target: Loaded, study: Study) -> dict[int, list[Inputs]]:
    """For each batch size, the inputs of all its runs."""
    if not study.prompts:
        return {}
    if target.tokenizer is None:
        raise ValueError(f"the target {name!r} has no tokenizer, so it cannot read prompts.")
    found: dict[int, list[Inputs]] = {}
    for size in study.batches:
        endless = itertools.cycle(study.prompts)
        texts = [list(itertools.islice(endless, size)) for _ in range(study.repeats)]
        found[size] = [encode(target.tokenizer, target.model, t, study.options["max_new_tokens"]) for t in texts]
    return found


def try_draft(
    target: Loaded,
    name: str,
    revision: str | None,
    batches: dict[int, list[Inputs]],
    study: Study,
    advance: Advance,
) -> DraftTrial:
    """Check one draft, and measure it if it fits."""
    trial = DraftTrial(name)
    try:
        weightless = weightless_draft(name)
        if weightless is None:
            found = load(name, revision, study, {"": last_device(target.model)})
            draft = LoadedDraft(*found)
            trial.findings = find_fit(target.model, found.model, target.tokenizer, found.tokenizer, study.prompts)
        else:
            draft = LoadedDraft(weightless)
            trial.findings = find_own(target.model, weightless)
        for finding in trial.findings:
            require(finding.verdict != ERROR, finding.follows)
        config = describe(target, draft, study)
        if study.prompts:
            measure_draft(target, draft, batches, study, config, advance)
    except (ValueError, OSError, RuntimeError) as error:  # the last is also for memory that is not enough
        trial.error = str(error)
        return trial
    trial.config, trial.pair = config, make_pair(target, draft, config)
    return trial


def make_pair(target: Loaded, draft: LoadedDraft, config: PairConfig) -> DraftTargetPair:
    """A pair that can be saved by reference, since it is known where its models are from."""
    sources: dict[str, ModelSource | None] = {"target": target.facts, "draft": draft.facts}
    loaded = LoadedPair(target.model, draft.model, target.tokenizer, draft.tokenizer, config, sources)
    return DraftTargetPair.from_loaded(loaded)


def describe(target: Loaded, draft: LoadedDraft, study: Study) -> PairConfig:
    """All that is known of a pair before it is measured."""
    tokenizer, own = target.tokenizer, draft.tokenizer
    config = PairConfig(
        target=target.facts,
        draft=replace(draft.facts, subfolder="draft" if draft.facts.name is None else ""),
        tokenizers=None if tokenizer is None or own is None else tokenizer_facts(tokenizer, own),
        verification=study.verification,
        prompts=list(study.prompts) if study.keep_prompts else [],
    )
    config.set_draft(draft.model if isinstance(draft.model, WeightlessDraft) else None)
    return config


def measure_draft(
    target: Loaded,
    draft: LoadedDraft,
    batches: dict[int, list[Inputs]],
    study: Study,
    config: PairConfig,
    advance: Advance,
) -> None:
    """Learn the acceptance, choose a number of drafts for each batch size, and time it; all into `config`."""
    chooses = isinstance(draft.model, SuffixDraft)  # the number itself, for each row
    strategy = SpeculativeDecoding(
        draft.model,
        num_draft_tokens="auto" if chooses else FIXED_DRAFT_TOKENS,
        verification=study.verification,
        tokenizer=target.tokenizer,
        draft_tokenizer=draft.tokenizer,
    )
    verification = _learn(target.model, strategy, batches[max(study.batches)][: study.learning], study, advance)
    for size in study.batches:
        if not chooses:
            strategy.calibrate(target.model, batches[size][0]["input_ids"])
            strategy.num_draft_tokens = strategy.costs.best_num_draft_tokens(size, verification)
        found = compare(target.model, strategy, batches[size], study.options, study.repeats, study.seed, advance)
        config.measurements.append(_measurement(size, target.model, strategy, found, study.command))
    numbers = {m.num_draft_tokens for m in config.measurements}
    known = len(study.batches) > 1 and len(numbers) == 1 and verification != "greedy" and not chooses
    config.num_draft_tokens = numbers.pop() if known else "auto"
    last = config.measurements[-1]
    config.costs = SavedCosts(last.hardware, last.dtype, **strategy.costs.to_dict())


def _learn(
    target: PreTrainedModel,
    strategy: SpeculativeDecoding,
    batches: list[Inputs],
    study: Study,
    advance: Advance,
) -> str:
    """Put the acceptance on the prompts into the costs, not weighed against what is assumed of any draft.

    Returns:
        The verification, as reports call it.
    """
    reports = []
    for run, inputs in enumerate(batches):
        torch.manual_seed(study.seed + run)
        target.generate(**inputs, **study.options, custom_generate=strategy)  # type: ignore[operator]
        assert strategy.report is not None
        reports.append(strategy.report)
        advance()
    kept, tried = (sum(report.survival[part] for report in reports) for part in range(2))
    if tried:
        strategy.costs.alpha[reports[0].verification] = kept / tried
    return reports[0].verification


def _measurement(
    size: int, target: PreTrainedModel, strategy: SpeculativeDecoding, found: Comparison, command: str
) -> Measurement:
    report, made, ratios = found.ours.reports[0], provenance(target), found.ratios
    draft, number = strategy.draft_model, strategy.num_draft_tokens
    return Measurement(
        batch=size,
        dtype=made["dtype"],
        verification=report.verification,
        num_draft_tokens=draft.max_candidates if isinstance(draft, SuffixDraft) else int(number),
        layout=report.layout,
        cost_coefficient=strategy.costs.cost_coefficient(size) or None,  # 0 where a draft runs no forwards
        tokens_per_round=ratios.pop("mean_acceptance_length"),
        **ratios,
        hardware=hardware(execution_device(target)),
        versions={name: made[name] for name in VERSIONS},
        command=command,
    )
