"""Whether a draft fits a target: what must be the same, what may differ, and what follows. Nothing is decoded."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.architectures import vocabulary
from hf_specx.common.tokenizers import same_tokens
from hf_specx.drafting.candidates import make_drafter
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.drafting.matching import matched
from hf_specx.drafting.vocabulary_map import vocabulary_map
from hf_specx.layouts.choose import layouts_of
from hf_specx.pair_files.pair_config import WeightlessDraft
from hf_specx.validation.models import (
    check_own_text,
    check_pair,
    vocabularies_of_other_sizes,
)


OK, NOTE, ERROR = "ok", "note", "error"
ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
PROBE_TEXTS = (  # where tokenizers with the same tokens may still part: merges, normalisation, digits, spaces
    "Hello, world! It's a test; don't stop.",
    "  leading,   inner  and trailing spaces  ",
    "line\n\n\tdef f(x):\r\n        return x ** 2  # comment\n",
    "x = 3.14159e-10; y += 1_000_000; z = 12345678901234567890",
    "CamelCase snake_case ALLCAPS iPhone naïve Ångström",
    "e\u0301 composed is \u00e9, \ufb01 is fi, \uff11\uff12\uff13 is 123, \u00a0 is a space",
    "日本語の文章 русский текст العربية हिन्दी 한국어 ไทย",
    "🙂👩\u200d👩\u200d👧🏽 \u2014 \u201cquotes\u201d … ½ ∑ €",
    "<s> </s> <pad> <unk> <|endoftext|> [CLS] [MASK]",
    "",
)


class Finding(NamedTuple):
    """One thing in which both models are compared.

    Attributes:
        subject: what was looked at.
        target, draft: what each has.
        verdict: "ok"; "note" where they differ and decoding is exact all the same; "error" where it is refused.
        follows: what comes of it, "" if nothing.
    """

    subject: str
    target: str
    draft: str
    verdict: str = OK
    follows: str = ""


def find_fit(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
    texts: Iterable[str] = (),
) -> list[Finding]:
    """All that matters for a pair, as findings; it fits if none of them is an error.

    Args:
        target, draft: in evaluation mode.
        tokenizer, draft_tokenizer: of each; None where it has none, so that only sizes can be compared.
        texts: more of them to encode with both, besides `PROBE_TEXTS`.
    """
    found = [_types(target, draft), _layouts(target, draft)]
    if tokenizer is None or draft_tokenizer is None:
        found.append(_unknown_tokens(target, draft, tokenizer, draft_tokenizer))
    elif same_tokens(tokenizer, draft_tokenizer):
        sizes = _both(lambda each: len(each.get_vocab()), tokenizer, draft_tokenizer)
        found.append(Finding("tokens", *sizes, OK, "every token has the same id in both"))
        found.append(_encodings(tokenizer, draft_tokenizer, [*PROBE_TEXTS, *texts]))
        found.append(_special_tokens(tokenizer, draft_tokenizer))
    else:
        found.append(_matched_tokens(target, draft, tokenizer, draft_tokenizer))
        error = _refused(check_own_text, target, draft, tokenizer, draft_tokenizer, 1)
        found += [_ends(target, draft), _positions(target, draft)]
        return found + ([Finding("decoding", "", "", ERROR, error)] if error else [])
    found += [_logit_rows(target, draft, tokenizer), _ends(target, draft), _positions(target, draft)]
    error = _refused(check_pair, target, draft, tokenizer, draft_tokenizer)
    if error and all(finding.follows != error for finding in found):
        found.append(Finding("decoding", "", "", ERROR, error))
    return found


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


def _refused(check: Callable[..., Any], *args: Any) -> str:
    """What a check says, "" if nothing."""
    try:
        check(*args)
    except ValueError as error:
        return str(error)
    return ""


def _both(of: Callable[[Any], object], target: Any, draft: Any) -> tuple[str, str]:
    """The same of both, as text."""
    return str(of(target)), str(of(draft))


def _finding(subject: str, target: str, draft: str, follows: str) -> Finding:
    """What follows, only where the two differ."""
    return Finding(subject, target, draft) if target == draft else Finding(subject, target, draft, NOTE, follows)


def _types(target: PreTrainedModel, draft: PreTrainedModel) -> Finding:
    types = _both(lambda model: _text_config(model).model_type, target, draft)
    return _finding("model type", *types, "families may differ")


def _layouts(target: PreTrainedModel, draft: PreTrainedModel) -> Finding:
    """How rows of unequal length share a batch."""
    error = _refused(layouts_of, target) or _refused(layouts_of, draft, True)
    if error:
        return Finding("layout", "", "", ERROR, error)
    names = layouts_of(target)[0], layouts_of(draft, drafts=True)[0]
    if "lockstep" in names:
        return Finding("layout", *names, NOTE, "all rows of a batch advance by the fewest accepted among them")
    return _finding("layout", *names, "each model has its own")


def _unknown_tokens(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
) -> Finding:
    sizes = _both(lambda each: "no tokenizer" if each is None else len(each.get_vocab()), tokenizer, draft_tokenizer)
    error = _refused(vocabularies_of_other_sizes, target, draft)
    if error:
        return Finding("tokens", *sizes, ERROR, error)
    return Finding("tokens", *sizes, NOTE, "not checked: the models only score equally many; be sure that ids agree")


def _matched_tokens(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft_tokenizer: PreTrainedTokenizerBase,
) -> Finding:
    """How the draft's tokens become the target's."""
    sizes = _both(lambda each: len(each.get_vocab()), tokenizer, draft_tokenizer)
    try:
        found = matched(vocabulary_map(tokenizer, draft_tokenizer, (vocabulary(target), vocabulary(draft))))
    except ValueError as error:
        return Finding("tokens", *sizes, ERROR, str(error))
    return Finding("tokens", *sizes, NOTE, f"another tokenizer, matched by {found.match} ({found.reason})")


def _encodings(
    tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> Finding:
    """Merges and normalisation, which decide how a text is split."""
    apart = [text for text in texts if _split(tokenizer, text) != _split(draft_tokenizer, text)]
    counts = f"{len(texts)} texts", f"{len(texts) - len(apart)} of them alike"
    if not apart:
        return Finding("encoding", counts[0], "the same")
    return Finding(
        "encoding", *counts, NOTE, f"the draft learned other splits, as of {apart[0][:40]!r}; it agrees less"
    )


def _split(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _special_tokens(tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase) -> Finding:
    def differing(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> str:
        own = {role: getattr(one, role) for role in ROLES if getattr(one, role) != getattr(other, role)}
        return ", ".join(f"{role.removesuffix('_token')} {token}" for role, token in own.items())

    differ = differing(tokenizer, draft_tokenizer), differing(draft_tokenizer, tokenizer)
    named = sum(getattr(tokenizer, role) is not None for role in ROLES)
    if not any(differ):
        return Finding("special tokens", f"{named} of {len(ROLES)} set", "the same")
    return Finding("special tokens", *differ, NOTE, "the target's count")


def _logit_rows(target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Finding:
    """Scores a position: often more than there are tokens, padded to a round number."""
    rows = vocabulary(target), vocabulary(draft)
    ids = rows[0] if tokenizer is None else min(rows[0], 1 + max(tokenizer.get_vocab().values(), default=0))
    if rows[1] < ids:
        follows = f"the draft never proposes ids from {rows[1]} on, and reads them as another"
    else:
        follows = "what comes after the tokens is padding"
    return _finding("logit rows", *_both(vocabulary, target, draft), follows)


def _ends(target: PreTrainedModel, draft: PreTrainedModel) -> Finding:
    return _finding("end tokens", *_both(_end_ids, target, draft), "a text ends at the target's")


def _end_ids(model: PreTrainedModel) -> str:
    config = model.generation_config
    ids = None if config is None else config.eos_token_id
    return ", ".join(map(str, sorted(ids))) if isinstance(ids, list) else "none" if ids is None else str(ids)


def _positions(target: PreTrainedModel, draft: PreTrainedModel) -> Finding:
    limits = tuple(getattr(_text_config(model), "max_position_embeddings", None) for model in (target, draft))
    shorter = limits[1] is not None and (limits[0] is None or limits[1] < limits[0])
    follows = f"after {limits[1]} tokens the draft agrees less" if shorter else "the draft reads as far as the target"
    shown = _both(lambda limit: "no limit" if limit is None else limit, *limits)
    return _finding("positions", *shown, follows)


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)
