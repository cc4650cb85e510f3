"""`MtpDraft`: the target's own multi-token layers, which its checkpoint has and transformers leaves out by default."""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.architectures import MASKED
from hf_specx.common.batch import Batch
from hf_specx.common.devices import last_device, synchronize, to_device
from hf_specx.common.errors import require
from hf_specx.common.wrappers import OfModels, shallow
from hf_specx.drafting.drafter import DraftContext, Drafter
from hf_specx.models.slots import SlotCache

from .config import HeadConfig
from .head_drafter import HeadDrafter
from .layers import SlotMapping
from .network import HeadNetwork, StepOutput


WINDOWS = ("sliding_attention", "hybrid_sliding")
LAYER_TYPES = ("full_attention", "hybrid", *WINDOWS)
QWEN = ("qwen3_next", "qwen3_5")  # how the names of their text models begin


class MtpDraft(Drafter):
    """Drafts with the multi-token layers of the target: layer i proposes candidate i.

    They are read from the target's checkpoint at the first call with it, and share its embeddings and its head. For
    the models whose layers transformers knows: DeepSeek-V3, GLM-4.5 and 4.6, Inkling, Mellum, Step-3.7; and for
    Qwen3-Next and Qwen3.5, whose layer it can read but does not know of. They read the states behind the final norm.

    Raises:
        ValueError: from a call, if the target has no such layers, or their weights are not found.
    """

    has_probs = True
    needs_hidden = True

    def __init__(self) -> None:
        self.models = OfModels[Any]()  # with the state when read

    def __repr__(self) -> str:
        return "MtpDraft()"

    def bind(self, target: PreTrainedModel) -> HeadDrafter:
        """The drafter of one call; it reads the layers if it has not yet for a target as it is now."""
        state = target.dtype, last_device(target), target.get_input_embeddings()
        if self.models.get(target, (None,))[0] != state:
            self.models[target] = state, read_layers(target)
        return MtpDrafter(Mtp(self.models[target][1]), None)


def read_layers(target: PreTrainedModel) -> Any:
    """The `MtpModel` of a target, from the files that this was loaded from."""
    name = type(target).__name__
    with_config = with_layers(target)
    require(
        bool(getattr(with_config.config.get_text_config(), "num_mtp_layers", None)),
        f"{name} has no multi-token layers (num_mtp_layers in its config); give a draft model or a head instead.",
    )
    try:
        from transformers.modeling_layers import MtpModel

        model: Any = MtpModel.from_pretrained(with_config, device_map={"": last_device(target)})
        require(hasattr(model, "forward_layer"), "transformers is older than 5.20")
    except (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        message = (
            f"the multi-token layers of {name} cannot be read from {target.name_or_path!r}: {error}; load the "
            "target from a checkpoint with them, or give a draft model or a head instead."
        )
        raise ValueError(message) from error
    if model.config._attn_implementation not in MASKED:
        model.config._attn_implementation = "sdpa"
    layer_types = getattr(model.config, "layer_types", None) or []
    require(
        set(layer_types) <= set(LAYER_TYPES),
        f"the multi-token layers of {name} are of type {', '.join(layer_types)}; only {', '.join(LAYER_TYPES)} are "
        "supported: give a draft model or a head instead.",
    )
    model.layers.requires_grad_(False).eval()
    return model


def masks_of_rows(
    config: Any, number: int, embedded: torch.Tensor, cache: "MtpCache", positions: Any
) -> dict[str, torch.Tensor]:
    """What layer `number` sees; the model itself knows batches of one alone."""
    layer_types = getattr(config, "layer_types", None)
    layer_config = config.per_layer_config[number] if config.is_heterogeneous else config
    has_window = layer_types is not None and layer_types[number] in WINDOWS
    window = layer_config.sliding_window if has_window else None
    return {"attention_mask": cache.mask(window, embedded.dtype)}


def with_layers(target: PreTrainedModel) -> Any:
    """The target with a config that has the layers that transformers leaves out, and the precision of its weights."""
    copied = shallow(target)
    copied.config = deepcopy(target.config)
    copied.config.dtype = target.dtype
    text_config = copied.config.get_text_config()
    if text_config.model_type.startswith(QWEN):
        text_config.num_mtp_layers = getattr(text_config, "mtp_num_hidden_layers", 1)
        text_config.mtp_layer_types = ["full_attention"]
    return copied


class Mtp(HeadNetwork):
    """The layers as the network of a head: layer j pairs state i with token i + 1 + j, and predicts the next one.

    Its last j tokens are candidates, so its last entries are computed anew once these are judged: each pass begins as
    many entries earlier as there are further layers.
    """

    autoregressive = True
    gives_logits = True
    model: Any
    max_candidates: int

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        self.max_candidates = len(model.layers)
        self.config = HeadConfig(kind="mtp")
        model.create_masks_for_mtp_layer = partial(masks_of_rows, model.config)

    def parameters(self, recurse: bool = True) -> Any:
        return self.model.layers.parameters()

    def append_context(self, cache: "MtpCache", tokens: Any, states: torch.Tensor) -> None:
        states, tokens = cache.with_recomputed(states, tokens)
        for number in range(self.max_candidates):
            states = self._forward_layer(cache, number, tokens.roll(-number, 1), states)

    def first_step(
        self, cache: "MtpCache", tokens: Any, states: torch.Tensor, newest: Any, num_candidates: int
    ) -> StepOutput:
        """Append entries to the first layer: logits behind each row's last, and what `next_step` goes on with."""
        states, tokens = cache.with_recomputed(states, tokens)
        return self._layer_step(cache, 0, tokens, states, newest + self.max_candidates - 1)

    def next_step(self, cache: "MtpCache", tokens: torch.Tensor, carried: Any) -> StepOutput:
        """By the next layer, which sees the candidates [R, 1] behind the last entry of each row."""
        number, earlier, states, newest = carried
        shifted = earlier.roll(-1, 1).scatter(1, newest, tokens)
        return self._layer_step(cache, number + 1, shifted, states, newest)

    def _layer_step(
        self, cache: "MtpCache", number: int, tokens: torch.Tensor, states: torch.Tensor, newest: torch.Tensor
    ) -> StepOutput:
        output = self._forward_layer(cache, number, tokens, states)
        last = output.gather(1, newest[..., None].expand(-1, -1, output.shape[2]))
        return self.model._project_to_logits(last), (number, tokens, output, newest)

    def _forward_layer(
        self, cache: "MtpCache", number: int, tokens: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        """[r, m, H] of a layer, for entries with these tokens [r, m] and states."""
        positions = cache.positions + number + 1
        # without rotary positions a layer counts them for all rows in the same way
        one_by_one = self.model.rotary_emb is None
        outputs = [
            self.model.forward_layer(number, states[part], positions[part], cache, tokens[part])
            for part in cache.row_slices(one_by_one)
        ]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


class MtpCache(SlotCache):
    """Runs the layers for one call, as `HeadRunner` does; has states and tokens too: last entries are computed anew.

    Attributes:
        num_recomputed: how many.
        entry_slots: [r, num_recomputed + q], the slots of the entries; below 0 there is none.
        positions: [r, num_recomputed + q] of these.
        layer_numbers: which layer of this cache has the values that are stored by a name.
    """

    positions: torch.Tensor
    entry_slots: torch.Tensor

    def __init__(self, network: Mtp, rows: int):
        super().__init__()
        self.network = network
        self.num_recomputed = network.max_candidates - 1
        self.slots.rows = rows
        self.layer_numbers = dict[Any, int]()

    def __call__(self, method: str, mapping: SlotMapping, *inputs: Any) -> Any:
        """What this method of the network returns."""
        self.positions = mapping.positions
        self.slots.set_write_slots(mapping.slots, 0, mapping.kv_length + 1, mapping.rows)
        return getattr(self.network, method)(self, *inputs)

    def padded_candidates(self, number: int) -> int:
        return number

    def padded_width(self, width: int) -> int:
        return width

    def store(self, name: Any, values: torch.Tensor) -> torch.Tensor:
        """Write values [r, q, N] of entries; returns all that these rows have by the name, [r, kv_length, N]."""
        number = self.layer_numbers.setdefault(name, self.num_recomputed + 1 + len(self.layer_numbers))
        return self.update(values[:, None], values[:, None, :, :0], number)[0][:, 0]

    def with_recomputed(self, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States [r, num_recomputed + q, W] and tokens: of entries that are computed anew, and of the new ones."""
        assert self.slots.index is not None
        all_states = self.store("states", states)
        all_tokens = self.store("tokens", tokens[..., None])[..., 0]
        rows, new_slots = self.slots.index
        earlier_slots = new_slots[:, :1] + torch.arange(-self.num_recomputed, 0, device=new_slots.device)
        self.entry_slots = torch.cat([earlier_slots, new_slots], 1)
        columns = self.entry_slots.clamp(min=0)
        self.positions = (self.positions - new_slots)[:, :1] + columns
        unseen = self.slots.kv_length - 1
        self.slots.index = rows, torch.where(self.entry_slots < 0, unseen, self.entry_slots)
        row_index = torch.arange(len(new_slots), device=new_slots.device)[:, None]
        return all_states[row_index, columns], all_tokens[row_index, columns]

    def row_slices(self, one_by_one: bool) -> Iterator[slice]:
        """The rows at once, or one by one: what is written and seen meanwhile is theirs."""
        assert self.slots.index is not None
        (rows, slots), entry_slots = self.slots.index, self.entry_slots
        parts = [slice(row, row + 1) for row in range(len(rows))] if one_by_one else [slice(None)]
        for part in parts:
            self.slots.index, self.entry_slots = (rows[part], slots[part]), entry_slots[part]
            yield part
        self.slots.index, self.entry_slots = (rows, slots), entry_slots

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[r, 1, q, S], additive: entries see their own slot and those before it."""
        assert self.slots.index is not None
        queries = self.slots.index[1][:, None, :, None]
        keys = torch.arange(self.slots.kv_length, device=queries.device)
        visible = keys <= queries
        if window is not None:
            visible = visible & (keys > queries - window)
        return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the first entry, for layers that count them: layer j is j + 1 tokens ahead."""
        return int(self.entry_slots[0, 0]) + layer_idx + 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys there are, and the position of the first."""
        return self.slots.kv_length, layer_idx + 1

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """What a convolution has read: it is given by `update_conv_state`."""

    def update_conv_state(  # type: ignore[override]
        self, states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 1
    ) -> torch.Tensor:
        """What a convolution reads for the entries: their states [r, C, q] behind those of earlier ones."""
        states = states.masked_fill(self.entry_slots[:, None] < 0, 0.0)
        stored = self.store((layer_idx, state_idx), states.mT)
        earlier_slots = self.entry_slots[:, :1] + torch.arange(1 - conv_kernel_size, 0, device=states.device)
        row_index = torch.arange(len(stored), device=stored.device)[:, None]
        earlier = stored[row_index, earlier_slots.clamp(min=0)]
        earlier = earlier.masked_fill(earlier_slots[..., None] < 0, 0.0)
        return torch.cat([earlier.mT, states], 2)


class MtpDrafter(HeadDrafter):
    """The drafter of one call with the layers."""

    source = "mtp"
    network: Mtp

    def _make_runner(self, context: DraftContext) -> MtpCache:
        return MtpCache(self.network, len(context.batch.rows))

    def _next_step(self, batch: Batch, index: int, previous: torch.Tensor) -> None:
        self._add_output(self.network.next_step(self.runner, previous, self.carried))

    def embed(self, tokens: torch.Tensor, num_masks: int = 0) -> torch.Tensor:
        """The tokens, which layers embed, each shifted by its number."""
        return to_device(tokens, self.device)

    def dummy_run(self, batch: Batch) -> None:
        """Run the step that finds one more candidate, after the prompts; nothing of it is kept."""
        tokens = batch.last(1).to(self.device)
        end = max(self.num_computed_tokens)
        width = self.network.model.config.hidden_size
        states = torch.zeros(len(tokens), 1, width, device=self.device, dtype=self.dtype)
        slots = tokens * 0 + end
        self.runner("first_step", SlotMapping(slots, slots, end + 1), tokens, states, tokens * 0, 1)
        synchronize(self.device)
