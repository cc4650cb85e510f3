"""Find the draft for a target where the caller names none: in the pair of this code, or in that of the target."""

import threading
import warnings
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from hf_specx.common.devices import execution_device, hardware, last_device
from hf_specx.common.drafts import PAIR_CONFIG_NAME
from hf_specx.common.errors import require
from hf_specx.common.load_model import COMMIT
from hf_specx.common.model_files import check_reference
from hf_specx.common.wrappers import vocabulary
from hf_specx.drafting.costs import Costs
from hf_specx.engine.generate_frame import custom_generate_argument

from .facts import IDENTIFYING, commit_of, differing
from .fetch import HUB_OPTIONS, get_pair, get_tokenizer
from .pair_config import PairConfig, WeightlessDraft
from .pair_models import find_model
from .pair_source import PAIR, REVISION


MEASURED_SIZE = ("parameters", "max_positions")

# the draft of a pair, options of `SpeculativeDecoding` that the pair recommends, its costs on this hardware
DraftOfPair = tuple[PreTrainedModel | WeightlessDraft, dict[str, Any], Costs]
# by target, then by name and revision of the pair; freed with the target
DRAFTS_OF_PAIRS: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, str | None], DraftOfPair]] = WeakKeyDictionary()
LOADING = threading.Lock()


def find_draft(target: PreTrainedModel, arguments: dict[str, Any]) -> DraftOfPair:
    """The draft of a target's pair, with the options that the pair recommends, and its costs.

    The pair is the one that `pair_source` names, or the folder that `generate` was given as `custom_generate`, else
    the one that the target was loaded from.

    It is loaded once for each target, on the device of the target's last layers and in its precision. Of the
    `arguments` of the call only `HUB_OPTIONS` and `revision` are used.
    """
    hub_kwargs = {name: arguments[name] for name in HUB_OPTIONS if arguments.get(name) is not None}
    name, revision = _pair_of(target, arguments)
    with LOADING:
        drafts = DRAFTS_OF_PAIRS.setdefault(target, {})
        if (name, revision) not in drafts:
            drafts[name, revision] = draft_of_pair(target, name, revision, hub_kwargs)
        return drafts[name, revision]


def _pair_of(target: PreTrainedModel, arguments: dict[str, Any]) -> tuple[str, str | None]:
    """The name and revision of the pair whose draft is wanted, as `find_draft` says."""
    if PAIR is not None and REVISION is not None:
        check_reference(PAIR)
        return PAIR, REVISION
    folder = _called_by()
    if folder is not None:
        return folder, None
    name = str(target.name_or_path or "")
    return name, None if Path(name).is_dir() else arguments.get("revision")


def _called_by() -> str | None:
    """The folder of a pair whose code `generate` was told to run; transformers copies the code elsewhere before."""
    folder = custom_generate_argument()
    return folder if isinstance(folder, str) and (Path(folder) / PAIR_CONFIG_NAME).is_file() else None


def draft_of_pair(target: PreTrainedModel, name: str, revision: str | None, hub_kwargs: dict[str, Any]) -> DraftOfPair:
    """The draft of a pair, loaded for a target; a ValueError if there is no such pair."""
    commit = None if Path(name).is_dir() else revision or commit_of(target, hub_kwargs.get("cache_dir"))
    try:
        require(bool(name), "it was made here")
        pair, config = get_pair(name, commit, **hub_kwargs)
    except (OSError, ValueError) as error:
        message = "there is no draft: pass draft_model= or assistant_model=, or load the target from a pair, which "
        message += f"brings its draft (this one is of no pair: {str(error).partition(';')[0]})."
        if PAIR is not None:
            message += f" The pair {PAIR!r}, which this code was published with, is not there."
        raise ValueError(message) from error
    warn_of_another_target(config, target)
    model = find_model(pair, config, "draft", hub_kwargs, False, True)
    draft = model.load(target, dtype=target.dtype)
    options, costs = recommended(config, target)
    if model.files is None:
        return draft, options, costs
    facts = config.draft_tokenizer
    if facts is not None or vocabulary(draft) != vocabulary(target):  # they may differ in padding only
        tokenizer = get_tokenizer(pair, config.tokenizers, trust_remote_code=False)
        draft_tokenizer = tokenizer
        if facts is not None or config.draft.name is not None:
            draft_tokenizer = get_tokenizer(model.files, facts or config.tokenizers, trust_remote_code=False)
        options |= {"tokenizer": tokenizer, "draft_tokenizer": draft_tokenizer}
    return draft.to(last_device(target)), options, costs


def recommended(config: PairConfig, target: PreTrainedModel) -> tuple[dict[str, Any], Costs]:
    """Options for `SpeculativeDecoding`, and what was measured on this hardware."""
    options = {name: getattr(config, name) for name in ("num_draft_tokens", "verification", "layout", "tree")}
    return options, config.costs_on(hardware(execution_device(target)), str(target.dtype).removeprefix("torch."))


def warn_of_another_target(config: PairConfig, target: PreTrainedModel) -> None:
    """Warn if a target is not the one that a pair was measured with; its text is right in any case."""
    changed = [*differing(config.target, target, (*IDENTIFYING, *MEASURED_SIZE))]
    commit = getattr(target.config, COMMIT, None)
    if config.target.revision is not None and commit is not None and commit != config.target.revision:
        changed.append("revision")
    if changed:
        warnings.warn(
            f"the target {target.name_or_path!r} differs in {', '.join(changed)} from the one that the pair was "
            "measured with, so that its draft and its recommendations may suit it less; see specx tune.",
            UserWarning,
            stacklevel=2,
        )
