"""Draft heads that are trained: a new EAGLE-3 or DSpark head, or one that was given."""

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
from hf_specx.drafting.heads.layers import to_device_of
from hf_specx.drafting.suffix import SuffixDraft

from .draft import Learner, Tokenizers, described
from .losses import Predicted
from .recipe import TrainingRecipe
from .target_outputs import TargetOutputs, Text
from .unrolled_drafts import UNROLL_BY_KIND, unrolled_drafts


MAX_LEARNED_TOKENS = 512  # of a text, its last ones: memory and time of a step grow with them
DRAFT_EVERY = 8  # of so many tokens one has a draft behind it in a step of training, from a random one on
INITIAL_STD = 0.02  # standard deviation of weights that start at random
MARKOV_RANK = 128  # of what the previous token adds to logits in a new head; half its width at most
MASK_CHOICES = 256  # the rarest ids, of which one is the mask


class HeadDraft(Learner):
    """A draft head that is trained for a target.

    A new one scores the most frequent tokens of the texts, so it is there once the first texts are; these are written
    with drafts from the text itself.

    Args:
        target: whose states it reads.
        start: a head of one of the kinds in `UNROLL_BY_KIND` to go on with, or one of `NEW_HEADS`.
    """

    def __init__(
        self, target: PreTrainedModel, start: DraftHead | str, recipe: TrainingRecipe, tokenizers: Tokenizers
    ):
        self.target, self.recipe, self.tokenizers = target, recipe, (tokenizers[0], tokenizers[0])
        self.device = last_device(target)
        self.models = [target]
        self.drafting = SuffixDraft()
        self.max_learned_tokens = MAX_LEARNED_TOKENS
        require(recipe.lora is None, f"lora={recipe.lora}: a head is small, and trained whole; leave lora out.")
        require(
            not recipe.training.get("gradient_checkpointing"),
            "training={'gradient_checkpointing': ...}: a head is too small for it to save memory; leave that out.",
        )
        head = start if isinstance(start, DraftHead) else None
        output: Any = target.get_output_embeddings()
        require(
            output is not None,
            f"{type(target).__name__} has no output embeddings that a head could start from; give 'layers:2'.",
        )
        require(
            not output.weight.is_meta or (head is not None and head.config.own_head),
            "the target's output embeddings are offloaded to memory or disk, and a head needs them; load the target "
            "without offloading.",
        )
        config: Any = new_config(target, str(start), recipe) if head is None else head.config
        require(
            config.kind in UNROLL_BY_KIND,
            f"a head of kind {config.kind!r} cannot be trained here; give one of EAGLE-3, DSpark, DFlash or DFlash2, "
            f"or {' or '.join(map(repr, NEW_HEADS))}, a new one.",
        )
        with torch.device("meta"):
            self.hidden_state_taps = (head or DraftHead(config)).hidden_state_taps(target)
        self.learning_rate = recipe.rate(config.hidden_size, "head" if head is None else "draft")
        self.source, self.description = start, f"a new {config.kind} head with random weights"
        if head is not None:
            self.description = described(head)
            self._start_from(head)

    def prepare(self, prompts: Sequence[list[int]], texts: Sequence[Text]) -> None:
        """Make a new head, for the tokens of the prompts and of the first texts."""
        if isinstance(self.source, str):
            ids = torch.tensor(list(itertools.chain(*(text.new for text in texts), *prompts)), device="cpu")
            counts = torch.bincount(ids, minlength=vocabulary(self.target))
            self._start_from(new_head(self.target, self.source, counts, self.recipe))

    def _start_from(self, head: DraftHead) -> None:
        self.initial = head
        self.trained = self.module(copy.deepcopy(head).float().requires_grad_())
        self.drafting = self.trained.draft_head
        if head.config.confidence_head:
            self.drafting.network.confidence_head.requires_grad_(False)  # of which no loss says anything

    def module(self, draft: Any) -> Any:
        return HeadOnTexts(draft, self.target, self.recipe.num_draft_tokens)

    def predict(
        self, model: Any, texts: Sequence[Text], outputs: TargetOutputs, draws: Sequence[int] | None = None
    ) -> Predicted:
        weight = next(model.parameters())
        every = 1 if draws is None else DRAFT_EVERY
        inputs = []
        first_row = 0
        for (prompt, new), states, draw in zip(texts, outputs.states, draws or [0] * len(texts), strict=True):
            ids = torch.tensor([*prompt, *new], device="cpu")
            first, last = max(0, len(ids) - 2 - MAX_LEARNED_TOKENS), max(1, len(ids) - 2)
            # entry i, of token i + 1, predicts token i + 2, which is new token `index` of the text
            index = torch.arange(first, last, device="cpu") + 2 - len(prompt)
            numbers = torch.where((index >= 0) & (index < len(new)), index + first_row, -1)
            begins = (numbers >= 0) & ((index - draw) % every == 0)
            inputs.append((ids[first + 1 : last + 1], numbers, begins, states[first:last]))
            first_row += len(new)
        tokens, numbers, begins, states = (
            nn.utils.rnn.pad_sequence(list(parts), True, padding).to(weight.device)
            for parts, padding in zip(zip(*inputs, strict=True), (0, -1, 0, 0), strict=True)
        )
        states = states.to(weight.dtype)
        logits, rows, steps, *selected = model(tokens, states, numbers, begins, learning=draws is not None)
        ids_of_head = None if self.initial.ids is None else self.initial.ids.to(weight.device)
        predicted = Predicted(logits, rows, steps, ids_of_head, every / self.recipe.num_draft_tokens)
        if not selected:
            return predicted
        top_tokens, scores = selected
        return predicted._replace(selected=Predicted(scores, rows, steps, top_tokens))

    def finished(self, trained: Any) -> PreTrainedModel:
        head = copy.deepcopy(self.initial)
        head.load_state_dict(trained.draft_head.state_dict())
        return cast(PreTrainedModel, head.requires_grad_(False).eval())


class HeadOnTexts(nn.Module):
    """A module that applies a head to whole texts, as training needs it; its weights are those of the head.

    Args:
        draft_head: in evaluation mode.
        target: whose embedding and output it has, if it has none of its own.
        num_steps: candidates of a draft at most.
    """

    def __init__(self, draft_head: DraftHead, target: PreTrainedModel, num_steps: int):
        super().__init__()
        self.draft_head = draft_head
        self.drafter = draft_head.bind(target)
        most = draft_head.network.max_candidates
        self.num_steps = num_steps if most is None else min(num_steps, most)

    def forward(self, *texts: torch.Tensor, learning: bool = False) -> list[torch.Tensor]:
        """Logits [M, V_d] in float32 of all candidates, the number of each [M], and how many are before it.

        The arguments are those of `unrolled_drafts`. While it is `learning`, a head with a selector gives the logits
        that this selects by, for no others reach a token that is not selected; and besides, the selected tokens [M, K]
        and their logits.
        """
        network = self.draft_head.network
        outputs: list[tuple[torch.Tensor, ...]] = []
        carried = None
        for step, previous, numbers, normed in unrolled_drafts(self, *texts):
            carried = None if step == 0 or carried is None else carried[: len(numbers)]
            logits = self.drafter.compute_logits(normed)
            selected: tuple[torch.Tensor, ...] = ()
            if learning and network.config.selector_top_k:
                logits = network.selecting_logits(logits)
                selected = network.candidate_selector.select(logits, normed, previous)
            else:
                logits, carried, _ = network.adjust_logits(logits, normed, previous[:, None], carried, False)
            outputs.append((logits, numbers, torch.full_like(numbers, step), *selected))
        logits, numbers, steps, *of_selector = map(torch.cat, zip(*outputs, strict=True))
        return [logits.float(), numbers, steps, *of_selector]


def new_config(
    target: PreTrainedModel, kind: str, recipe: TrainingRecipe, num_tokens: int = 1, mask_token_id: int = 0
) -> Any:
    """The `HeadConfig` of a head with one layer as wide as the target's, which reads the states of three of them."""
    text_config = target.config.get_text_config(decoder=True)
    width, depth = text_config.hidden_size, text_config.num_hidden_layers
    num_heads = _number(text_config, "num_attention_heads", 1)
    defaults: dict[str, Any] = {
        "intermediate_size": 4 * width,
        "num_key_value_heads": num_heads,
        "head_dim": width // num_heads,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
    }
    fields = {name: _number(text_config, name, default) for name, default in defaults.items()}
    if kind == "dspark":
        fields |= {
            "block_size": max(2, recipe.num_draft_tokens),
            "sample_from_anchor": True,
            "qk_norm": True,
            "markov_rank": min(MARKOV_RANK, width // 2),
            "mask_token_id": mask_token_id,
        }
    rope = getattr(text_config, "rope_parameters", None) or {}
    return HeadConfig(
        kind=kind,
        layer_ids=sorted({depth // 2, 3 * depth // 4, depth - 1}),
        hidden_size=width,
        target_hidden_size=width,
        num_attention_heads=num_heads,
        vocab_size=vocabulary(target),
        draft_vocab_size=num_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
        norm_before_residual=kind == "eagle3",
        num_draft_tokens=recipe.num_draft_tokens,
        own_head=True,
        target=public_name(target),
        target_architectures=[type(target).__name__],
        dtype=target.dtype,
        **fields,
    )


def _number(config: PreTrainedConfig, name: str, default: float) -> Any:
    """A field of a target's config; the default if it has none, or a list with one value for each layer."""
    try:
        value = getattr(config, name, None)
    except Exception:  # of a type that transformers has for fields by layer
        return default
    return value if isinstance(value, int | float) and value else default


@torch.no_grad()
def new_head(target: PreTrainedModel, kind: str, counts: torch.Tensor, recipe: TrainingRecipe) -> DraftHead:
    """A head that scores the ids that are most frequent by counts [V]; its output starts as the target's.

    All else is random. Its mask is one of the rarest ids, that with the longest embedding: pads may have zeros.
    """
    ids = counts.argsort(descending=True, stable=True)[: recipe.draft_vocab_size].sort().values
    rarest = counts.argsort(stable=True)[:MASK_CHOICES]
    embedding = target.get_input_embeddings()
    lengths = embedding(to_device_of(embedding, rarest)).float().norm(dim=-1)
    mask_token_id = int(rarest[lengths.argmax().cpu()])
    with torch.device("cpu"):
        head: Any = DraftHead(new_config(target, kind, recipe, len(ids), mask_token_id)).float()
    generator = torch.Generator("cpu").manual_seed(recipe.seed)
    for weight in head.parameters():
        if weight.ndim > 1:
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32, device="cpu")
            weight.copy_(noise * INITIAL_STD)
    output: Any = target.get_output_embeddings()
    head.lm_head.weight.copy_(output.weight[ids.to(output.weight.device)])
    if len(ids) < vocabulary(target):
        head.d2t.copy_(ids - torch.arange(len(ids), device="cpu"))
        head.t2d[ids] = True
    return cast(DraftHead, head.to(last_device(target), target.dtype).requires_grad_(False).eval())
