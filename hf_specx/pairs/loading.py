"""Load the models and tokenizers of a pair, each from inside the pair or from where it refers to."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.devices import last_device
from hf_specx.common.errors import require
from hf_specx.hub.facts import check_kind, model_facts
from hf_specx.hub.fetch import (
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
from hf_specx.hub.find_draft import warn_of_another_target
from hf_specx.hub.load_model import get_head, holds_head, load_config, load_model, with_head
from hf_specx.hub.pair_config import ModelSource, PairConfig
from hf_specx.hub.schema import check_place

from .placement import CACHE_TOKENS, Placement, plan


FOR_TARGET = ("quantization_config", "offload_folder")
OF_PAIRS: tuple[str, ...] = ("num_draft_tokens", "verification", "layout", "costs", "subfolder", "variant")
OF_PAIRS += ("output_loading_info", "ignore_mismatched_sizes", "state_dict", "config")


Sources = dict[str, ModelSource | None]  # by role, where on the Hub a model was loaded from


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
) -> tuple[dict[str, Any], Sources]:
    """Check all files of a pair, then load its models and tokenizers; what is wrong or unsafe is a ValueError.

    It returns the arguments of `DraftTargetPair`, and where the models are from.

    Args:
        name_or_path: a folder, or an id on the Hub.
        device_map, draft_device_map, max_memory, cache_tokens: where the models go, see `plan`.
        dtype: of both models; "auto" is as they were saved.
        target, draft: a model, or a folder or id of one, to use instead of the pair's own.
        revision: commit, branch or tag of the pair. Models by reference have theirs in the config.
        trust_remote_code: whether code of models may run; of a repository that the config names, at a full commit.
        use_safetensors: False also loads pickles, which may run code.
        draft_kwargs: for the draft's `from_pretrained` only.
        **kwargs: `HUB_OPTIONS`, and for `from_pretrained` of both models, those in `FOR_TARGET` for the target's.
    """
    own, hub = _own(kwargs, draft_kwargs or {}), {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
    shared = kwargs | {"dtype": dtype, "use_safetensors": use_safetensors or None}
    pair, config = get_pair(name_or_path, revision, **hub)
    if draft is not None:
        config.set_draft(None)
    weightless, head = config.weightless_draft(), get_head(pair, config, **hub)
    asked = {"target": target} | ({"draft": draft} if weightless is None else {})
    _check_used(asked, {"device_map": device_map} | own["target"], draft_device_map, draft_kwargs)
    trust = trust_remote_code, use_safetensors
    found = {role: _find(pair, config, role, other, hub, *trust) for role, other in asked.items()}
    tokenizers = _tokenizers(pair, found, config, trust_remote_code)
    place = _plan(found, own["target"], device_map, draft_device_map, max_memory, cache_tokens, dtype)
    loaded = _load(found["target"], **shared | own["target"] | place.target)
    warn_of_another_target(config, loaded)
    drafting: Any = weightless and with_head(weightless, head, loaded)
    if weightless is None:
        placed = {"": place.home or last_device(loaded)} if draft_device_map in (None, "auto") else draft_device_map
        drafting = _load(found["draft"], loaded, **shared | {"device_map": placed} | own["draft"])
    return {"target": loaded, "draft": drafting, "config": config} | tokenizers, _sources(found)


def _own(kwargs: dict[str, Any], draft_kwargs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments for one model only, by role; those for the target are taken out of `kwargs`."""
    for name in (*kwargs, *draft_kwargs):
        told = f"{name}= has no place in loading a pair, which sets it itself; leave it out, or give it to a call."
        require(name not in OF_PAIRS, told)
    target = {name: kwargs.pop(name) for name in FOR_TARGET if name in kwargs}
    if "offload_folder" in target:  # two models in one folder would overwrite each other's files
        draft_kwargs = {"offload_folder": Path(target["offload_folder"]) / "draft"} | draft_kwargs
    return {"target": target, "draft": draft_kwargs}


def _check_used(asked: dict[str, Any], of_target: dict[str, Any], draft_device_map: Any, draft_kwargs: Any) -> None:
    """Whether the models that arguments are for are loaded at all: neither given as a model nor without weights."""
    of_target = {name: value for name, value in of_target.items() if name != "offload_folder"}
    of_draft = {"draft_device_map": draft_device_map, "draft_kwargs": draft_kwargs or None}
    for role, given in {"target": of_target, "draft": of_draft}.items():
        loaded = role in asked and not isinstance(asked[role], PreTrainedModel)
        why = "is given as a model" if role in asked else "of this pair has no weights of its own"
        for name, value in given.items():
            told = f"{name}= says how the {role} is loaded, and the {role} {why}; leave it out."
            require(loaded or value is None, told)


class FoundModel(NamedTuple):
    """A model of a pair in checked files, not loaded yet; or one that the caller gave, which has none."""

    files: Files | None
    source: ModelSource  # where in the files it is
    config: PreTrainedConfig | None  # of a head there is none, and it takes little room
    trusted: bool = False  # whether its code may run
    model: PreTrainedModel | None = None


def _find(pair: Files, config: PairConfig, role: str, other: Any, hub: dict[str, Any], *trust: bool) -> FoundModel:
    """Check the files of a model: the pair's own, or `other`, a model, its folder or id, where that is given.

    The config forgets its measurements where it is not the model that they were made with.
    """
    source = getattr(config, role)
    if isinstance(other, PreTrainedModel):
        facts = model_facts(other)
        if facts.name is None or (facts.name, facts.revision) != (source.name, source.revision):
            config.forget()
        return FoundModel(None, ModelSource(), other.config, model=other)
    if other is None:
        files = get_model(pair, source, *trust, **hub)
        changed = is_changed(files, source)
    else:
        check_place(str(other), None)
        files = get_model(get_files(other, None, SMALL_FILES, **hub), ModelSource(), *trust, **hub)
        changed = not trust[1] or fingerprint(files.root) != source.fingerprint
        source = ModelSource()
    if changed:
        config.forget()
    trusted = trust[0] and source.is_pinned
    is_model = role == "target" or not holds_head(files, source.subfolder)
    return FoundModel(files, source, load_config(files, source.subfolder, trusted) if is_model else None, trusted)


def _plan(found: dict[str, FoundModel], own: dict[str, Any], *where: Any) -> Placement:
    """Where the models go, `where` and how the target is loaded; a draft that was given as a model needs no room."""
    target, draft = found["target"], found.get("draft")
    if target.model is not None:
        return Placement({})
    needs = None if draft is None or draft.model is not None else draft.config
    assert target.config is not None
    where += own.get("quantization_config"), target.trusted
    return plan(target.config, needs, *where)


def _load(found: FoundModel, target: PreTrainedModel | None = None, **kwargs: Any) -> PreTrainedModel:
    if found.model is not None:
        return found.model
    assert found.files is not None
    model = load_model(found.files, found.source.subfolder, found.trusted, target, **kwargs)
    check_kind(found.files.name, found.source, model)
    return model


def _tokenizers(
    pair: Files, found: dict[str, FoundModel], config: PairConfig, trust_remote_code: bool
) -> dict[str, PreTrainedTokenizerBase | None]:
    """The target's tokenizer (the pair's, unless the target is from elsewhere), and the draft's, if it may differ."""
    own = get_tokenizer(pair, "", config.tokenizers, trust_remote_code)
    others = {}
    for role, each in found.items():
        named = each.source != ModelSource()  # by the pair, and not given in place of what it names
        facts = config.draft_tokenizer if role == "draft" and named else None
        if each.files is not None and (each.files != pair or facts is not None):
            others[role] = get_tokenizer(each.files, each.source.subfolder, facts, each.trusted)
    target, draft = others.get("target"), others.get("draft")
    return {"tokenizer": target or own, "draft_tokenizer": draft or (own if target and "draft" in found else None)}


def _sources(found: dict[str, FoundModel]) -> Sources:
    """The entries of a config that load models from where they were loaded from; None if that is not the Hub."""
    sources: Sources = {"target": None, "draft": None}
    for role, each in found.items():
        if each.files is not None and each.files.revision is not None:
            sources[role] = replace(each.source, name=each.files.name, revision=each.files.revision)
    return sources
