"""The ragged layout in compiled forwards: buffers of fixed size, whose rows and lengths are told by tensors."""

import inspect
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.import_utils import is_torch_greater_or_equal

from hf_specx.common.batch import Batch
from hf_specx.common.errors import require

from .attention import grouped_queries
from .compiled_forwards import capacity_bucket, compiled_forwards_of, forward, length_bucket, row_bucket
from .layers import RingLayer
from .packed_weights import PackedLinear
from .prompts import PreparedInputs
from .ragged import RaggedRunner
from .slots import MARGIN, copy_buffers, keys_values_of


FAR = 2**40  # a slot that no text reaches
AGAIN = MARGIN // 4  # tokens of a row that are fed again, at most, where another lacks as many and layers have rings
LEAST_OF_TREE = 8  # query length of a round with a tree, at least
ROOM = 512  # new tokens that there are slots for at first; then the buffers grow
LENGTHENING = ("dynamic", "longrope")  # types of RoPE whose frequencies depend on the length of the text


def check_compile(model: PreTrainedModel, layout: str, reason: str, synced: bool) -> None:
    """Raise ValueError unless a model that has this layout for this reason can be compiled, on `synced` ranks."""
    name, device = type(model).__name__, str(model.device)
    require(
        layout == "ragged",
        f"compile=True goes with layout='ragged', and {name} would be decoded in {layout!r} ({reason}); use "
        "compile=False, or what takes the ragged layout.",
    )
    why = _hinders(model)
    require(not why, f"compile=True cannot compile {name}: {why}; use compile=False.")
    is_hooked = any(hasattr(module, "_hf_hook") for module in model.modules())
    require(
        not synced and not is_hooked and model.device.type in ("cpu", "cuda"),
        f"compile=True takes models that lie whole on one CPU or CUDA device; {name} is on {device!r}"
        f"{' under hooks of accelerate' * is_hooked}{' of several ranks' * synced}; use compile=False, or load it on "
        "one device.",
    )
    is_recent = is_torch_greater_or_equal("2.9", accept_dev=True)  # earlier ones cannot trace transformers' forwards
    compiler = "Triton" if model.device.type == "cuda" else "a C++ compiler"
    require(
        is_recent and has_compiler(model.device.type),
        f"compile=True needs {compiler if is_recent else 'torch 2.9 or later'} for device {device!r}; install one, or "
        "use compile=False.",
    )


def _hinders(model: PreTrainedModel) -> str:
    """Why torch cannot compile a model's forwards; empty if it can."""
    config = model.config.get_text_config(decoder=True)
    rope, quantizer = getattr(config, "rope_parameters", None) or {}, getattr(model, "hf_quantizer", None)
    kinds = [parameters.get("rope_type") for parameters in (rope, *rope.values()) if isinstance(parameters, dict)]
    if not model._can_compile_fullgraph or "position_ids" not in inspect.signature(model.forward).parameters:
        return "transformers does not say that its forward is one graph by position"
    if any(kind in LENGTHENING for kind in kinds):
        return "its frequencies follow the length of the text"
    if quantizer is not None and not quantizer.is_compileable:
        return f"it is quantised by {type(quantizer).__name__}"
    return ""


@cache
def has_compiler(device_type: str) -> bool:
    """Whether torch finds what it compiles with, by modules of its own that other calls do not depend on."""
    if device_type == "cuda":
        from torch.utils._triton import has_triton

        return has_triton()

    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError:
        return False
    return True


class CompiledRunner(RaggedRunner):
    """A `RaggedRunner` whose forwards after the prompts are compiled.

    The buffers have a power of two of rows. The R decoding rows are the first; the others are idle: token 0 is fed
    into their first slots, and what comes of it is not used.
    """

    def __init__(self, prompt: PreparedInputs, draft_vocab_size: int | None = None):
        super().__init__(prompt, draft_vocab_size)
        self.forwards = compiled_forwards_of(self.model, self.device)
        self.compiled_before = self.forwards.compilations
        # query length of the last round that the end of the text did not cut short, of chains and of trees
        self.usual = {"chain": 1, "tree": 1}
        self.row_tensors: dict[str, torch.Tensor] = {}  # of each buffer row; made anew when there are others

    @property
    def is_half_idle(self) -> bool:  # type: ignore[override]
        """As in `ModelRunner`."""
        return len(self.buffers[0][0]) >= 2 * self.num_rows

    @property
    def compilations(self) -> int:  # type: ignore[override]
        """Forwards of this model that were compiled since this runner was made."""
        return self.forwards.compilations - self.compiled_before

    def prefill(self) -> Any:
        with PackedLinear(self.forwards.packed_weights):
            output = super().prefill()
        slots = self.width + min(self.prompt.max_new_tokens_now, ROOM) + MARGIN
        self._resize(row_bucket(self.num_rows), capacity_bucket(slots))
        return output

    def _resize(self, rows: int, capacity: int) -> None:
        """Have what the rows hold in buffers of another size."""
        before, layers = keys_values_of(self.cache), self.cache.layers
        ring = min(capacity, self.cache.slots.ring)
        slots = [ring if isinstance(layer, RingLayer) else capacity for layer in layers]
        buffers = self.forwards.pool.allocate(self, rows, slots, before)
        copy_buffers(before, buffers)
        for layer, (keys, values) in zip(layers, buffers, strict=True):
            layer.keys, layer.values = keys, values
        self.buffers, self.capacity, self.row_tensors = buffers, capacity, {}

    def _reserve(self, end: int) -> None:
        """Have slots for so many columns, the last of them in layers with a window."""
        if end > self.capacity:
            self._resize(len(self.buffers[0][0]), capacity_bucket(end + MARGIN))
        self.cache.slots.has_lost |= 0 < self.cache.slots.ring < end

    def _note_rows(self, index: torch.Tensor) -> None:
        """Prepare what the forwards are given for each buffer row, of which `index` [R] are the decoding ones."""
        assert self.first_position is not None
        offsets = self.first_position.index_select(-2, index) - self.width
        last = torch.full_like(offsets, self.width + min(self.prompt.max_new_tokens, FAR) - 2)
        if self.max_positions is not None:
            last = torch.minimum(last, self.max_positions - 1 - offsets)
        self.row_tensors = {"offsets": self._to_buffer_rows(offsets, -2), "last": self._to_buffer_rows(last, -2)}
        self.row_tensors["pads"] = self._to_buffer_rows(self.pads[index])
        if self.gaps is not None:
            gaps = torch.nn.functional.pad(self.gaps[index], (0, self.capacity - self.width))
            self.row_tensors["gaps"] = self._to_buffer_rows(gaps)

    def _to_buffer_rows(self, values: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Values of the R rows along a dimension, with zeros for idle rows after them."""
        values, shape = values.to(self.device), list(values.shape)
        shape[dim] = len(self.buffers[0][0]) - shape[dim]
        return torch.cat([values, values.new_zeros(shape)], dim) if shape[dim] else values.contiguous()

    def _forward(self, batch: Batch, tokens: torch.Tensor, ahead: int, logits_to_keep: int) -> torch.Tensor:
        buffer_rows, count = len(self.buffers[0][0]), tokens.shape[1]
        length = self._length(batch, count, ahead)
        starts = batch.ends + (self.width - batch.width + ahead - count)
        beyond = ahead + length - count  # columns behind a text
        self._reserve(self.width + max([batch.counts[row] for row in batch.rows]) + beyond)
        window, spare = self.masks.longest_window, max(length, beyond) + AGAIN
        if 0 < self.cache.slots.ring < min(window + spare, self.capacity):
            self._enlarge_rings(window + -(-spare // MARGIN) * MARGIN, starts[:, None] - 1)
            self._resize(buffer_rows, self.capacity)
        rows = self.forwards.rows(len(tokens), buffer_rows, self.capacity)
        if rows < buffer_rows:
            self._resize(rows, self.capacity)
        if not self.row_tensors:
            self._note_rows(batch.index)
        inputs: dict[str, Any] = {
            name: self._to_buffer_rows(value) for name, value in self._row_inputs(length).items()
        }
        tree, num_logits = self._tree_attention(batch, count, ahead), logits_to_keep
        if tree is not None:
            more = length - count
            inputs["node_depths"] = self._to_buffer_rows(torch.nn.functional.pad(tree.node_depths, (0, more)))
            inputs["node_mask"] = self._to_buffer_rows(torch.nn.functional.pad(tree.node_mask, (0, more, 0, more)))
        if length > count:
            tokens, num_logits = torch.nn.functional.pad(tokens, (0, length - count)), length
        if "logits_to_keep" in self.parameters:
            inputs["logits_to_keep"] = num_logits
        inputs |= self.row_tensors | {"starts": self._to_buffer_rows(starts)}
        taps = [] if self.hidden is None else [(id(module), reads) for module, reads in self.hidden.taps]
        sizes = {"capacity": self.capacity, "ring": self.cache.slots.ring, "keep": num_logits}
        size = (len(self.buffers[0][0]), *sizes.values(), length, *inputs, *taps)
        arguments = self.model, self.hidden, self.forwards.masks, self.buffers, self._to_buffer_rows(tokens)
        with grouped_queries(traced=True):
            logits, states = self.forwards.run(forward, size, *arguments, **sizes, **inputs)
        assert logits is not None
        first = 0 if length == count else count - logits_to_keep
        self.states = None if states is None else states[: len(tokens), first : first + logits_to_keep]
        return logits[: len(tokens), first : first + logits_to_keep]

    def _last_hidden(self, logits_to_keep: int) -> torch.Tensor | None:
        return self.states

    def _length(self, batch: Batch, count: int, ahead: int) -> int:
        """The query length for `count` tokens; a round that the end of the text cuts short has the usual one.

        A tree has a power of two from `LEAST_OF_TREE` on, since its size may change from round to round.
        """
        if ahead != count - 1:
            return length_bucket(count)
        if batch.tree is None:
            kind, depth, length = "chain", ahead, length_bucket(count)
        else:
            kind, depth, length = "tree", batch.tree.depth, max(LEAST_OF_TREE, row_bucket(count))
        if depth < max([batch.remaining_tokens(row) for row in batch.rows]) - 1:
            self.usual[kind] = length
        return max(self.usual[kind], length)

    def _max_tokens_at_once(self, batch: Batch) -> int:
        """Nor is a row fed more tokens than it has: they go to consecutive slots; nor again what rings have lost."""
        most = min(super()._max_tokens_at_once(batch), batch.shortest_length())
        return min(most, AGAIN) if 0 < self.cache.slots.ring < self.capacity else most

    def _widen_cache(self, count: int) -> None:
        self._reserve(self.width + count + max(self.num_computed_tokens))
        for buffer in (x for layer in self.buffers for x in layer):
            buffer.copy_(buffer.roll(count, 2))

    def admit(self, batch: Batch, rows: list[int]) -> None:
        with PackedLinear(self.forwards.packed_weights):
            super().admit(batch, rows)
        self.row_tensors = {}

    def gather_rows(self, keep_indices: torch.Tensor) -> None:
        self._gather_inputs(keep_indices)
        if len(keep_indices) > len(self.buffers[0][0]):  # where rows come: see `add_rows`
            self._resize(row_bucket(len(keep_indices)), self.capacity)
        copy_buffers(self.buffers, self.buffers, keep_indices.to(self.device))
        self.row_tensors = {}

    def common_slots(self, length: int) -> slice | None:
        """None: the buffers serve later calls."""
        return None

    def _feed_last_tokens(self, batch: Batch) -> None:
        """As many tokens as in a round, so that nothing is compiled for it."""
        count = min(self.usual["chain"], self._max_tokens_at_once(batch), *(batch.counts[row] for row in batch.rows))
        self.decode_tokens(batch, count, 0, logits_to_keep=count)
