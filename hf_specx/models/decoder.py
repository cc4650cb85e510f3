"""What all layouts share: a model with its cache reads the prompts as in `generate`, then is fed what rows add."""

import inspect
import sys
from typing import Any

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation import utils

from hf_specx.common.architectures import BLIND_STEPS
from hf_specx.common.batch import Batch
from hf_specx.common.devices import execution_device, last_device, synchronize
from hf_specx.common.round import Draft, Round

from .export import Columns, assemble, columns_of
from .forward_outputs import Forward, HiddenStates, last_layer
from .inputs import has_rows, select
from .position_tables import position_table
from .prompts import UNLIMITED, Prompt
from .slots import select_rows, self_attention


DROPPED = set(getattr(utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()))  # fed with prompts only
NOT_FED = {"labels", "output_attentions", "output_hidden_states"}
TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}


class Decoder:
    """A model with its cache, fed the last tokens of each row of a `Batch`.

    Attributes:
        width: slots that the prompts take in the cache, pads among them; known once they are read.
        after_prompt: logits [B, 1, V] after the last tokens of the prompts; `opening` says whether all rows are those
            that these were read with.
        held: [B], how many tokens after its prompt each row was fed so far, candidates among them; `valid`: how many
            of these, from the first on, may still be its text.
        hidden: states of the last layer, where the drafter reads them.
    """

    even = False  # whether all rows must have emitted equally many tokens

    def __init__(self, prompt: Prompt, known_ids: int | None = None):
        """
        Args:
            prompt: the model and its inputs.
            known_ids: V of a draft that knows fewer ids than its target; an id beyond is fed as V - 1. None for all.
        """
        self.model, self.prompt, self.known_ids = prompt.model, prompt, known_ids
        self.kwargs = {x: value for x, value in prompt.kwargs.items() if value is not None and x not in NOT_FED}
        self.cache_name = "cache_params" if "cache_params" in self.kwargs else "past_key_values"
        self.cache = self.kwargs.pop(self.cache_name, None)
        self.hidden = HiddenStates(*([last_layer(self.model)] if prompt.gives_hidden else []))
        bounded = known_ids is None and prompt.max_new_tokens != UNLIMITED  # else by the target's own limits
        self.max_positions = None if bounded else position_table(self.model)
        self.held = [0] * len(prompt.input_ids)
        self.valid = list(self.held)
        self.left: dict[int, Columns] = {}
        self.every: dict[str, Any] = {}
        self.per_row: set[str] = set()
        self.holes: torch.Tensor | None = None  # [B, width] bool, hidden slots after the pads, if there are any
        self.crossed: Columns = []
        self.width, self.opening = 0, True
        decodes = self.model.config.is_encoder_decoder
        side = "decoder_" if decodes else ""
        self.mask_name, self.position_name = f"{side}attention_mask", f"{side}position_ids"
        positions = self.kwargs.get(self.position_name)
        if self.max_positions is not None and positions is not None:  # a draft may have fewer than its prompt
            self.kwargs[self.position_name] = positions.clamp(max=self.max_positions - 1)
        self.parameters = inspect.signature(self.model.forward).parameters
        self.device, self.last_device = execution_device(self.model), last_device(self.model)

    def read(self) -> None:
        """Read the prompts of all rows."""
        home = self.prompt.input_ids.device
        with self.hidden:
            logits = self._first()
        self.hidden_after_prompt = self._last_hidden(1)
        mask, positions = self.kwargs.pop(self.mask_name, None), self.kwargs.get(self.position_name)
        self._note_width(self._unmasked_width() if mask is None else mask.shape[1])
        rows = self.rows = len(self.held)
        self.pads = torch.zeros(rows, dtype=torch.int64, device=home)  # [B], leading slots without a token
        self.absent = self.pads  # [B], pads and other slots that are hidden
        if mask is not None and self.model.config.model_type not in BLIND_STEPS:
            known = mask.bool().to(home)
            self.pads = known.int().argmax(-1)
            holes = ~known & (known.cumsum(-1) > 0)
            self.holes = holes if holes.any() else None
            self.absent = (~known).sum(-1)
        self.padding: list[int] = self.pads.tolist()
        # [..., B, 1], the position of the first emitted token, in as many dimensions as the model's positions have
        self.first_position = None if positions is None else positions[..., -1:].to(home) + 1
        if self.first_position is not None:
            self.first_position = self.first_position.expand(*self.first_position.shape[:-2], rows, 1)
        for name in (self.position_name, "inputs_embeds", "logits_to_keep"):
            self.kwargs.pop(name, None)
        self.every = dict(self.kwargs) if self.prompt.keeps_past else {}  # of all rows
        self.per_row = {name for name, value in self.kwargs.items() if has_rows(value, rows)}
        self.after_prompt = logits.to(home)
        if self.prompt.keeps_past and isinstance(self.cache, EncoderDecoderCache):  # before rows leave it
            self.crossed = columns_of(self.cache.cross_attention_cache)

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """Read the prompts of rows that have just been put in the places of others; nothing is emitted there yet."""
        raise NotImplementedError

    def _first(self) -> torch.Tensor:
        """The first forward of `generate`: logits [B, 1, V] after the last tokens."""
        given = self.kwargs | {self.cache_name: self.cache}
        ids = self._known(self.prompt.input_ids)
        output = self.model._prefill(ids, self.prompt.generation_config, given)  # type: ignore[operator]
        if self.cache is None:  # the model makes one of its own
            self.cache = output.past_key_values
        return output.logits[:, -1:]

    def _unmasked_width(self) -> int:
        """Slots that prompts without a mask take."""
        if self.model.config.is_encoder_decoder and self.cache is not None:  # all ids were fed after what it held
            return self_attention(self.cache).get_seq_length()
        return getattr(self.prompt.generation_config, "_mask_length", self.prompt.input_ids.shape[1])

    def _note_width(self, width: int) -> None:
        """The prompts were read, and take `width` slots."""
        self.width = width

    def __call__(self, batch: Batch, draft: Draft) -> Forward:
        """The forward of a round: logits after the last emitted token and after each candidate.

        Before any token is emitted and without candidates it needs no forward: reading the prompts has given these.
        """
        most = draft.tokens.shape[1]
        if self.opening and not most and not any(batch.counts):
            return Forward(self.after_prompt, self.hidden_after_prompt)
        with self.hidden:
            logits = self.feed(batch, 1 + most, most, 1 + most)
        return Forward(logits, self._last_hidden(1 + most))

    def _last_hidden(self, keep: int) -> torch.Tensor | None:
        """[R, keep, H], states at the positions of the last `keep` logits; None unless they are read."""
        return self.hidden.last(keep)

    def feed(self, batch: Batch, count: int, ahead: int, keep: int) -> torch.Tensor:
        """Feed the last tokens of each row.

        Args:
            batch: the text, with candidates after the ends of its R decoding rows.
            count: q, tokens fed for each row; one that was fed before is fed again in the same slot.
            ahead: candidates of each row; the last of them is the last token that is fed.
            keep: for how many of the last tokens logits are wanted.

        Returns:
            logits [R, keep, V] in the model's dtype.
        """
        tokens = self._known(batch.last(count, ahead))
        logits = self._forward(batch, tokens, ahead, keep)
        for row in batch.rows:
            self.held[row] = self.valid[row] = batch.counts[row] + ahead
        return logits.to(tokens.device)

    def keep(self, row: int, count: int) -> None:
        """Of what a row was fed, only the first `count` tokens after its prompt are its text."""
        self.valid[row] = min(self.valid[row], count)

    def step(self, batch: Batch, ahead: int, skipped: int = 0) -> torch.Tensor:
        """Logits [R, 1, V] after `ahead` candidates; feeds what is missing, also `skipped` ones before the last."""
        if ahead > skipped:
            return self.feed(batch, 1 + skipped, ahead, keep=1)
        if self.opening and not any(batch.counts):
            return self.after_prompt
        part = self._at_once(batch)
        while self.missing(batch) > part:
            counts = [min(count, self.valid[row] + part) for row, count in enumerate(batch.counts)]
            self.feed(batch.until(counts), part, 0, keep=1)
        return self.feed(batch, self.missing(batch) + ahead, ahead, keep=1)

    def _at_once(self, batch: Batch) -> int:
        """The most tokens a row that may be missing in one forward: while opening, no row is fed its prompt again."""
        return min(batch.counts[row] for row in batch.rows) if self.opening else sys.maxsize

    def rehearse(self, batch: Batch, count: int) -> None:
        """Feed `count` arbitrary tokens after the prompts and wait for it; the next forward rolls them back."""
        self._forward(batch, batch.index.new_zeros(len(batch.rows), count), count, count)
        self.held, self.valid = [count] * len(self.held), [0] * len(self.held)
        for device in {self.device, self.last_device}:
            synchronize(device)

    def _forward(self, batch: Batch, tokens: torch.Tensor, ahead: int, keep: int) -> torch.Tensor:
        """Logits [R, keep, V] of tokens [R, q], of which the last lie `ahead` tokens after the ends of their rows."""
        raise NotImplementedError

    def columns(self, index: int, row: int) -> Columns:
        """Keys and values [H, n, D] by layer, pads among them, of what row `row`, the `index`-th of R, was fed."""
        raise NotImplementedError

    def observe(self, done: Round) -> None:
        """Drop rows that have left. Where the call wants its cache, the columns of rows that have ended are kept."""
        if done.finished:
            self.leave(done.rows, done.batch.index[:0])
        elif done.stay is not None:
            self.leave(done.rows, done.stay)

    def leave(self, rows: list[int], stay: torch.Tensor) -> None:
        """Keep only those of the decoding rows [R] that are at indices `stay` [R']."""
        if self.prompt.keeps_past:
            self._keep_columns(rows, stay)
        if len(stay):
            self.select(stay)

    def _keep_columns(self, rows: list[int], stay: torch.Tensor) -> None:
        """Copy the columns of the rows that leave."""
        gone = set(range(len(rows))) - set(stay.tolist())
        self.left.update((rows[index], self.columns(index, rows[index])) for index in gone)

    def past(self, batch: Batch, emitted: int) -> Cache | None:
        """The cache that `generate` would return: of all columns except the last. None if that cannot be made."""
        for count in set(batch.counts) - {emitted}:
            self._feed_ends(batch, [row for row, own in enumerate(batch.counts) if own == count], count)
        ends = [self.width + min(count, emitted - 1) for count in batch.counts]
        return assemble(self.left, ends, self.width + emitted - 1, self.crossed)

    def _feed_ends(self, batch: Batch, rows: list[int], count: int) -> None:
        """Feed rows their last token, the `count`-th, as `generate` does while others go on; completes `left`."""
        end, index = self.width + count, torch.tensor(rows, device=batch.ids.device)
        crossed = [(keys[index.to(keys.device)], values[index.to(values.device)]) for keys, values in self.crossed]
        cache = assemble({n: self.left[row] for n, row in enumerate(rows)}, [end - 1] * len(rows), end - 1, crossed)
        total = len(self.held)
        given = {name: select(x, index, total) if name in self.per_row else x for name, x in self.every.items()}
        given[self.mask_name] = torch.arange(end, device=index.device) >= self.pads[index, None]
        if self.holes is not None:
            given[self.mask_name] &= ~torch.nn.functional.pad(self.holes[index], (0, count))
        given[self.mask_name] = given[self.mask_name].long()
        if self.first_position is not None:
            given[self.position_name] = self.first_position.index_select(-2, index) + count - 1
        tokens = batch.ids[index, batch.width + count - 1][:, None]
        inputs = self.model.prepare_inputs_for_generation(  # type: ignore[operator]
            torch.nn.functional.pad(tokens, (end - 1, 0)),
            next_sequence_length=1,
            is_first_iteration=False,
            past_key_values=cache,
            **given,
        )
        self.model(**inputs, return_dict=True)
        columns = columns_of(self_attention(cache))
        self.left |= {row: [(keys[n], values[n]) for keys, values in columns] for n, row in enumerate(rows)}

    @property
    def last_column(self) -> int:
        """The last column that `generate` feeds; in those after it are only candidates that cannot be emitted."""
        last = self.width + self.prompt.max_new_tokens - 2
        return last if self.max_positions is None else min(last, self.max_positions - 1)

    def missing(self, batch: Batch) -> int:
        """How many of their last tokens have to be fed, in the row that lacks most; the last one was never fed."""
        return max([batch.counts[r] - min(self.valid[r], batch.counts[r] - 1) for r in batch.rows])

    def select(self, stay: torch.Tensor) -> None:
        """Keep only the rows at indices `stay` [R'] in the cache and in the inputs."""
        select_rows(self.cache, stay)
        self._select_inputs(stay)

    def _select_inputs(self, stay: torch.Tensor) -> None:
        self.kwargs |= {name: select(self.kwargs[name], stay, self.rows) for name in self.per_row}
        self.rows = len(stay)

    def _token_types(self, count: int) -> dict[str, torch.Tensor]:
        """Types [R, count] of the next tokens: as in `generate` that of the last token, or text."""
        given = {}
        for name in TOKEN_TYPES & self.kwargs.keys():
            last = self.kwargs[name][:, -1:].expand(-1, count)
            given[name] = last if name == "token_type_ids" else torch.zeros_like(last)
        return given

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self.known_ids is None else tokens.clamp(max=self.known_ids - 1)

    def _positions(self, batch: Batch, emitted: torch.Tensor, longest: int | None = None) -> torch.Tensor | None:
        """Positions [..., R, q] of emitted tokens, None where the model is given none.

        Args:
            emitted: [R or 1, q], how many emitted tokens of its row come before each.
            longest: the most that a row has, candidates among them; None if that is not known.
        """
        if self.first_position is None:
            return None
        last = self.prompt.max_new_tokens - 2
        if longest is None or longest - 1 > last:
            # candidates that cannot be emitted must not be given a position that does not exist
            emitted = emitted.clamp(max=last)
        first = self.first_position
        if len(batch.rows) < first.shape[-2]:
            first = first.index_select(-2, batch.index)
        positions = first + emitted
        return positions if self.max_positions is None else positions.clamp(max=self.max_positions - 1)
