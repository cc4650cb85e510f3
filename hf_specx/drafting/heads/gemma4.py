"""Assistants of Gemma 4: small models without keys and values of their own, which attend to those of the target."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.architectures import MASKED
from hf_specx.common.batch import Batch
from hf_specx.common.devices import synchronize, to_device, to_device_async
from hf_specx.common.errors import require
from hf_specx.common.round import Draft, Round
from hf_specx.common.wrappers import vocabulary
from hf_specx.drafting.drafter import DraftContext, Drafter, no_candidates
from hf_specx.drafting.forward_times import ForwardSize, size_of
from hf_specx.models.attention import grouped_queries
from hf_specx.models.runner import SharedKeys

from .layers import to_device_of
from .levels import Level, TreeDrafter


TARGETS = ("gemma4_text", "gemma4_unified_text")  # their text models
UNLIKELY = -1e30  # a logit that gives probability 0 beside any other; among such alone, all tokens have the same


class AssistantDraft(Drafter):
    """Drafts with an assistant of Gemma 4 for the target that it was trained with."""

    has_probs = True
    needs_hidden = True
    all_prompt_hidden = False

    def __init__(self, assistant: PreTrainedModel):
        self.assistant = assistant

    def bind(self, target: PreTrainedModel) -> "AssistantDrafter":
        return AssistantDrafter(self.assistant, target.get_input_embeddings(), layers_of(self.assistant, target))


def layers_of(assistant: Any, target: PreTrainedModel) -> dict[str, int]:
    """The layer of the target whose keys and values the assistant's layers of each type read.

    Raises ValueError if the assistant does not fit the target, or cannot run.
    """
    name, config = type(assistant).__name__, assistant.config.get_text_config()
    target_config: Any = target.config.get_text_config(decoder=True)
    require(
        target_config.model_type in TARGETS,
        f"{name} reads keys and values of Gemma 4, and the target is {type(target).__name__}; give the target that "
        "this assistant was made for, or another draft.",
    )
    target_layers = {
        target_config.layer_types[number]: number
        for number, mode in enumerate(target_config.kv_sharing_modes)
        if mode == "store"
    }
    assistant_layers = {layer_type: number for number, layer_type in enumerate(config.layer_types)}
    sizes = {
        "backbone_hidden_size": (assistant.config.backbone_hidden_size, target_config.hidden_size),
        "vocab_size": (config.vocab_size, vocabulary(target)),
        "sliding_window": (config.sliding_window, target_config.sliding_window),
    }
    for layer_type, number in assistant_layers.items():
        require(
            layer_type in target_layers,
            f"{name} has layers of type {layer_type}, and the target has none; give its own assistant.",
        )
        layer_config = config.per_layer_config[number]
        target_layer_config = target_config.per_layer_config[target_layers[layer_type]]
        for size in ("head_dim", "num_key_value_heads"):
            sizes[f"{size} of {layer_type}"] = getattr(layer_config, size), getattr(target_layer_config, size)
    for size, (expected, actual) in sizes.items():
        require(
            expected == actual,
            f"{name} is made for a target with {size}={expected}, and this one has {actual}; give its own.",
        )
    attention = config._attn_implementation
    require(
        attention in MASKED,
        f"{name} has attn_implementation={attention!r}, which takes no mask by position; load it with "
        "attn_implementation='sdpa'.",
    )
    require(
        not assistant.training,
        f"{name} is in training mode, where its candidates may be random; call its eval().",
    )
    return {layer_type: target_layers[layer_type] for layer_type in assistant_layers}


class AssistantDrafter(TreeDrafter):
    """Samples candidates from an assistant over the target's own cache, of which it writes nothing.

    All candidates of a round are drawn at one position, that of the newest token that the target has read, over the
    keys up to it. Each step gives a token, and the state that the next one reads.

    Attributes:
        newest_states: [R, 1, H], the target's at these positions; those of new prompts come with their first round.
        state: [R, 1, H], the same after the candidates so far; [R, n, H] after those of a level.
        shared_keys: the target's keys and values, with masks.
    """

    source = "assistant"
    grows_trees = True
    needs_hidden = True
    all_prompt_hidden = False
    state: torch.Tensor

    def __init__(self, assistant: Any, embedding: Any, layers: dict[str, int]):
        super().__init__(None)  # type: ignore[arg-type]
        self.assistant, self.embedding, self.layers = assistant, embedding, layers
        self.device, self.dtype = assistant.pre_projection.weight.device, assistant.pre_projection.weight.dtype

    def start(self, context: DraftContext) -> None:
        self.target = context.target
        self.newest_states: torch.Tensor
        self.state: torch.Tensor
        super().start(context)
        self.admit(context.batch, context.batch.rows)

    def _make_runner(self, context: DraftContext) -> None:
        return None

    def _ready(self, batch: Batch) -> Any:
        return self

    def add_rows(self, batch: Batch, previous_indices: torch.Tensor) -> None:
        self.newest_states = self.newest_states.index_select(0, previous_indices.to(self.newest_states.device))

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """Ask for the last states of new prompts alone, which their first round gives."""
        states = self.target.prompt_hidden
        assert states is not None
        self.target.prompt_hidden = states[:, -1:].clone()

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """Draft for every decoding row that has emitted a token: before that its state is not known."""
        limits = [length if batch.counts[row] else 0 for row, length in zip(batch.rows, lengths, strict=True)]
        return super().propose(batch, limits) if any(limits) else no_candidates(batch)

    def observe(self, round_: Round) -> None:
        """Note the states at the newest tokens that the target has read."""
        states = round_.forward.hidden
        last = to_device_async([max(1, number) - 1 for number in round_.emitted], states.device)[:, None, None]
        self.newest_states = states.gather(1, last.expand(-1, -1, states.shape[2]))
        if round_.keep_indices is not None:
            self.newest_states = self.newest_states.index_select(0, round_.keep_indices.to(states.device))

    def decode_step(self, batch: Batch, ahead: int, num_unfed: int = 0) -> torch.Tensor:
        """Logits [R, 1, V] after `ahead` candidates; for the `num_unfed` ones before these there were none."""
        for index in range(ahead - num_unfed, ahead + 1):
            if index == 0:
                self._read_shared_keys(batch)
            states = self._next_step(batch.last(1, index))
        return self._compute_logits(states).to(batch.ids.device)

    def level_logits(self, batch: Batch, tokens: torch.Tensor, level: Level) -> torch.Tensor:
        """As in `TreeDrafter`. All candidates are at one position, and read the target's keys alone."""
        if level.tree is None:
            self._read_shared_keys(batch)
        else:
            self.state = self.state.index_select(1, to_device(level.fed_parents, self.device))
        states = self._next_step(tokens)
        logits = self._compute_logits(states.flatten(0, 1)[:, None])
        return logits.view(*tokens.shape, -1).to(batch.ids.device)

    def _read_shared_keys(self, batch: Batch) -> None:
        """Have what the target's cache has by now, and the state of its newest token."""
        positions, masks, keys_values = self.target.shared_keys(batch, self.layers)
        masks = {layer_type: self._mask(masks[layer_type]) for layer_type in keys_values}
        on_device = {
            layer_type: tuple(to_device(x, self.device, self.dtype) for x in pair)
            for layer_type, pair in keys_values.items()
        }
        self.shared_keys = SharedKeys(to_device(positions, self.device), masks, on_device)  # type: ignore[arg-type]
        self.state = to_device(self.newest_states, self.device, self.dtype)

    def _mask(self, mask: torch.Tensor) -> torch.Tensor:
        """A mask as the assistant's attention takes it, whatever the target's takes."""
        visible = to_device(mask if mask.dtype == torch.bool else mask == 0, self.device)
        if self.assistant.config.get_text_config()._attn_implementation == "sdpa":
            return visible
        return torch.zeros_like(visible, dtype=self.dtype).masked_fill_(~visible, torch.finfo(self.dtype).min)

    def _next_step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Normed states [R, n, H] behind tokens [R, n]; notes the states that the next step reads."""
        positions, masks, keys = self.shared_keys
        if tokens.shape[1] > 1:  # candidates of a tree, which has rows of their own
            positions = positions.expand(-1, tokens.shape[1])
            masks = {kind: mask.expand(-1, -1, tokens.shape[1], -1) for kind, mask in masks.items()}
        embedded = to_device(self.embedding(to_device_of(self.embedding, tokens)), self.device, self.dtype)
        inputs = self.assistant.pre_projection(torch.cat([embedded, self.state], -1))
        with grouped_queries():
            output = self.assistant.model(
                inputs_embeds=inputs.view(*positions.shape, -1),
                attention_mask=masks,
                position_ids=positions,
                shared_kv_states=dict(keys),
                use_cache=False,
                logits_to_keep=None,  # an int would have it cut masks
            )
        states = output.last_hidden_state.reshape(*tokens.shape, -1)
        self.state = self.assistant.post_projection(states)
        return states

    def _compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [R, 1, V] of normed states; with clusters those of the tokens in the likeliest ones alone."""
        assistant, clusters = self.assistant, self.assistant.masked_embedding
        if clusters is None:
            return assistant.lm_head(states)
        likeliest = clusters.centroids(states)[:, 0].topk(clusters.centroid_intermediate_top_k, -1).indices
        ids = clusters.token_ordering.long().view(clusters.num_centroids, -1)[likeliest].flatten(1)  # [R, n]
        logits = torch.einsum("rnh,rh->rn", assistant.lm_head.weight[ids], states[:, 0]).float()
        unlikely = logits.new_full((len(ids), assistant.lm_head.weight.shape[0]), UNLIKELY)
        return unlikely.scatter_(1, ids, logits)[:, None]

    def cost(self, batch: Batch) -> Callable[[int], object] | None:
        return lambda count: self.dummy_run(batch)

    def dummy_run(self, batch: Batch) -> None:
        """Run the step that finds one more candidate, after the prompts, and wait for it; nothing of it is kept."""
        self.newest_states = self.embedding(to_device_of(self.embedding, batch.last(1))) * 0
        self._read_shared_keys(batch)
        self._compute_logits(self._next_step(batch.last(1)))
        synchronize(self.device)

    def size(self) -> ForwardSize | None:
        return size_of(self.assistant)
