"""Whether a draft fits a target: what must be the same, what may differ, and what follows. Nothing is decoded."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.tokenizers import same_tokens
from hf_specx.common.wrappers import vocabulary
from hf_specx.drafting.candidates import make_drafter
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.drafting.heads.head import DraftHead
from hf_specx.drafting.other_tokenizer import matched
from hf_specx.drafting.vocabulary_map import vocabulary_map
from hf_specx.engine.check_models import check_own_text, check_pair, check_sizes, one_tokenizer
from hf_specx.hub.pair_config import WeightlessDraft


OK, NOTE, ERROR = "ok", "note", "error"
Tokenizer = PreTrainedTokenizerBase


class Finding(NamedTuple):
    """One thing in which both models are compared."""

    subject: str
    target: str  # what each has
    draft: str
    verdict: str = OK  # or NOTE: they differ, and decoding is exact all the same; or ERROR: it is refused
    follows: str = ""  # what comes of it


def find_fit(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: Tokenizer | None,
    draft_tokenizer: Tokenizer | None,
) -> list[Finding]:
    """All that matters for a pair, as findings; it fits if none of them is an error.

    Where a model has no tokenizer, only sizes are compared.
    """
    both: Any = target, draft, tokenizer, draft_tokenizer
    found, other_tokens = [_or_error("tokens", _tokens, *both)], not same_tokens(tokenizer, draft_tokenizer)
    if not other_tokens:
        found.append(_logit_rows(target, draft, tokenizer))
    found.append(_compared("end tokens", _end_ids(target), _end_ids(draft), "a text ends at the target's"))
    found.append(_positions(target, draft))
    decoding = _or_error("decoding", partial(check_own_text, width=1) if other_tokens else check_pair, *both)
    if decoding.verdict == ERROR and decoding.follows not in [finding.follows for finding in found]:
        found.append(decoding)
    return found


def find_own(target: PreTrainedModel, draft: WeightlessDraft | DraftHead) -> list[Finding]:
    """What such a draft is made of; raises a ValueError if it cannot serve this target."""
    make_drafter(draft, target)
    layers = target.config.get_text_config(decoder=True).num_hidden_layers
    drafting = "none: what followed the same tokens"
    if isinstance(draft, DraftHead):
        drafting = f"{draft.config.num_hidden_layers} of its own, by the states {draft.config.layer_ids}"
    if isinstance(draft, EarlyExitDraft):
        drafting = f"the first {draft.exit_layer} of them"
    return [Finding("layers", str(layers), drafting)]


def _or_error(subject: str, find: Callable[..., Finding | None], *args: Any) -> Finding:
    """What is found, also where a check refuses it; a check that passes finds nothing."""
    try:
        return find(*args) or Finding(subject, "", "")
    except ValueError as error:
        return Finding(subject, "", "", ERROR, str(error))


def _compared(subject: str, target: object, draft: object, follows: str) -> Finding:
    """What follows, only where the two differ."""
    if target == draft:
        return Finding(subject, str(target), str(draft))
    return Finding(subject, str(target), str(draft), NOTE, follows)


def _tokens(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Tokenizer | None, draft_tokenizer: Tokenizer | None
) -> Finding:
    """How the draft's tokens become the target's."""
    both = tokenizer, draft_tokenizer
    size, own = ("no tokenizer" if each is None else str(len(each.get_vocab())) for each in both)
    if tokenizer is None or draft_tokenizer is None:
        check_sizes(target, draft, *both)
        if one_tokenizer(target, draft, *both):
            return Finding("tokens", size, own, OK, "every token has the same id in both")
        told = "not checked, since a tokenizer is missing; make sure that each id means the same token in both"
        return Finding("tokens", size, own, NOTE, told)
    if same_tokens(tokenizer, draft_tokenizer):
        return Finding("tokens", size, own, OK, "every token has the same id in both")
    found = matched(vocabulary_map(tokenizer, draft_tokenizer, (vocabulary(target), vocabulary(draft))))
    return Finding("tokens", size, own, NOTE, f"another tokenizer, matched by {found.match} ({found.reason})")


def _logit_rows(target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Tokenizer | None) -> Finding:
    """Scores a position: often more than there are tokens, padded to a round number."""
    rows, own = vocabulary(target), vocabulary(draft)
    tokens = rows if tokenizer is None else max(tokenizer.get_vocab().values(), default=0) + 1
    lacks = f"the draft has no ids from {own} on: it never proposes them, and reads another token in their place"
    return _compared("logit rows", rows, own, lacks if own < tokens else "what comes after the tokens is padding")


def _end_ids(model: PreTrainedModel) -> str:
    ids = getattr(model.generation_config, "eos_token_id", None)
    return ", ".join(map(str, sorted(ids))) if isinstance(ids, list) else "none" if ids is None else str(ids)


def _positions(target: PreTrainedModel, draft: PreTrainedModel) -> Finding:
    configs = (model.config.get_text_config(decoder=True) for model in (target, draft))
    limit, own = (getattr(config, "max_position_embeddings", None) for config in configs)
    shorter = own is not None and (limit is None or own < limit)
    follows = f"after {own} tokens the draft agrees less" if shorter else "the draft reads as far as the target"
    return _compared("positions", limit or "no limit", own or "no limit", follows)
