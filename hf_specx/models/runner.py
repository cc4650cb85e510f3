"""`ModelRunner`, which all layouts share: a model with its cache prefills prompts, then decodes the tokens of rows."""

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

from hf_specx.common.architectures import UNMASKED_STEPS
from hf_specx.common.batch import Batch
from hf_specx.common.devices import cat_on, execution_device, last_device, synchronize
from hf_specx.common.errors import require
from hf_specx.common.round import Draft, Round
from hf_specx.common.tree import at_nodes
from hf_specx.common.wrappers import text_decoder, without_cache_reset

from .prompts import UNLIMITED, HiddenStateTap, PreparedInputs, gather_input_rows, has_rows, position_table
from .slots import (
    KeysValues,
    LayersKeysValues,
    cache_name,
    fill_returned_cache,
    gather_cache_rows,
    keys_values_of,
    pop_layers,
    self_attention,
)


NOT_FED = {"labels", "output_attentions", "output_hidden_states"}
TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}


class Forward(NamedTuple):
    """What a target forward gave after the last emitted token and after each candidate."""

    logits: torch.Tensor  # [R, K + 1, V]
    hidden: torch.Tensor | None = None  # [R, K + 1, H], of the last layer or of all taps joined; None unless wanted

    def at_nodes(self, nodes: torch.Tensor) -> "Forward":
        """What it gave after nodes [R, n] of a tree alone, as a forward of a chain of these would have."""
        hidden = None if self.hidden is None else at_nodes(self.hidden, nodes)
        return Forward(at_nodes(self.logits, nodes), hidden)


class SharedKeys(NamedTuple):
    """Keys and values of a target's cache for a draft that attends to them (Gemma 4's), with its query's mask.

    There is one query for each decoding row, at the last token that the cache has computed. Queries have the shape
    [r, q] in which the layout feeds the model, with r * q = R: [R, 1], or [1, R] where all rows are packed in one.
    """

    positions: torch.Tensor  # [r, q] of the queries
    masks: dict[str, torch.Tensor]  # [r, 1, q, S] by kind, bool, or additive as the model takes them
    keys: dict[str, tuple[torch.Tensor, torch.Tensor]]  # keys and values [r, H, S, D] by kind


class HiddenStates:
    """A context in which hooks record hidden states: the outputs of some modules, or their inputs, in this thread.

    With `output_hidden_states=True` a forward would keep the states of all layers. Torch compiles what the hooks do
    into a forward, if it compiles one in the context; such a forward gives the states itself.

    Gemma 4 runs its layers that share keys only for the positions whose logits are asked for; where states of these
    layers are read, `logits_to_keep` is withheld from them.
    """

    def __init__(self, taps: Sequence[HiddenStateTap], device: torch.device, model: PreTrainedModel):
        self.taps, self.device = taps, device
        decoder = text_decoder(model)
        first_sharing = getattr(decoder, "first_kv_shared_layer_idx", sys.maxsize)
        sharing_layers = list(getattr(decoder, "layers", ()))[first_sharing:]
        # the decoder from which `logits_to_keep` is withheld
        self.computes_all_positions = decoder if any(module in sharing_layers for module, _ in taps) else None

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        self.outputs: list[list[torch.Tensor]] = [[] for _ in self.taps]  # of each tap, forward by forward
        self.hooks = []
        for (module, reads_input), outputs in zip(self.taps, self.outputs, strict=True):
            self.hooks.append(module.register_forward_hook(partial(self._record, reads_input, outputs)))
        if self.computes_all_positions is not None:
            hook = self.computes_all_positions.register_forward_pre_hook(_without_logits_to_keep, with_kwargs=True)
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

    def last(self, logits_to_keep: int = 0) -> torch.Tensor:
        """[R, n, H], the states at the last n = `logits_to_keep` positions, at all for 0; those of all taps joined."""
        require(
            all(outputs[0].ndim == 3 for outputs in self.outputs),  # Gemma 3n
            "the target's layers pass on several states of a token, which no draft head reads; give a draft model.",
        )
        states = [torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0] for outputs in self.outputs]
        return cat_on([x[:, -logits_to_keep:] for x in states], self.device)


def _without_logits_to_keep(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a forward of layers that gives the states of all positions."""
    return args, kwargs | {"logits_to_keep": None}


_without_logits_to_keep.reads_only = True  # type: ignore[attr-defined]  # what a position gets stays as it is


class ModelRunner:
    """A model with its cache: computes prompts (`prefill`), then the newest tokens of the rows of a `Batch`.

    To feed a token is to compute its keys and values and keep them in the cache.

    Attributes:
        width: slots that the prompts take in the cache, pads among them; 0 before `prefill`.
        prompt_logits: [B, 1, V] after the last tokens of the prompts that were computed last.
        has_all_prompt_logits: whether `prompt_logits` are of all rows, and not of refills alone.
        prompt_hidden: hidden states [B, L, H] of these prompts, right-aligned; None unless they are wanted.
        num_computed_tokens: [B], how many of each row's tokens after its prompt are in the cache, from the first on.
            Candidates of the last forward are among them, also rejected ones: of a target until its next forward, of a
            draft until its drafter calls `limit_computed_tokens`. Slots beyond these hold what is never seen, and
            overwritten.
        pads: [B] int64, leading slots without a token; `pad_counts` are the same numbers as a list.
        gaps: [B, width] bool, slots after the pads that `attention_mask` hides; None if there are none.
        first_position: [..., B, 1], the position of each row's first token after its prompt; None where the model
            counts positions itself.
        saved_keys_values: by row, what the cache held of rows that have left before others; empty unless the call
            returns its cache.
        last_rows: the rows that were in the cache at the end of the call.
        num_rows: R, as many rows as the per-row inputs of the model have.
        compilations: forwards that torch has compiled for this one.
        reused_tokens: tokens of prompts whose keys were copied from other prompts with the same beginning.
    """

    lockstep = False  # whether all rows must have emitted equally many tokens
    is_half_idle = False  # whether half or more of the rows that a forward computes are fillers
    compilations = reused_tokens = 0

    def __init__(self, prompt: PreparedInputs, draft_vocab_size: int | None = None):
        """`draft_vocab_size`: of a draft with fewer ids than its target; any id beyond becomes the last of them."""
        self.model, self.prompt, self.draft_vocab_size = prompt.model, prompt, draft_vocab_size
        self.kwargs = {name: x for name, x in prompt.kwargs.items() if x is not None and name not in NOT_FED}
        self.cache_name = cache_name(self.kwargs)
        self.cache = self.kwargs.pop(self.cache_name, None)
        self.last_device, self.hidden = last_device(self.model), None
        if prompt.returns_hidden:
            taps = prompt.hidden_state_taps or [(text_decoder(self.model), False)]
            self.hidden = HiddenStates(taps, self.last_device, self.model)
        self.prompt_hidden: torch.Tensor | None = None
        # a target alone cannot go beyond its positions: `generate` has limited the length of its text
        is_limited_target = draft_vocab_size is None and prompt.max_new_tokens != UNLIMITED
        self.max_positions = None if is_limited_target else position_table(self.model)
        self.num_computed_tokens = [0] * len(prompt.input_ids)
        self.saved_keys_values: dict[int, LayersKeysValues] = {}
        self.last_rows: list[int] = []
        self.per_row_inputs: set[str] = set()
        self.gaps: torch.Tensor | None = None
        self.first_position: torch.Tensor | None = None
        self.cross_attention: LayersKeysValues = []
        self.width, self.has_all_prompt_logits = 0, True
        prefix = "decoder_" if self.model.config.is_encoder_decoder else ""
        self.mask_name, self.position_name = f"{prefix}attention_mask", f"{prefix}position_ids"
        positions = self.kwargs.get(self.position_name)
        if self.max_positions is not None and positions is not None:  # a draft may have fewer than its prompt
            self.kwargs[self.position_name] = positions.clamp(max=self.max_positions - 1)
        self.parameters = inspect.signature(self.model.forward).parameters
        self.device = execution_device(self.model)

    def prefill(self) -> Any:
        """Compute the prompts of all rows by the first forward of `generate`; returns the output of that."""
        ids, config = self.prompt.input_ids, self.prompt.generation_config
        rows = len(ids)
        with self.hidden or contextlib.nullcontext():
            inputs = self.kwargs | {self.cache_name: self.cache}
            output = without_cache_reset(self.model)._prefill(self._clamp_ids(ids), config, inputs)
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
        self.pads, self.pad_counts = torch.zeros(rows, dtype=torch.int64, device=ids.device), [0] * rows
        if mask is not None and self.model.config.model_type not in UNMASKED_STEPS:
            is_token = mask.bool().to(ids.device)
            self.pads = is_token.int().argmax(-1)
            gaps = ~is_token & (is_token.cumsum(-1) > 0)
            *self.pad_counts, has_gaps = torch.cat([self.pads, gaps.any()[None]]).tolist()  # one wait for both
            self.gaps = gaps if has_gaps else None
        if positions is not None:
            # [..., B, 1], that of the first emitted token, in as many dimensions as the model's positions have
            first = positions[..., -1:].to(ids.device) + 1
            self.first_position = first.expand(*first.shape[:-2], rows, 1)
        for name in ("inputs_embeds", "logits_to_keep"):
            self.kwargs.pop(name, None)
        self.per_row_inputs = {name for name, value in self.kwargs.items() if has_rows(value, rows)}
        if self.prompt.returns_cache and isinstance(self.cache, EncoderDecoderCache):  # before rows leave it
            self.cross_attention = keys_values_of(self.cache.cross_attention_cache)
        return output

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """Compute the prompts of refills: of rows that have just replaced others, and have emitted nothing yet."""
        raise NotImplementedError

    def add_rows(self, batch: Batch, previous_indices: torch.Tensor) -> None:
        """Make room for the rows that decode from now on; some have no prompts until `admit`.

        `previous_indices` [R'] is what `Batch.add_rows` returned.
        """
        raise NotImplementedError

    def __call__(self, batch: Batch, draft: Draft) -> Forward:
        """The target's forward of a round: logits after the last emitted token and after each candidate.

        Before any token is emitted and without candidates there is no forward: that of the prompts has given these.
        """
        max_length = draft.tokens.shape[1]
        if self.has_all_prompt_logits and not max_length and not any(batch.counts):
            return Forward(self.prompt_logits, None if self.prompt_hidden is None else self.prompt_hidden[:, -1:])
        num_positions = 1 + max_length
        logits = self.decode_tokens(batch, num_positions, max_length, num_positions)
        return Forward(logits, self._last_hidden(num_positions))

    def _last_hidden(self, logits_to_keep: int) -> torch.Tensor | None:
        """[R, n, H], hidden states at the last n = `logits_to_keep` positions; None unless they are wanted."""
        return None if self.hidden is None else self.hidden.last(logits_to_keep)

    def decode_tokens(self, batch: Batch, count: int, ahead: int, logits_to_keep: int) -> torch.Tensor:
        """Feed `count` tokens of each row, up to its candidate number `ahead`; returns the last of their logits.

        A token that was fed before is fed again in the same slot.

        Returns:
            Logits [R, n, V] after the last n = `logits_to_keep` of these tokens.
        """
        tokens = self._clamp_ids(batch.last(count, ahead))
        with self.hidden or contextlib.nullcontext():
            logits = self._forward(batch, tokens, ahead, logits_to_keep)
        for row in batch.rows:
            self.num_computed_tokens[row] = batch.counts[row] + ahead
        return logits.to(tokens.device)

    def limit_computed_tokens(self, row: int, count: int) -> None:
        """Count at most the first `count` tokens of a row after its prompt as computed: what follows was rejected."""
        self.num_computed_tokens[row] = min(self.num_computed_tokens[row], count)

    def decode_step(self, batch: Batch, ahead: int, num_unfed: int = 0) -> torch.Tensor:
        """Logits [R, 1, V] after the first `ahead` candidates of a round: one step of a draft.

        Each step feeds the candidate that the step before it has drafted. Forced candidates need no step of their
        own: `num_unfed` of them, before the last candidate, are fed by the next one. In the first step of a round
        `num_unfed` equals `ahead`, and the emitted tokens that the cache lacks are fed too.
        """
        is_first_step = num_unfed == ahead
        if not is_first_step:
            return self.decode_tokens(batch, 1 + num_unfed, ahead, logits_to_keep=1)
        if self.has_all_prompt_logits and not any(batch.counts):
            return self.prompt_logits
        self._feed_missing_in_parts(batch)
        num_missing = max(self.num_missing_tokens(batch))
        return self.decode_tokens(batch, num_missing + ahead, ahead, logits_to_keep=1)

    def _feed_missing_in_parts(self, batch: Batch) -> None:
        """Feed emitted tokens that the cache lacks, until all rows lack no more than one forward takes."""
        while True:
            part = self._max_tokens_at_once(batch)
            if max(self.num_missing_tokens(batch)) <= part:
                return
            counts = [min(count, self.num_computed_tokens[row] + part) for row, count in enumerate(batch.counts)]
            self.decode_tokens(batch.view_at(counts), part, 0, logits_to_keep=1)

    def _max_tokens_at_once(self, batch: Batch) -> int:
        """The most missing tokens of a row that one forward takes, 1 or more.

        Just after the prompts these are as many as the shortest row has emitted, so that no row is fed its prompt.
        """
        if not self.has_all_prompt_logits:
            return sys.maxsize
        return max(1, min([batch.counts[row] for row in batch.rows]))

    def num_missing_tokens(self, batch: Batch) -> list[int]:
        """How many of its emitted tokens each decoding row lacks in the cache, [R]: at least the last one."""
        return [batch.counts[row] - min(self.num_computed_tokens[row], batch.counts[row] - 1) for row in batch.rows]

    def preview(self, batch: Batch, count: int) -> torch.Tensor:
        """Logits [R, count, V] after each of the `count` tokens behind the rows' ends; the next forward undoes it."""
        tokens = self._clamp_ids(batch.last(count, count))
        with self.hidden or contextlib.nullcontext():
            logits = self._forward(batch, tokens, count, count)
        self.num_computed_tokens = [0] * len(self.num_computed_tokens)
        return logits.to(tokens.device)

    def dummy_run(self, batch: Batch, count: int) -> None:
        """Feed `count` arbitrary tokens after the prompts and wait for the device; the next forward undoes it."""
        with self.hidden or contextlib.nullcontext():
            self._forward(batch, batch.index.new_zeros(len(batch.rows), count), count, count)
        self.num_computed_tokens = [0] * len(self.num_computed_tokens)
        for device in {self.device, self.last_device}:
            synchronize(device)

    def _forward(self, batch: Batch, tokens: torch.Tensor, ahead: int, logits_to_keep: int) -> torch.Tensor:
        """The last `logits_to_keep` logits of tokens [R, q], of which the last `ahead` lie after their rows' ends."""
        raise NotImplementedError

    def _logits(self, tokens: torch.Tensor, logits_to_keep: int, **inputs: Any) -> torch.Tensor:
        """The last `logits_to_keep` logits of the model's own forward over tokens [R, q] and other inputs."""
        if "logits_to_keep" in self.parameters:
            inputs["logits_to_keep"] = logits_to_keep
        inputs[self.cache_name] = self.cache
        return self.model(input_ids=tokens, use_cache=True, return_dict=True, **inputs).logits[:, -logits_to_keep:]

    def shared_keys(self, batch: Batch, layers: dict[str, int]) -> SharedKeys:
        """Keys and values of some layers, for a draft that attends to them before the next forward.

        Of each row those of its prompt and its emitted tokens but the last; the query is at the newest of these.

        Args:
            layers: the number of a layer, by the kind of its attention.
        """
        raise NotImplementedError

    def _newest_computed(self, batch: Batch) -> torch.Tensor:
        """[R, 1], the `emitted_index` of the newest token in the cache; -1 if that is the last of a prompt."""
        return (batch.ends - batch.width - 2).clamp(min=-1)[:, None]

    def observe(self, round_: Round) -> None:
        """Drop rows that have left the batch; where the call returns its cache, save their keys and values before."""
        if self.prompt.returns_cache and (round_.finished or round_.keep_indices is not None):
            self._save_keys_values(round_)
        if round_.keep_indices is not None:
            self.gather_rows(round_.keep_indices)
            self.forget_prompts([row for row in round_.rows if row not in round_.batch.rows])

    def forget_prompts(self, rows: list[int]) -> None:
        """Copy nothing for later prompts from these rows, which have left: their slots will be others'."""

    def gather_rows(self, keep_indices: torch.Tensor) -> None:
        """Go on with the rows at indices `keep_indices` [R'] of the decoding ones, in this order, some also twice."""
        gather_cache_rows(self.cache, keep_indices)
        self._gather_inputs(keep_indices)

    def _gather_inputs(self, keep_indices: torch.Tensor) -> None:
        for name in self.per_row_inputs:
            self.kwargs[name] = gather_input_rows(self.kwargs[name], keep_indices, self.num_rows)
        self.num_rows = len(keep_indices)

    def _save_keys_values(self, round_: Round) -> None:
        """Copy keys and values of the rows that leave now; those of the last rows of a call stay in the cache.

        A row's last token is fed now, unless it was a candidate, which the forward of the round has fed.
        """
        counts = list(round_.batch.counts)
        staying = [] if round_.keep_indices is None else round_.batch.rows
        leaving = [row for row in round_.rows if row not in staying]
        # `generate` does not feed the last tokens of the longest rows
        max_count = max(counts) if round_.finished else None
        lacking = []  # rows whose last token the cache lacks
        for row, emitted, accepted in zip(round_.rows, round_.emitted, round_.accepted, strict=True):
            if emitted > accepted and counts[row] != max_count:
                lacking.append(row)
        if not set(lacking).isdisjoint(leaving):
            if self.lockstep:  # rows that are shorter have ended before the last candidate: of them, no more is kept
                counts = [max(counts)] * len(counts)
            self._feed_last_tokens(round_.batch.view_at(counts, round_.rows))
        if round_.finished:
            self.last_rows = leaving
        else:
            self.saved_keys_values |= {row: list(self.row_keys_values(round_.rows.index(row), row)) for row in leaving}

    def _feed_last_tokens(self, batch: Batch) -> None:
        self.decode_tokens(batch, 1, 0, logits_to_keep=1)

    def row_keys_values(self, index: int, row: int) -> Iterator[KeysValues]:
        """Layer by layer the keys and values [H, n, D] of one row, pads among them; `index` is its row index."""
        raise NotImplementedError

    def common_slots(self, length: int) -> slice | None:
        """The slots that hold the first `length` columns of all decoding rows; None if rows have others each.

        None as well if the buffers are kept for later calls.
        """
        return None

    def past_key_values(self, batch: Batch, num_columns: int) -> Cache | None:
        """The cache that `generate` would return, of all columns except the last; None if that cannot be made.

        It is made of this runner's cache, which is empty afterwards.
        """
        ends = [self.width + min(count, num_columns - 1) for count in batch.counts]
        length = self.width + num_columns - 1
        slots = getattr(self_attention(self.cache), "slots", None)
        has_lost = slots is not None and slots.has_lost  # else layers with a window hold the whole text too
        past = DynamicCache(config=self.model.config) if has_lost else DynamicCache()
        rows: dict[int, Iterator[KeysValues]] = {}
        for row, layers in self.saved_keys_values.items():
            rows[row] = pop_layers(layers)
        for index, row in enumerate(self.last_rows):
            rows[row] = self.row_keys_values(index, row)
        slots_of_all = None if self.saved_keys_values else self.common_slots(length)
        source = self_attention(self.cache)
        return fill_returned_cache(past, source, rows, ends, length, slots_of_all, self.cross_attention)

    def _token_types(self, count: int) -> dict[str, torch.Tensor]:
        """Token types [R, count] of the next tokens, by name: as in `generate` that of the last token, or text."""
        types = {}
        for name in TOKEN_TYPES & self.kwargs.keys():
            last = self.kwargs[name][:, -1:].expand(-1, count)
            types[name] = last if name == "token_type_ids" else torch.zeros_like(last)
        return types

    def _clamp_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self.draft_vocab_size is None else tokens.clamp(max=self.draft_vocab_size - 1)

    def _positions(self, batch: Batch, emitted_index: torch.Tensor) -> torch.Tensor | None:
        """Positions [..., R, q] of the tokens of rows with `emitted_index` [R, q], 0 for the first after the prompt.

        None where the model counts positions itself. A candidate beyond the row's limit, which cannot be emitted, gets
        the position of the last token that can, since its own may not exist.
        """
        if self.first_position is None:
            return None
        first = self.first_position
        if len(batch.rows) < first.shape[-2]:
            first = first.index_select(-2, batch.index)
        positions = first + emitted_index.clamp(max=self.prompt.max_new_tokens - 2)
        return positions if self.max_positions is None else positions.clamp(max=self.max_positions - 1)
