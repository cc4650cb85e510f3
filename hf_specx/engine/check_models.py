"""Whether a target and a draft can be served, and whether the draft's tokens mean what the target's mean."""

import inspect
import warnings
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import transformers
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_specx.common.architectures import ENCODERS, WINDOW_IN_CACHE
from hf_specx.common.checkpoints import find_file
from hf_specx.common.errors import require
from hf_specx.common.tokenizers import same_tokens, vocabulary_of
from hf_specx.common.wrappers import logical_parameters, vocabulary
from hf_specx.models.choose import layouts_of, why_no_layout
from hf_specx.models.prompts import PreparedInputs
from hf_specx.models.self_check import tokens_of_a_round
from hf_specx.models.slots import num_cached_tokens


OWN_TEXT_LAYOUTS = ("ragged", "padded")  # of a draft with other tokens, whose rows grow each by its own number
OF_OTHER_HEADS = ("summary", "classifier")  # of no language model
CHECKPOINTS_KEEP_CACHE = (5, 24)  # of transformers
TOKENIZER_FILE = "tokenizer.json"
BY_ROW = {"adapter_names", "alora_offsets", "task_ids"}  # what hooks of PEFT's `generate` hand to layers
GIVE_BOTH = "pass tokenizer= and draft_tokenizer= to SpeculativeDecoding, which compares and matches their tokens."
GIVE_ITS_OWN = "pass the draft's own as draft_tokenizer=, or, if it knows the target's, save that in its folder."
COMPARED: WeakKeyDictionary[PreTrainedModel, WeakSet[PreTrainedModel]] = WeakKeyDictionary()  # targets of each draft
WEIGHED: WeakKeyDictionary[PreTrainedModel, WeakSet[PreTrainedModel]] = WeakKeyDictionary()  # likewise
TokenizerOrNone = PreTrainedTokenizerBase | None


def check_target(model: PreTrainedModel) -> None:
    """Raise ValueError if the weights of the target are not there."""
    _check_weights("target", model)


def why_model_plain(model: PreTrainedModel) -> Iterator[str]:
    """Reasons why transformers itself decodes with this target, each with its remedy, whatever it is given to read."""
    yield why_learned_prompt(model)
    yield why_training("target", model)
    yield why_no_layout(model)
    config = model.config.get_text_config(decoder=True)
    if config.model_type in ENCODERS and not config.is_decoder:
        both = f"{type(model).__name__} attends in both directions, so that candidates would change what stands before"
        yield f"{both} them; set is_decoder=True in its config"


def why_plain(prompt: PreparedInputs) -> str:
    """Why transformers' own sampler has to decode with this model; empty if ours can."""
    name, kind, past = type(prompt.model).__name__, prompt.model.config.model_type, prompt.past
    in_parts = prompt.generation_config.prefill_chunk_size is not None or (
        past is not None and num_cached_tokens(past)
    )
    if kind in WINDOW_IN_CACHE and in_parts:
        return f"{name} reads whole prompts without its window, and parts of prompts with it"
    fits = tokens_of_a_round(prompt.model)
    if fits is not None and fits < 2:
        shared = "shared by all rows" if fits == 0 else f"{fits} token of a row in a forward"
        return f"the experts of {name} have a capacity ({shared}), which several tokens would exceed"
    if adapts_rows(prompt.model):
        return (
            "PEFT says what adapter each row has (as by adapter_names), or where it begins (aLoRA), for whole batches"
        )
    return ""


def adapts_rows(model: PreTrainedModel) -> bool:
    """Whether rows of a call of PEFT's `generate` have adapters of their own, or such as begin at some token."""
    for hook in [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]:
        names: Any = getattr(hook, "keywords", None) or getattr(getattr(hook, "__code__", None), "co_freevars", ())
        if not BY_ROW.isdisjoint(names):
            return True
    return False


def why_learned_prompt(inner: PreTrainedModel) -> str:
    """Why PEFT's own preparation has to feed the target; empty if its adapters are in its weights."""
    wrapper = getattr(inner.prepare_inputs_for_generation, "__self__", None)  # put there while PEFT's `generate` runs
    config = getattr(wrapper, "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False):
        return ""
    learned = f"the target has a learned prompt ({type(config).__name__}), which PEFT's own generate alone puts before"
    return f"{learned} the text; use adapters in the weights, as LoRA"


def _check_weights(role: str, model: PreTrainedModel) -> None:
    """Raise ValueError if a model has parameters without values, and nothing that loads them."""
    if any(map(attrgetter("is_meta"), model.parameters())):
        message = f"the {role} model has parameters on the meta device and no offload hook to load them; load its "
        message += "weights first, for example with from_pretrained(..., device_map='auto')."
        require(any(hasattr(module, "_hf_hook") for module in model.modules()), message)


def _check_draft(model: PreTrainedModel) -> None:
    """Raise ValueError if a draft has no weights, or if anything in it is random or without a cache."""
    _check_weights("draft", model)
    why = why_training("draft", model)
    require(not why, f"{why}.")


def why_training(role: str, model: PreTrainedModel) -> str:
    """What in a model that is in training mode is random, or turns its cache off; empty if nothing is."""
    if not any(map(attrgetter("training"), model.modules())):
        return ""
    training = {name: module for name, module in model.named_modules() if module.training}
    random = list(_active_dropout(training))
    if random:
        shown = ", ".join(random[:3]) + f" and {len(random) - 3} more" * (len(random) > 3)
        mode = f"the {role} is in training mode, where its text is random or its statistics change ({shown})"
        return f"{mode}; call {role}.eval(), or set these probabilities to 0"
    if any(_loses_cache(module) for module in training.values()):
        mode = f"the {role} is in training mode with gradient checkpointing, which turns its cache off"
        return f"{mode}; call {role}.eval() or gradient_checkpointing_disable() while it generates"
    return ""


def _loses_cache(module: nn.Module) -> bool:
    """Whether gradient checkpointing takes a module's cache away where there are no gradients.

    From transformers 5.24 on its layers keep the cache then, but for models whose own forward looks at the setting.
    """
    if not getattr(module, "gradient_checkpointing", False):
        return False
    forward = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    looks = forward is None or "gradient_checkpointing" in forward.co_names
    return looks or tuple(map(int, transformers.__version__.split(".")[:2])) < CHECKPOINTS_KEEP_CACHE


def _active_dropout(training: dict[str, nn.Module]) -> Iterator[str]:
    """Of modules in training mode those that draw random numbers or change in a forward, and what they are set to."""
    for name, module in training.items():
        if isinstance(module, _BatchNorm):
            yield name
        of_config = {} if (config := getattr(module, "config", None)) is None else vars(config)
        for key, value in (of_config | vars(module)).items():
            is_rate = isinstance(value, float) and value > 0
            if is_rate and ("drop" in key or "jitter" in key) and not key.startswith(OF_OTHER_HEADS):
                yield f"{name}.{key}={value}".removeprefix(".")
        if isinstance(module, _DropoutNd) and module.p > 0:
            yield f"{name}.p={module.p}"


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
        message = f"the two tokenizers differ, for instance in {token!r} with id {number}; choose a draft with the "
        raise ValueError(f"{message}target's tokenizer, or a model, whose tokens SpeculativeDecoding can match.")
    compared = COMPARED.setdefault(draft, WeakSet())
    if target not in compared and (None in (tokenizer, draft_tokenizer) or draft_tokenizer is tokenizer):
        compare_vocabularies(target, draft, tokenizer, draft_tokenizer)
        compared.add(target)


def warn_of_larger_draft(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Warn, once for two models, if the draft is the larger one: the text is that of the smaller one then."""
    weighed = WEIGHED.setdefault(draft, WeakSet())
    if target in weighed:
        return
    weighed.add(target)
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
    same_size = size == draft_size or target in COMPARED.get(draft, ())
    same_size = same_size or one_tokenizer(target, draft, tokenizer, draft_tokenizer)
    require(same_size, f"the target scores {size} tokens and the draft {draft_size}; {GIVE_BOTH}")


def one_tokenizer(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: TokenizerOrNone, draft_tokenizer: TokenizerOrNone
) -> bool:
    """Whether two models have the same tokens by their tokenizers, given or beside their files; False if not known."""
    file, draft_file = _file_of(target), _file_of(draft)
    if tokenizer is None and draft_tokenizer is None and file and draft_file and _same_contents(file, draft_file):
        return True
    tokens, draft_tokens = _tokens(tokenizer, file), _tokens(draft_tokenizer, draft_file)
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
            f"the draft {name} reads encoder outputs of width {draft_width}, and the target's have {width}; choose "
        )
        message += f"a draft with its own encoder, or with d_model={width}."
        require(None in (width, draft_width) or width == draft_width, message)


def check_own_text(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: TokenizerOrNone, other: TokenizerOrNone, width: int
) -> None:
    """Raise ValueError if a draft with another tokenizer cannot run.

    `width` is how many columns of ids the target's prompts have.
    """
    message, encodes = f"the draft {type(draft).__name__} has", draft.config.is_encoder_decoder
    why = "an encoder and another tokenizer than the target, so it cannot read what that reads; choose a decoder-only "
    require(not encodes, f"{message} {why}draft, or one with the target's tokenizer.")
    message = f"{message} another tokenizer than the target"
    why = "so that its rows grow by unequal numbers of tokens, which it can only take one row at a time; choose a "
    able = not set(layouts_of(draft, drafts=True)).isdisjoint(OWN_TEXT_LAYOUTS)
    require(able, f"{message}, {why}draft with attention alone, or one with the target's tokenizer.")
    require(width > 0, f"{message} and cannot read inputs_embeds; pass input_ids= as well.")
    _check_draft(draft)
    for role, model, model_tokenizer in (("target", target, tokenizer), ("draft", draft, other)):
        if model_tokenizer is not None:
            _check_tokenizer(role, model, model_tokenizer)


def _check_tokenizer(role: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if a tokenizer is not that of a model, as far as one can tell."""
    added, size = tokenizer.added_tokens_decoder, vocabulary(model)
    ids = tokenizer.get_vocab() if vocabulary_of(tokenizer).largest >= size else {}
    beyond = {number: token for token, number in ids.items() if number >= size and number not in added}
    message, number = f"the {role}'s tokenizer is not that of {type(model).__name__}:", min(beyond, default=0)
    shown = f"{beyond.get(number)!r} has id {number}"
    require(not beyond, f"{message} {shown}, and the model scores {size} tokens; pass its own.")
    ends = getattr(model.generation_config, "eos_token_id", None)
    for number in [] if ends is None else ends if isinstance(ends, list) else [ends]:
        special = number >= size or number in added or number in tokenizer.all_special_ids
        text = None if special else tokenizer.convert_ids_to_tokens(number)
        shown = f"the model's texts end at id {number}, which means {text!r} there"
        require(text is None, f"{message} {shown}; pass its own.")


def compare_vocabularies(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: TokenizerOrNone, draft_tokenizer: TokenizerOrNone
) -> None:
    """Compare two tokenizers of equally many tokens; raise if most ids differ, and warn where too little is known.

    A tokenizer that was not given is looked for where its model was loaded from, in a folder or in the cache of the
    Hub. Where one is not found, two models count as alike if they are of one type and their texts begin and end with
    the same ids. A few other ids do no harm, as candidates are judged. One object given twice is said to be of common.
    """
    shared = tokenizer is not None and draft_tokenizer is tokenizer
    file, draft_file = _file_of(target), _file_of(draft)
    if file and draft_file and _same_contents(file, draft_file):
        return
    tokens, draft_tokens = _tokens(tokenizer, file), _tokens(None if shared else draft_tokenizer, draft_file)
    if not (tokens and draft_tokens):
        why = "" if shared else _differ((target, draft), (tokenizer, draft_tokenizer))
        if why:
            message = (
                "target and draft score equally many tokens, and whether these are the same tokens is not known, "
            )
            message += f"since {why}. If not, hardly any candidate is accepted (the text stays right); {GIVE_BOTH}"
            warnings.warn(message, UserWarning, stacklevel=2)
        return
    common = tokens.keys() & draft_tokens.keys()
    differ = [number for number in common if tokens[number] != draft_tokens[number]]
    number = max(differ, default=0)
    message = (
        f"target and draft have different tokenizers: {len(differ)} of {len(common)} ids stand for other tokens, for "
    )
    message += f"instance {number} for {tokens.get(number)!r} and {draft_tokens.get(number)!r}"
    require(2 * len(differ) <= len(common), f"{message}; {GIVE_ITS_OWN if shared else GIVE_BOTH}")


def _file_of(model: PreTrainedModel) -> Path | None:
    """The tokenizer's file beside the files that a model was loaded from, if it is on this disk."""
    name, commit = str(getattr(model, "name_or_path", None) or ""), getattr(model.config, "_commit_hash", None)
    try:
        return find_file(name, TOKENIZER_FILE, revision=commit, local_files_only=True) if name else None
    except ValueError:  # a name that is no id on the Hub
        return None


def _tokens(tokenizer: TokenizerOrNone, file: Path | None) -> dict[int, str] | None:
    """The tokens by their ids; None where they are not known."""
    if tokenizer is None and file is not None:
        try:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
        except Exception:  # the tokenizers library raises plain Exceptions for a file that it cannot read
            return None
    return None if tokenizer is None else {number: token for token, number in tokenizer.get_vocab().items()}


def _differ(
    models: tuple[PreTrainedModel, PreTrainedModel], tokenizers: tuple[TokenizerOrNone, TokenizerOrNone]
) -> str:
    """What speaks against one tokenizer of target and draft; empty if nothing does."""
    kind, draft_kind = (model.config.get_text_config(decoder=True).model_type for model in models)
    if kind != draft_kind:
        return f"the target is of type {kind} and the draft of type {draft_kind}"
    for name, what in (("bos_token_id", "begin with"), ("eos_token_id", "end at")):
        ids, draft_ids = (_special(name, *known) for known in zip(models, tokenizers, strict=True))
        if ids and draft_ids and not ids & draft_ids:
            return f"the target's texts {what} id {min(ids)}, and the draft's {what} id {min(draft_ids)}"
    return ""


def _special(name: str, model: PreTrainedModel, tokenizer: TokenizerOrNone) -> set[int]:
    """The ids of a special token, by both configs of a model and by its tokenizer."""
    special: set[int] = set()
    for config in (model.config.get_text_config(decoder=True), model.generation_config, tokenizer):
        ids: Any = getattr(config, name, None)
        special |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return special
