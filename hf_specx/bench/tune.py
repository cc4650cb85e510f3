"""Try drafts for a target: which of them fit, and which is fastest. Nothing is printed."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.devices import last_device
from hf_specx.common.drafts import (
    DRAFT_FOLDER,
    EXIT,
    SEVERAL_EXITS,
    SUFFIX,
    check_head,
    read_draft,
    split_revision,
)
from hf_specx.common.errors import require
from hf_specx.common.load_model import load_config
from hf_specx.drafting.heads.draft_names import weightless_draft
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
from hf_specx.hub.known_pairs import folder_of, is_embedded
from hf_specx.hub.pair_config import ModelSource, PairConfig, WeightlessDraft
from hf_specx.hub.pair_models import load_model_or_head
from hf_specx.hub.quantize import quantization_config
from hf_specx.pairs.pair import DraftTargetPair

from .compatibility import ERROR, describe_draft, find_fit
from .inputs import generation_settings, prompt_rows
from .measure_draft import measure_draft
from .timer import Advance
from .tune_settings import DraftTrial, TuneSettings


TRIED_SHARES = (1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2)  # of the target's layers; beyond a half nothing is gained


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
    settings = replace(settings, options=generation_settings(loaded.model, settings.options), drafts=len(drafts))
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
        f"{name} is a pair, and no draft; name the draft in it, as {name}/{DRAFT_FOLDER}.",
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
    model = load_model_or_head(files, trust, target_model, dtype=settings.dtype, device_map=device_map, **quantized)
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
        raise ValueError(
            f"{path} has base_model_name_or_path={base_name!r}, which cannot be loaded ({error}); write there the id "
            "or folder of the model that the adapter was trained on."
        ) from error
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
            draft=replace(draft.facts, subfolder=DRAFT_FOLDER if draft.facts.name is None else ""),
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
