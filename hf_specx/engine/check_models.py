"""Targets and drafts that are refused before any forward: without weights, or with tokens of other meanings."""

import inspect
import warnings
from operator import attrgetter
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_specx.common.checkpoints import find_file
from hf_specx.common.errors import require
from hf_specx.common.tokenizers import same_tokens, vocabulary_of
from hf_specx.common.wrappers import logical_parameters, vocabulary
from hf_specx.models.choose import layouts_of

from .reasons import why_training


OTHER_TOKENIZER_LAYOUTS = ("ragged", "padded")  # of a draft with other tokens, whose rows grow each by its own number
TOKENIZER_FILE = "tokenizer.json"
GIVE_BOTH = "pass tokenizer= and draft_tokenizer= to SpeculativeDecoding, which compares and matches their tokens."
GIVE_ONE = "choose a draft with the target's tokenizer; if it has that, pass it as tokenizer= and draft_tokenizer=."
GIVE_ITS_OWN = "pass the draft's own as draft_tokenizer=, or, if it knows the target's, save that in its folder."
TargetsByDraft = WeakKeyDictionary[PreTrainedModel, WeakSet[PreTrainedModel]]
COMPARED_TARGETS: TargetsByDraft = WeakKeyDictionary()  # whose tokens were compared with the draft's
WARNED_TARGETS: TargetsByDraft = WeakKeyDictionary()  # whose number of parameters was compared with the draft's
TokenizerOrNone = PreTrainedTokenizerBase | None


def check_target(model: PreTrainedModel) -> None:
    """Raise ValueError if the weights of the target are not there."""
    _check_weights("target", model)


def _check_weights(role: str, model: PreTrainedModel) -> None:
    """Raise ValueError if a model has parameters without values, and nothing that loads them."""
    if any(map(attrgetter("is_meta"), model.parameters())):
        message = (
            f"the {role} model has parameters on the meta device and no offload hook to load them; load its weights "
            "first, for example with from_pretrained(..., device_map='auto')."
        )
        require(any(hasattr(module, "_hf_hook") for module in model.modules()), message)


def _check_draft(model: PreTrainedModel) -> None:
    """Raise ValueError if a draft has no weights, or if anything in it is random or without a cache."""
    _check_weights("draft", model)
    why = why_training("draft", model)
    require(not why, f"{why}.")


def check_pair(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: TokenizerOrNone, draft_tokenizer: TokenizerOrNone
) -> None:
    """Raise ValueError if the draft cannot run, or its token ids do not mean what the target's mean."""
    _check_draft(draft)
    _check_encoder(target, draft)
    if tokenizer is None or draft_tokenizer is None:
        check_sizes(target, draft, tokenizer, draft_tokenizer)
    elif not same_tokens(tokenizer, draft_tokenizer):
        token, number = min(tokenizer.get_vocab().items() ^ draft_tokenizer.get_vocab().items())
        message = (
            f"the two tokenizers differ, for instance in {token!r} with id {number}; choose a draft with the "
            "target's tokenizer, or a model, whose tokens SpeculativeDecoding can match."
        )
        raise ValueError(message)
    already_compared = COMPARED_TARGETS.setdefault(draft, WeakSet())
    if target not in already_compared and (None in (tokenizer, draft_tokenizer) or draft_tokenizer is tokenizer):
        compare_vocabularies(target, draft, tokenizer, draft_tokenizer)
        already_compared.add(target)


def warn_of_larger_draft(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Warn, once for two models, if the draft is the larger one: the text is that of the smaller one then."""
    already_warned = WARNED_TARGETS.setdefault(draft, WeakSet())
    if target in already_warned:
        return
    already_warned.add(target)
    sizes = logical_parameters(target), logical_parameters(draft)
    if sizes[1] > sizes[0]:
        message = (
            f"the draft {type(draft).__name__} has {sizes[1]:,} parameters, and the target {type(target).__name__} "
            f"has {sizes[0]:,}: the text is that of the smaller model. If you want the other, call the larger one's "
            "generate, and give the smaller one as its draft."
        )
        warnings.warn(message, UserWarning, stacklevel=2)


def check_sizes(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: TokenizerOrNone, draft_tokenizer: TokenizerOrNone
) -> None:
    """Raise ValueError if two models score other numbers of tokens, and are not known to have one tokenizer."""
    size, draft_size = vocabulary(target), vocabulary(draft)
    same_size = size == draft_size or target in COMPARED_TARGETS.get(draft, ())
    same_size = same_size or one_tokenizer(target, draft, tokenizer, draft_tokenizer)
    require(same_size, f"the target scores {size} tokens and the draft {draft_size}; {_remedy(draft)}")


def _remedy(draft: PreTrainedModel) -> str:
    """What to do about a draft whose tokens may be others; where it has an encoder, they cannot be matched."""
    return GIVE_ONE if draft.config.is_encoder_decoder else GIVE_BOTH


def one_tokenizer(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: TokenizerOrNone, draft_tokenizer: TokenizerOrNone
) -> bool:
    """Whether two models have the same tokens by their tokenizers, given or beside their files; False if not known."""
    file, draft_file = _tokenizer_file(target), _tokenizer_file(draft)
    if tokenizer is None and draft_tokenizer is None and file and draft_file and _same_contents(file, draft_file):
        return True
    tokens, draft_tokens = _tokens_by_id(tokenizer, file), _tokens_by_id(draft_tokenizer, draft_file)
    return tokens is not None and tokens == draft_tokens


def _same_contents(file: Path, other: Path) -> bool:
    return file == other or file.read_bytes() == other.read_bytes()


def _check_encoder(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Raise ValueError if a draft cannot read what the target's encoder reads, or gives."""
    name, encodes = type(draft).__name__, target.config.is_encoder_decoder
    draft_encodes = draft.config.is_encoder_decoder
    message = f"the draft {name} is an encoder-decoder, the target is decoder-only; choose a decoder-only draft."
    require(encodes or not draft_encodes, message)
    if draft_encodes and draft.get_encoder() is not target.get_encoder():
        reads, draft_reads = target.main_input_name, draft.main_input_name
        message = f"the target reads {reads} and the draft {name} {draft_reads}; choose a draft that reads the same."
        require(reads != "input_ids" or draft_reads == "input_ids", message)
        bins, draft_bins = (getattr(model.config, "num_mel_bins", None) for model in (target, draft))
        message = f"the target hears {bins} mel bins and the draft {draft_bins}; choose one with num_mel_bins={bins}."
        require(None in (bins, draft_bins) or bins == draft_bins, message)
    elif encodes and not draft_encodes and "encoder_outputs" in inspect.signature(draft.forward).parameters:
        width, draft_width = (getattr(model.config, "d_model", None) for model in (target, draft))
        message = (
            f"the draft {name} reads encoder outputs of width {draft_width}, and the target's have {width}; choose a "
            f"draft with its own encoder, or with d_model={width}."
        )
        require(None in (width, draft_width) or width == draft_width, message)


def check_other_tokenizer(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: TokenizerOrNone, other: TokenizerOrNone, width: int
) -> None:
    """Raise ValueError if a draft with another tokenizer cannot run.

    `width` is how many columns of ids the target's prompts have.
    """
    name = type(draft).__name__
    message = (
        f"the draft {name} has an encoder and another tokenizer than the target, so it cannot read what that reads; "
        "choose a decoder-only draft, or one with the target's tokenizer."
    )
    require(not draft.config.is_encoder_decoder, message)
    message = (
        f"the draft {name} has another tokenizer than the target, so that its rows grow by unequal numbers of tokens, "
        "which it can only take one row at a time; choose a draft with attention alone, or one with the target's "
        "tokenizer."
    )
    able = not set(layouts_of(draft, drafts=True)).isdisjoint(OTHER_TOKENIZER_LAYOUTS)
    require(able, message)
    message = (
        f"the draft {name} has another tokenizer than the target and cannot read inputs_embeds; pass input_ids= as "
        "well."
    )
    require(width > 0, message)
    _check_draft(draft)
    for role, model, model_tokenizer in (("target", target, tokenizer), ("draft", draft, other)):
        if model_tokenizer is not None:
            _check_tokenizer(role, model, model_tokenizer)


def _check_tokenizer(role: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if a tokenizer is not that of a model, as far as one can tell."""
    added, size = tokenizer.added_tokens_decoder, vocabulary(model)
    mismatch = f"the {role}'s tokenizer is not that of {type(model).__name__}:"
    if vocabulary_of(tokenizer).largest >= size:
        beyond = {token_id: token for token, token_id in tokenizer.get_vocab().items() if token_id >= size}
        unknown = sorted(beyond.keys() - added.keys())
        if unknown:
            has = f"{beyond[unknown[0]]!r} has id {unknown[0]}"
            raise ValueError(f"{mismatch} {has}, and the model scores {size} tokens; pass its own.")
    end_ids: Any = getattr(model.generation_config, "eos_token_id", None)
    for end_id in [] if end_ids is None else end_ids if isinstance(end_ids, list) else [end_ids]:
        is_special = end_id >= size or end_id in added or end_id in tokenizer.all_special_ids
        text = None if is_special else tokenizer.convert_ids_to_tokens(end_id)
        ends = f"the model's texts end at id {end_id}, which means {text!r} there"
        require(text is None, f"{mismatch} {ends}; pass its own.")


def compare_vocabularies(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: TokenizerOrNone, draft_tokenizer: TokenizerOrNone
) -> None:
    """Compare two tokenizers of equally many tokens; raise if most ids differ, and warn where too little is known.

    A tokenizer that was not given is looked for where its model was loaded from, in a folder or in the cache of the
    Hub. Where one is not found, two models count as alike if they are of one type and their texts begin and end with
    the same ids. A few other ids do no harm, as candidates are judged. One tokenizer given for both says nothing of
    the draft, whose own is then looked for.
    """
    shared = tokenizer is not None and draft_tokenizer is tokenizer
    file, draft_file = _tokenizer_file(target), _tokenizer_file(draft)
    if file and draft_file and _same_contents(file, draft_file):
        return
    tokens = _tokens_by_id(tokenizer, file)
    draft_tokens = _tokens_by_id(None if shared else draft_tokenizer, draft_file)
    if not (tokens and draft_tokens):
        why = "" if shared else _why_other_tokens((target, draft), (tokenizer, draft_tokenizer))
        if why:
            message = (
                "target and draft score equally many tokens, and whether these are the same tokens is not known, "
                f"since {why}. If not, hardly any candidate is accepted (the text stays right); {_remedy(draft)}"
            )
            warnings.warn(message, UserWarning, stacklevel=2)
        return
    common = tokens.keys() & draft_tokens.keys()
    differ = [number for number in common if tokens[number] != draft_tokens[number]]
    number = max(differ, default=0)
    message = (
        f"target and draft have different tokenizers: {len(differ)} of {len(common)} ids stand for other tokens, for "
        f"instance {number} for {tokens.get(number)!r} and {draft_tokens.get(number)!r}; "
        f"{GIVE_ITS_OWN if shared else _remedy(draft)}"
    )
    require(2 * len(differ) <= len(common), message)


def _tokenizer_file(model: PreTrainedModel) -> Path | None:
    """The tokenizer's file beside the files that a model was loaded from, if it is on this disk."""
    name, commit = str(getattr(model, "name_or_path", None) or ""), getattr(model.config, "_commit_hash", None)
    try:
        return find_file(name, TOKENIZER_FILE, revision=commit, local_files_only=True) if name else None
    except ValueError:  # a name that is no id on the Hub
        return None


def _tokens_by_id(tokenizer: TokenizerOrNone, file: Path | None) -> dict[int, str] | None:
    """The tokens by their ids; None where they are not known."""
    if tokenizer is None and file is not None:
        try:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
        except Exception:  # the tokenizers library raises plain Exceptions for a file that it cannot read
            return None
    return None if tokenizer is None else {number: token for token, number in tokenizer.get_vocab().items()}


def _why_other_tokens(
    models: tuple[PreTrainedModel, PreTrainedModel], tokenizers: tuple[TokenizerOrNone, TokenizerOrNone]
) -> str:
    """What speaks against one tokenizer of target and draft; empty if nothing does."""
    kind, draft_kind = (model.config.get_text_config(decoder=True).model_type for model in models)
    if kind != draft_kind:
        return f"the target is of type {kind} and the draft of type {draft_kind}"
    for name, what in (("bos_token_id", "begin with"), ("eos_token_id", "end at")):
        ids, draft_ids = (_special_ids(name, *each) for each in zip(models, tokenizers, strict=True))
        if ids and draft_ids and not ids & draft_ids:
            return f"the target's texts {what} id {min(ids)}, and the draft's {what} id {min(draft_ids)}"
    return ""


def _special_ids(name: str, model: PreTrainedModel, tokenizer: TokenizerOrNone) -> set[int]:
    """The ids of a special token, by both configs of a model and by its tokenizer."""
    special: set[int] = set()
    for config in (model.config.get_text_config(decoder=True), model.generation_config, tokenizer):
        ids: Any = getattr(config, name, None)
        special |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return special
