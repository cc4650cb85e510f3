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
from hf_specx.hub.pair_config import ModelSource, PairConfig, WeightlessDraft
from hf_specx.hub.pair_models import FoundModel, find_model

from .generate import STRATEGY_OPTIONS
from .placement import CACHE_TOKENS, plan


if TYPE_CHECKING:
    from .pair import DraftTargetPair

FOR_TARGET = ("quantization_config", "offload_folder")
SET_BY_PAIRS = ("subfolder", "variant", "output_loading_info", "ignore_mismatched_sizes", "state_dict", "config")


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
    """Load the models and tokenizers of a pair once all files are checked; what is wrong or unsafe is a ValueError.

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
    for_one_model = _options_of_one_model(kwargs, draft_kwargs or {})
    hub_kwargs = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
    for_both = kwargs | {"dtype": dtype, "use_safetensors": use_safetensors or None}
    files, config = get_pair(name_or_path, revision, **hub_kwargs)
    trust = (trust_remote_code, use_safetensors)
    replacements = {"target": target, "draft": with_weightless_drafts(draft)}
    drafts = config.weightless_draft() if draft is None else replacements["draft"]
    for_target = {"device_map": device_map} | for_one_model["target"]
    _check_used({"target": target, "draft": drafts}, for_target, draft_device_map, draft_kwargs)
    models = {role: _find(files, config, role, other, hub_kwargs, *trust) for role, other in replacements.items()}
    tokenizers: dict[str, Any] = _tokenizers(files, models, config, trust_remote_code)
    placement = plan(
        models["target"].config("target"),
        models["draft"].config("draft"),
        device_map,
        draft_device_map,
        max_memory,
        cache_tokens,
        dtype,
        for_one_model["target"].get("quantization_config"),
        models["target"].trusted,
    )
    loaded_target = models["target"].load(**for_both | for_one_model["target"] | placement.target)
    warn_of_another_target(config, loaded_target)
    draft_device: Any = draft_device_map
    if draft_device_map in (None, "auto"):
        draft_device = {"": placement.draft_device or last_device(loaded_target)}
    loaded_draft = models["draft"].load(
        loaded_target, **for_both | {"device_map": draft_device} | for_one_model["draft"]
    )
    check_head(draft if isinstance(draft, str) else "", loaded_draft)
    pair = cls(loaded_target, loaded_draft, config=config, **tokenizers)
    pair.sources = {role: _source(model) for role, model in models.items()}
    pair.cache_dir = hub_kwargs.get("cache_dir")
    return pair


def embedded_dtype(dtype: Any, device_map: Any) -> Any:
    """The precision of the embedded pair: where none is asked for, float32 on the CPU and as saved elsewhere."""
    devices = device_map.values() if isinstance(device_map, dict) else [device_map]
    on_cpu = all(str(device) in ("None", "cpu") for device in devices) or not torch.accelerator.is_available()
    if on_cpu and dtype in (None, "auto"):
        return torch.float32
    return dtype or "auto"


def _options_of_one_model(kwargs: dict[str, Any], draft_kwargs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments for one model only, by role; those for the target are taken out of `kwargs`."""
    for name in (*kwargs, *draft_kwargs):
        require(
            name not in (*SET_BY_PAIRS, *STRATEGY_OPTIONS),
            f"{name}= has no place in loading a pair, which sets it itself; leave it out, or give it to a call.",
        )
    target = {name: kwargs.pop(name) for name in FOR_TARGET if name in kwargs}
    if "offload_folder" in target:  # two models in one folder would overwrite each other's files
        draft_kwargs = {"offload_folder": Path(target["offload_folder"]) / "draft"} | draft_kwargs
    return {"target": target, "draft": draft_kwargs}


def _find(
    pair: Files, config: PairConfig, role: str, other: Any, hub_kwargs: dict[str, Any], *trust: bool
) -> FoundModel:
    """The pair's own model in checked files, or `other`, a model, its folder or id; if it was not measured, the config
    forgets what was."""
    if other is None:
        return find_model(pair, config, role, hub_kwargs, *trust)
    if role == "draft":
        config.set_draft(other if isinstance(other, WeightlessDraft) else None)
    source: ModelSource = getattr(config, role)
    if isinstance(other, PreTrainedModel):
        model, facts = FoundModel(None, model=other), model_facts(other)
        is_same = facts.name is not None and (facts.name, facts.revision) == (source.name, source.revision)
    elif isinstance(other, WeightlessDraft):
        model, is_same = FoundModel(None, model=other), False
    else:
        if role == "draft":
            model_files = find_draft_files(read_draft(str(other)).model or str(other), **hub_kwargs)
        else:
            model_files = find_files(str(other), **hub_kwargs)
        files = get_model(model_files, ModelSource(), *trust, **hub_kwargs)
        model = FoundModel(files, trusted=trust[0])
        is_same = trust[1] and fingerprint(files.root) == source.fingerprint
    if not is_same:
        config.forget()
    return model


def _check_used(models: dict[str, Any], for_target: dict[str, Any], draft_device_map: Any, draft_kwargs: Any) -> None:
    """Raise ValueError if an argument is for loading a model that is loaded already, or has no weights."""
    for_target = {name: value for name, value in for_target.items() if name != "offload_folder"}
    for_draft = {"draft_device_map": draft_device_map, "draft_kwargs": draft_kwargs or None}
    for role, options in {"target": for_target, "draft": for_draft}.items():
        if isinstance(models[role], PreTrainedModel):
            reason = "is given as a model"
        elif isinstance(models[role], WeightlessDraft):
            reason = "of this pair has no weights of its own"
        else:
            continue
        for name, value in options.items():
            require(value is None, f"{name}= says how the {role} is loaded, and the {role} {reason}; leave it out.")


def _tokenizers(
    pair: Files, models: dict[str, FoundModel], config: PairConfig, trust_remote_code: bool
) -> dict[str, PreTrainedTokenizerBase | None]:
    """The target's tokenizer (the pair's, unless the target is from elsewhere), and the draft's, if it may differ."""
    pair_tokenizer = get_tokenizer(pair, config.tokenizers, trust_remote_code)
    by_role = {}
    for role, model in models.items():
        is_named = model.source != ModelSource()  # by the pair, and not given in place of what it names
        facts = config.draft_tokenizer if role == "draft" and is_named else None
        if model.files is not None and (model.files.root != pair.root or facts is not None):
            by_role[role] = get_tokenizer(model.files, facts, model.trusted)
    target_tokenizer, draft_tokenizer = by_role.get("target"), by_role.get("draft")
    if (
        draft_tokenizer is None
        and target_tokenizer is not None
        and not isinstance(models["draft"].model, WeightlessDraft)
    ):
        draft_tokenizer = pair_tokenizer
    return {"tokenizer": target_tokenizer or pair_tokenizer, "draft_tokenizer": draft_tokenizer}


def _source(model: FoundModel) -> ModelSource | None:
    """The entry of a config that loads a model from where it was found; None if that is not the Hub."""
    if model.files is None or model.files.revision is None:
        return None
    return replace(model.source, name=model.files.name, revision=model.files.revision)
