"""What all layouts share: a model with its cache reads the prompts as in `generate`, then is fed what rows add."""

import contextlib
import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from hf_specx.common.architectures import BLIND_STEPS
from hf_specx.common.batch import Batch
from hf_specx.common.devices import cat_on, execution_device, last_device, synchronize
from hf_specx.common.errors import require
from hf_specx.common.round import Draft, Round
from hf_specx.common.wrappers import keeping_cache, text_decoder

from .prompts import UNLIMITED, HiddenStateTap, Prompt, gather_input_rows, has_rows, position_table
from .slots import Columns, KeysValues, assemble, cache_name, columns_of, gather_cache_rows, pop_layers, self_attention


NOT_FED = {"labels", "output_attentions", "output_hidden_states"}
TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}


class Forward(NamedTuple):
    """What a target forward gave after the last emitted token and after each candidate."""

    logits: torch.Tensor  # [R, K + 1, V]
    hidden: torch.Tensor | None = (
        None  # [R, K + 1, H], of the last layer, or those of all taps joined; if they are read
    )


class SharedKeys(NamedTuple):
    """What a query at the last token that the cache has read of each row may attend to, in layers of each kind.

    There is a query for each decoding row, in the shape [r, q] that the layout feeds the model: r * q = R.
    """

    positions: torch.Tensor  # [r, q] of the queries
    masks: dict[str, torch.Tensor]  # [r, 1, q, S] by kind, bool, or additive as the model takes them
    keys: dict[str, tuple[torch.Tensor, torch.Tensor]]  # keys and values [r, H, S, D] by kind


class HiddenStates:
    """What modules give, or are given, in forwards of this thread: read by hooks, which are there in a context alone.

    With `output_hidden_states=True` a forward would keep the states of all layers. Torch compiles what the hooks do
    into a forward, if it compiles one in the context; such a forward gives the states itself.

    Gemma 4 runs the layers that share keys for the positions of the asked logits alone; if states of these are read,
    it is not told which those are.
    """

    def __init__(self, taps: Sequence[HiddenStateTap], device: torch.device, model: PreTrainedModel):
        self.taps, self.device = taps, device
        decoder = text_decoder(model)
        first_sharing = getattr(decoder, "first_kv_shared_layer_idx", sys.maxsize)
        sharing_layers = list(getattr(decoder, "layers", ()))[first_sharing:]
        # the decoder that is not told for which positions logits are asked
        self.uninformed_decoder = decoder if any(module in sharing_layers for module, _ in taps) else None

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        self.outputs: list[list[torch.Tensor]] = [[] for _ in self.taps]  # of each tap, forward by forward
        self.hooks = []
        for (module, reads_input), outputs in zip(self.taps, self.outputs, strict=True):
            self.hooks.append(module.register_forward_hook(partial(self._record, reads_input, outputs)))
        if self.uninformed_decoder is not None:
            hook = self.uninformed_decoder.register_forward_pre_hook(_without_logits_to_keep, with_kwargs=True)
            self.hooks.append(hook)

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _record(
        self, reads_input: bool, outputs: list[torch.Tensor], module: nn.Module, args: Any, output: Any
    ) -> None:
        if self.is_own_thread():
            states = args if reads_input else output
            outputs.append(states if isinstance(states, torch.Tensor) else states[0])

    @torch.compiler.assume_constant_result
    def is_own_thread(self) -> bool:
        """Whether this thread is that of the context."""
        return threading.get_ident() == self.thread

    def last(self, keep: int = 0) -> torch.Tensor:
        """[R, keep, H], of the last positions of the forwards in the context, of all for 0; those of taps joined."""
        require(
            all(outputs[0].ndim == 3 for outputs in self.outputs),  # Gemma 3n
            "the target's layers pass on several states of a token, which no draft head reads; give a draft model.",
        )
        states = [torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0] for outputs in self.outputs]
        return cat_on([x[:, -keep:] for x in states], self.device)


def _without_logits_to_keep(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a forward of layers that gives the states of all positions."""
    return args, kwargs | {"logits_to_keep": None}


_without_logits_to_keep.reads_only = True  # type: ignore[attr-defined]  # what a position gets stays as it is


class ModelRunner:
    """A model with its cache, fed the last tokens of each row of a `Batch`.

    Attributes:
        width: slots that the prompts take in the cache, pads among them; known once they are read.
        prompt_logits: [B, 1, V] after the last tokens of the prompts that were read last; `has_all_prompt_logits`:
            whether these are all rows'. `prompt_hidden`: their states [B, L, H], right-aligned; None unless they are
            read.
        num_computed_tokens: [B], how many tokens after its prompt, from the first on, the cache holds of each row's
            text. Candidates of the last forward count as text until `crop` says which were, or the row turns out to
            be shorter. What the slots hold beyond these is never seen, and overwritten.
        pads: [B] int64, leading slots without a token; `pad_counts` are the same numbers as a list.
        left_columns: the columns of rows that have left before the end, where the call wants its cache; `last_rows`:
            the rows whose columns are in the cache at the end.
        num_rows: of the inputs that the model is given, R.
        compilations: forwards that torch has compiled for this one.
        reused_tokens: tokens of prompts that were copied from others that begin with them, and not read.
    """

    lockstep = False  # whether all rows must have emitted equally many tokens
    is_half_idle = False  # whether half or more of the rows of a forward are of no use
    compilations = reused_tokens = 0

    def __init__(self, prompt: Prompt, draft_vocab_size: int | None = None):
        """A draft with fewer ids than its target, `draft_vocab_size`, is fed the last of them for any beyond."""
        self.model, self.prompt, self.draft_vocab_size = prompt.model, prompt, draft_vocab_size
        self.kwargs = {name: x for name, x in prompt.kwargs.items() if x is not None and name not in NOT_FED}
        self.cache_name = cache_name(self.kwargs)
        self.cache = self.kwargs.pop(self.cache_name, None)
        self.last_device, self.hidden = last_device(self.model), None
        if prompt.gives_hidden:
            taps = prompt.hidden_state_taps or [(text_decoder(self.model), False)]
            self.hidden = HiddenStates(taps, self.last_device, self.model)
        self.prompt_hidden: torch.Tensor | None = None
        bounded = draft_vocab_size is None and prompt.max_new_tokens != UNLIMITED  # else by the target's own limits
        self.max_positions = None if bounded else position_table(self.model)
        self.num_computed_tokens = [0] * len(prompt.input_ids)
        self.left_columns: dict[int, Columns] = {}
        self.last_rows: list[int] = []
        self.per_row_inputs: set[str] = set()
        self.holes: torch.Tensor | None = None  # [B, width] bool, hidden slots after the pads, if there are any
        self.first_position: torch.Tensor | None = None
        self.cross_attention: Columns = []
        self.width, self.has_all_prompt_logits = 0, True
        prefix = "decoder_" if self.model.config.is_encoder_decoder else ""
        self.mask_name, self.position_name = f"{prefix}attention_mask", f"{prefix}position_ids"
        positions = self.kwargs.get(self.position_name)
        if self.max_positions is not None and positions is not None:  # a draft may have fewer than its prompt
            self.kwargs[self.position_name] = positions.clamp(max=self.max_positions - 1)
        self.parameters = inspect.signature(self.model.forward).parameters
        self.device = execution_device(self.model)

    def prefill(self) -> Any:
        """Read the prompts of all rows, by the first forward of `generate`; returns what it gave."""
        ids, config = self.prompt.input_ids, self.prompt.generation_config
        rows = len(ids)
        with self.hidden or contextlib.nullcontext():
            inputs = self.kwargs | {self.cache_name: self.cache}
            output = keeping_cache(self.model)._prefill(self._clamp_ids(ids), config, inputs)
        if self.cache is None:  # the model makes one of its own
            self.cache = getattr(output, self.cache_name)
        self.prompt_logits = output.logits[:, -1:].to(ids.device)
        self.prompt_hidden = None if self.hidden is None else self.hidden.last()
        mask, positions = self.kwargs.pop(self.mask_name, None), self.kwargs.pop(self.position_name, None)
        if mask is not None:
            self.width = mask.shape[1]
        elif self.model.config.is_encoder_decoder and self.cache is not None:  # all ids were fed after what it held
            self.width = self_attention(self.cache).get_seq_length()
        else:
            self.width = getattr(config, "_mask_length", ids.shape[1])
        self.num_rows = rows
        self.pads = torch.zeros(rows, dtype=torch.int64, device=ids.device)
        if mask is not None and self.model.config.model_type not in BLIND_STEPS:
            is_token = mask.bool().to(ids.device)
            self.pads = is_token.int().argmax(-1)
            holes = ~is_token & (is_token.cumsum(-1) > 0)
            self.holes = holes if holes.any() else None
        self.pad_counts: list[int] = self.pads.tolist()
        if positions is not None:
            # [..., B, 1], that of the first emitted token, in as many dimensions as the model's positions have
            first = positions[..., -1:].to(ids.device) + 1
            self.first_position = first.expand(*first.shape[:-2], rows, 1)
        for name in ("inputs_embeds", "logits_to_keep"):
            self.kwargs.pop(name, None)
        self.per_row_inputs = {name for name, value in self.kwargs.items() if has_rows(value, rows)}
        if self.prompt.keeps_past and isinstance(self.cache, EncoderDecoderCache):  # before rows leave it
            self.cross_attention = columns_of(self.cache.cross_attention_cache)
        return output

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """Read the prompts of rows that have just been put in the places of others; nothing is emitted there yet."""
        raise NotImplementedError

    def seat_rows(self, batch: Batch, before: torch.Tensor) -> None:
        """Have the decoding rows of a batch, some free until `admit`; `before` [R'] is what `Batch.seat_rows` gave."""
        raise NotImplementedError

    def __call__(self, batch: Batch, draft: Draft) -> Forward:
        """The forward of a round: logits after the last emitted token and after each candidate.

        Before any token is emitted and without candidates it needs no forward: reading the prompts has given these.
        """
        most = draft.tokens.shape[1]
        if self.has_all_prompt_logits and not most and not any(batch.counts):
            return Forward(self.prompt_logits, None if self.prompt_hidden is None else self.prompt_hidden[:, -1:])
        logits = self.decode_tokens(batch, 1 + most, most, 1 + most)
        return Forward(logits, self._last_hidden(1 + most))

    def _last_hidden(self, keep: int) -> torch.Tensor | None:
        """[R, keep, H], states at the positions of the last `keep` logits; None unless they are read."""
        return None if self.hidden is None else self.hidden.last(keep)

    def decode_tokens(self, batch: Batch, count: int, ahead: int, keep: int) -> torch.Tensor:
        """Feed the last `count` tokens of each row, `ahead` candidates after its end among them.

        One that was fed before is fed again in the same slot. Returns logits [R, keep, V] after the last `keep`.
        """
        tokens = self._clamp_ids(batch.last(count, ahead))
        with self.hidden or contextlib.nullcontext():
            logits = self._forward(batch, tokens, ahead, keep)
        for row in batch.rows:
            self.num_computed_tokens[row] = batch.counts[row] + ahead
        return logits.to(tokens.device)

    def crop(self, row: int, count: int) -> None:
        """Of what a row was fed, only the first `count` tokens after its prompt are its text."""
        self.num_computed_tokens[row] = min(self.num_computed_tokens[row], count)

    def decode_step(self, batch: Batch, ahead: int, skipped: int = 0) -> torch.Tensor:
        """Logits [R, 1, V] after `ahead` candidates; feeds the last, `skipped` before it, first what is missing."""
        if ahead > skipped:
            return self.decode_tokens(batch, 1 + skipped, ahead, keep=1)
        if self.has_all_prompt_logits and not any(batch.counts):
            return self.prompt_logits
        missing = max(self.num_missing_tokens(batch))
        while missing > 1:
            part = self._most_at_once(batch)
            if missing <= part:
                break
            counts = [min(count, self.num_computed_tokens[row] + part) for row, count in enumerate(batch.counts)]
            self.decode_tokens(batch.view_at(counts), part, 0, keep=1)
            missing = max(self.num_missing_tokens(batch))
        return self.decode_tokens(batch, missing + ahead, ahead, keep=1)

    def _most_at_once(self, batch: Batch) -> int:
        """The most missing tokens of a row in one forward: just after the prompts, as few as some row has emitted."""
        if not self.has_all_prompt_logits:
            return sys.maxsize
        return max(1, min([batch.counts[row] for row in batch.rows]))

    def num_missing_tokens(self, batch: Batch) -> list[int]:
        """How many of its last tokens each decoding row has to be fed; the last one was never fed."""
        return [batch.counts[row] - min(self.num_computed_tokens[row], batch.counts[row] - 1) for row in batch.rows]

    def preview(self, batch: Batch, count: int) -> torch.Tensor:
        """Logits [R, count, V] of the `count` tokens after the ends of all rows; the next forward rolls them back."""
        tokens = self._clamp_ids(batch.last(count, count))
        with self.hidden or contextlib.nullcontext():
            logits = self._forward(batch, tokens, count, count)
        self.num_computed_tokens = [0] * len(self.num_computed_tokens)
        return logits.to(tokens.device)

    def dummy_run(self, batch: Batch, count: int) -> None:
        """Feed `count` arbitrary tokens after the prompts and wait for it; the next forward rolls them back."""
        with self.hidden or contextlib.nullcontext():
            self._forward(batch, batch.index.new_zeros(len(batch.rows), count), count, count)
        self.num_computed_tokens = [0] * len(self.num_computed_tokens)
        for device in {self.device, self.last_device}:
            synchronize(device)

    def _forward(self, batch: Batch, tokens: torch.Tensor, ahead: int, keep: int) -> torch.Tensor:
        """Logits [R, keep, V] of tokens [R, q], of which the last lie `ahead` tokens after the ends of their rows."""
        raise NotImplementedError

    def _logits(self, tokens: torch.Tensor, keep: int, **inputs: Any) -> torch.Tensor:
        """Logits [R, keep, V] of tokens [R, q] that the model is fed as they are, with its other inputs."""
        if "logits_to_keep" in self.parameters:
            inputs["logits_to_keep"] = keep
        inputs[self.cache_name] = self.cache
        return self.model(input_ids=tokens, use_cache=True, return_dict=True, **inputs).logits[:, -keep:]

    def shared_keys(self, batch: Batch, layers: dict[str, int]) -> SharedKeys:
        """Keys and values that the cache has in `layers`, by kind, for a draft that reads them before the next feed.

        Of each row those of its prompt and its emitted tokens but the last; the query is at the newest of these.
        """
        raise NotImplementedError

    def _newest(self, batch: Batch) -> torch.Tensor:
        """[R, 1], how many emitted tokens lie before the newest that the cache has read; -1 at the end of a prompt."""
        return (batch.ends - batch.width - 2).clamp(min=-1)[:, None]

    def observe(self, done: Round) -> None:
        """Drop rows that have left. Where the call wants its cache, the columns of rows that have ended are saved."""
        if self.prompt.keeps_past and (done.finished or done.stay is not None):
            self._save_columns(done)
        if done.stay is not None:
            self.drop_rows(done.stay)

    def drop_rows(self, stay: torch.Tensor) -> None:
        """Keep only those of the decoding rows [R] that are at indices `stay` [R']."""
        gather_cache_rows(self.cache, stay)
        self._gather_inputs(stay)

    def _gather_inputs(self, stay: torch.Tensor) -> None:
        for name in self.per_row_inputs:
            self.kwargs[name] = gather_input_rows(self.kwargs[name], stay, self.num_rows)
        self.num_rows = len(stay)

    def _save_columns(self, done: Round) -> None:
        """Copy the columns of rows that leave before others; the last ones' stay in the cache.

        A last token that is no candidate was not fed yet, and is now.
        """
        counts = list(done.batch.counts)
        staying = [] if done.stay is None else done.batch.rows
        leaving = [row for row in done.rows if row not in staying]
        # `generate` does not feed the last tokens of the longest rows
        longest = max(counts) if done.finished else None
        unfed = []  # rows whose last token the cache lacks
        for row, emitted, accepted in zip(done.rows, done.emitted, done.accepted, strict=True):
            if emitted > accepted and counts[row] != longest:
                unfed.append(row)
        if not set(unfed).isdisjoint(leaving):
            if self.lockstep:  # rows that are shorter have ended before the last candidate: of them, no more is kept
                counts = [max(counts)] * len(counts)
            self._feed_last_tokens(done.batch.view_at(counts, done.rows))
        if done.finished:
            self.last_rows = leaving
        else:
            self.left_columns |= {row: list(self.row_columns(done.rows.index(row), row)) for row in leaving}

    def _feed_last_tokens(self, batch: Batch) -> None:
        self.decode_tokens(batch, 1, 0, keep=1)

    def row_columns(self, index: int, row: int) -> Iterator[KeysValues]:
        """By layer keys and values [H, n, D], pads among them, of what row `row`, the `index`-th of R, was fed."""
        raise NotImplementedError

    def common_slots(self, length: int) -> slice | None:
        """The slots that hold the first `length` columns of all rows that decode; None if these differ.

        Or if the buffers are kept for later calls.
        """
        return None

    def past_key_values(self, batch: Batch, emitted: int) -> Cache | None:
        """The cache that `generate` would return: of all columns except the last. None if that cannot be made.

        This runner has no cache then.
        """
        ends = [self.width + min(count, emitted - 1) for count in batch.counts]
        length = self.width + emitted - 1
        slots = getattr(self_attention(self.cache), "slots", None)
        has_lost = slots is not None and slots.has_lost  # windows are of the whole text otherwise
        past = DynamicCache(config=self.model.config) if has_lost else DynamicCache()
        rows: dict[int, Iterator[KeysValues]] = {}
        for row, columns in self.left_columns.items():
            rows[row] = pop_layers(columns)
        for index, row in enumerate(self.last_rows):
            rows[row] = self.row_columns(index, row)
        slots_of_all = None if self.left_columns else self.common_slots(length)
        return assemble(past, self_attention(self.cache), rows, ends, length, slots_of_all, self.cross_attention)

    def _token_types(self, count: int) -> dict[str, torch.Tensor]:
        """Types [R, count] of the next tokens: as in `generate` that of the last token, or text."""
        types = {}
        for name in TOKEN_TYPES & self.kwargs.keys():
            last = self.kwargs[name][:, -1:].expand(-1, count)
            types[name] = last if name == "token_type_ids" else torch.zeros_like(last)
        return types

    def _clamp_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self.draft_vocab_size is None else tokens.clamp(max=self.draft_vocab_size - 1)

    def _positions(self, batch: Batch, emitted: torch.Tensor) -> torch.Tensor | None:
        """Positions [..., R, q] of tokens with `emitted` [R, q] ones before them; None where the model is given none.

        Candidates that cannot be emitted are not given a position that does not exist.
        """
        if self.first_position is None:
            return None
        first = self.first_position
        if len(batch.rows) < first.shape[-2]:
            first = first.index_select(-2, batch.index)
        positions = first + emitted.clamp(max=self.prompt.max_new_tokens - 2)
        return positions if self.max_positions is None else positions.clamp(max=self.max_positions - 1)
