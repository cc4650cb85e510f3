"""Drafts without weights by name, as the command line takes them, and which of them to try for a target."""

from collections.abc import Sequence

from transformers import PreTrainedConfig, PreTrainedModel

from hf_specx.common.errors import require
from hf_specx.drafting.candidates import make_drafter
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.drafting.suffix import SuffixDraft
from hf_specx.pair_files.pair_config import WeightlessDraft

from .compatibility import Finding


SUFFIX, EXIT, EXITS = "suffix", "exit:", "exits"
TRIED_SHARES = (1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2)  # of the target's layers; beyond a half nothing is gained


def weightless_draft(name: str) -> WeightlessDraft | None:
    """`SuffixDraft()` for "suffix", `EarlyExitDraft(4)` for "exit:4"; None for any other name.

    Raises:
        ValueError: there is no number of layers after "exit:".
    """
    if name == SUFFIX:
        return SuffixDraft()
    if not name.startswith(EXIT):
        return None
    number = name.removeprefix(EXIT)
    known = number.isascii() and number.isdecimal() and int(number) >= 1
    require(known, f"{name!r} names no number of layers; give one of 1 or more, like {EXIT}4.")
    return EarlyExitDraft(int(number))


def find_own(target: PreTrainedModel, draft: WeightlessDraft) -> list[Finding]:
    """What such a draft is made of, as `find_fit` says it of a model.

    Raises:
        ValueError: it cannot serve this target.
    """
    make_drafter(draft, target)
    drafting = "none: what followed the same tokens"
    if isinstance(draft, EarlyExitDraft):
        drafting = f"the first {draft.exit_layer} of them"
    return [Finding("layers", str(target.config.get_text_config(decoder=True).num_hidden_layers), drafting)]


def exit_layers(config: PreTrainedConfig) -> list[int]:
    """Numbers of first layers that are worth trying as a draft of a target with this config."""
    if config.is_encoder_decoder:
        return []
    layers = config.get_text_config(decoder=True).num_hidden_layers
    return sorted({number for share in TRIED_SHARES if 1 <= (number := round(share * layers)) < layers})


def named_drafts(drafts: Sequence[str], config: PreTrainedConfig) -> list[str]:
    """The drafts to try, each once: "exits" stands for an "exit:n" of each number in `exit_layers`.

    Args:
        drafts: names; [] stands for all that need no other model.
        config: of the target.
    """
    exits = [f"{EXIT}{number}" for number in exit_layers(config)]
    named = [each for name in drafts or (SUFFIX, EXITS) for each in (exits if name == EXITS else [name])]
    return list(dict.fromkeys(named)) if EXITS in drafts else named
