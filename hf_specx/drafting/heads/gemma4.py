"""Assistants of Gemma 4: small models without keys and values of their own, which attend to those of the target."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.architectures import MASKED
from hf_specx.common.batch import Batch
from hf_specx.common.devices import moved, sent, synchronize
from hf_specx.common.errors import require
from hf_specx.common.round import Draft, Round
from hf_specx.common.wrappers import vocabulary
from hf_specx.drafting.candidates import SampledCandidateGenerator
from hf_specx.drafting.drafter import DraftContext, Drafter, no_candidates
from hf_specx.drafting.forward_times import ForwardSize, size_of
from hf_specx.models.attention import grouped_queries
from hf_specx.models.runner import SharedKeys

from .layers import read_by


ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
TARGETS = ("gemma4_text", "gemma4_unified_text")  # their text models
UNLIKELY = -1e30  # a score that gives 0 beside any other; among such alone, all tokens have the same chance


def read_assistants(draft: Any) -> Any:
    """A draft, or a list of drafts, with assistants of Gemma 4 as drafts that read the target's keys."""
    if isinstance(draft, list | tuple):
        return [read_assistants(part) for part in draft]
    is_model = isinstance(draft, PreTrainedModel)
    return AssistantDraft(draft) if is_model and draft.config.model_type in ASSISTANTS else draft


class AssistantDraft(Drafter):
    """Drafts with an assistant of Gemma 4 for the target that it was trained with."""

    has_probs = True
    needs_hidden = True
    hidden_of_all = False

    def __init__(self, assistant: PreTrainedModel):
        self.assistant = assistant

    def bind(self, target: PreTrainedModel) -> "AssistantDrafter":
        return AssistantDrafter(self.assistant, target.get_input_embeddings(), layers_of(self.assistant, target))


def layers_of(assistant: Any, target: PreTrainedModel) -> dict[str, int]:
    """The layer of the target whose keys and values the assistant's layers of each kind read.

    Raises ValueError if the assistant does not fit the target, or cannot run.
    """
    name, config = type(assistant).__name__, assistant.config.get_text_config()
    text: Any = target.config.get_text_config(decoder=True)
    message = f"{name} reads keys and values of Gemma 4, and the target is {type(target).__name__}; give the target "
    message += "that this assistant was made for, or another draft."
    require(text.model_type in TARGETS, message)
    last = {text.layer_types[number]: number for number, mode in enumerate(text.kv_sharing_modes) if mode == "store"}
    kinds = {kind: number for number, kind in enumerate(config.layer_types)}
    sizes = {
        "backbone_hidden_size": (assistant.config.backbone_hidden_size, text.hidden_size),
        "vocab_size": (config.vocab_size, vocabulary(target)),
        "sliding_window": (config.sliding_window, text.sliding_window),
    }
    for kind, number in kinds.items():
        require(kind in last, f"{name} has layers of type {kind}, and the target has none; give its own assistant.")
        for size in ("head_dim", "num_key_value_heads"):
            both = config.per_layer_config[number], text.per_layer_config[last[kind]]
            sizes[f"{size} of {kind}"] = getattr(both[0], size), getattr(both[1], size)
    for size, (ours, its) in sizes.items():
        require(ours == its, f"{name} is made for a target with {size}={ours}, and this one has {its}; give its own.")
    attention = config._attn_implementation
    message = f"{name} has attn_implementation={attention!r}, which takes no mask by position; load it with "
    require(attention in MASKED, f"{message}attn_implementation='sdpa'.")
    message = f"{name} is in training mode, where its candidates may be random; call its eval()."
    require(not assistant.training, message)
    return {kind: last[kind] for kind in kinds}


class AssistantDrafter(SampledCandidateGenerator):
    """Samples candidates from an assistant over the target's own cache, of which it writes nothing.

    All candidates of a round are drawn at one position, that of the newest token that the target has read, over the
    keys up to it. What each step gives is, beside its token, the state that the next one reads.

    Attributes:
        newest: [R, 1, H], the target's states at these positions; those of new prompts come with their first round.
        state: the same after the candidates so far; `shared`, what they see.
    """

    source = "assistant"
    needs_hidden = True
    hidden_of_all = False

    def __init__(self, assistant: Any, embedding: Any, layers: dict[str, int]):
        super().__init__(None)  # type: ignore[arg-type]
        self.assistant, self.embedding, self.layers = assistant, embedding, layers
        self.device, self.dtype = assistant.pre_projection.weight.device, assistant.pre_projection.weight.dtype

    def start(self, context: DraftContext) -> None:
        self.target = context.target
        super().start(context)
        self.admit(context.batch, context.batch.rows)

    def _make_runner(self, context: DraftContext) -> None:
        return None

    def _ready(self, batch: Batch) -> Any:
        return self

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """Ask for the last states of new prompts alone, which their first round gives."""
        states = self.target.prompt_hidden
        assert states is not None
        self.target.prompt_hidden = states[:, -1:].clone()

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """Draft for every decoding row that has emitted a token: before that its state is not known."""
        limits = [length if batch.counts[row] else 0 for row, length in zip(batch.rows, lengths, strict=True)]
        return super().propose(batch, limits) if any(limits) else no_candidates(batch)

    def observe(self, done: Round) -> None:
        """Note the states at the newest tokens that the target has read."""
        states = done.forward.hidden
        last = sent([max(1, number) - 1 for number in done.emitted], states.device)[:, None, None]
        self.newest = states.gather(1, last.expand(-1, -1, states.shape[2]))
        if done.stay is not None:
            self.newest = self.newest.index_select(0, done.stay.to(states.device))

    def decode_step(self, batch: Batch, ahead: int, skipped: int = 0) -> torch.Tensor:
        """Logits [R, 1, V] after `ahead` candidates; for the `skipped` ones before these there were none."""
        for place in range(ahead - skipped, ahead + 1):
            if place == 0:
                self._begin(batch)
            states = self._next(batch.last(1, place))
        return self._scored(states).to(batch.ids.device)

    def _begin(self, batch: Batch) -> None:
        """Have what the target's cache holds by now."""
        positions, masks, keys = self.target.shared_keys(batch, self.layers)
        masks = {kind: self._mask(masks[kind]) for kind in keys}
        there = {kind: tuple(moved(x, self.device, self.dtype) for x in both) for kind, both in keys.items()}
        self.shared = SharedKeys(moved(positions, self.device), masks, there)  # type: ignore[arg-type]
        self.state = moved(self.newest, self.device, self.dtype)

    def _mask(self, mask: torch.Tensor) -> torch.Tensor:
        """A mask as the assistant's attention takes it, whatever the target's takes."""
        seen = moved(mask if mask.dtype == torch.bool else mask == 0, self.device)
        if self.assistant.config.get_text_config()._attn_implementation == "sdpa":
            return seen
        return torch.zeros_like(seen, dtype=self.dtype).masked_fill_(~seen, torch.finfo(self.dtype).min)

    def _next(self, tokens: torch.Tensor) -> torch.Tensor:
        """Normed states [R, 1, H] behind tokens [R, 1], and have what the next step reads."""
        embedded = moved(self.embedding(read_by(self.embedding, tokens)), self.device, self.dtype)
        entries = self.assistant.pre_projection(torch.cat([embedded, self.state], -1))
        with grouped_queries():
            output = self.assistant.model(
                inputs_embeds=entries.view(*self.shared.positions.shape, -1),
                attention_mask=self.shared.masks,
                position_ids=self.shared.positions,
                shared_kv_states=dict(self.shared.keys),
                use_cache=False,
                logits_to_keep=None,  # an int would have it cut masks
            )
        states = output.last_hidden_state.reshape(len(tokens), 1, -1)
        self.state = self.assistant.post_projection(states)
        return states

    def _scored(self, states: torch.Tensor) -> torch.Tensor:
        """Scores [R, 1, V] of normed states; with clusters those of the tokens in the likeliest ones alone."""
        assistant, ordered = self.assistant, self.assistant.masked_embedding
        if ordered is None:
            return assistant.lm_head(states)
        likeliest = ordered.centroids(states)[:, 0].topk(ordered.centroid_intermediate_top_k, -1).indices
        ids = ordered.token_ordering.long().view(ordered.num_centroids, -1)[likeliest].flatten(1)  # [R, n]
        scores = torch.einsum("rnh,rh->rn", assistant.lm_head.weight[ids], states[:, 0]).float()
        every = scores.new_full((len(ids), assistant.lm_head.weight.shape[0]), UNLIKELY)
        return every.scatter_(1, ids, scores)[:, None]

    def cost(self, batch: Batch) -> Callable[[int], object] | None:
        return lambda count: self.rehearse(batch)

    def rehearse(self, batch: Batch) -> None:
        """Run the step that finds one more candidate, after the prompts, and wait for it; nothing of it is kept."""
        self.newest = self.embedding(read_by(self.embedding, batch.last(1))) * 0
        self._begin(batch)
        self._scored(self._next(batch.last(1)))
        synchronize(self.device)

    def size(self) -> ForwardSize | None:
        return size_of(self.assistant)
