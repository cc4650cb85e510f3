"""Try drafts for a target: which of them fit, what they bring, how many tokens to draft. It prints nothing."""

import itertools
import operator
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.devices import execution_device, hardware, last_device
from hf_specx.common.drafts import EXIT, SEVERAL_EXITS, SUFFIX, check_head, read_draft
from hf_specx.common.errors import require
from hf_specx.drafting.candidates import make_drafter
from hf_specx.drafting.draft_length import FIXED_DRAFT_TOKENS
from hf_specx.drafting.heads.named import weightless_draft
from hf_specx.drafting.suffix import SuffixDraft
from hf_specx.engine.strategy import SpeculativeDecoding
from hf_specx.hub.facts import model_facts, tokenizer_facts
from hf_specx.hub.fetch import find_draft_files, find_files, fingerprint, get_model, get_settings, get_tokenizer
from hf_specx.hub.load_model import load_config, load_model
from hf_specx.hub.pair_config import Measurement, ModelSource, PairConfig, SavedCosts, WeightlessDraft
from hf_specx.pairs.pair import DraftTargetPair

from .compatibility import ERROR, find_fit, find_own
from .contenders import Contender
from .inputs import Inputs, encode, settings_of
from .prediction import Prediction
from .store import provenance
from .study import DraftTrial, Study
from .timer import Advance, Comparison, compare, time_call


TRIED_SHARES = (1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2)  # of the target's layers; beyond a half nothing is gained
TOO_SHORT = "texts ended before anything was drafted, so their speed tells nothing; give prompts with longer answers, "
TOO_SHORT += "and a chat model chats (--chat)."
VERSIONS = ("hf_specx", "torch", "transformers", "python")


class Loaded(NamedTuple):
    """A model, or a draft without weights; its tokenizer, and what a config says of it."""

    model: Any
    tokenizer: PreTrainedTokenizerBase | None = None
    facts: ModelSource = ModelSource()


def drafts_to_try(target: str, drafts: Sequence[str], study: Study) -> list[str]:
    """The drafts of `tune` by name: "exits" stands for an "exit:4" of each number of layers that is worth trying.

    Without drafts they are all that need no other model. Of the target at most the config is read.
    """
    if drafts and SEVERAL_EXITS not in drafts:
        return list(drafts)
    trust = study.trust_remote_code
    config = load_config(get_settings(find_files(target), ModelSource(), trust), trust)
    exits = [f"{EXIT}{number}" for number in exit_layers(config)]
    named = [exits if name == SEVERAL_EXITS else [name] for name in drafts or (SUFFIX, SEVERAL_EXITS)]
    return list(dict.fromkeys(itertools.chain.from_iterable(named)))


def exit_layers(config: PreTrainedConfig) -> list[int]:
    """Numbers of first layers that are worth trying as a draft of a target with this config."""
    if config.is_encoder_decoder:
        return []
    layers = config.get_text_config(decoder=True).num_hidden_layers
    return sorted({number for share in TRIED_SHARES if 1 <= (number := round(share * layers)) < layers})


def tune(target: str, drafts: Sequence[str], study: Study, advance: Advance = lambda: None) -> list[DraftTrial]:
    """Check whether each draft fits a target, measure those that fit, and put the best one first.

    The target is an id on the Hub, perhaps with "@" and a commit, branch or tag behind it, or a folder; drafts are
    named as in `read_draft`. `advance` is called `len(drafts) * (1 + study.runs)` times at most. Behind those that can
    be used, by measured speed-up, come the others, each with its `error`.

    Raises:
        ValueError: for no draft or one given twice, and for a target that cannot be loaded or read the prompts.
    """
    once = drafts and len(set(drafts)) == len(drafts)
    require(bool(once), f"drafts={list(drafts)!r}: give at least one, and each once.")
    loaded = load(target, study, study.device_map)
    study = replace(study, options=settings_of(loaded.model, study.options))
    batches = encode_batches(target, loaded, study)
    trials: list[DraftTrial] = []
    for name in drafts:
        trials.append(try_draft(loaded, name, batches, study, advance))
        trials.sort(key=lambda trial: (trial.error is not None, -trial.speedup))
        for other in trials[1:]:
            other.pair = None  # its weights are no longer needed
        advance()
    return trials


def load(name: str, study: Study, device_map: Any, target: Loaded | None = None) -> Loaded:
    """A model and its tokenizer, if it has one, from an id or a folder; the draft of a target may be a head."""
    trust, files = study.trust_remote_code, find_files(name) if target is None else find_draft_files(name)
    files = get_model(files, ModelSource(), trust_remote_code=trust, use_safetensors=True)
    of_target = None if target is None else target.model
    model = load_model(files, trust, of_target, dtype=study.dtype, device_map=device_map)
    facts = replace(model_facts(model), fingerprint=fingerprint(files.root))
    if study.dtype != "auto" and facts.name is not None:
        facts.dtype = None  # of the files, which the loaded weights no longer tell
    if target is not None and not model.can_generate():  # a head, whose tokens are the target's
        return Loaded(model, target.tokenizer, facts)
    return Loaded(model, get_tokenizer(files, None, trust), facts)


def encode_batches(name: str, target: Loaded, study: Study) -> dict[int, list[Inputs]]:
    if not study.prompts:
        return {}
    tokenizer, found = target.tokenizer, {}
    if tokenizer is None:
        raise ValueError(f"the target {name!r} has no tokenizer, so it cannot read prompts.")
    for size in study.batches:
        endless = itertools.cycle(study.prompts)
        texts = [list(itertools.islice(endless, size)) for _ in range(study.repeats)]
        found[size] = [encode(tokenizer, target.model, each, study.options["max_new_tokens"]) for each in texts]
    return found


def try_draft(
    target: Loaded, name: str, batches: dict[int, list[Inputs]], study: Study, advance: Advance
) -> DraftTrial:
    """Check one draft, and measure it if it fits."""
    trial = DraftTrial(name)
    try:
        draft = Loaded(weightless_draft(name))
        if draft.model is None:
            draft = load(read_draft(name).model or name, study, {"": last_device(target.model)}, target)
            check_head(name, draft.model)
        if isinstance(draft.model, PreTrainedModel) and draft.model.can_generate():
            trial.findings = find_fit(target.model, draft.model, target.tokenizer, draft.tokenizer)
        else:
            trial.findings = find_own(target.model, draft.model)
        for finding in trial.findings:
            require(finding.verdict != ERROR, finding.follows)
        both = target.tokenizer, draft.tokenizer
        config = PairConfig(
            target=target.facts,
            draft=replace(draft.facts, subfolder="draft" if draft.facts.name is None else ""),
            tokenizers=None if None in both else tokenizer_facts(*both),  # type: ignore[arg-type]
        )
        config.set_draft(draft.model if isinstance(draft.model, WeightlessDraft) else None)
        pair = DraftTargetPair(target.model, draft.model, target.tokenizer, config, draft.tokenizer)
        pair.sources = {"target": target.facts, "draft": draft.facts}
        if study.prompts:
            trial.misread = measure_draft(pair, batches, study, advance)
    except (ValueError, OSError, RuntimeError) as error:  # the last is also for memory that is not enough
        trial.error = str(error)
    else:
        trial.pair, trial.config = pair, config
    return trial


def measure_draft(pair: DraftTargetPair, batches: dict[int, list[Inputs]], study: Study, advance: Advance) -> str:
    """Learn the acceptance, choose a number of drafts for each batch size, and time it; all into the pair's config.

    It comes in the place of what was there. Returns why the draft's files look as if they were misread, if they do.
    """
    target, config, measurements = pair.target, pair.config, list[Measurement]()
    chooses = isinstance(pair.draft, SuffixDraft)  # the number itself, for each row
    strategy = SpeculativeDecoding(
        pair.draft,
        num_draft_tokens="auto" if chooses else FIXED_DRAFT_TOKENS,
        tokenizer=pair.tokenizer,
        draft_tokenizer=pair.draft_tokenizer,
    )
    contender, reports = Contender("ours", target, strategy=strategy), list[Any]()
    for run, inputs in enumerate(batches[max(study.batches)][: study.learning]):
        reports.append(time_call(contender, inputs, study.options, study.seed + run).report)
        advance()
    report: Any = reduce(operator.add, reports)
    if not report.rounds and not chooses:
        warnings.warn(TOO_SHORT, UserWarning, stacklevel=2)
    if report.survival[1]:
        strategy.costs.alpha[report.verification] = report.survival_rate
    for size in () if chooses else study.batches:
        strategy.calibrate(target, batches[size][0]["input_ids"])
    most = make_drafter(pair.draft, target).max_candidates
    for size in study.batches:
        if not chooses:
            strategy.num_draft_tokens = strategy.costs.best_num_draft_tokens(size, report.verification, most)
        found = compare(target, strategy, batches[size], study.options, study.repeats, study.seed, advance)
        measured = _measurement(size, target, strategy, found, study.command)
        if report.rounds and not chooses:
            room = min(strategy.num_draft_tokens, study.options["max_new_tokens"] - 1)
            prediction = Prediction(strategy.costs.alpha.get(report.verification, 0.0), room)
            measured.predicted_speedup = prediction.speedup(found)
            measured.why_not_predicted = prediction.why_not(found)
        measurements.append(measured)
    config.measurements = measurements
    numbers = {m.num_draft_tokens for m in config.measurements}
    faster = all(m.measured_speedup > 1 for m in config.measurements)
    known = len(study.batches) > 1 and len(numbers) == 1 and report.verification != "greedy" and not chooses
    config.num_draft_tokens = 0 if not config.pays else numbers.pop() if known and faster else "auto"
    last = config.measurements[-1]
    config.costs = SavedCosts(last.hardware, last.dtype, **strategy.costs.to_dict())
    pair.strategy = pair._strategy()
    return str(report.misread_reason)


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
        plain_tokens_per_second=found.plain.tokens_per_second,
    )
