"""Load the two models of a pair and their tokenizers: one inside the pair, one from elsewhere, wherever they are."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.devices import last_device
from hf_specx.pair_files.facts import model_facts
from hf_specx.pair_files.fetch import (
    HUB_OPTIONS,
    SMALL_FILES,
    Files,
    fingerprint,
    get_files,
    get_model,
    get_pair,
    get_tokenizer,
    is_changed,
)
from hf_specx.pair_files.find_draft import KIND, facts_beside, warn_of_another_target
from hf_specx.pair_files.loading import load_config, load_model
from hf_specx.pair_files.model_files import check_facts
from hf_specx.pair_files.pair_config import ModelSource, PairConfig
from hf_specx.pair_files.schema import check_loading, check_place

from .placement import CACHE_TOKENS, plan


FOR_TARGET = ("quantization_config", "offload_folder")


class LoadedPair(NamedTuple):
    """The parts of a `DraftTargetPair`.

    Attributes:
        sources: where each model was loaded from, for saving by reference; by role.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    draft_tokenizer: PreTrainedTokenizerBase | None
    config: PairConfig
    sources: dict[str, ModelSource | None]


def load_pair(
    name_or_path: str | Path,
    *,
    device_map: Any = None,
    draft_device_map: Any = None,
    max_memory: dict[int | str, int | str] | None = None,
    cache_tokens: int = CACHE_TOKENS,
    dtype: Any = "auto",
    target: PreTrainedModel | str | Path | None = None,
    draft: PreTrainedModel | str | Path | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    use_safetensors: bool = True,
    draft_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> LoadedPair:
    """The models and tokenizers of a pair, once all files were checked.

    Args:
        name_or_path: a folder, or an id on the Hub.
        device_map, draft_device_map, max_memory, cache_tokens: where the models go, as in `plan`.
        dtype: of both models; "auto" is as they were saved.
        target, draft: a model, or a folder or id of one, to take in place of the pair's own.
        revision: commit, branch or tag of the pair; models that it has by reference have theirs in its config.
        trust_remote_code: whether models and tokenizers may be classes of their own.
        use_safetensors: False also loads pickles, which may run code.
        draft_kwargs: for the draft's `from_pretrained` alone.
        **kwargs: those of `HUB_OPTIONS`; the rest is for `from_pretrained`, `quantization_config` of the target's.

    Raises:
        ValueError: for anything in the pair's files that is not as it should be.
    """
    own = _own(kwargs, draft_kwargs or {})
    hub = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
    trust = {"trust_remote_code": trust_remote_code}
    shared = kwargs | trust | {"dtype": dtype, "use_safetensors": use_safetensors or None}
    room = {"max_memory": max_memory, "cache_tokens": cache_tokens, "dtype": dtype} | trust
    pair, config = get_pair(name_or_path, revision, **hub)
    places = {
        "target": _find(pair, config.target, target, hub, use_safetensors=use_safetensors, **trust),
        "draft": _find(pair, config.draft, draft, hub, use_safetensors=use_safetensors, **trust),
    }
    if any(place.changed for place in places.values()):
        config.forget()
    tokenizers = _tokenizers(pair, places, config, trust_remote_code)
    maps = _plan(places, own, device_map, draft_device_map, **room)
    models = {role: _load(place, **shared | own[role] | maps[role]) for role, place in places.items()}
    warn_of_another_target(config, models["target"])
    sources = {role: _reference(place) for role, place in places.items()}
    return LoadedPair(models["target"], models["draft"], *tokenizers, config, sources)


def _own(kwargs: dict[str, Any], draft_kwargs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is for one model alone, by role; taken out of `kwargs`."""
    check_loading([*kwargs, *draft_kwargs])
    target = {name: kwargs.pop(name) for name in FOR_TARGET if name in kwargs}
    if "offload_folder" in target:  # files there are called by the names of weights
        draft_kwargs = {"offload_folder": Path(target["offload_folder"]) / "draft"} | draft_kwargs
    return {"target": target, "draft": draft_kwargs}


class Place(NamedTuple):
    """Where a model of a pair is: its files, checked, or the model itself where it was given.

    Attributes:
        changed: whether it is another one than the pair was saved with.
    """

    files: Files | None
    source: ModelSource
    config: PreTrainedConfig
    changed: bool
    model: PreTrainedModel | None = None


def _find(pair: Files, source: ModelSource, other: Any, hub: dict[str, Any], **options: bool) -> Place:
    if isinstance(other, PreTrainedModel):
        facts = model_facts(other)
        same = facts.name is not None and (facts.name, facts.revision) == (source.name, source.revision)
        return Place(None, ModelSource(), other.config, not same, other)
    if other is None:
        files = get_model(pair, source, **options, **hub)
        changed = is_changed(files, source)
    else:
        check_place(str(other), None)
        files = get_model(get_files(other, None, SMALL_FILES, **hub), ModelSource(), **options, **hub)
        changed = not options["use_safetensors"] or fingerprint(files.root) != source.fingerprint
        source = ModelSource()
    return Place(files, source, load_config(files, source.subfolder, options["trust_remote_code"]), changed)


def _plan(
    places: dict[str, Place], own: dict[str, dict[str, Any]], device_map: Any, draft_device_map: Any, **options: Any
) -> dict[str, dict[str, Any]]:
    """Arguments of `from_pretrained` that say where a model goes, by role."""
    options["quantization_config"] = own["target"].get("quantization_config")
    target, draft = places["target"], places["draft"]
    if target.model is not None:  # it has its place
        return {"target": {}, "draft": {"device_map": draft_device_map or {"": last_device(target.model)}}}
    if draft.model is not None:
        draft_device_map = last_device(draft.model)
    planned = plan(target.config, draft.config, device_map=device_map, draft_device_map=draft_device_map, **options)
    return {"target": planned.target, "draft": planned.draft}


def _load(place: Place, **kwargs: Any) -> PreTrainedModel:
    if place.model is not None:
        return place.model
    assert place.files is not None
    model = load_model(place.files, place.source.subfolder, **kwargs)
    check_facts(place.files.name, *facts_beside(place.source, model, KIND))
    return model


def _tokenizers(
    pair: Files, places: dict[str, Place], config: PairConfig, trust_remote_code: bool
) -> tuple[PreTrainedTokenizerBase | None, PreTrainedTokenizerBase | None]:
    """The target's, if it comes from elsewhere with one, or else the pair's; and the draft's, if that may differ."""
    found = [get_tokenizer(pair, "", config.tokenizers, trust_remote_code)]
    for place in places.values():
        elsewhere = None if place.files is None or place.files == pair else place.files
        found.append(elsewhere and get_tokenizer(elsewhere, place.source.subfolder, None, trust_remote_code))
    return found[1] or found[0], found[2] or (found[0] if found[1] else None)


def _reference(place: Place) -> ModelSource | None:
    """What a config would say to load a model from where it was loaded from."""
    if place.files is None or place.files.revision is None:
        return None
    return replace(place.source, name=place.files.name, revision=place.files.revision)
