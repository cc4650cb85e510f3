"""What a model is fed first: the inputs that `generate` has prepared, and those of a draft, made from them."""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.modeling_outputs import ModelOutput

from hf_specx.common.architectures import ANY_POSITION
from hf_specx.common.errors import require
from hf_specx.common.wrappers import shallow
from hf_specx.sampling.stopping import Stopping

from .slots import CACHE, cache_name


UNLIMITED = sys.maxsize
HiddenStateTap = tuple[torch.nn.Module, bool]  # a module, and whether its input is read in place of its output
NOT_SHARED = """
    attention_mask position_ids cache past_key_values cache_params use_cache logits_to_keep encoder_outputs input_ids
    decoder_attention_mask decoder_position_ids decoder_input_ids output_attentions output_hidden_states
""".split()  # noqa: SIM905
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id", "audio_token_index")
SIZES = {  # fields of a config, the first that it has
    "encoder": ("max_source_positions", "max_encoder_position_embeddings", "max_position_embeddings"),
    "decoder": ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings", "max_seq_len"),
}


@dataclass(frozen=True, eq=False)
class PreparedInputs:
    """What `generate` hands to a decoding method, for one model, and what this call wants of its forwards.

    Attributes:
        input_ids: [B, L] int64; for an encoder-decoder what its decoder starts with.
        generation_config: with the lengths and special tokens of this call.
        kwargs: of the model's forward, the cache among them.
        max_new_tokens: no row gets more; `UNLIMITED` in a queue, whose later requests have limits of their own.
        max_new_tokens_now: the same for the rows of the first prompts alone, for which room is made in the cache.
        returns_cache: whether the cache is wanted at the end.
        returns_hidden: whether forwards give hidden states, for a draft head.
        all_prompt_hidden: whether of prompts those of all tokens are wanted, or of the last token alone.
        hidden_state_taps: the modules where they are read; without any they are those behind the final norm.
        synced_gpus: whether other ranks run forwards whenever this one does, so that none may be added.
        processors, criteria: as `generate` hands them over.
        inputs_tensor: what an encoder reads, before rows were repeated; None where that is not known.
        seeds: one for each row, as the user gave them.
    """

    model: PreTrainedModel
    input_ids: torch.Tensor
    generation_config: GenerationConfig
    kwargs: dict[str, Any]
    max_new_tokens: int = UNLIMITED
    returns_cache: bool = False
    returns_hidden: bool = False
    all_prompt_hidden: bool = True
    hidden_state_taps: Sequence[HiddenStateTap] = ()
    max_new_tokens_now: int = UNLIMITED
    synced_gpus: bool = False
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    inputs_tensor: torch.Tensor | None = None
    seeds: Any = None

    @cached_property
    def stopping(self) -> Stopping:
        """When rows end, by these criteria."""
        return Stopping(self.criteria, self.input_ids.shape[1], self.generation_config.max_length)

    @property
    def past(self) -> Any:
        """The cache that was given; None without one."""
        return self.kwargs.get(cache_name(self.kwargs))


def prepare(model: PreTrainedModel, max_new_tokens: int, inputs: dict[str, Any]) -> PreparedInputs:
    """What transformers' `generate` prepares for a model from these inputs, up to where decoding would begin."""

    def decoding_method(
        _: Any, input_ids: torch.Tensor, generation_config: GenerationConfig, **kwargs: Any
    ) -> PreparedInputs:
        processors, criteria = kwargs.pop("logits_processor"), kwargs.pop("stopping_criteria")
        return PreparedInputs(
            model,
            input_ids,
            generation_config,
            kwargs,
            max_new_tokens,
            max_new_tokens_now=max_new_tokens,
            processors=processors,
            criteria=criteria,
        )

    special = {name: getattr(model.generation_config, name, None) for name in SPECIAL}
    config = GenerationConfig(max_new_tokens=1, use_cache=True, **special)
    copied = shallow(model)  # its own settings are not for this call, and other threads may read them
    copied.generation_config = GenerationConfig()
    mixin: Any = GenerationMixin
    return mixin.generate(copied, **inputs, generation_config=config, custom_generate=decoding_method)


def draft_prompt(draft: PreTrainedModel, target: PreparedInputs) -> PreparedInputs:
    """What a draft is fed first, made from what its target is; raises ValueError if it cannot read that."""
    names = inspect.signature(draft.forward).parameters
    shared = {k: v for k, v in target.kwargs.items() if v is not None and k in names and k not in NOT_SHARED}
    if draft.config.is_encoder_decoder:
        inputs = _for_both_sides(shared, draft, target)
    else:
        inputs = _for_decoder(shared, draft, target)
        if target.model.config.is_encoder_decoder and "encoder_outputs" in names:
            inputs["encoder_outputs"] = target.kwargs["encoder_outputs"]
    dtypes = target.model.dtype, draft.dtype
    inputs = {name: _in_dtype(value, *dtypes) for name, value in inputs.items() if value is not None}
    prompt = prepare(draft, target.max_new_tokens, inputs)
    prompt = replace(prompt, max_new_tokens_now=target.max_new_tokens_now, synced_gpus=target.synced_gpus)
    if not draft.config.is_encoder_decoder and prompt.past is not None:
        prompt.generation_config.prefill_chunk_size = target.generation_config.prefill_chunk_size
    if "encoder_outputs" in inputs and not draft.config.is_encoder_decoder:  # by default it caches the text alone
        prompt.kwargs[CACHE] = EncoderDecoderCache(DynamicCache(), DynamicCache())
    return prompt


def _in_dtype(value: Any, dtype: torch.dtype, draft_dtype: torch.dtype) -> Any:
    """An input in a draft's precision if it has the target's, as sounds and encodings do; any other as it is."""
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _in_dtype(part, dtype, draft_dtype) for name, part in value.items()})
    return value.to(draft_dtype) if isinstance(value, torch.Tensor) and value.dtype == dtype else value


def _for_both_sides(shared: dict[str, Any], draft: PreTrainedModel, target: PreparedInputs) -> dict[str, Any]:
    """What an encoder-decoder reads; `shared` are the inputs that it takes as its target does."""
    inputs_tensor, encoder_outputs = target.inputs_tensor, None
    assert inputs_tensor is not None
    are_features = inputs_tensor.is_floating_point()
    are_embeds = are_features and draft.main_input_name == "input_ids"
    if are_embeds:
        _check_embeds(draft, inputs_tensor, inputs_tensor)
    if draft.get_encoder() is target.model.get_encoder():
        encoder_outputs = target.kwargs["encoder_outputs"]
    else:
        require(
            are_features or bool((inputs_tensor >= 0).any()),  # without any, `generate` makes negative ids
            f"the call gives encoder_outputs alone, and the draft {type(draft).__name__} has an encoder of its own; "
            "pass what the encoder reads as well.",
        )
    repeated = inputs_tensor.repeat_interleave(len(target.input_ids) // len(inputs_tensor), 0)
    return shared | {
        "inputs_embeds": repeated if are_embeds else None,
        "inputs": None if are_embeds else repeated,
        "attention_mask": target.kwargs.get("attention_mask"),
        "encoder_outputs": encoder_outputs,
        "decoder_input_ids": target.input_ids,
        "decoder_attention_mask": target.kwargs.get("decoder_attention_mask"),
    }


def _for_decoder(shared: dict[str, Any], draft: PreTrainedModel, target: PreparedInputs) -> dict[str, Any]:
    """What a decoder reads; `shared` are the inputs that it takes as its target does.

    It has the target's features of images if it can read them, since `generate` has dropped the pixels by now; else
    the placeholders are hidden from it, and the words keep positions of their own.
    """
    ids, model, inputs = target.input_ids, target.model, dict(shared)
    mask = target.kwargs.get("decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask")
    of_one_type = draft.config.model_type == model.config.model_type
    reads_images = of_one_type and _embedding_width(draft) == _embedding_width(model)
    if ids.shape[1]:
        mask = torch.ones_like(ids) if mask is None else mask[:, -ids.shape[1] :]
        mask = mask if reads_images else _without_placeholders(mask, ids, model)
        inputs |= {"inputs_embeds": None, "input_ids": ids}
    else:
        _check_embeds(draft, inputs.get("inputs_embeds"), target.kwargs["inputs_embeds"])
    if "mm_encoder_outputs" in inputs and not reads_images:
        inputs["mm_encoder_outputs"] = None
    positions = target.kwargs.get("position_ids")
    if of_one_type and positions is not None and positions.ndim == 3:  # made from sizes of images, dropped as well
        inputs["position_ids"] = positions
    return inputs | {"attention_mask": mask}


def _without_placeholders(mask: torch.Tensor, ids: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """A mask [B, L] without what stands for an image, video or sound in a model's prompt; the last token stays."""
    mask = mask.clone()
    for name in PLACEHOLDERS:
        placeholder = getattr(model.config, name, None)
        if placeholder:
            mask[:, :-1].masked_fill_(ids[:, :-1].eq(placeholder), 0)
    return mask


def _check_embeds(draft: PreTrainedModel, readable: torch.Tensor | None, embeds: torch.Tensor) -> None:
    """Raise ValueError if a draft cannot read the embeddings that a call gives to its target."""
    width = _embedding_width(draft)
    require(
        readable is not None and embeds.shape[-1] == width,
        f"inputs_embeds of width {embeds.shape[-1]} cannot be read by the draft {type(draft).__name__}, which embeds "
        f"in {width}; pass input_ids= as well, which the draft reads.",
    )


def _embedding_width(model: PreTrainedModel) -> int | None:
    weight = getattr(model.get_input_embeddings(), "weight", None)
    return None if weight is None else weight.shape[-1]


def position_table(model: PreTrainedModel, encoder: bool = False) -> int | None:
    """How many positions the table of a decoder or an encoder has; None where positions are computed."""
    part = "encoder" if encoder else "decoder"
    owner = getattr(model.get_encoder(), "config", model.config) if encoder else model.config  # of two models, its own
    config = owner.get_text_config(**{part: True})
    if hasattr(config, "rope_parameters") or config.model_type in ANY_POSITION:
        return None
    for name in SIZES[part]:
        size = getattr(config, name, None)
        if size:
            return size
    return None


def has_rows(value: Any, rows: int) -> bool:
    """Whether an input has an entry for each of the rows."""
    if isinstance(value, ModelOutput):
        return any(has_rows(part, rows) for part in value.values())
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == rows


def gather_input_rows(value: Any, index: torch.Tensor, rows: int) -> Any:
    """The entries at row indices [R'] of an input that has one for each of the rows; any other input as it is.

    Hidden states of layers in an encoder's output are left alone: `generate` does not repeat them for
    `num_return_sequences`, and no decoder reads them.
    """
    if isinstance(value, ModelOutput):
        return type(value)(**{name: gather_input_rows(part, index, rows) for name, part in value.items()})
    return value[index.to(value.device)] if has_rows(value, rows) else value
