"""The ragged layout: each token stays in the slot of its column, and a mask by position hides the rest."""

import contextlib
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import utils

from hf_specx.common.architectures import ASK_FOR_MASKS
from hf_specx.common.batch import Batch

from .attention import grouped_queries
from .decoder import Decoder
from .prompts import Prompt, prepare
from .slots import MARGIN, Columns, SlotCache, with_slots


DROPPED = set(getattr(utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()))  # fed with prompts only
Mask = torch.Tensor | dict[str, torch.Tensor]  # [R, 1, q, S], or one for each kind of layer if a model has several


class RaggedDecoder(Decoder):
    """Rows of unequal length side by side; the model must take positions and 4D masks as given."""

    def __init__(self, prompt: Prompt, known_ids: int | None = None):
        super().__init__(prompt, known_ids)
        self.cache = with_slots(self.cache, prompt.input_ids.shape[1] + prompt.longest)
        assert isinstance(self.cache, SlotCache)
        self.masks = Masks(self.model)

    def _forward(self, batch: Batch, tokens: torch.Tensor, ahead: int, keep: int) -> torch.Tensor:
        count, counts = tokens.shape[1], [batch.counts[row] for row in batch.rows]
        emitted = batch.columns(ahead - count, count) - batch.width  # [R, q], those before each token
        longest, even = max(counts), len(set(counts)) == 1
        if 1 < count - ahead > batch.shortest():  # a row with fewer tokens is fed its first one again and again
            emitted, even = emitted.maximum((batch.starts - batch.width)[batch.index, None]), False
        slots, extent = (self.width + emitted).to(self.device), self.width + longest + ahead
        self.cache.slots.aim(None if even else slots, extent - count, extent)
        given = self._others(count) if self.per_row else {}
        if "logits_to_keep" in self.parameters:
            given["logits_to_keep"] = keep
        positions = self._positions(batch, emitted, longest + ahead)
        if positions is not None and "position_ids" in self.parameters:
            given["position_ids"] = positions.to(self.device)
        mask = self._mask(batch, slots, extent, even)
        with contextlib.nullcontext() if mask is None else grouped_queries():
            output = self.model(
                input_ids=tokens.to(self.device),
                attention_mask=mask,
                **{self.cache_name: self.cache},
                use_cache=True,
                return_dict=True,
                **given,
            )
        return output.logits[:, -keep:]

    def _mask(self, batch: Batch, slots: torch.Tensor, extent: int, even: bool) -> Mask | None:
        """None if one token of each row sees all that the cache holds; `even` says whether rows are equally long."""
        pads = holes = None
        if self.holes is not None:
            holes = torch.nn.functional.pad(self.holes[batch.index], (0, extent - self.width)).to(self.device)
        if holes is not None or max([self.padding[row] for row in batch.rows]):
            pads = self.pads[batch.index].to(self.device)
        elif even and slots.shape[1] == 1 and self.masks.only_causal:
            return None
        return self.masks(slots, pads, extent, holes)

    def _others(self, count: int) -> dict[str, Any]:
        """What else the forward is given for each row, as `generate` gives it to the next tokens."""
        names = self.per_row & self.parameters.keys() - DROPPED
        given = {name: value for name, value in self.kwargs.items() if name in names}
        return given | self._token_types(count)

    def admit(self, batch: Batch, rows: list[int]) -> None:
        if batch.width > self.width:
            self.widen(batch.width - self.width)
        index = torch.tensor(rows).to(batch.ids.device, non_blocking=True)
        width = max(batch.prompt_lengths[row] for row in rows)
        ids = batch.ids[index, batch.width - width : batch.width]
        mask = torch.arange(batch.width - width, batch.width, device=index.device) >= batch.starts[index, None]
        given = {"input_ids": ids, "attention_mask": mask.long()}
        prompt = prepare(self.model, self.prompt.max_new_tokens, given)
        prompt.gives_hidden, prompt.places = self.prompt.gives_hidden, self.prompt.places
        fresh = RaggedDecoder(prompt, self.known_ids)
        fresh.read()
        self.prompt_hidden = fresh.prompt_hidden
        self.opening, self.after_prompt = rows == list(range(len(batch.counts))), fresh.after_prompt
        self.cache.slots.limit = self.width + max(batch.limits) + MARGIN
        self.cache.take(fresh.cache, [batch.rows.index(row) for row in rows], self.width - width, self.width)
        self.pads = self.pads.index_copy(0, index, fresh.pads + self.width - width)
        for row, number in zip(rows, fresh.padding, strict=True):
            self.held[row], self.valid[row], self.padding[row] = 0, 0, number + self.width - width
        if self.holes is not None:
            self.holes = self.holes.index_fill(0, index, False)
        if self.first_position is not None and fresh.first_position is not None:
            self.first_position = self.first_position.index_copy(-2, index, fresh.first_position)

    def widen(self, count: int) -> None:
        """Put `count` columns of pads before the prompts of all rows."""
        self._widen_cache(count)
        self.width += count
        self.pads = self.pads + count
        self.padding = [number + count for number in self.padding]
        if self.holes is not None:
            self.holes = torch.nn.functional.pad(self.holes, (count, 0))

    def _widen_cache(self, count: int) -> None:
        self.cache.widen(count)

    def columns(self, index: int, row: int) -> Columns:
        return self.cache.row(index, torch.arange(self.width + self.held[row], device=self.device))


class Masks:
    """4D masks by position for one model: bool under sdpa, additive under eager attention."""

    def __init__(self, model: PreTrainedModel):
        config = model.config.get_text_config(decoder=True)
        self.additive = None if config._attn_implementation == "sdpa" else model.dtype
        self.window: int | None = getattr(config, "sliding_window", None)
        self.chunk: int | None = getattr(config, "attention_chunk_size", None)
        self.kinds = sorted(set(getattr(config, "layer_types", None) or ()))
        plain = self.additive is None and self.window is None and not self.kinds
        self.only_causal = plain and config.model_type not in ASK_FOR_MASKS

    def __call__(
        self, slots: torch.Tensor, pads: torch.Tensor | None, extent: int, holes: torch.Tensor | None = None
    ) -> Mask:
        """For queries at slots [R, q], of `extent` leading slots without `pads` [R] and `holes` [R, S] bool."""
        keys, queries = torch.arange(extent, device=slots.device), slots[:, None, :, None]
        if pads is None:
            return self.between(queries, keys)
        first = pads[:, None, None, None]
        known = keys >= first
        return self.between(queries, keys, known if holes is None else known & ~holes[:, None, None], first)

    def between(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        known: torch.Tensor | None = None,
        first: torch.Tensor | int = 0,
    ) -> Mask:
        """For queries and keys by their numbers in a text, counted alike; all arguments broadcast to [R, 1, q, S].

        A key is `known` if it is a token of the query's row, as all are if None; `first` is the row's first number.
        """
        full = keys <= queries if known is None else known & (keys <= queries)
        if not self.kinds:
            return self._as_asked(full if self.window is None else full & (keys > queries - self.window))
        masks = {}
        for kind in self.kinds:
            visible = full
            if kind == "sliding_attention" and self.window is not None:
                visible = full & (keys > queries - self.window)
            elif kind == "chunked_attention" and self.chunk is not None:
                visible = full & ((keys - first) // self.chunk == (queries - first) // self.chunk)
            masks[kind] = self._as_asked(visible)
        return masks

    def _as_asked(self, visible: torch.Tensor) -> torch.Tensor:
        if self.additive is None:
            return visible
        lowest = torch.finfo(self.additive).min
        return torch.zeros(visible.shape, dtype=self.additive, device=visible.device).masked_fill_(~visible, lowest)
