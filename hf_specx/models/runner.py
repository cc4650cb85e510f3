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
from hf_specx.common.devices import execution_device, joined, last_device, synchronize
from hf_specx.common.errors import require
from hf_specx.common.round import Draft, Round
from hf_specx.common.wrappers import keeping_cache, text_decoder

from .prompts import UNLIMITED, Place, Prompt, has_rows, position_table, select
from .slots import Columns, KeysValues, assemble, cache_name, columns_of, drained, select_rows, self_attention


NOT_FED = {"labels", "output_attentions", "output_hidden_states"}
TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}


class Forward(NamedTuple):
    """What a target forward gave after the last emitted token and after each candidate."""

    logits: torch.Tensor  # [R, K + 1, V]
    hidden: torch.Tensor | None = None  # [R, K + 1, H], of the last layer, or joined those of places; if they are read


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

    def __init__(self, places: Sequence[Place], device: torch.device, model: PreTrainedModel):
        self.places, self.device, decoder = places, device, text_decoder(model)
        sharing = list(getattr(decoder, "layers", ()))[getattr(decoder, "first_kv_shared_layer_idx", sys.maxsize) :]
        self.narrowing = decoder if any(place in sharing for place, _ in places) else None

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        self.found: list[list[torch.Tensor]] = [[] for _ in self.places]
        noted = zip(self.places, self.found, strict=True)
        self.hooks = [x.register_forward_hook(partial(self._note, read, found)) for (x, read), found in noted]
        if self.narrowing is not None:
            self.hooks.append(self.narrowing.register_forward_pre_hook(_without_logits_to_keep, with_kwargs=True))

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _note(self, reads: bool, found: list[torch.Tensor], module: nn.Module, args: Any, output: Any) -> None:
        if self.is_here():
            states = args if reads else output
            found.append(states if isinstance(states, torch.Tensor) else states[0])

    @torch.compiler.assume_constant_result
    def is_here(self) -> bool:
        """Whether this thread is that of the context."""
        return threading.get_ident() == self.thread

    def last(self, keep: int = 0) -> torch.Tensor:
        """[R, keep, H], of the last positions of the forwards in the context, of all for 0; those of places joined."""
        told = "the target's layers pass on several states of a token, which no draft head reads; give a draft model."
        require(all(found[0].ndim == 3 for found in self.found), told)  # Gemma 3n
        whole = [torch.cat(found, 1) if len(found) > 1 else found[0] for found in self.found]
        return joined([states[:, -keep:] for states in whole], self.device)


def _without_logits_to_keep(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a forward of layers that gives the states of all positions."""
    return args, kwargs | {"logits_to_keep": None}


_without_logits_to_keep.reads_only = True  # type: ignore[attr-defined]  # what a position gets stays as it is


class ModelRunner:
    """A model with its cache, fed the last tokens of each row of a `Batch`.

    Attributes:
        width: slots that the prompts take in the cache, pads among them; known once they are read.
        after_prompt: logits [B, 1, V] after the last tokens of the prompts that were read last; `opening`: whether
            these are all rows'. `prompt_hidden`: their states [B, L, H], right-aligned; None unless they are read.
        held: [B], how many tokens after its prompt each row was fed so far, candidates among them; `valid`: how many
            of these, from the first on, may still be its text.
        left: the columns of rows that have left before the end, where the call wants its cache; `last`: the rows whose
            columns are in the cache at the end.
        compilations: forwards that torch has compiled for this one.
        copied: tokens of prompts that were not read, since others begin alike.
    """

    even = False  # whether all rows must have emitted equally many tokens
    idles = False  # whether half or more of the rows of a forward are of no use
    compilations = copied = 0

    def __init__(self, prompt: Prompt, known_ids: int | None = None):
        """A draft that knows fewer ids than its target, `known_ids`, is fed the last of them for any beyond."""
        self.model, self.prompt, self.known_ids = prompt.model, prompt, known_ids
        self.kwargs = {x: value for x, value in prompt.kwargs.items() if value is not None and x not in NOT_FED}
        self.cache_name = cache_name(self.kwargs)
        self.cache = self.kwargs.pop(self.cache_name, None)
        self.last_device, self.hidden = last_device(self.model), None
        if prompt.gives_hidden:
            places = prompt.places or [(text_decoder(self.model), False)]
            self.hidden = HiddenStates(places, self.last_device, self.model)
        self.prompt_hidden: torch.Tensor | None = None
        bounded = known_ids is None and prompt.max_new_tokens != UNLIMITED  # else by the target's own limits
        self.max_positions = None if bounded else position_table(self.model)
        self.held = [0] * len(prompt.input_ids)
        self.valid = list(self.held)
        self.left: dict[int, Columns] = {}
        self.last: list[int] = []
        self.per_row: set[str] = set()
        self.holes: torch.Tensor | None = None  # [B, width] bool, hidden slots after the pads, if there are any
        self.first_position: torch.Tensor | None = None
        self.crossed: Columns = []
        self.width, self.opening = 0, True
        side = "decoder_" if self.model.config.is_encoder_decoder else ""
        self.mask_name, self.position_name = f"{side}attention_mask", f"{side}position_ids"
        positions = self.kwargs.get(self.position_name)
        if self.max_positions is not None and positions is not None:  # a draft may have fewer than its prompt
            self.kwargs[self.position_name] = positions.clamp(max=self.max_positions - 1)
        self.parameters = inspect.signature(self.model.forward).parameters
        self.device = execution_device(self.model)

    def prefill(self) -> Any:
        """Read the prompts of all rows, by the first forward of `generate`; returns what it gave."""
        ids, config = self.prompt.input_ids, self.prompt.generation_config
        home, rows = ids.device, len(self.held)
        with self.hidden or contextlib.nullcontext():
            given = self.kwargs | {self.cache_name: self.cache}
            output = keeping_cache(self.model)._prefill(self._known(ids), config, given)
        if self.cache is None:  # the model makes one of its own
            self.cache = getattr(output, self.cache_name)
        self.after_prompt = output.logits[:, -1:].to(home)
        self.prompt_hidden = None if self.hidden is None else self.hidden.last()
        mask, positions = self.kwargs.pop(self.mask_name, None), self.kwargs.pop(self.position_name, None)
        if mask is not None:
            self.width = mask.shape[1]
        elif self.model.config.is_encoder_decoder and self.cache is not None:  # all ids were fed after what it held
            self.width = self_attention(self.cache).get_seq_length()
        else:
            self.width = getattr(config, "_mask_length", ids.shape[1])
        self.rows = rows
        self.pads = torch.zeros(rows, dtype=torch.int64, device=home)  # [B], leading slots without a token
        if mask is not None and self.model.config.model_type not in BLIND_STEPS:
            known = mask.bool().to(home)
            self.pads = known.int().argmax(-1)
            holes = ~known & (known.cumsum(-1) > 0)
            self.holes = holes if holes.any() else None
        self.padding: list[int] = self.pads.tolist()
        if positions is not None:
            # [..., B, 1], that of the first emitted token, in as many dimensions as the model's positions have
            first = positions[..., -1:].to(home) + 1
            self.first_position = first.expand(*first.shape[:-2], rows, 1)
        for name in ("inputs_embeds", "logits_to_keep"):
            self.kwargs.pop(name, None)
        self.per_row = {name for name, value in self.kwargs.items() if has_rows(value, rows)}
        if self.prompt.keeps_past and isinstance(self.cache, EncoderDecoderCache):  # before rows leave it
            self.crossed = columns_of(self.cache.cross_attention_cache)
        return output

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """Read the prompts of rows that have just been put in the places of others; nothing is emitted there yet."""
        raise NotImplementedError

    def __call__(self, batch: Batch, draft: Draft) -> Forward:
        """The forward of a round: logits after the last emitted token and after each candidate.

        Before any token is emitted and without candidates it needs no forward: reading the prompts has given these.
        """
        most = draft.tokens.shape[1]
        if self.opening and not most and not any(batch.counts):
            return Forward(self.after_prompt, None if self.prompt_hidden is None else self.prompt_hidden[:, -1:])
        logits = self.decode_tokens(batch, 1 + most, most, 1 + most)
        return Forward(logits, self._last_hidden(1 + most))

    def _last_hidden(self, keep: int) -> torch.Tensor | None:
        """[R, keep, H], states at the positions of the last `keep` logits; None unless they are read."""
        return None if self.hidden is None else self.hidden.last(keep)

    def decode_tokens(self, batch: Batch, count: int, ahead: int, keep: int) -> torch.Tensor:
        """Feed the last `count` tokens of each row, `ahead` candidates after its end among them.

        One that was fed before is fed again in the same slot. Returns logits [R, keep, V] after the last `keep`.
        """
        tokens = self._known(batch.last(count, ahead))
        with self.hidden or contextlib.nullcontext():
            logits = self._forward(batch, tokens, ahead, keep)
        for row in batch.rows:
            self.held[row] = self.valid[row] = batch.counts[row] + ahead
        return logits.to(tokens.device)

    def crop(self, row: int, count: int) -> None:
        """Of what a row was fed, only the first `count` tokens after its prompt are its text."""
        self.valid[row] = min(self.valid[row], count)

    def decode_step(self, batch: Batch, ahead: int, skipped: int = 0) -> torch.Tensor:
        """Logits [R, 1, V] after `ahead` candidates; feeds the last, `skipped` before it, first what is missing."""
        if ahead > skipped:
            return self.decode_tokens(batch, 1 + skipped, ahead, keep=1)
        if self.opening and not any(batch.counts):
            return self.after_prompt
        missing = max(self.missing(batch))
        while missing > 1 and missing > (part := self._at_once(batch)):
            counts = [min(count, self.valid[row] + part) for row, count in enumerate(batch.counts)]
            self.decode_tokens(batch.until(counts), part, 0, keep=1)
            missing = max(self.missing(batch))
        return self.decode_tokens(batch, missing + ahead, ahead, keep=1)

    def _at_once(self, batch: Batch) -> int:
        """The most tokens a row that may be missing in one forward: while opening, as few as some row has emitted."""
        return max(1, min([batch.counts[row] for row in batch.rows])) if self.opening else sys.maxsize

    def missing(self, batch: Batch) -> list[int]:
        """How many of its last tokens each decoding row has to be fed; the last one was never fed."""
        return [batch.counts[row] - min(self.valid[row], batch.counts[row] - 1) for row in batch.rows]

    def preview(self, batch: Batch, count: int) -> torch.Tensor:
        """Logits [R, count, V] of the `count` tokens after the ends of all rows; the next forward rolls them back."""
        tokens = self._known(batch.last(count, count))
        with self.hidden or contextlib.nullcontext():
            logits = self._forward(batch, tokens, count, count)
        self.held, self.valid = [number + count for number in batch.counts], [0] * len(self.held)
        return logits.to(tokens.device)

    def rehearse(self, batch: Batch, count: int) -> None:
        """Feed `count` arbitrary tokens after the prompts and wait for it; the next forward rolls them back."""
        with self.hidden or contextlib.nullcontext():
            self._forward(batch, batch.index.new_zeros(len(batch.rows), count), count, count)
        self.held, self.valid = [count] * len(self.held), [0] * len(self.held)
        for device in {self.device, self.last_device}:
            synchronize(device)

    def _forward(self, batch: Batch, tokens: torch.Tensor, ahead: int, keep: int) -> torch.Tensor:
        """Logits [R, keep, V] of tokens [R, q], of which the last lie `ahead` tokens after the ends of their rows."""
        raise NotImplementedError

    def _logits(self, tokens: torch.Tensor, keep: int, **given: Any) -> torch.Tensor:
        """Logits [R, keep, V] of tokens [R, q] that the model is fed as they are, with what else it is given."""
        if "logits_to_keep" in self.parameters:
            given["logits_to_keep"] = keep
        given[self.cache_name] = self.cache
        return self.model(input_ids=tokens, use_cache=True, return_dict=True, **given).logits[:, -keep:]

    def shared_keys(self, batch: Batch, layers: dict[str, int]) -> SharedKeys:
        """Keys and values that the cache has in `layers`, by kind, for a draft that reads them before the next feed.

        Of each row those of its prompt and its emitted tokens but the last; the query is at the newest of these.
        """
        raise NotImplementedError

    def _newest(self, batch: Batch) -> torch.Tensor:
        """[R, 1], how many emitted tokens lie before the newest that the cache has read; -1 at the end of a prompt."""
        return (batch.ends - batch.width - 2).clamp(min=-1)[:, None]

    def observe(self, done: Round) -> None:
        """Drop rows that have left. Where the call wants its cache, the columns of rows that have ended are kept."""
        if self.prompt.keeps_past and (done.finished or done.stay is not None):
            self._keep_columns(done)
        if done.stay is not None:
            self.drop_rows(done.stay)

    def drop_rows(self, stay: torch.Tensor) -> None:
        """Keep only those of the decoding rows [R] that are at indices `stay` [R']."""
        select_rows(self.cache, stay)
        self._select_inputs(stay)

    def _select_inputs(self, stay: torch.Tensor) -> None:
        self.kwargs |= {name: select(self.kwargs[name], stay, self.rows) for name in self.per_row}
        self.rows = len(stay)

    def _keep_columns(self, done: Round) -> None:
        """Copy the columns of rows that leave before others; the last ones' stay in the cache.

        A last token that is no candidate was not fed yet, and is now.
        """
        counts, staying = list(done.batch.counts), [] if done.stay is None else done.batch.rows
        leaving = [row for row in done.rows if row not in staying]
        last = max(counts) if done.finished else None  # `generate` does not feed the last tokens of the longest rows
        fed = [emitted <= accepted for emitted, accepted in zip(done.emitted, done.accepted, strict=True)]
        lacking = [row for row, held in zip(done.rows, fed, strict=True) if not held and counts[row] != last]
        if not set(lacking).isdisjoint(leaving):
            if self.even:  # rows that are shorter have ended before the last candidate: of them, no more is kept
                counts = [max(counts)] * len(counts)
            self._feed_last(done.batch.until(counts, done.rows))
        if done.finished:
            self.last = leaving
        else:
            self.left |= {row: list(self.columns(done.rows.index(row), row)) for row in leaving}

    def _feed_last(self, batch: Batch) -> None:
        self.decode_tokens(batch, 1, 0, keep=1)

    def columns(self, index: int, row: int) -> Iterator[KeysValues]:
        """By layer keys and values [H, n, D], pads among them, of what row `row`, the `index`-th of R, was fed."""
        raise NotImplementedError

    def shared_slots(self, length: int) -> slice | None:
        """The slots that hold the first `length` columns of all rows that decode; None if these differ.

        Or if the buffers are kept for later calls.
        """
        return None

    def past(self, batch: Batch, emitted: int) -> Cache | None:
        """The cache that `generate` would return: of all columns except the last. None if that cannot be made.

        This decoder has no cache then.
        """
        ends = [self.width + min(count, emitted - 1) for count in batch.counts]
        length, slots = self.width + emitted - 1, getattr(self_attention(self.cache), "slots", None)
        cut = slots is not None and slots.has_lost  # windows are of the whole text otherwise
        made = DynamicCache(config=self.model.config) if cut else DynamicCache()
        rows: dict[int, Iterator[KeysValues]] = {row: drained(columns) for row, columns in self.left.items()}
        rows |= {row: self.columns(index, row) for index, row in enumerate(self.last)}
        shared = None if self.left else self.shared_slots(length)
        return assemble(made, self_attention(self.cache), rows, ends, length, shared, self.crossed)

    def _token_types(self, count: int) -> dict[str, torch.Tensor]:
        """Types [R, count] of the next tokens: as in `generate` that of the last token, or text."""
        last = {name: self.kwargs[name][:, -1:].expand(-1, count) for name in TOKEN_TYPES & self.kwargs.keys()}
        return {name: types if name == "token_type_ids" else torch.zeros_like(types) for name, types in last.items()}

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self.known_ids is None else tokens.clamp(max=self.known_ids - 1)

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
