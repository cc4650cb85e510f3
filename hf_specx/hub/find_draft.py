"""Find the draft for a target where the caller names none: in the pair of this code, or in that of the target."""

import sys
import threading
import warnings
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from hf_specx.common.devices import execution_device, hardware, last_device
from hf_specx.common.errors import require
from hf_specx.common.model_files import check_reference
from hf_specx.common.wrappers import vocabulary
from hf_specx.drafting.auto import Costs
from hf_specx.drafting.heads.load_model import COMMIT
from hf_specx.engine.entry import frame_of_generate

from .facts import KIND, commit_of, differing
from .fetch import HUB_OPTIONS, get_pair, get_tokenizer
from .load_model import find_model
from .pair_config import CONFIG_NAME, PairConfig, WeightlessDraft
from .pair_source import PAIR, REVISION


SIZE = ("parameters", "max_positions")

# the draft of a pair, options of `SpeculativeDecoding` that the pair recommends, its costs on this hardware
Found = tuple[PreTrainedModel | WeightlessDraft, dict[str, Any], Costs]
# by target, then by name and revision of the pair; freed with the target
LOADED: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, str | None], Found]] = WeakKeyDictionary()
LOADING = threading.Lock()


def find_draft(target: PreTrainedModel, given: dict[str, Any]) -> Found:
    """The draft for a target: of the pair that `pair_source` names, or of the folder that `generate` was given by name
    as `custom_generate`, else of the pair that the target was loaded from.

    It is loaded once for each target, on the device of the target's last layers and in its precision. Of the arguments
    of the call that are `given` only `HUB_OPTIONS` and `revision` are used.
    """
    hub = {name: given[name] for name in HUB_OPTIONS if given.get(name) is not None}
    name = str(target.name_or_path or "")
    source = name, None if Path(name).is_dir() else given.get("revision")
    if PAIR is not None and REVISION is not None:
        check_reference(PAIR)
        source = PAIR, REVISION
    elif (folder := _called_by()) is not None:
        source = folder, None
    with LOADING:
        loaded = LOADED.setdefault(target, {})
        if source not in loaded:
            loaded[source] = _load(target, *source, hub)
        return loaded[source]


def _called_by() -> str | None:
    """The folder of a pair whose code `generate` was told to run; transformers copies the code elsewhere before."""
    frame = frame_of_generate(sys._getframe())
    folder = None if frame is None else frame.f_locals.get("custom_generate")
    return folder if isinstance(folder, str) and (Path(folder) / CONFIG_NAME).is_file() else None


def _load(target: PreTrainedModel, name: str, revision: str | None, hub: dict[str, Any]) -> Found:
    commit = None if Path(name).is_dir() else revision or commit_of(target, hub.get("cache_dir"))
    try:
        require(bool(name), "it was made here")
        pair, config = get_pair(name, commit, **hub)
    except (OSError, ValueError) as error:
        told = "there is no draft: pass draft_model= or assistant_model=, or load the target from a pair, which "
        told += f"brings its draft (this one is of no pair: {str(error).partition(';')[0]})."
        gone = f" The pair {PAIR!r}, which this code was published with, is not there." if PAIR is not None else ""
        raise ValueError(told + gone) from error
    warn_of_another_target(config, target)
    found = find_model(pair, config, "draft", hub, False, True)
    draft = found.load(target, dtype=target.dtype)
    options, costs = recommended(config, target)
    if found.files is None:
        return draft, options, costs
    own = config.draft_tokenizer
    if own is not None or vocabulary(draft) != vocabulary(target):  # they may differ in padding only
        tokenizer = other = get_tokenizer(pair, config.tokenizers, trust_remote_code=False)
        if own is not None or config.draft.name is not None:
            other = get_tokenizer(found.files, own or config.tokenizers, trust_remote_code=False)
        options |= {"tokenizer": tokenizer, "draft_tokenizer": other}
    return draft.to(last_device(target)), options, costs


def recommended(config: PairConfig, target: PreTrainedModel) -> tuple[dict[str, Any], Costs]:
    """Options for `SpeculativeDecoding`, and what was measured on this hardware."""
    options = {name: getattr(config, name) for name in ("num_draft_tokens", "verification", "layout")}
    return options, config.costs_on(hardware(execution_device(target)), str(target.dtype).removeprefix("torch."))


def warn_of_another_target(config: PairConfig, target: PreTrainedModel) -> None:
    """Warn if a target is not the one that a pair was measured with; its text is right in any case."""
    changed = [*differing(config.target, target, (*KIND, *SIZE))]
    commit = getattr(target.config, COMMIT, None)
    if config.target.revision is not None and commit is not None and commit != config.target.revision:
        changed.append("revision")
    if changed:
        told = f"the target {target.name_or_path!r} differs in {', '.join(changed)} from the one that the pair was "
        told += "measured with, so that its draft and its recommendations may suit it less; see specx tune."
        warnings.warn(told, UserWarning, stacklevel=2)
