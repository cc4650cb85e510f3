"""Compare a draft with a target: what must be the same, and what follows where they differ. Nothing is decoded."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.tokenizers import same_tokens
from hf_specx.common.wrappers import vocabulary
from hf_specx.drafting.candidates import make_drafter
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.drafting.heads.detect_head import ASSISTANTS
from hf_specx.drafting.heads.gemma4 import layers_of
from hf_specx.drafting.heads.head import DraftHead
from hf_specx.drafting.other_tokenizer import matched
from hf_specx.drafting.vocabulary_map import vocabulary_map
from hf_specx.engine.check_models import check_other_tokenizer, check_pair, check_sizes, one_tokenizer
from hf_specx.hub.pair_config import WeightlessDraft


OK, NOTE, ERROR = "ok", "note", "error"
Tokenizer = PreTrainedTokenizerBase


class Finding(NamedTuple):
    """The result of comparing both models in one respect."""

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
    """Compare a draft with a target in all that matters; it fits if no finding is an error.

    Where a model has no tokenizer, only sizes are compared. An assistant of Gemma 4 has the target's tokens.
    """
    if draft.config.model_type in ASSISTANTS:
        return [_or_error("layers", _find_layers_read, target, draft)]
    pair: Any = target, draft, tokenizer, draft_tokenizer
    findings = [_or_error("tokens", _compare_tokens, *pair)]
    shares_tokens = same_tokens(tokenizer, draft_tokenizer)
    if shares_tokens:
        findings.append(_compare_logit_rows(target, draft, tokenizer))
    findings.append(_compare("end tokens", _end_ids(target), _end_ids(draft), "a text ends at the target's"))
    findings.append(_compare_positions(target, draft))
    check = check_pair if shares_tokens else partial(check_other_tokenizer, width=1)
    decoding = _or_error("decoding", check, *pair)
    if decoding.verdict == ERROR and decoding.follows not in [finding.follows for finding in findings]:
        findings.append(decoding)
    return findings


def describe_draft(target: PreTrainedModel, draft: WeightlessDraft | DraftHead) -> list[Finding]:
    """The finding for a head or a draft without weights; a ValueError if it cannot draft for this target."""
    make_drafter(draft, target)
    layers = target.config.get_text_config(decoder=True).num_hidden_layers
    draft_layers = "none: what followed the same tokens"
    if isinstance(draft, DraftHead):
        draft_layers = f"{draft.config.num_hidden_layers} of its own, by the states {draft.config.layer_ids}"
    if isinstance(draft, EarlyExitDraft):
        draft_layers = f"the first {draft.exit_layer} of them"
    return [Finding("layers", str(layers), draft_layers)]


def _find_layers_read(target: PreTrainedModel, assistant: Any) -> Finding:
    """The layers of an assistant, and those of the target whose keys they read."""
    numbers = ", ".join(map(str, sorted(layers_of(assistant, target).values())))
    num_layers, num_draft_layers = (
        model.config.get_text_config(decoder=True).num_hidden_layers for model in (target, assistant)
    )
    return Finding("layers", str(num_layers), f"{num_draft_layers} of its own, by the keys of layers {numbers}")


def _or_error(subject: str, compare: Callable[..., Finding | None], *args: Any) -> Finding:
    """The finding of a comparison, or an error where it raises a ValueError; a check that passes has no finding."""
    try:
        return compare(*args) or Finding(subject, "", "")
    except ValueError as error:
        return Finding(subject, "", "", ERROR, str(error))


def _compare(subject: str, target: object, draft: object, follows: str) -> Finding:
    """A finding on two values; if they differ it is a note that says what follows."""
    if target == draft:
        return Finding(subject, str(target), str(draft))
    return Finding(subject, str(target), str(draft), NOTE, follows)


def _compare_tokens(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Tokenizer | None, draft_tokenizer: Tokenizer | None
) -> Finding:
    """The finding on tokens: the same ids in both, not checked, or how two tokenizers are matched."""
    sizes = _size(tokenizer), _size(draft_tokenizer)
    if tokenizer is None or draft_tokenizer is None:
        check_sizes(target, draft, tokenizer, draft_tokenizer)
        if one_tokenizer(target, draft, tokenizer, draft_tokenizer):
            return Finding("tokens", *sizes, OK, "every token has the same id in both")
        follows = "not checked, since a tokenizer is missing; make sure that each id means the same token in both"
        return Finding("tokens", *sizes, NOTE, follows)
    if same_tokens(tokenizer, draft_tokenizer):
        return Finding("tokens", *sizes, OK, "every token has the same id in both")
    match = matched(vocabulary_map(tokenizer, draft_tokenizer, (vocabulary(target), vocabulary(draft))))
    return Finding("tokens", *sizes, NOTE, f"another tokenizer, matched by {match.match} ({match.reason})")


def _size(tokenizer: Tokenizer | None) -> str:
    return "no tokenizer" if tokenizer is None else str(len(tokenizer.get_vocab()))


def _compare_logit_rows(target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Tokenizer | None) -> Finding:
    """The finding on the number of logits, which is often padded beyond the number of tokens."""
    rows, draft_rows = vocabulary(target), vocabulary(draft)
    tokens = rows if tokenizer is None else max(tokenizer.get_vocab().values(), default=0) + 1
    follows = "those beyond the tokens are padding"
    if draft_rows < tokens:
        follows = f"the draft has ids below {draft_rows} only: it proposes no others, and in their place it reads its "
        follows += f"last id, {draft_rows - 1}"
    return _compare("logit rows", rows, draft_rows, follows)


def _end_ids(model: PreTrainedModel) -> str:
    """The ids of the end tokens, separated by commas."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        return "none"
    return ", ".join(map(str, sorted(ids))) if isinstance(ids, list) else str(ids)


def _compare_positions(target: PreTrainedModel, draft: PreTrainedModel) -> Finding:
    """The finding on the longest texts that both models read."""
    limit, draft_limit = _max_positions(target), _max_positions(draft)
    follows = "the draft reads as far as the target"
    if draft_limit is not None and (limit is None or draft_limit < limit):
        follows = f"after {draft_limit} tokens the draft agrees less"
    return _compare("positions", limit or "no limit", draft_limit or "no limit", follows)


def _max_positions(model: PreTrainedModel) -> int | None:
    limit: int | None = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit
