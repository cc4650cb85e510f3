"""What is trained: an EAGLE-3 or DSpark head, from nothing or from one that was given."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_specx.common.devices import last_device
from hf_specx.common.drafts import NEW_HEADS
from hf_specx.common.errors import require
from hf_specx.common.wrappers import public_name, vocabulary
from hf_specx.drafting.heads.config import HeadConfig
from hf_specx.drafting.heads.head import DraftHead
from hf_specx.drafting.heads.layers import read_by
from hf_specx.drafting.suffix import SuffixDraft

from .draft import Learner, Tokenizers, named
from .losses import Predicted
from .places import DRAFTS, places
from .reading import Said, Text
from .recipe import TrainingRecipe


MOST = 512  # tokens of a text that are learned from, its last ones: memory and time of a step grow with them
EVERY = 8  # of how many tokens one has a draft behind it in a step of training, from a random one on
INITIAL = 0.02  # standard deviation of weights that start at random
RANK = 128  # of what the token before adds to the scores of a new DSpark head, and half of its width at most
RAREST = 256  # ids of which one is the mask


class HeadDraft(Learner):
    """A draft head that is trained for a target.

    A new one scores the most frequent tokens of the texts, so it is there once the first texts are; these are written
    with drafts from the text itself.

    Args:
        target: whose states it reads.
        start: one of the kinds in `DRAFTS` to go on with, or one of `NEW_HEADS`.
    """

    def __init__(
        self, target: PreTrainedModel, start: DraftHead | str, recipe: TrainingRecipe, tokenizers: Tokenizers
    ):
        self.target, self.recipe, self.tokenizers = target, recipe, (tokenizers[0], tokenizers[0])
        self.device, self.models, self.drafts, self.most = last_device(target), [target], SuffixDraft(), MOST
        require(recipe.lora is None, f"lora={recipe.lora}: a head is small, and trained whole; leave lora out.")
        told = "training={'gradient_checkpointing': ...}: a head is too small for it to save memory; leave that out."
        require(not recipe.training.get("gradient_checkpointing"), told)
        head = start if isinstance(start, DraftHead) else None
        output: Any = target.get_output_embeddings()
        told = f"{type(target).__name__} has no output embeddings that a head could start from; give 'layers:2'."
        require(output is not None, told)
        own_head = head is not None and head.config.own_head
        told = "the target's output embeddings are offloaded to memory or disk, and a head needs them; load the "
        require(not output.weight.is_meta or own_head, f"{told}target without offloading.")
        config: Any = new_config(target, str(start), recipe) if head is None else head.config
        told = f"a head of kind {config.kind!r} cannot be trained here; give one of EAGLE-3, DSpark or DFlash, or "
        require(config.kind in DRAFTS, f"{told}{' or '.join(map(repr, NEW_HEADS))}, a new one.")
        with torch.device("meta"):
            self.hidden_state_taps = (head or DraftHead(config)).hidden_state_taps(target)
        self.rate = recipe.rate(config.hidden_size, "head" if head is None else "draft")
        self.made_from, self.in_words = start, f"a new {config.kind} head with random weights"
        if head is not None:
            self.in_words = named(head)
            self._start(head)

    def begin(self, prompts: Sequence[list[int]], texts: Sequence[Text]) -> None:
        if isinstance(self.made_from, str):
            ids = torch.tensor(list(itertools.chain(*(text.new for text in texts), *prompts)), device="cpu")
            counts = torch.bincount(ids, minlength=vocabulary(self.target))
            self._start(new_head(self.target, self.made_from, counts, self.recipe))

    def _start(self, head: DraftHead) -> None:
        self.first = head
        self.trained = self.module(copy.deepcopy(head).float().requires_grad_())
        self.drafts = self.trained.draft_head
        if head.config.confidence_head:
            self.drafts.body.confidence_head.requires_grad_(False)  # of which no loss says anything

    def module(self, draft: Any) -> Any:
        return HeadOnTexts(draft, self.target, self.recipe.num_draft_tokens)

    def predict(self, model: Any, texts: Sequence[Text], said: Said, draws: Sequence[int] | None = None) -> Predicted:
        weight, entries, begin = next(model.parameters()), [], 0
        every = 1 if draws is None else EVERY
        for (prompt, new), seen, draw in zip(texts, said.states, draws or [0] * len(texts), strict=True):
            ids = torch.tensor([*prompt, *new], device="cpu")
            first, last = max(0, len(ids) - 2 - MOST), max(1, len(ids) - 2)
            # entry i, of token i + 1, says what token i + 2 is
            row = torch.arange(first, last, device="cpu") + 2 - len(prompt)
            number = torch.where((row >= 0) & (row < len(new)), row + begin, -1)
            begins = (number >= 0) & ((row - draw) % every == 0)
            entries.append((ids[first + 1 : last + 1], number, begins, seen[first:last]))
            begin += len(new)
        tokens, numbers, begins, states = (
            nn.utils.rnn.pad_sequence(list(parts), True, -1 * (part == 1)).to(weight.device)
            for part, parts in enumerate(zip(*entries, strict=True))
        )
        logits, rows, steps = model(tokens, states.to(weight.dtype), numbers, begins)
        known = None if self.first.ids is None else self.first.ids.to(weight.device)
        return Predicted(logits, rows, steps, known, every / self.recipe.num_draft_tokens)

    def finished(self, trained: Any) -> PreTrainedModel:
        made = copy.deepcopy(self.first)
        made.load_state_dict(trained.draft_head.state_dict())
        return cast(PreTrainedModel, made.requires_grad_(False).eval())


class HeadOnTexts(nn.Module):
    """A head that is trained, over whole texts; its weights are those of this module.

    Args:
        draft_head: in evaluation mode.
        target: whose tables it reads, if it has none of its own.
        steps: candidates of a draft at most.
    """

    def __init__(self, draft_head: DraftHead, target: PreTrainedModel, steps: int):
        super().__init__()
        self.draft_head, self.drafter, most = draft_head, draft_head.bind(target), draft_head.body.most
        self.steps = steps if most is None else min(steps, most)

    def forward(self, *texts: torch.Tensor) -> list[torch.Tensor]:
        """Logits [M, V_d] in float32 of all places, the number of each [M], and how many are before it in its draft.

        Arguments as those of `places.places`.
        """
        body, found, memory = self.draft_head.body, [], None
        for step, before, rows, normed in places(self, *texts):
            memory = None if step == 0 or memory is None else memory[: len(rows)]
            given = self.drafter.scored(normed), normed, before[:, None], memory, False
            scores, memory, _ = body.scored(*given)
            found.append((scores, rows, torch.full_like(rows, step)))
        logits, rows, steps = map(torch.cat, zip(*found, strict=True))
        return [logits.float(), rows, steps]


def new_config(target: PreTrainedModel, kind: str, recipe: TrainingRecipe, tokens: int = 1, mask: int = 0) -> Any:
    """The `HeadConfig` of a head with one layer as wide as the target's, which reads the states of three of them."""
    text = target.config.get_text_config(decoder=True)
    width, heads, count = text.hidden_size, _number(text, "num_attention_heads", 1), text.num_hidden_layers
    fields: dict[str, Any] = {"intermediate_size": 4 * width, "num_key_value_heads": heads, "head_dim": width // heads}
    fields |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
    fields = {name: _number(text, name, usual) for name, usual in fields.items()}
    if kind == "dspark":
        fields |= {"block_size": max(2, recipe.num_draft_tokens), "sample_from_anchor": True, "qk_norm": True}
        fields |= {"markov_rank": min(RANK, width // 2), "mask_token_id": mask}
    rope = getattr(text, "rope_parameters", None) or {}
    return HeadConfig(
        kind=kind,
        layer_ids=sorted({count // 2, 3 * count // 4, count - 1}),
        hidden_size=width,
        target_hidden_size=width,
        num_attention_heads=heads,
        vocab_size=vocabulary(target),
        draft_vocab_size=tokens,
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
        norm_before_residual=kind == "eagle3",
        num_draft_tokens=recipe.num_draft_tokens,
        own_head=True,
        target=public_name(target),
        target_architectures=[type(target).__name__],
        dtype=target.dtype,
        **fields,
    )


def _number(config: PreTrainedConfig, name: str, usual: float) -> Any:
    """A field of a target's config; the usual one where it has none, or one for each layer."""
    try:
        found = getattr(config, name, None)
    except Exception:  # of a type that transformers has for fields by layer
        return usual
    return found if isinstance(found, int | float) and found else usual


@torch.no_grad()
def new_head(target: PreTrainedModel, kind: str, counts: torch.Tensor, recipe: TrainingRecipe) -> DraftHead:
    """A head that scores the ids that are most frequent by counts [V]; its output starts as the target's.

    All else is random. Its mask is one of the rarest ids, that with the longest embedding: pads may have zeros.
    """
    known = counts.argsort(descending=True, stable=True)[: recipe.draft_vocab_size].sort().values
    rare, embed = counts.argsort(stable=True)[:RAREST], target.get_input_embeddings()
    mask = int(rare[embed(read_by(embed, rare)).float().norm(dim=-1).argmax().cpu()])
    with torch.device("cpu"):
        head: Any = DraftHead(new_config(target, kind, recipe, len(known), mask)).float()
    generator = torch.Generator("cpu").manual_seed(recipe.seed)
    for weight in head.parameters():
        if weight.ndim > 1:
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float32, device="cpu") * INITIAL)
    output: Any = target.get_output_embeddings()
    head.lm_head.weight.copy_(output.weight[known.to(output.weight.device)])
    if len(known) < vocabulary(target):
        head.d2t.copy_(known - torch.arange(len(known), device="cpu"))
        head.t2d[known] = True
    return cast(DraftHead, head.to(last_device(target), target.dtype).requires_grad_(False).eval())
