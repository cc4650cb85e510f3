"""What is trained: an EAGLE-3 head, from nothing or from one that was given."""

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specx.bench.drafts import HEAD
from hf_specx.common.devices import last_device
from hf_specx.common.errors import require
from hf_specx.common.wrappers import public_name, vocabulary
from hf_specx.drafting.heads.config import HeadConfig
from hf_specx.drafting.heads.head import DraftHead
from hf_specx.drafting.suffix import SuffixDraft

from .draft import Learner, Tokenizers, named
from .losses import Predicted
from .reading import Said, Text
from .recipe import TrainingRecipe
from .unrolled import Unrolled


MOST = 512  # tokens of a text that are learned from, its last ones: memory and time of a step grow with them
INITIAL = 0.02  # standard deviation of weights that start at random


class HeadDraft(Learner):
    """A draft head that is trained for a target.

    A new one scores the most frequent tokens of the texts, so it is there once the first texts are; these are written
    with drafts from the text itself.

    Args:
        target: whose states it reads.
        head: one of the kind "eagle3" to go on with; None is a new one.
    """

    def __init__(
        self, target: PreTrainedModel, head: DraftHead | None, recipe: TrainingRecipe, tokenizers: Tokenizers
    ):
        self.target, self.recipe, self.tokenizers = target, recipe, (tokenizers[0], tokenizers[0])
        self.device, self.models, self.drafts, self.most = last_device(target), [target], SuffixDraft(), MOST
        require(recipe.lora is None, f"lora={recipe.lora}: a head is small, and trained whole; leave lora out.")
        told = "training={'gradient_checkpointing': ...}: a head is too small for it to save memory; leave that out."
        require(not recipe.training.get("gradient_checkpointing"), told)
        check_output(target, head)
        config: Any = new_config(target, 1) if head is None else head.config
        told = f"a head of kind {config.kind!r} cannot be trained here; give one of EAGLE-3, or {HEAD!r}, a new one."
        require(config.kind == HEAD, told)
        with torch.device("meta"):
            self.places = (head or DraftHead(config)).places(target)
        self.rate = recipe.rate(config.hidden_size, HEAD if head is None else "draft")
        self.made_from, self.in_words = HEAD, "an EAGLE-3 head with random weights"
        if head is not None:
            self.made_from, self.in_words = head, named(head)
            head.of(target)  # or it is refused
            self._start(head)

    def begin(self, prompts: Sequence[list[int]], texts: Sequence[Text]) -> None:
        if isinstance(self.made_from, DraftHead):
            return
        size, wanted = vocabulary(self.target), self.recipe.draft_vocab_size
        ids = torch.tensor([i for text in texts for i in text.new] + [i for prompt in prompts for i in prompt])
        counts = torch.bincount(ids, minlength=size)
        known = counts.argsort(descending=True, stable=True)[:wanted].sort().values
        self._start(new_head(self.target, known, self.recipe.seed))

    def _start(self, head: DraftHead) -> None:
        self.first = head
        self.trained = self.module(copy.deepcopy(head).float().requires_grad_())
        self.drafts = self.trained.draft_head

    def module(self, draft: Any) -> Any:
        embed: Any = self.target.get_input_embeddings()
        return Unrolled(draft, embed, self.target.get_output_embeddings(), self.recipe.num_draft_tokens)

    def predict(self, model: Any, texts: Sequence[Text], said: Said) -> Predicted:
        weight, entries, begin = next(model.parameters()), [], 0
        for (prompt, new), seen in zip(texts, said.states, strict=True):
            ids = torch.tensor([*prompt, *new])
            first, last = max(0, len(ids) - 2 - MOST), max(1, len(ids) - 2)
            row = torch.arange(first, last) + 2 - len(prompt)  # entry i, of token i + 1, says what token i + 2 is
            number = torch.where((row >= 0) & (row < len(new)), row + begin, -1)
            entries.append((ids[first + 1 : last + 1], number, seen[first:last]))
            begin += len(new)
        tokens, numbers, states = (
            nn.utils.rnn.pad_sequence(list(parts), True, -1 * (part == 1)).to(weight.device)
            for part, parts in enumerate(zip(*entries, strict=True))
        )
        logits = model(tokens, states.to(weight.dtype), numbers >= 0)
        rows = [numbers[:, step:][numbers[:, step:] >= 0] for step in range(len(logits))]
        steps = [torch.full_like(each, step) for step, each in enumerate(rows)]
        known = None if self.first.ids is None else self.first.ids.to(weight.device)
        return Predicted(torch.cat(logits).float(), torch.cat(rows), torch.cat(steps), known)

    def finished(self, trained: Any) -> PreTrainedModel:
        made = copy.deepcopy(self.first)
        made.load_state_dict(trained.draft_head.state_dict())
        return cast(PreTrainedModel, made.requires_grad_(False).eval())


def check_output(target: PreTrainedModel, head: DraftHead | None) -> None:
    """Check that the target's output can be copied, or read for a head that has none."""
    output: Any = target.get_output_embeddings()
    told = f"{type(target).__name__} has no output embeddings that a head could start from; give 'layers:2'."
    require(output is not None, told)
    told = "the target's output embeddings are offloaded to memory or disk, and a head needs them; load the target "
    require(not output.weight.is_meta or (head is not None and head.config.own_head), f"{told}without offloading.")


def new_config(target: PreTrainedModel, tokens: int) -> Any:
    """The `HeadConfig` of a head with one layer as wide as the target's, which reads the states of three of them."""
    text = target.config.get_text_config(decoder=True)
    width, heads, count = text.hidden_size, text.num_attention_heads, text.num_hidden_layers
    rope = getattr(text, "rope_parameters", None) or {}
    return HeadConfig(
        kind=HEAD,
        layer_ids=sorted({count // 2, 3 * count // 4, count - 1}),
        hidden_size=width,
        target_hidden_size=width,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * width,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or width // heads,
        vocab_size=vocabulary(target),
        draft_vocab_size=tokens,
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-6,
        max_position_embeddings=getattr(text, "max_position_embeddings", None) or 32768,
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
        norm_before_residual=True,
        own_head=True,
        target=public_name(target),
        target_architectures=[type(target).__name__],
        dtype=target.dtype,
    )


@torch.no_grad()
def new_head(target: PreTrainedModel, known: torch.Tensor, seed: int) -> DraftHead:
    """A head that scores these ids, which ascend: its output starts as the target's, the rest at random."""
    head: Any = DraftHead(new_config(target, len(known)))
    generator = torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        if weight.ndim > 1:
            weight.copy_(torch.randn(weight.shape, generator=generator) * INITIAL)
    output: Any = target.get_output_embeddings()
    head.lm_head.weight.copy_(output.weight[known.to(output.weight.device)])
    if len(known) < vocabulary(target):
        head.d2t.copy_(known - torch.arange(len(known)))
        head.t2d[known] = True
    return cast(DraftHead, head.to(last_device(target), target.dtype).requires_grad_(False).eval())
