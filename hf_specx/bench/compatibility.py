"""Whether a draft fits a target: what must be the same, what may differ, and what follows. Nothing is decoded."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.architectures import vocabulary
from hf_specx.common.tokenizers import same_tokens
from hf_specx.drafting.candidates import make_drafter
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.drafting.other_tokenizer import matched
from hf_specx.drafting.vocabulary_map import vocabulary_map
from hf_specx.engine.check_models import check_own_text, check_pair, vocabularies_of_other_sizes
from hf_specx.hub.pair_config import WeightlessDraft
from hf_specx.models.choose import layouts_of


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
Tokenizer = PreTrainedTokenizerBase


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
    tokenizer: Tokenizer | None,
    draft_tokenizer: Tokenizer | None,
    texts: Iterable[str] = (),
) -> list[Finding]:
    """All that matters for a pair, as findings; it fits if none of them is an error.

    Args:
        target, draft: in evaluation mode.
        tokenizer, draft_tokenizer: of each; None where it has none, so that only sizes can be compared.
        texts: more of them to encode with both, besides `PROBE_TEXTS`.
    """
    models, tokenizers = (target, draft), (tokenizer, draft_tokenizer)
    known = tokenizer is not None and draft_tokenizer is not None
    found = [
        _compared("model type", [_text_config(model).model_type for model in models], "families may differ"),
        _layouts(target, draft),
        *(_tokens(models, tokenizer, draft_tokenizer, texts) if known else [_unknown_tokens(models, tokenizers)]),
    ]
    own_text = known and not same_tokens(*tokenizers)
    if not own_text:
        found.append(_logit_rows(target, draft, tokenizer))
    found.append(_compared("end tokens", list(map(_end_ids, models)), "a text ends at the target's"))
    found.append(_positions(target, draft))
    error = (
        _refused(check_own_text, *models, *tokenizers, 1) if own_text else _refused(check_pair, *models, *tokenizers)
    )
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
    return [Finding("layers", str(_text_config(target).num_hidden_layers), drafting)]


def _refused(check: Callable[..., Any], *args: Any) -> str:
    """What a check says, "" if nothing."""
    try:
        check(*args)
    except ValueError as error:
        return str(error)
    return ""


def _compared(subject: str, both: Sequence[object], follows: str) -> Finding:
    """What follows, only where the two differ."""
    target, draft = map(str, both)
    return Finding(subject, target, draft) if target == draft else Finding(subject, target, draft, NOTE, follows)


def _layouts(target: PreTrainedModel, draft: PreTrainedModel) -> Finding:
    """How rows of unequal length share a batch."""
    error = _refused(layouts_of, target) or _refused(layouts_of, draft, True)
    if error:
        return Finding("layout", "", "", ERROR, error)
    names = layouts_of(target)[0], layouts_of(draft, drafts=True)[0]
    if "lockstep" in names:
        return Finding("layout", *names, NOTE, "all rows of a batch advance by the fewest accepted among them")
    return _compared("layout", names, "each model has its own")


def _unknown_tokens(
    models: tuple[PreTrainedModel, PreTrainedModel], tokenizers: tuple[Tokenizer | None, Tokenizer | None]
) -> Finding:
    sizes = _sizes(*tokenizers)
    error = _refused(vocabularies_of_other_sizes, *models)
    if error:
        return Finding("tokens", *sizes, ERROR, error)
    return Finding("tokens", *sizes, NOTE, "not checked: the models only score equally many; be sure that ids agree")


def _sizes(*tokenizers: Tokenizer | None) -> tuple[str, str]:
    one, other = ("no tokenizer" if each is None else str(len(each.get_vocab())) for each in tokenizers)
    return one, other


def _tokens(
    models: tuple[PreTrainedModel, PreTrainedModel], tokenizer: Any, draft_tokenizer: Any, texts: Iterable[str]
) -> list[Finding]:
    """How the draft's tokens become the target's."""
    sizes = _sizes(tokenizer, draft_tokenizer)
    if same_tokens(tokenizer, draft_tokenizer):
        same = Finding("tokens", *sizes, OK, "every token has the same id in both")
        encoded = _encodings(tokenizer, draft_tokenizer, [*PROBE_TEXTS, *texts])
        return [same, encoded, _special_tokens(tokenizer, draft_tokenizer)]
    try:
        found = matched(vocabulary_map(tokenizer, draft_tokenizer, (vocabulary(models[0]), vocabulary(models[1]))))
    except ValueError as error:
        return [Finding("tokens", *sizes, ERROR, str(error))]
    return [Finding("tokens", *sizes, NOTE, f"another tokenizer, matched by {found.match} ({found.reason})")]


def _encodings(tokenizer: Tokenizer, draft_tokenizer: Tokenizer, texts: list[str]) -> Finding:
    """Merges and normalisation, which decide how a text is split."""

    def split(by: Tokenizer, text: str) -> list[int]:
        return by(text, add_special_tokens=False)["input_ids"]

    apart = [text for text in texts if split(tokenizer, text) != split(draft_tokenizer, text)]
    if not apart:
        return Finding("encoding", f"{len(texts)} texts", "the same")
    follows = f"the draft learned other splits, as of {apart[0][:40]!r}; it agrees less"
    return Finding("encoding", f"{len(texts)} texts", f"{len(texts) - len(apart)} of them alike", NOTE, follows)


def _special_tokens(tokenizer: Tokenizer, draft_tokenizer: Tokenizer) -> Finding:
    def differing(one: Tokenizer, other: Tokenizer) -> str:
        own = {role: getattr(one, role) for role in ROLES if getattr(one, role) != getattr(other, role)}
        return ", ".join(f"{role.removesuffix('_token')} {token}" for role, token in own.items())

    differ = differing(tokenizer, draft_tokenizer), differing(draft_tokenizer, tokenizer)
    named = sum(getattr(tokenizer, role) is not None for role in ROLES)
    if not any(differ):
        return Finding("special tokens", f"{named} of {len(ROLES)} set", "the same")
    return Finding("special tokens", *differ, NOTE, "the target's count")


def _logit_rows(target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Tokenizer | None) -> Finding:
    """Scores a position: often more than there are tokens, padded to a round number."""
    rows = vocabulary(target), vocabulary(draft)
    ids = rows[0] if tokenizer is None else min(rows[0], 1 + max(tokenizer.get_vocab().values(), default=0))
    follows = "what comes after the tokens is padding"
    if rows[1] < ids:
        follows = f"the draft never proposes ids from {rows[1]} on, and reads them as another"
    return _compared("logit rows", rows, follows)


def _end_ids(model: PreTrainedModel) -> str:
    config = model.generation_config
    ids = None if config is None else config.eos_token_id
    return ", ".join(map(str, sorted(ids))) if isinstance(ids, list) else "none" if ids is None else str(ids)


def _positions(target: PreTrainedModel, draft: PreTrainedModel) -> Finding:
    limits = [getattr(_text_config(model), "max_position_embeddings", None) for model in (target, draft)]
    shorter = limits[1] is not None and (limits[0] is None or limits[1] < limits[0])
    follows = f"after {limits[1]} tokens the draft agrees less" if shorter else "the draft reads as far as the target"
    return _compared("positions", ["no limit" if limit is None else limit for limit in limits], follows)


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)
