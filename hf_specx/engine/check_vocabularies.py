"""Whether the tokens of a draft mean what the target's mean, where its own tokenizer was not given."""

import warnings
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet

from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.hub import try_to_load_from_cache


TOKENIZER_FILE = "tokenizer.json"
GIVE_BOTH = (
    "pass tokenizer= and draft_tokenizer= to SpeculativeDecoding, which then compares and matches their tokens."
)
GIVE_ITS_OWN = (
    "pass the draft's own tokenizer as draft_tokenizer=, or, if the draft was trained for the target's tokens, save "
    "the target's tokenizer in its folder."
)
COMPARED: WeakKeyDictionary[PreTrainedModel, WeakSet[PreTrainedModel]] = WeakKeyDictionary()  # targets of each draft


def files_of_other_tokens(vocab: dict[str, int], draft_vocab: dict[str, int], remedy: str = GIVE_BOTH) -> None:
    """Check that most ids stand for the same tokens; a few that were renamed do no harm, as candidates are judged."""
    tokens = [{number: token for token, number in each.items()} for each in (vocab, draft_vocab)]
    both = sorted(tokens[0].keys() & tokens[1].keys())
    apart = [number for number in both if tokens[0][number] != tokens[1][number]]
    if 2 * len(apart) <= len(both):
        return
    number = apart[-1]
    raise ValueError(
        f"target and draft score equally many tokens and have different tokenizers: {len(apart)} of {len(both)} ids "
        f"stand for other tokens, for instance {number} for {tokens[0][number]!r} and {tokens[1][number]!r}; "
        f"{remedy}"
    )


def compare_vocabularies(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Compare what is known of two tokenizers, and warn where that is too little; once for each two models.

    A tokenizer that was not given is looked for where its model was loaded from, in a folder or in the cache of the
    Hub, without the network. Where one is not found, two models count as alike if they are of one type and their
    texts begin and end with the same ids.

    Args:
        target, draft: score equally many tokens.
        tokenizer, draft_tokenizer: as they were given, None where one was not; the same object is said to be of both.

    Raises:
        ValueError: if most ids stand for other tokens.
    """
    known = COMPARED.setdefault(draft, WeakSet())
    if target in known:
        return
    shared = tokenizer is not None and draft_tokenizer is tokenizer
    file, draft_file = _file_of(target), _file_of(draft)
    if file is None or draft_file is None or (file != draft_file and file.read_bytes() != draft_file.read_bytes()):
        vocab = _vocabulary(tokenizer, file)
        draft_vocab = _vocabulary(None if shared else draft_tokenizer, draft_file)
        if vocab is not None and draft_vocab is not None:
            files_of_other_tokens(vocab, draft_vocab, GIVE_ITS_OWN if shared else GIVE_BOTH)
        elif not shared:
            _warn(_differ((target, draft), (tokenizer, draft_tokenizer)))
    known.add(target)


def _file_of(model: PreTrainedModel) -> Path | None:
    """The tokenizer's file beside the files that a model was loaded from, if it is on this disk."""
    name = str(getattr(model, "name_or_path", None) or "")
    if not name:
        return None
    if Path(name).is_dir():
        path = Path(name) / TOKENIZER_FILE
        return path if path.is_file() else None
    try:
        found = try_to_load_from_cache(name, TOKENIZER_FILE, revision=getattr(model.config, "_commit_hash", None))
    except ValueError:  # a name that is no id on the Hub
        return None
    return Path(found) if isinstance(found, str) else None


def _vocabulary(tokenizer: PreTrainedTokenizerBase | None, file: Path | None) -> dict[str, int] | None:
    if tokenizer is not None or file is None:
        return None if tokenizer is None else tokenizer.get_vocab()
    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(file)).get_vocab()
    except Exception:  # the tokenizers library raises plain Exceptions for a file that it cannot read
        return None


def _warn(why: str) -> None:
    if why:
        told = (
            "target and draft score equally many tokens, and whether these are the same tokens is not known, since "
            f"{why}. If they are not, hardly any candidate is accepted (the text stays right); {GIVE_BOTH}"
        )
        warnings.warn(told, UserWarning, stacklevel=2)


def _differ(
    models: tuple[PreTrainedModel, PreTrainedModel],
    tokenizers: tuple[PreTrainedTokenizerBase | None, PreTrainedTokenizerBase | None],
) -> str:
    """What speaks against one tokenizer of target and draft; empty if nothing does."""
    types = [model.config.get_text_config(decoder=True).model_type for model in models]
    if types[0] != types[1]:
        return f"the target is of type {types[0]} and the draft of type {types[1]}"
    for name, what in (("bos_token_id", "begin with"), ("eos_token_id", "end at")):
        ids, draft_ids = (_special(name, *known) for known in zip(models, tokenizers, strict=True))
        if ids and draft_ids and not ids & draft_ids:
            return f"the target's texts {what} id {min(ids)}, and the draft's {what} id {min(draft_ids)}"
    return ""


def _special(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """The ids of a special token, by both configs of a model and by its tokenizer."""
    found: set[int] = set()
    for told in (model.config.get_text_config(decoder=True), model.generation_config, tokenizer):
        ids = getattr(told, name, None)
        found |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return found
