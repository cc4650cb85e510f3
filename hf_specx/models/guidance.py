"""Classifier-free guidance (Sanchez et al. 2023, arXiv 2306.17806) over all positions of a round at once.

The unconditional text is a second batch with a `ModelRunner` of its own, which reads the negative prompts and is then
fed what the rows emit. The draft is not guided: with the embedded pair that doubled its cost and did not raise acceptance.
"""

from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft
from hf_specx.sampling.processors import Processor, RoundProcessor

from .choose import make_runner
from .prompts import Prompt
from .runner import ModelRunner
from .slots import CACHE


# transformers gives the unconditional forward no position_ids. These models then take them from the mask, which is not
# the column where prompts are padded
FROM_MASK = ("opt", "biogpt")
# and these from ids that are no pads, or start again in each step
NOT_BY_COLUMN = """
    bamba camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod
""".split()  # noqa: SIM905


class Guidance(RoundProcessor):
    """`UnbatchedClassifierFreeGuidanceLogitsProcessor` for any number of positions.

    Its runner is that of the unconditional text, and reads the negative prompts when the first scores are there.
    """

    def __init__(self, scale: float, runner: ModelRunner):
        self.scale, self.runner = scale, runner

    def __call__(self, batch: Batch, draft: Draft | None, scores: torch.Tensor, ahead: int) -> torch.Tensor:
        if not self.runner.width:
            self.runner.prefill()
        positions = scores.shape[1]
        if positions == 1:
            logits = self.runner.decode_step(batch, ahead)
        else:
            logits = self.runner.decode_tokens(batch, positions, ahead + positions - 1, keep=positions)
        conditional, unconditional = scores.log_softmax(-1), logits.log_softmax(-1)
        return self.scale * (conditional - unconditional) + unconditional


def is_guidance(processor: Processor, prompt: Prompt) -> bool:
    """Whether `guide` can replace a processor: transformers' own, unused, for a model whose positions we know."""
    if type(processor) is not UnbatchedClassifierFreeGuidanceLogitsProcessor or processor.model is not prompt.model:
        return False
    context: dict[str, Any] = processor.unconditional_context
    config = prompt.model.config
    mask = context["attention_mask"]
    padded = mask is not None and not bool(mask.all())
    plain = config.get_text_config(decoder=True) is config and not config.is_encoder_decoder
    numbered = config.model_type not in NOT_BY_COLUMN and not (padded and config.model_type in FROM_MASK)
    numbered = numbered and plain and CACHE in prompt.kwargs
    return bool(numbered and context["first_pass"] and context["use_cache"] and prompt.input_ids.shape[1])


def guide(processor: Any, prompt: Prompt, layout: str) -> Guidance:
    """The `Guidance` that replaces a processor of a call whose target has this prompt and layout."""
    context: dict[str, Any] = processor.unconditional_context
    # without negative prompts the last token of each prompt is one
    ids = prompt.input_ids[:, -1:] if context["input_ids"] is None else context["input_ids"]
    mask = torch.ones_like(ids) if context["attention_mask"] is None else context["attention_mask"]
    kwargs = {"attention_mask": mask, "use_cache": True, CACHE: DynamicCache(config=prompt.model.config)}
    if prompt.kwargs.get("position_ids") is not None:
        kwargs["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)  # pads count too
    alone = replace(prompt, input_ids=ids, kwargs=kwargs, keeps_past=False, gives_hidden=False)
    return Guidance(processor.guidance_scale, make_runner("ragged" if layout == "packed" else layout, alone))
