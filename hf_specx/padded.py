"""The padded and the lockstep layout: the model is fed as stock feeds it, rows right-aligned under a 2D mask.

Padded rows keep what each of them accepted and are shifted right into their left padding, as in transformers PR
#32189, by one gather a tensor. In lockstep all rows advance alike, so that nothing is ever shifted and the host's own
cache is simply cropped.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import torch
from transformers.cache_utils import Cache

from .attention import grouped_queries
from .cache import SlotCache, self_attention, with_slots
from .decoders import TOKEN_TYPES, Decoder, Prompt
from .past import Columns
from .sequences import Sequences
from .states import states_of


class HostedDecoder(Decoder):
    """Fed through the model's own `prepare_inputs_for_generation`."""

    length = 0  # slots that hold something, pads among them

    def _forward(self, sequences: Sequences, tokens: torch.Tensor, ahead: int, keep: int) -> torch.Tensor:
        count = tokens.shape[1]
        wanted = [sequences.counts[row] + ahead - count for row in sequences.rows]
        if ahead < count or wanted != [self.held[row] for row in sequences.rows]:
            self._rewind(sequences, wanted)
        return self._fed(sequences, tokens, wanted, keep)

    def _fed(self, sequences: Sequences, tokens: torch.Tensor, held: list[int], keep: int) -> torch.Tensor:
        """Logits [R, keep, V] of tokens [R, q] behind the first `held` emitted tokens of each row."""
        count = tokens.shape[1]
        before = torch.tensor(held, device=tokens.device)[:, None]
        emitted = before + torch.arange(count, device=tokens.device)  # [R, q]
        given = self._inputs(sequences, tokens, emitted)
        total = self.length + count
        real = [self.width - self.padding[row] + n + count for row, n in zip(sequences.rows, held, strict=True)]
        if any(number < total for number in real):
            columns = torch.arange(total, device=tokens.device)
            given[self.mask_name] = (columns >= total - torch.tensor(real, device=tokens.device)[:, None]).long()
        # the host looks at the last `count` columns only
        columns = torch.nn.functional.pad(tokens, (self.length, 0))
        inputs = self.model.prepare_inputs_for_generation(  # type: ignore[operator]
            columns, next_sequence_length=count, is_first_iteration=False, **given, **{self.cache_name: self.cache}
        )
        if "logits_to_keep" in self.parameters:
            inputs["logits_to_keep"] = keep
        with self._own_positions(held), grouped_queries():
            output = self.model(**inputs, return_dict=True)
        self.length = total
        return output.logits[:, -keep:]

    def _inputs(self, sequences: Sequences, tokens: torch.Tensor, emitted: torch.Tensor) -> dict[str, Any]:
        given = dict(self.kwargs)
        positions = self._positions(sequences, emitted)
        if positions is not None:
            given[self.position_name] = positions
        elif self._counts_slots:
            # stock gives none, so that models count columns; only Whisper's own preparation leaves out pads
            config = self.model.config
            pads = config.is_encoder_decoder and config.model_type == "whisper"
            first = self.width - self.pads[sequences.index, None] * pads
            given[self.position_name] = first + emitted.clamp(max=self._last)
        for name in TOKEN_TYPES:
            if name in given:
                last = given[name][:, -1:].expand(-1, tokens.shape[1])
                given[name] = last if name == "token_type_ids" else torch.zeros_like(last)
        if "cross_attention_mask" in given:
            given["cross_attention_mask"] = given["cross_attention_mask"][:, -1:].expand(-1, tokens.shape[1], -1, -1)
        return given

    def _rewind(self, sequences: Sequences, wanted: list[int]) -> None:
        """Make the cache hold the first wanted emitted tokens of each decoding row."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _own_positions(self, held: list[int]) -> Iterator[None]:
        """Let tables that count slots go by the columns in which stock would have the tokens."""
        first, last = [self.width + number for number in held], self.width + self._last
        found = {table: vars(table).get("forward") for table in self._tables}  # accelerate puts one there
        for table in found:
            table.forward = partial(by_column, table.forward, first, last)
        try:
            yield
        finally:
            for table, forward in found.items():
                del table.forward
                if forward is not None:
                    table.forward = forward

    @property
    def _last(self) -> int:
        """The last emitted token that stock feeds; behind it lie candidates that nobody looks at."""
        return max(0, self.prompt.max_new_tokens - 2)

    @cached_property
    def _counts_slots(self) -> bool:
        """Whether the model numbers tokens by the slots before them unless it is told their positions."""
        if self.position_name in self.parameters:
            return True
        decoder = self.model.get_decoder()
        taken = {} if decoder is None else inspect.signature(decoder.forward).parameters
        return not self._tables and "position_ids" in taken and "kwargs" in self.parameters

    @cached_property
    def _tables(self) -> list[torch.nn.Module]:
        """Modules that number tokens by the slots before them; none where the model is told its positions."""
        if self.position_name in self.parameters:
            return []
        modules = (self.model.get_decoder() or self.model).modules()
        tables = [m for m in modules if "past_key_values_length" in inspect.signature(m.forward).parameters]
        # even rows lie in the columns where stock has them, but some tables also count the ids that are no pads
        return [t for t in tables if not self.even or getattr(t, "padding_idx", None) is not None]


def by_column(
    lookup: Callable[..., torch.Tensor], first: list[int], last: int, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """What a position table gives to tokens that are fed one by one, as stock feeds them.

    Args:
        lookup: the table's own forward; its first argument is tokens [R, q, ...], or only their shape.
        first: the columns of the first tokens of the R rows.
        last: the last column that stock feeds; it stands in for those behind it, which the table may lack.

    Returns:
        [R, q, D]
    """
    given = inspect.signature(lookup).bind(*args, **kwargs).arguments
    name, tokens = next(iter(given.items()))
    rows, count, *rest = tokens.shape if isinstance(tokens, torch.Tensor) else tokens
    columns = (torch.tensor(first)[:, None] + torch.arange(count)).clamp(max=last).flatten()  # [R * q]

    def as_rows(*shape: int) -> Any:
        return tokens.reshape(*shape, *rest) if isinstance(tokens, torch.Tensor) else shape

    position_ids = given.get("position_ids")
    if position_ids is not None:
        given[name] = as_rows(1, rows * count)
        given["position_ids"] = columns.to(position_ids).view(-1, *[1] * (position_ids.ndim - 1))
        return lookup(**given).reshape(rows, count, -1)
    given[name] = as_rows(rows * count, 1)  # a table that reads ids gives pads no position, nor counts them
    vectors = torch.zeros(())
    for column in columns.unique().tolist():
        given["past_key_values_length"] = column
        found = lookup(**given)  # [R * q or 1, 1, D] or [1, D]
        here = (columns == column).to(found.device)[:, None]
        vectors = torch.where(here, found.flatten(0, -2), vectors.to(found))
    return vectors.view(rows, count, -1)


class PaddedDecoder(HostedDecoder):
    """Rows shift right into their left padding when they accepted different numbers."""

    def __init__(self, prompt: Prompt, known_ids: int | None = None):
        super().__init__(prompt, known_ids)
        self.cache = with_slots(self.cache, prompt.input_ids.shape[1] + prompt.max_new_tokens)

    def columns(self, place: int, row: int) -> Columns:
        columns = self.width + self.held[row]
        slots = torch.arange(self.length - columns, self.length)
        return self.text.row(place, slots.masked_fill(torch.arange(columns) < self.padding[row], -1))

    @property
    def text(self) -> SlotCache:
        cache = self_attention(self.cache)
        assert isinstance(cache, SlotCache)
        return cache

    def _note_width(self, width: int) -> None:
        super()._note_width(width)
        self.length = width

    def _rewind(self, sequences: Sequences, wanted: list[int]) -> None:
        gone = [self.held[row] - number for row, number in zip(sequences.rows, wanted, strict=True)]
        kept = [self.width - self.padding[row] + n for row, n in zip(sequences.rows, wanted, strict=True)]
        if len(set(gone)) == 1:
            self.length -= gone[0]
        else:
            # row r ends at slot length - gone[r]; it moves to the end of the longest row
            cut = max(kept)
            shift = torch.tensor([self.length - number - cut for number in gone])[:, None]
            source = (torch.arange(cut) + shift).clamp(min=0).to(self.device)  # [R, n]
            self.text.roll(source)
            self.length = cut

    def _fed(self, sequences: Sequences, tokens: torch.Tensor, held: list[int], keep: int) -> torch.Tensor:
        self.text.slots.aim(None, self.length)
        return super()._fed(sequences, tokens, held, keep)


class LockstepDecoder(HostedDecoder):
    """All rows have emitted equally many tokens, so the host's own cache is cropped, or its states are restored."""

    even = True

    def _note_width(self, width: int) -> None:
        super()._note_width(width)
        self.length, self.states = width, states_of(self.cache)
        config = self.model.config.get_text_config(decoder=True)
        self.images = getattr(config, "cross_attention_layers", None) or ()  # layers that hold no text

    def _rewind(self, sequences: Sequences, wanted: list[int]) -> None:
        held, target = self.held[sequences.rows[0]], wanted[0]
        reached = self.states.restore(target, held)
        self.states.crop(held - reached, self.images)
        self.length -= held - reached
        if reached < target:  # the state of an earlier moment: feed again what was accepted since
            missing = self._known(sequences.last(target - reached, target - sequences.counts[sequences.rows[0]]))
            self._fed(sequences, missing, [reached] * len(wanted), 1)
        for row in sequences.rows:
            self.held[row] = target

    def _fed(self, sequences: Sequences, tokens: torch.Tensor, held: list[int], keep: int) -> torch.Tensor:
        self.states.save(held[0])
        return super()._fed(sequences, tokens, held, keep)

    def leave(self, rows: list[int], places: torch.Tensor | None) -> None:
        if places is not None and len(places):
            self.select(places)

    def past(self, sequences: Sequences, emitted: int) -> Cache | None:
        """The host's own cache if all rows ended together; a window or a state cannot be put together from rows."""
        if self.rows < len(sequences.counts) or len(set(sequences.counts)) > 1:
            return None
        sequences.revive()
        self._rewind(sequences, [emitted - 1] * self.rows)
        return self.cache

    def select(self, places: torch.Tensor) -> None:
        super().select(places)
        self.states.select(places)
