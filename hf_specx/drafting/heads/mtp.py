"""`MtpDraft`: the target's own multi-token layers, which its checkpoint has and transformers leaves out by default."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from hf_specx.common.architectures import MASKED
from hf_specx.common.batch import Batch
from hf_specx.common.devices import last_device, synchronize
from hf_specx.common.errors import require
from hf_specx.common.round import Draft
from hf_specx.drafting.drafter import Drafter
from hf_specx.drafting.forward_times import ForwardSize
from hf_specx.models.slots import CACHE

from .config import HeadConfig
from .driver import HeadDrafter
from .feed import Feed


WINDOWS = ("sliding_attention", "hybrid_sliding")
LAYER_TYPES = ("full_attention", "hybrid", *WINDOWS)


class MtpDraft(Drafter):
    """Drafts with the multi-token layers of the target: layer i proposes candidate i.

    They are read from the target's checkpoint at the first call with it, and share its embeddings and its head. For
    the models whose layers transformers knows: DeepSeek-V3, GLM-4.5 and 4.6, Inkling, Mellum, Step-3.7.

    Raises:
        ValueError: from a call, if the target has no such layers, or their weights are not found.
    """

    has_probs = True
    needs_hidden = True

    def __init__(self) -> None:
        self.models: WeakKeyDictionary[PreTrainedModel, Any] = WeakKeyDictionary()  # their layers, by target

    def __repr__(self) -> str:
        return "MtpDraft()"

    def of(self, target: PreTrainedModel) -> HeadDrafter:
        """The drafter of one call; it reads the layers if it has not yet."""
        if target not in self.models:
            self.models[target] = read_layers(target)
        body = Mtp(self.models[target])
        weights = [weight.numel() * weight.element_size() for weight in body.parameters()]
        drafter = HeadDrafter(MtpFeed(body), [], body.count, True, ForwardSize(1, sum(weights) / body.count))
        drafter.source = "mtp"
        return drafter

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        raise NotImplementedError  # what `of` returns does


def read_layers(target: PreTrainedModel) -> Any:
    """The `MtpModel` of a target, from the files that this was loaded from."""
    name, text = type(target).__name__, target.config.get_text_config()
    told = f"{name} has no multi-token layers (num_mtp_layers in its config); give a draft model or a head instead."
    require(bool(getattr(text, "num_mtp_layers", None)), told)
    try:
        from transformers.modeling_layers import MtpModel

        found = MtpModel.from_pretrained(target, device_map={"": last_device(target)})
    except (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        told = (
            f"the multi-token layers of {name} cannot be read from {target.name_or_path!r}: {error}; load the target "
        )
        raise ValueError(f"{told}from a checkpoint with them, or give a draft model or a head instead.") from error
    if found.config._attn_implementation not in MASKED:
        found.config._attn_implementation = "sdpa"
    kinds = getattr(found.config, "layer_types", None) or []
    told = f"the multi-token layers of {name} are of type {', '.join(kinds)}; only {', '.join(LAYER_TYPES)} are "
    require(set(kinds) <= set(LAYER_TYPES), f"{told}supported: give a draft model or a head instead.")
    found.layers.requires_grad_(False).eval()
    return found


class Mtp:
    """The layers as the body of a head: layer j pairs state i with token i + 1 + j, and predicts the next one.

    Its last j tokens are candidates, so its last entries are computed anew once these are judged: each pass begins as
    many entries earlier as there are further layers.
    """

    sees_ahead = False

    def __init__(self, model: Any):
        self.model, self.count, self.config = model, len(model.layers), HeadConfig(kind="mtp")

    def parameters(self) -> Any:
        return self.model.layers.parameters()

    def extra(self, number: int) -> int:
        """It has no entries of its own."""
        return 0

    def read(self, feed: "MtpFeed") -> None:
        """Take up entries of which nothing is drafted."""
        states, tokens = feed.slots.extended(feed)
        for number in range(self.count):
            states = self._layer(feed, number, tokens.roll(-number, 1), states)

    def begin(self, feed: "MtpFeed", extra: int) -> torch.Tensor:
        """Take up the new entries by the first layer: [R, 1, H] behind the last of each row."""
        states, tokens = feed.slots.extended(feed)
        feed.newest = feed.newest + self.count - 1
        return self._noted(feed, 0, tokens, states)

    def next(self, feed: "MtpFeed", tokens: torch.Tensor) -> torch.Tensor:
        """[R, 1, H] by the next layer, which sees the candidates [R, 1] behind the last entry of each row."""
        shifted = feed.kept["tokens"].roll(-1, 1).scatter(1, feed.newest, tokens)
        return self._noted(feed, feed.found.shape[1], shifted, feed.kept["states"])

    def score(self, feed: "MtpFeed", states: torch.Tensor, place: int, tokens: torch.Tensor) -> torch.Tensor:
        """[R, V] by states [R, H]."""
        return self.model._project_to_logits(states)

    def _noted(self, feed: "MtpFeed", number: int, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        found = self._layer(feed, number, tokens, states)
        feed.kept = {"tokens": tokens, "states": found}
        return found.gather(1, feed.newest[..., None].expand(-1, -1, found.shape[2]))

    def _layer(self, feed: "MtpFeed", number: int, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """[r, m, H] of a layer, for entries with these tokens [r, m] and states."""
        model, slots, turns = self.model, feed.slots, None
        embedded, positions = feed.embed(tokens), slots.positions + number + 1
        kinds: Any = getattr(model.config, "layer_types", None)
        if model.rotary_emb is not None:
            kind = {"layer_type": kinds[number]} if model.has_per_layer_rope else {}
            turns = model.rotary_emb(embedded, position_ids=positions, **kind)
        mask = slots.mask(self._window(number, kinds), states.dtype)
        parts = [slice(None)] if turns else [slice(row, row + 1) for row in range(len(states))]
        found = []
        for slots.part in parts:  # without rotary positions a layer counts them for all rows alike
            inputs = {"position_embeddings": turns, "position_ids": positions[slots.part]}
            inputs |= {"attention_mask": mask[slots.part], CACHE: slots}
            found.append(model.layers[number](embedded[slots.part], states[slots.part], **inputs))
        both = torch.cat(found) if len(found) > 1 else found[0]
        return model.shared_post_norm(both) if model.use_shared_post_norm else both

    def _window(self, number: int, kinds: list[str] | None) -> int | None:
        config = self.model.config
        config = config.per_layer_config[number] if config.is_heterogeneous else config
        return config.sliding_window if kinds is not None and kinds[number] in WINDOWS else None


class MtpSlots:
    """Keys and values of the layers, as their cache: in slots of each row, written in place.

    It also keeps the states and tokens of all entries, for those that are computed anew. `part` are the rows, of those
    whose entries come, that a layer is run for.
    """

    part = slice(None)

    def __init__(self, again: int):
        self.again, self.capacity = again, 0
        self.held: dict[Any, torch.Tensor] = {}  # [R, C, ...]
        self.rows: torch.Tensor | None = None  # [r], whose entries come now; None is all

    def reserve(self, rows: int, extent: int, like: torch.Tensor) -> None:
        """Have `extent` slots for each row, and one for fillers, which nothing sees."""
        self.count = rows
        if extent >= self.capacity:
            self.capacity = 2 * extent + 1

    def aim(self, slots: torch.Tensor, positions: torch.Tensor, extent: int, block: int = 0) -> None:
        """Say where the coming entries go: slots and positions [r, q]; nothing from `extent` on is seen."""
        self.coming, self.offset, self.extent = slots, (positions - slots)[:, :1], extent

    def extended(self, feed: "MtpFeed") -> tuple[torch.Tensor, torch.Tensor]:
        """States [r, again + q, W] and tokens of the coming entries, and of as many before them as come once more."""
        self.slots, self.part = self.coming, slice(None)
        states, tokens = self._written("states", feed.states), self._written("tokens", feed.tokens)
        first = self.coming[:, :1] + torch.arange(-self.again, 0, device=self.coming.device)
        earlier = torch.cat([first, self.coming], 1)
        self.slots, self.earlier = torch.where(earlier < 0, self.capacity - 1, earlier), earlier
        self.positions = self.offset + earlier.clamp(min=0)
        rows = torch.arange(len(earlier), device=earlier.device)[:, None]
        index = earlier.clamp(min=0)
        return states[rows, index], tokens[rows, index]

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[r, 1, q, S], additive: entries see their own slot and those before it."""
        keys, queries = torch.arange(self.extent, device=self.slots.device), self.slots[:, None, :, None]
        seen = keys <= queries
        seen = seen if window is None else seen & (keys > queries - window) | (queries >= self.extent)
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *more: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values [r, H, S, D], those of the coming entries [r, H, q, D] among them."""
        found = [self._written((layer_idx, name), x.transpose(1, 2)) for name, x in (("key", key), ("value", value))]
        return found[0].transpose(1, 2), found[1].transpose(1, 2)

    def get_query_offset(self, layer_idx: int) -> int:
        """The position of the first coming entry, for layers that count them: layer j is j + 1 tokens ahead."""
        return int(self.earlier[self.part][0, 0]) + layer_idx + 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys there are, and the position of the first."""
        return self.extent, layer_idx + 1

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """What a convolution has read: it is given by `update_conv_state`."""

    def update_conv_state(
        self, states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 1
    ) -> torch.Tensor:
        """What a convolution reads for the coming entries: their states [r, C, q] behind those of earlier ones."""
        earlier = self.earlier[self.part]
        states = states.masked_fill(earlier[:, None] < 0, 0.0)
        kept = self._written((layer_idx, "convolution", state_idx), states.transpose(1, 2))
        before = earlier[:, :1] + torch.arange(1 - conv_kernel_size, 0, device=earlier.device)
        found = kept[torch.arange(len(kept), device=kept.device)[:, None], before.clamp(min=0)]
        return torch.cat([found.masked_fill(before[..., None] < 0, 0.0).transpose(1, 2), states], 2)

    def _written(self, name: Any, values: torch.Tensor) -> torch.Tensor:
        """[r, S, ...], all that is held by this name, once values [r, q, ...] are written."""
        kept = self.held.get(name)
        if kept is None or kept.shape[1] < self.capacity:
            made = values.new_zeros(self.count, self.capacity, *values.shape[2:])
            if kept is not None:
                made[:, : kept.shape[1]] = kept
            self.held[name] = kept = made
        rows = torch.arange(len(kept), device=kept.device) if self.rows is None else self.rows
        rows = rows[self.part]
        kept[rows[:, None], self.slots[self.part]] = values
        kept = kept[:, : self.extent]
        return kept if len(rows) == len(kept) else kept[rows]

    def select(self, stay: torch.Tensor) -> None:
        """Keep only the rows at indices `stay` [R']."""
        self.held = {name: kept.index_select(0, stay.to(kept.device)) for name, kept in self.held.items()}


class MtpFeed(Feed):
    """The rows of one call as the layers see them."""

    slots: MtpSlots  # type: ignore[assignment]

    def __init__(self, body: Mtp):
        super().__init__(body, body.model.embed_tokens, None, None)
        self.slots = MtpSlots(body.count - 1)

    def rehearse(self, batch: Batch, count: int) -> None:
        """Run the step that finds one more candidate, after the prompts; nothing of it is kept."""
        tokens = batch.last(1).to(self.device)
        width, self.behind = self.body.model.config.hidden_size, (batch.ids, batch.index, batch.ends - 1)
        self.states = torch.zeros(len(tokens), 1, width, device=self.device, dtype=self.dtype)
        self.rows, self.ends, self.newest = batch.index.to(self.device), tokens * 0 + max(self.held) + 1, tokens * 0
        self._aim(batch, 1)
        self.body.score(self, self.body.begin(self, 0)[:, 0], 0, tokens)
        synchronize(self.device)
