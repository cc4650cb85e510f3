"""`MtpDraft`: the target's own multi-token layers, which its checkpoint has and transformers leaves out by default."""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.architectures import MASKED
from hf_specx.common.batch import Batch
from hf_specx.common.devices import last_device, moved, synchronize
from hf_specx.common.errors import require
from hf_specx.common.wrappers import OfModels, shallow
from hf_specx.drafting.drafter import DraftContext, Drafter
from hf_specx.models.slots import SlotCache

from .body import Body
from .config import HeadConfig
from .driver import HeadDrafter
from .layers import Places


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
    name, model = type(target).__name__, with_layers(target)
    told = f"{name} has no multi-token layers (num_mtp_layers in its config); give a draft model or a head instead."
    require(bool(getattr(model.config.get_text_config(), "num_mtp_layers", None)), told)
    try:
        from transformers.modeling_layers import MtpModel

        found: Any = MtpModel.from_pretrained(model, device_map={"": last_device(target)})
        require(hasattr(found, "forward_layer"), "transformers is older than 5.20")
    except (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        told = f"the multi-token layers of {name} cannot be read from {target.name_or_path!r}: {error}; load the "
        told += "target from a checkpoint with them, or give a draft model or a head instead."
        raise ValueError(told) from error
    if found.config._attn_implementation not in MASKED:
        found.config._attn_implementation = "sdpa"
    kinds = getattr(found.config, "layer_types", None) or []
    told = f"the multi-token layers of {name} are of type {', '.join(kinds)}; only {', '.join(LAYER_TYPES)} are "
    require(set(kinds) <= set(LAYER_TYPES), f"{told}supported: give a draft model or a head instead.")
    found.layers.requires_grad_(False).eval()
    return found


def masks_of_rows(
    config: Any, number: int, embedded: torch.Tensor, entries: "MtpCache", positions: Any
) -> dict[str, torch.Tensor]:
    """What layer `number` sees; the model itself knows batches of one alone."""
    kinds = getattr(config, "layer_types", None)
    own = config.per_layer_config[number] if config.is_heterogeneous else config
    window = own.sliding_window if kinds is not None and kinds[number] in WINDOWS else None
    return {"attention_mask": entries.mask(window, embedded.dtype)}


def with_layers(target: PreTrainedModel) -> Any:
    """The target with a config that has the layers that transformers leaves out, and the precision of its weights."""
    found = shallow(target)
    found.config = deepcopy(target.config)
    found.config.dtype, text = target.dtype, found.config.get_text_config()
    if text.model_type.startswith(QWEN):
        text.num_mtp_layers, text.mtp_layer_types = getattr(text, "mtp_num_hidden_layers", 1), ["full_attention"]
    return found


class Mtp(Body):
    """The layers as the body of a head: layer j pairs state i with token i + 1 + j, and predicts the next one.

    Its last j tokens are candidates, so its last entries are computed anew once these are judged: each pass begins as
    many entries earlier as there are further layers.
    """

    chained = True
    model: Any
    most: int

    def __init__(self, model: Any):
        super().__init__()
        self.model, self.most, self.config = model, len(model.layers), HeadConfig(kind="mtp")
        model.create_masks_for_mtp_layer = partial(masks_of_rows, model.config)

    def parameters(self, recurse: bool = True) -> Any:
        return self.model.layers.parameters()

    def read(self, entries: "MtpCache", tokens: Any, states: torch.Tensor) -> None:
        states, tokens = entries.extended(states, tokens)
        for number in range(self.most):
            states = self._layer(entries, number, tokens.roll(-number, 1), states)

    def begin(self, entries: "MtpCache", tokens: Any, states: torch.Tensor, newest: Any, number: int) -> Any:
        """Take up the new entries by the first layer: scores behind each row's last, and what `next` goes on with."""
        states, tokens = entries.extended(states, tokens)
        return self._noted(entries, 0, tokens, states, newest + self.most - 1)

    def next(self, entries: "MtpCache", tokens: torch.Tensor, state: Any) -> Any:
        """By the next layer, which sees the candidates [R, 1] behind the last entry of each row."""
        number, earlier, states, newest = state
        return self._noted(entries, number + 1, earlier.roll(-1, 1).scatter(1, newest, tokens), states, newest)

    def _noted(self, entries: "MtpCache", number: int, tokens: torch.Tensor, states: Any, newest: Any) -> Any:
        found = self._layer(entries, number, tokens, states)
        last = found.gather(1, newest[..., None].expand(-1, -1, found.shape[2]))
        return self.model._project_to_logits(last), (number, tokens, found, newest)

    def _layer(self, entries: "MtpCache", number: int, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """[r, m, H] of a layer, for entries with these tokens [r, m] and states."""
        positions, found = entries.positions + number + 1, []
        # without rotary positions a layer counts them for all rows alike
        for part in entries.parts(self.model.rotary_emb is None):
            found.append(self.model.forward_layer(number, states[part], positions[part], entries, tokens[part]))
        return torch.cat(found) if len(found) > 1 else found[0]


class MtpCache(SlotCache):
    """Runs the layers for one call, as `Layers` does; keeps states and tokens: the last entries are computed anew.

    Attributes:
        again: how many.
        earlier: [r, again + q], the slots of the entries; below 0 there is none.
        positions: [r, again + q] of these.
        numbers: where what is kept by a name lies among the layers.
    """

    positions: torch.Tensor
    earlier: torch.Tensor

    def __init__(self, body: Mtp, rows: int):
        super().__init__()
        self.body, self.again, self.slots.rows = body, body.most - 1, rows
        self.numbers = dict[Any, int]()

    def __call__(self, part: str, places: Places, *inputs: Any) -> Any:
        """What this method of the body gives."""
        self.positions = places.positions
        self.slots.set_write_slots(places.slots, 0, places.extent + 1, places.rows)
        return getattr(self.body, part)(self, *inputs)

    def number(self, number: int) -> int:
        return number

    width = number

    def kept(self, name: Any, values: torch.Tensor) -> torch.Tensor:
        """Write values [r, q, N] of entries; all that these rows have by the name, [r, extent, N]."""
        number = self.numbers.setdefault(name, self.again + 1 + len(self.numbers))
        return self.update(values[:, None], values[:, None, :, :0], number)[0][:, 0]

    def extended(self, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States [r, again + q, W] and tokens of the coming entries, and of as many before them as come once more."""
        assert self.slots.index is not None
        all_states, all_tokens = self.kept("states", states), self.kept("tokens", tokens[..., None])[..., 0]
        rows, coming = self.slots.index
        first = coming[:, :1] + torch.arange(-self.again, 0, device=coming.device)
        self.earlier = torch.cat([first, coming], 1)
        index, here = self.earlier.clamp(min=0), torch.arange(len(coming), device=coming.device)[:, None]
        self.positions = (self.positions - coming)[:, :1] + index
        self.slots.index = rows, torch.where(self.earlier < 0, self.slots.extent - 1, self.earlier)
        return all_states[here, index], all_tokens[here, index]

    def parts(self, apart: bool) -> Iterator[slice]:
        """The rows at once, or one by one: what is written and seen meanwhile is theirs."""
        assert self.slots.index is not None
        (rows, slots), earlier = self.slots.index, self.earlier
        for part in [slice(row, row + 1) for row in range(len(rows))] if apart else [slice(None)]:
            self.slots.index, self.earlier = (rows[part], slots[part]), earlier[part]
            yield part
        self.slots.index, self.earlier = (rows, slots), earlier

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[r, 1, q, S], additive: entries see their own slot and those before it."""
        assert self.slots.index is not None
        queries = self.slots.index[1][:, None, :, None]
        keys = torch.arange(self.slots.extent, device=queries.device)
        seen = keys <= queries if window is None else (keys <= queries) & (keys > queries - window)
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the first coming entry, for layers that count them: layer j is j + 1 tokens ahead."""
        return int(self.earlier[0, 0]) + layer_idx + 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys there are, and the position of the first."""
        return self.slots.extent, layer_idx + 1

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """What a convolution has read: it is given by `update_conv_state`."""

    def update_conv_state(  # type: ignore[override]
        self, states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 1
    ) -> torch.Tensor:
        """What a convolution reads for the coming entries: their states [r, C, q] behind those of earlier ones."""
        states = states.masked_fill(self.earlier[:, None] < 0, 0.0)
        kept = self.kept((layer_idx, state_idx), states.mT)
        before = self.earlier[:, :1] + torch.arange(1 - conv_kernel_size, 0, device=states.device)
        found = kept[torch.arange(len(kept), device=kept.device)[:, None], before.clamp(min=0)]
        return torch.cat([found.masked_fill(before[..., None] < 0, 0.0).mT, states], 2)


class MtpDrafter(HeadDrafter):
    """The drafter of one call with the layers."""

    source = "mtp"
    body: Mtp

    def _make_runner(self, context: DraftContext) -> MtpCache:
        return MtpCache(self.body, len(context.batch.rows))

    def _next(self, batch: Batch, place: int, tokens: torch.Tensor) -> None:
        self._note(self.body.next(self.runner, tokens, self.state))

    def embed(self, tokens: torch.Tensor, masks: int = 0) -> torch.Tensor:
        """The tokens, which layers embed, each shifted by its number."""
        return moved(tokens, self.device)

    def rehearse(self, batch: Batch) -> None:
        """Run the step that finds one more candidate, after the prompts; nothing of it is kept."""
        tokens, end = batch.last(1).to(self.device), max(self.held)
        width = self.body.model.config.hidden_size
        states = torch.zeros(len(tokens), 1, width, device=self.device, dtype=self.dtype)
        slots = tokens * 0 + end
        self.runner("begin", Places(slots, slots, end + 1), tokens, states, tokens * 0, 1)
        synchronize(self.device)
