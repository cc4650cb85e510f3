"""Why a call is decoded by transformers' own sampler: all reasons, each with its remedy.

Such a call is one that plain `generate` serves, and that candidates could not serve exactly. (What plain `generate`
refuses as well raises in `check_inputs.py` and `check_models.py`.) `reasons_in_call` collects what speaks against
candidates in

- the model (`reasons_in_model`, `why_not_together`),
- its inputs (`reasons_in_mode`, `reasons_in_text`, `reasons_in_length`),
- processors, criteria and outputs (`reasons_in_processors`, `reasons_in_state`, `reasons_in_outputs`),
- devices and ranks (`why_no_noise`, `why_out_of_step`).

Three more are known elsewhere: `SWITCHED_OFF` by the options, `DOES_NOT_PAY` by the costs of earlier calls
(`Call.would_not_draft`), and `why_measured_wrong` after a measurement (`measured_target.py`).
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessor

from hf_specx.common.architectures import ENCODERS, WINDOW_IN_CACHE
from hf_specx.models.choose import layouts_of, why_no_layout
from hf_specx.models.prompts import PreparedInputs
from hf_specx.models.self_check import tokens_of_a_round
from hf_specx.models.slots import CACHE, num_cached_tokens, unknown_cache
from hf_specx.sampling.processors import SYNTHID, Processor, can_look_ahead
from hf_specx.sampling.stopping import Stopping

from .check_inputs import decoding_method_of, text_width


SWITCHED_OFF = "num_draft_tokens=0, given or of a pair whose draft was slower; pass 'auto' to draft nevertheless"
DOES_NOT_PAY = "earlier calls show that its draft would not pay; it is tried again now and then"
SILENCE = "num_draft_tokens=0 decodes plainly without this warning"
OTHER_HEADS = ("summary", "classifier")  # names of dropout rates in configs that no language model uses
CHECKPOINTS_KEEP_CACHE = (5, 24)  # the transformers from which on gradient checkpointing leaves the cache
ROW_ADAPTERS = {"adapter_names", "alora_offsets", "task_ids"}  # what hooks of PEFT's `generate` hand to layers
IGNORES_GAPS = ("led",)  # its decoder takes a mask, but sees what it hides
NOISE_DEVICES = ("cpu", "cuda")  # on others `generate` draws noise ahead, or the generator cannot be read
ASSISTED_MODES = {  # fields of a config that select assisted generation: its name, and the same as a draft
    "prompt_lookup_num_tokens": ("prompt lookup", "SuffixDraft({})"),
    "assistant_early_exit": ("early exit", "EarlyExitDraft({})"),
    "use_mtp": ("multi-token prediction heads", "MtpDraft()"),
}
RARE_PROCESSORS: dict[type[LogitsProcessor], str] = {
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor: (
        "guidance_scale= feeds a second text to the model, one token at a time; leave it out to have candidates"
    ),
    logits_process.WatermarkLogitsProcessor: (
        "a WatermarkingConfig draws a list of tokens after each token; a SynthIDTextWatermarkingConfig has candidates"
    ),
    SYNTHID: (
        "SynthID has candidates where its processor is unused, without debug_mode= and skip_first_ngram_calls=, and "
        "with a sampling_table_size= that is a power of 2 up to 65536"
    ),
    logits_process.EncoderRepetitionPenaltyLogitsProcessor: (
        "encoder_repetition_penalty= is applied to one token at a time; leave it out to have candidates"
    ),
    logits_process.EncoderNoRepeatNGramLogitsProcessor: (
        "encoder_no_repeat_ngram_size= is applied to one token at a time; leave it out to have candidates"
    ),
    logits_process.WhisperNoSpeechDetection: (
        "no_speech_threshold= keeps what it finds at the beginning of a window; leave it out to have candidates"
    ),
}


def reasons_in_call(
    prompt: PreparedInputs, processors: Sequence[Processor], stopping: Stopping, verification: str, synced_gpus: bool
) -> list[str]:
    """All that speaks against candidates in a call; empty if it can be speculated.

    Args:
        prompt: what `generate` has prepared.
        processors: of the call, where grammars have masks already.
        stopping: of the call.
        verification: that the call would have if it samples.
        synced_gpus: whether other ranks run the same forwards.
    """
    reasons = [
        *reasons_in_inputs(prompt, stopping.max_new_tokens),
        *reasons_in_state(processors, stopping),
        *reasons_in_outputs(prompt),
        why_no_noise(prompt.input_ids.device, verification if prompt.generation_config.do_sample else "greedy"),
    ]
    if synced_gpus and not any(reasons):
        reasons.append(why_out_of_step(prompt.model))
    return _without_empty(reasons)


def reasons_in_inputs(prompt: PreparedInputs, new_tokens: int) -> list[str]:
    """What speaks against candidates in a model and in its prepared inputs, for so many new tokens."""
    return _without_empty(
        [
            *reasons_in_model(prompt.model),
            why_not_together(prompt),
            *reasons_in_mode(prompt),
            *reasons_in_text(prompt),
            *reasons_in_length(prompt, new_tokens),
            *reasons_in_processors(prompt),
        ]
    )


def _without_empty(reasons: Iterable[str]) -> list[str]:
    return [reason for reason in reasons if reason]


def reasons_in_model(model: PreTrainedModel) -> Iterator[str]:
    """Reasons in a target, whatever it is given to read; some may be empty."""
    yield why_learned_prompt(model)
    yield why_training("target", model)
    yield why_no_layout(model)
    config = model.config.get_text_config(decoder=True)
    if config.model_type in ENCODERS and not config.is_decoder:
        both = f"{type(model).__name__} attends in both directions, so that candidates would change what stands before"
        yield f"{both} them; set is_decoder=True in its config"


def why_learned_prompt(model: PreTrainedModel) -> str:
    """Why PEFT's own preparation has to feed the target; empty if its adapters are in its weights."""
    wrapper = getattr(model.prepare_inputs_for_generation, "__self__", None)  # put there while PEFT's `generate` runs
    config = getattr(wrapper, "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False):
        return ""
    learned = f"the target has a learned prompt ({type(config).__name__}), which PEFT's own generate alone puts before"
    return f"{learned} the text; use adapters in the weights, as LoRA"


def why_training(role: str, model: PreTrainedModel) -> str:
    """What in a model in training mode draws random numbers, or turns its cache off; empty if nothing does.

    `role` is "target" or "draft".
    """
    if not any(map(attrgetter("training"), model.modules())):
        return ""
    training = {name: module for name, module in model.named_modules() if module.training}
    random = list(_random_modules(training))
    if random:
        shown = ", ".join(random[:3]) + f" and {len(random) - 3} more" * (len(random) > 3)
        mode = f"the {role} is in training mode, where its text is random or its statistics change ({shown})"
        return f"{mode}; call {role}.eval(), or set these probabilities to 0"
    if any(_loses_cache(module) for module in training.values()):
        mode = f"the {role} is in training mode with gradient checkpointing, which turns its cache off"
        return f"{mode}; call {role}.eval() or gradient_checkpointing_disable() while it generates"
    return ""


def _random_modules(training: dict[str, nn.Module]) -> Iterator[str]:
    """The names of modules in training mode that draw random numbers or change in a forward, with their rates."""
    for name, module in training.items():
        if isinstance(module, _BatchNorm):
            yield name
        of_config = {} if (config := getattr(module, "config", None)) is None else vars(config)
        for key, value in (of_config | vars(module)).items():
            is_rate = isinstance(value, float) and value > 0
            if is_rate and ("drop" in key or "jitter" in key) and not key.startswith(OTHER_HEADS):
                yield f"{name}.{key}={value}".removeprefix(".")
        if isinstance(module, _DropoutNd) and module.p > 0:
            yield f"{name}.p={module.p}"


def _loses_cache(module: nn.Module) -> bool:
    """Whether gradient checkpointing takes a module's cache away where there are no gradients.

    From transformers 5.24 on its layers keep the cache then, but for models whose own forward looks at the setting.
    """
    if not getattr(module, "gradient_checkpointing", False):
        return False
    forward = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    looks = forward is None or "gradient_checkpointing" in forward.co_names
    return looks or tuple(map(int, transformers.__version__.split(".")[:2])) < CHECKPOINTS_KEEP_CACHE


def why_not_together(prompt: PreparedInputs) -> str:
    """Why this model computes several tokens of a row at once otherwise than one by one; empty if it does not."""
    name, model_type, past = type(prompt.model).__name__, prompt.model.config.model_type, prompt.past
    is_continued = past is not None and num_cached_tokens(past) > 0
    if model_type in WINDOW_IN_CACHE and (is_continued or prompt.generation_config.prefill_chunk_size is not None):
        return f"{name} reads whole prompts without its window, and parts of prompts with it"
    round_size = tokens_of_a_round(prompt.model)
    if round_size is not None and round_size < 2:
        capacity = "shared by all rows" if round_size == 0 else f"{round_size} token of a row in a forward"
        return f"the experts of {name} have a capacity ({capacity}), which several tokens would exceed"
    if adapts_rows(prompt.model):
        peft = "PEFT says what adapter each row has (as by adapter_names), or where it begins (aLoRA)"
        return f"{peft}, for whole batches"
    return ""


def adapts_rows(model: PreTrainedModel) -> bool:
    """Whether rows of a call of PEFT's `generate` have adapters of their own, or such as begin at some token."""
    for hook in [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]:
        names: Any = getattr(hook, "keywords", None) or getattr(getattr(hook, "__code__", None), "co_freevars", ())
        if not ROW_ADAPTERS.isdisjoint(names):
            return True
    return False


def reasons_in_mode(prompt: PreparedInputs) -> Iterator[str]:
    """Reasons in how a call generates: not by greedy decoding or sampling, or without a usable cache."""
    config, method = prompt.generation_config, decoding_method_of(prompt)
    if method == "_beam_search":
        reads_tokens = prompt.model.main_input_name == "input_ids"
        default = "" if reads_tokens else " (of a pipeline for speech 5 is the default)"
        yield f"num_beams={config.num_beams} is beam search, which has no candidates; set num_beams=1{default}"
    for name, (mode, draft) in ASSISTED_MODES.items() if method == "_assisted_decoding" else ():
        value = getattr(config, name, None)
        if value:
            instead = f"give SpeculativeDecoding({draft.format(value)}), or a list of it and other drafts"
            yield f"{name}={value!r} selects {mode}; {instead}, and leave it out, also of model.generation_config"
    if prompt.kwargs.get("use_cache") is False:
        yield "use_cache=False leaves no cache, which candidates need; pass use_cache=True"
    unknown = "" if prompt.past is None else unknown_cache(prompt.past)
    if unknown:
        yield f"{unknown}, from which rejected tokens cannot be taken back; use a DynamicCache"
    if "inputs_embeds" in prompt.kwargs and config.prefill_chunk_size is not None:
        yield "prefill_chunk_size= reads tokens in the places of inputs_embeds=; leave one of them out"


def reasons_in_text(prompt: PreparedInputs) -> Iterator[str]:
    """Reasons in the mask and the cache of a call, which `generate` takes as they are, though they fit no text."""
    (_, width), kwargs = prompt.input_ids.shape, prompt.kwargs
    decodes = "encoder_outputs" in kwargs
    name = "decoder_attention_mask" if decodes else "attention_mask"
    mask, embeds = kwargs.get(name), None if decodes else kwargs.get("inputs_embeds")
    cached = 0 if prompt.past is None else num_cached_tokens(prompt.past)
    widths = {width} if embeds is None else {width, embeds.shape[1]} - {0}
    all_ones = getattr(prompt.generation_config, "_mask_length", None)
    columns = all_ones if mask is None else mask.shape[-1]
    if cached and embeds is None and not decodes and columns == width and cached >= width:  # it is then the whole text
        more = "pass the text with at least one token more than the cache holds, or the new tokens with a mask for all"
        yield f"{CACHE} holds {cached} tokens, and the whole text has {width}; {more}"
    if columns is not None and columns not in widths and columns - cached not in widths:
        fits = f"pass the mask that came with input_ids, with columns before them for the {cached} tokens of {CACHE}"
        yield f"{name} has {columns} columns, and the text {' or '.join(map(str, sorted(widths)))}; {fits}"
    if mask is None:
        return
    mask = mask.cpu()  # so that all that follow wait for the device once
    seen = mask.bool()
    strange = mask[(mask != 0) & (mask != 1)][:1].tolist()
    if strange:
        yield f"{name} has the value {strange[0]}; pass 1 for a token and 0 for a pad"
    unset = f"if you passed no mask, transformers took the pad id for padding; pass {name} with a 1 for each token"
    empty, last = (~seen.any(-1)).nonzero()[:, 0].tolist(), (~seen[:, -1]).nonzero()[:, 0].tolist()
    if empty:
        yield f"the prompt of row {empty[0]} is empty ({name} is all 0); pass at least one token a row, and {unset}"
    elif last:
        left = "pad prompts on the left, set tokenizer.padding_side='left'"
        yield f"row {last[0]} of {name} ends in 0: {left}, and {unset}"
    if prompt.model.config.model_type in IGNORES_GAPS and (seen.cummax(-1).values != seen).any():
        ignores = f"zeros between tokens of a row, which {type(prompt.model).__name__} ignores"
        yield f"{name} has {ignores}; pad on the left only"


def reasons_in_length(prompt: PreparedInputs, new_tokens: int) -> Iterator[str]:
    """Reasons in how long a text with so many new tokens may be: what a model does with it changes on the way."""
    longest, config = text_width(prompt) + new_tokens, prompt.model.config.get_text_config(decoder=True)
    for rope_type, limit in rope_limits(prompt.model):
        if longest > limit and not (rope_type == "longrope" and is_beyond(prompt, limit)):
            changes = (
                f"rope_type={rope_type!r} changes its frequencies after position {limit}, which candidates reach too"
            )
            yield f"{changes} early; keep prompt and new tokens within {limit} (they may be {longest})"
    window = getattr(config, "keep_window_size", None)
    if window is not None and longest > window:
        leaves = f"{type(prompt.model).__name__} leaves tokens out of texts longer than keep_window_size={window}"
        yield f"{leaves}, and of equal ones rounding decides; keep within it (there may be {longest} tokens)"


def rope_limits(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """The kinds of rotary frequencies that depend on the length of the text, each with where it changes them."""
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):  # one for each kind of layer, in some models
        kind, limit = str(rope.get("rope_type")) if isinstance(rope, dict) else "", None
        if kind in ("dynamic", "longrope"):
            limit = getattr(config, "max_position_embeddings", None)
        if kind == "longrope":
            limit = rope.get("original_max_position_embeddings", limit)
        if limit is not None:
            yield kind, limit


def is_beyond(prompt: PreparedInputs, limit: int) -> bool:
    """Whether all forwards of a call have more than `limit` tokens in some row, whichever rows have ended by then."""
    positions = prompt.kwargs.get("position_ids")
    at_once = prompt.generation_config.prefill_chunk_size is None and not (
        prompt.past and num_cached_tokens(prompt.past)
    )
    return at_once and positions is not None and positions.ndim == 2 and bool((positions[:, -1] >= limit).all())


def reasons_in_processors(prompt: PreparedInputs) -> Iterator[str]:
    """Reasons in the processors of a call: those of transformers that few use, for which nothing is written here."""
    for processor in prompt.processors:
        if type(processor) in RARE_PROCESSORS and not can_look_ahead(processor):
            yield RARE_PROCESSORS[type(processor)]


def reasons_in_state(processors: Sequence[Processor], stopping: Stopping) -> Iterator[str]:
    """Reasons in processors and criteria that may keep state, and would see candidates that are rejected later."""
    stateful = [type(p).__name__ for p in processors if not can_look_ahead(p) and type(p) not in RARE_PROCESSORS]
    if stateful or stopping.stateful:
        names = ", ".join(dict.fromkeys(stateful + stopping.stateful))
        remedy = "(set its attribute stateless = True if it keeps none)"
        yield f"{names} may keep state, and must be shown each token once, in order {remedy}"


def reasons_in_outputs(prompt: PreparedInputs) -> Iterator[str]:
    """Reasons in what a call returns besides its text."""
    config = prompt.generation_config
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            yield f"{name}=True returns one entry a token, which a forward over several does not give (leave it out)"


def why_no_noise(device: torch.device, verification: str) -> str:
    """Why the random numbers of a call cannot be drawn where its text is; empty if they can. "greedy" draws none."""
    if verification != "greedy" and device.type == "mps":
        needed = "sampling draws numbers of 64 bits, which device type 'mps' does not have"
        return f"{needed}; use do_sample=False or the CPU"
    if verification == "coupled" and device.type not in NOISE_DEVICES:
        cannot = f"'coupled' cannot redraw the noise of sampling on {device.type!r}"
        return f"{cannot}; use verification='token' or 'block'"
    return ""


def why_out_of_step(model: PreTrainedModel) -> str:
    """Why ranks with parts of a model would run different forwards; empty if they keep step."""
    if layouts_of(model, drafts=True)[0] != "lockstep":
        return ""
    same = "synced_gpus=True needs the same forwards on every rank"
    again = "a model that takes layout='lockstep' only is fed again what was accepted, on some ranks more often"
    remedy = "use a target and a draft that take another layout, or replicas without synced_gpus"
    return f"{same}, and {again}; {remedy}"


def why_measured_wrong(description: str, differences: Sequence[str]) -> str:
    """Why a target is not trusted that was measured in all of its layouts; `description` says why it was measured."""
    wrong = f"{description}, and several tokens at once give it other distributions than one at a time "
    return f"{wrong}({'; '.join(differences)}); {SILENCE}"
