"""Load the models and tokenizers of a pair, each from inside the pair or from where it refers to."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.checkpoints import Files
from hf_specx.common.devices import last_device
from hf_specx.common.drafts import check_head, read_draft
from hf_specx.common.errors import require
from hf_specx.drafting.heads.draft_names import with_weightless_drafts
from hf_specx.hub.facts import model_facts
from hf_specx.hub.fetch import (
    HUB_OPTIONS,
    find_draft_files,
    find_files,
    fingerprint,
    get_model,
    get_pair,
    get_tokenizer,
)
from hf_specx.hub.find_draft import warn_of_another_target
from hf_specx.hub.known_pairs import embedded_folder, is_embedded
from hf_specx.hub.load_model import FoundModel, find_model
from hf_specx.hub.pair_config import ModelSource, PairConfig, WeightlessDraft

from .placement import CACHE_TOKENS, plan


if TYPE_CHECKING:
    from .pair import DraftTargetPair

FOR_TARGET = ("quantization_config", "offload_folder")
OF_PAIRS: tuple[str, ...] = ("num_draft_tokens", "verification", "layout", "costs", "subfolder", "variant")
OF_PAIRS += ("output_loading_info", "ignore_mismatched_sizes", "state_dict", "config")


def load_pair(
    cls: "type[DraftTargetPair]",
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
) -> "DraftTargetPair":
    """Check all files of a pair, then load its models and tokenizers; what is wrong or unsafe is a ValueError.

    Args:
        name_or_path: a local folder, else an id on the Hub or "embedded".
        device_map, draft_device_map, max_memory, cache_tokens: where the models go, see `plan`.
        dtype: of both models; "auto" is as they were saved.
        target, draft: a model, a folder or id of one, to use instead of the pair's own; a draft by any of its names.
        revision: commit, branch or tag of the pair. Models by reference have theirs in the config.
        trust_remote_code: whether code of models may run; of a repository that the config names, at a full commit.
        use_safetensors: False also loads pickles, which may run code.
        draft_kwargs: for the draft's `from_pretrained` only.
        **kwargs: `HUB_OPTIONS`, and for `from_pretrained` of both models, those in `FOR_TARGET` for the target's.
    """
    if is_embedded(str(name_or_path)):
        name_or_path, dtype = embedded_folder(), embedded_dtype(dtype, device_map)
    own, hub = _own(kwargs, draft_kwargs or {}), {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
    shared = kwargs | {"dtype": dtype, "use_safetensors": use_safetensors or None}
    files, config = get_pair(name_or_path, revision, **hub)
    trust = (trust_remote_code, use_safetensors)
    given = {"target": target, "draft": with_weightless_drafts(draft)}
    drafts = config.weightless_draft() if draft is None else given["draft"]
    _check_used(given | {"draft": drafts}, {"device_map": device_map} | own["target"], draft_device_map, draft_kwargs)
    found = {role: _find(files, config, role, other, hub, *trust) for role, other in given.items()}
    tokenizers: dict[str, Any] = _tokenizers(files, found, config, trust_remote_code)
    how = device_map, draft_device_map, max_memory, cache_tokens, dtype, own["target"].get("quantization_config")
    place = plan(found["target"].config("target"), found["draft"].config("draft"), *how, found["target"].trusted)
    loaded = found["target"].load(**shared | own["target"] | place.target)
    warn_of_another_target(config, loaded)
    home = {"": place.home or last_device(loaded)} if draft_device_map in (None, "auto") else draft_device_map
    drafting = found["draft"].load(loaded, **shared | {"device_map": home} | own["draft"])
    check_head(draft if isinstance(draft, str) else "", drafting)
    pair = cls(loaded, drafting, config=config, **tokenizers)
    pair.sources, pair.cache_dir = {role: _source(each) for role, each in found.items()}, hub.get("cache_dir")
    return pair


def embedded_dtype(dtype: Any, device_map: Any) -> Any:
    """The precision of the embedded pair: where none is asked for, float32 on the CPU and as saved elsewhere."""
    places = device_map.values() if isinstance(device_map, dict) else [device_map]
    on_cpu = all(str(place) in ("None", "cpu") for place in places) or not torch.accelerator.is_available()
    return torch.float32 if on_cpu and dtype in (None, "auto") else dtype or "auto"


def _own(kwargs: dict[str, Any], draft_kwargs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments for one model only, by role; those for the target are taken out of `kwargs`."""
    for name in (*kwargs, *draft_kwargs):
        told = f"{name}= has no place in loading a pair, which sets it itself; leave it out, or give it to a call."
        require(name not in OF_PAIRS, told)
    target = {name: kwargs.pop(name) for name in FOR_TARGET if name in kwargs}
    if "offload_folder" in target:  # two models in one folder would overwrite each other's files
        draft_kwargs = {"offload_folder": Path(target["offload_folder"]) / "draft"} | draft_kwargs
    return {"target": target, "draft": draft_kwargs}


def _find(pair: Files, config: PairConfig, role: str, other: Any, hub: dict[str, Any], *trust: bool) -> FoundModel:
    """Check the files of the pair's own model, or of `other`, a model, its folder or id; if it was not measured, the
    config forgets what was."""
    if other is None:
        return find_model(pair, config, role, hub, *trust)
    if role == "draft":
        config.set_draft(other if isinstance(other, WeightlessDraft) else None)
    source: ModelSource = getattr(config, role)
    if isinstance(other, PreTrainedModel):
        facts, found = model_facts(other), FoundModel(None, made=other)
        is_same = facts.name is not None and (facts.name, facts.revision) == (source.name, source.revision)
    elif isinstance(other, WeightlessDraft):
        found, is_same = FoundModel(None, made=other), False
    else:
        name, find = str(other), find_draft_files if role == "draft" else find_files
        if role == "draft" and not Path(name).is_dir():
            name = read_draft(name).model or name
        files = get_model(find(name, **hub), ModelSource(), *trust, **hub)
        found = FoundModel(files, trusted=trust[0])
        is_same = trust[1] and fingerprint(files.root) == source.fingerprint
    if not is_same:
        config.forget()
    return found


def _check_used(made: dict[str, Any], of_target: dict[str, Any], draft_device_map: Any, kwargs: Any) -> None:
    """Whether the models that arguments are for are loaded at all, and not `made` already."""
    of_target = {name: value for name, value in of_target.items() if name != "offload_folder"}
    of_draft = {"draft_device_map": draft_device_map, "draft_kwargs": kwargs or None}
    for role, given in {"target": of_target, "draft": of_draft}.items():
        loaded = not isinstance(made[role], PreTrainedModel | WeightlessDraft)
        is_model = isinstance(made[role], PreTrainedModel)
        why = "is given as a model" if is_model else "of this pair has no weights of its own"
        for name, value in given.items():
            told = f"{name}= says how the {role} is loaded, and the {role} {why}; leave it out."
            require(loaded or value is None, told)


def _tokenizers(
    pair: Files, found: dict[str, FoundModel], config: PairConfig, trust_remote_code: bool
) -> dict[str, PreTrainedTokenizerBase | None]:
    """The target's tokenizer (the pair's, unless the target is from elsewhere), and the draft's, if it may differ."""
    own = get_tokenizer(pair, config.tokenizers, trust_remote_code)
    others = {}
    for role, each in found.items():
        named = each.source != ModelSource()  # by the pair, and not given in place of what it names
        facts = config.draft_tokenizer if role == "draft" and named else None
        if each.files is not None and (each.files.root != pair.root or facts is not None):
            others[role] = get_tokenizer(each.files, facts, each.trusted)
    target, draft = others.get("target"), others.get("draft")
    drafts = target is not None and not isinstance(found["draft"].made, WeightlessDraft)
    return {"tokenizer": target or own, "draft_tokenizer": draft or (own if drafts else None)}


def _source(found: FoundModel) -> ModelSource | None:
    """The entry of a config that loads a model from where it was found; None if that is not the Hub."""
    if found.files is None or found.files.revision is None:
        return None
    return replace(found.source, name=found.files.name, revision=found.files.revision)
