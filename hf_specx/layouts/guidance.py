"""Classifier-free guidance (Sanchez et al. 2023, arXiv 2306.17806) over all positions of a round at once.

Stock's processor holds the unconditional text in a cache of its own, one token a call, so it cannot look ahead. Here
that text is one more batch of rows for a `Decoder`: it reads the negative prompts and is fed what the rows emit. The
draft is not guided: with the embedded pair that doubled its cost and gained no acceptance, at scales of 1.2 to 3.
"""

from dataclasses import replace
from typing import Any, TypeGuard

import torch
from transformers.cache_utils import DynamicCache
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from hf_specx.common.batch import Batch
from hf_specx.sampling.processors import Processor, RoundProcessor

from .choose import make_decoder
from .decoder import Decoder
from .prompts import Prompt


# Stock gives no positions here. These number tokens by the mask then, which matters where prompts are padded
FROM_MASK = ("opt", "biogpt")
# and these otherwise than by columns: by ids that are no pads, or anew in each step
NOT_BY_COLUMN = """
    bamba camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod
""".split()  # noqa: SIM905


class Guidance(RoundProcessor):
    """What `UnbatchedClassifierFreeGuidanceLogitsProcessor` does to the scores of one position, for any number.

    Args:
        scale: of the guidance; 1 is none.
        decoder: of the unconditional text, which it has not read yet.
    """

    def __init__(self, scale: float, decoder: Decoder):
        self.scale, self.decoder = scale, decoder
        decoder.read()

    def __call__(self, batch: Batch, scores: torch.Tensor, ahead: int) -> torch.Tensor:
        positions = scores.shape[1]
        if positions == 1:
            logits = self.decoder.step(batch, ahead)
        else:
            logits = self.decoder.feed(batch, positions, ahead + positions - 1, keep=positions)
        conditional, unconditional = scores.log_softmax(-1), logits.log_softmax(-1)
        return self.scale * (conditional - unconditional) + unconditional

    def leave(self, rows: list[int], stay: torch.Tensor) -> None:
        self.decoder.leave(rows, stay)


def is_guidance(processor: Processor, prompt: Prompt) -> TypeGuard[UnbatchedClassifierFreeGuidanceLogitsProcessor]:
    """Whether a processor is stock's, fresh, and for a model whose unconditional text we can number as stock does.

    Any other is called in order, like all processors that keep state. One that we have taken the place of stays fresh.
    """
    if type(processor) is not UnbatchedClassifierFreeGuidanceLogitsProcessor or processor.model is not prompt.model:
        return False
    context: dict[str, Any] = processor.unconditional_context
    config = prompt.model.config
    mask = context["attention_mask"]
    padded = mask is not None and not bool(mask.all())
    plain = config.get_text_config(decoder=True) is config and not config.is_encoder_decoder
    numbered = config.model_type not in NOT_BY_COLUMN and not (padded and config.model_type in FROM_MASK)
    numbered = numbered and plain and "past_key_values" in prompt.kwargs
    return bool(numbered and context["first_pass"] and context["use_cache"] and prompt.input_ids.shape[1])


def guide(processor: UnbatchedClassifierFreeGuidanceLogitsProcessor, prompt: Prompt, layout: str) -> Guidance:
    """Our own in place of stock's.

    Args:
        processor: of the call; it has the negative prompts, or else the last token of each prompt is one.
        prompt: the target's.
        layout: the target's.
    """
    context: dict[str, Any] = processor.unconditional_context
    ids = prompt.input_ids[:, -1:] if context["input_ids"] is None else context["input_ids"]
    mask = torch.ones_like(ids) if context["attention_mask"] is None else context["attention_mask"]
    kwargs = {"attention_mask": mask, "use_cache": True, "past_key_values": DynamicCache(config=prompt.model.config)}
    if prompt.kwargs.get("position_ids") is not None:
        kwargs["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)  # pads count in stock
    alone = replace(prompt, input_ids=ids, kwargs=kwargs, keeps_past=False)
    return Guidance(processor.guidance_scale, make_decoder("ragged" if layout == "packed" else layout, alone))
