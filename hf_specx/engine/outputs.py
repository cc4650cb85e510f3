"""Scores, logits, hidden states and attentions of a call, one entry an emitted column, as stock returns them.

Up to the end of a row its values are stock's. Behind it stock has those of pads that it feeds to the row, and here are
zeros of the same shape.
"""

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from hf_specx.common.round import Round
from hf_specx.layouts.forward_outputs import Extras, Layers, Notes, copies_first, has_copies


class Outputs:
    """What a call wants to know of each emitted token besides the token.

    Args:
        generation_config: of the call; without `return_dict_in_generate` nothing is kept.
        rows: B.
        notes: the target's.
    """

    def __init__(self, generation_config: GenerationConfig, rows: int, notes: Notes):
        config = generation_config if generation_config.return_dict_in_generate else GenerationConfig()
        self.scores = Steps(rows) if config.output_scores else None
        self.logits = Steps(rows) if config.output_logits else None
        self.shown: list[torch.Tensor] = []
        self.hidden, self.attending = bool(config.output_hidden_states), bool(config.output_attentions)
        self.layers = LayerOutputs(rows, notes) if self.hidden or self.attending else None

    def observe(self, done: Round) -> None:
        """Keep what belongs to the tokens that a round emitted."""
        if self.scores is None and self.logits is None and self.layers is None:
            return
        cells = [(place, n) for place, number in enumerate(done.emitted) for n in range(number)]
        if not cells:
            return
        place, position = torch.tensor(cells).unbind(1)  # [N]
        row = [done.rows[p] for p, _ in cells]
        step = [done.before[p] + n for p, n in cells]
        for steps, values in ((self.scores, done.scores), (self.logits, done.forward.logits)):
            if steps is not None:
                steps.put(row, step, values[place, position].float())
        if self.layers is not None:
            self.layers.put(row, step, place, position)

    def shown_in_order(self, scores: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """What stock shows to criteria after a column: scores [B, V] of each so far, pads' too; None if not wanted."""
        if self.scores is None:
            return None
        self.shown.append(scores)
        return tuple(self.shown)

    def finish(
        self,
        sequences: torch.Tensor,
        columns: int,
        past: Cache | None,
        kwargs: dict[str, Any],
        is_encoder_decoder: bool,
        report: Any,
    ) -> GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
        """Stock's output.

        Args:
            sequences: [B, L + columns] int64.
            columns: emitted columns; what rows emitted behind these does not count.
            past: the cache to return.
            kwargs: inputs of the model, with `encoder_outputs` where it has an encoder.
            is_encoder_decoder: of the model.
            report: becomes the attribute `speculation_report`; no item, as Whisper takes each of these apart by row.
        """
        hidden, attentions, crossed = (self._of_layers(kind, columns) for kind in Extras._fields)
        common: dict[str, Any] = {
            "sequences": sequences,
            "scores": None if self.scores is None else tuple(self.scores.entries[:columns]),
            "logits": None if self.logits is None else tuple(self.logits.entries[:columns]),
            "past_key_values": past,
        }
        output: GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput
        if is_encoder_decoder:
            encoded = kwargs["encoder_outputs"]
            output = GenerateEncoderDecoderOutput(
                **common,
                encoder_attentions=encoded.get("attentions") if self.attending else None,
                encoder_hidden_states=encoded.get("hidden_states") if self.hidden else None,
                decoder_attentions=attentions,
                cross_attentions=crossed,
                decoder_hidden_states=hidden,
            )
        else:
            output = GenerateDecoderOnlyOutput(**common, attentions=attentions, hidden_states=hidden)
        output.speculation_report = report
        return output

    def _of_layers(self, kind: str, columns: int) -> Any:
        wanted = self.hidden if kind == "hidden_states" else self.attending
        return self.layers.entries(kind, columns) if wanted and self.layers is not None else None


class Steps:
    """Values [V] of rows at their steps, put together at once.

    Attributes:
        entries: [B, V] a step, zeros where a row had none.
    """

    def __init__(self, rows: int):
        self.rows = rows
        self.entries: list[torch.Tensor] = []

    def put(self, rows: list[int], steps: list[int], values: torch.Tensor) -> None:
        """Note values [N, V] of rows [N] at steps [N]."""
        while len(self.entries) <= max(steps):
            self.entries.append(values.new_zeros(self.rows, values.shape[1]))
        for step in set(steps):
            here = [n for n, other in enumerate(steps) if other == step]
            self.entries[step][[rows[n] for n in here]] = values[here]


class LayerOutputs:
    """Values of each layer, put together at the end, since layers are many."""

    first: Extras

    def __init__(self, rows: int, notes: Notes):
        self.rows, self.notes = rows, notes
        self.cells: list[tuple[int, int]] = []  # (step, row)
        self.parts: dict[tuple[str, int], list[torch.Tensor]] = {}  # by kind and layer; joined, one value a cell

    def put(self, rows: list[int], steps: list[int], place: torch.Tensor, position: torch.Tensor) -> None:
        """Note what the last forward gave at positions [N] of the rows at indices [N], which are `rows` at `steps`."""
        if steps[0] == 0:  # the first tokens, of all rows at once
            assert self.notes.first is not None
            self.first = self.notes.first
            return
        seen = self.notes.seen
        assert seen is not None
        self.cells += zip(steps, rows, strict=True)
        for kind, layers in seen.extras._asdict().items():
            for number, layer in enumerate(layers or ()):
                if layer is None:
                    continue
                shape = self._shape(kind, number, max(steps))
                if kind == "hidden_states":
                    found = seen.states(layer, place, position, shape[1])
                else:
                    columns = shape[3] if self._columns(kind, number, 1) else None
                    found = seen.weights(layer, place, position, shape[2], columns)
                self.parts.setdefault((kind, number), []).append(found)

    def entries(self, kind: str, columns: int) -> tuple[Layers, ...]:
        """What stock returns of a kind: for each column its layers [B, ...]."""
        layers = getattr(self.first, kind)
        if layers is None:
            return (None,) * columns
        if not layers:
            return ((),) * columns
        found = [self._layer(kind, number, columns) for number in range(len(layers))]
        return tuple(zip(*found, strict=True))

    def _layer(self, kind: str, number: int, columns: int) -> list[torch.Tensor | None]:
        """The entries of one layer."""
        first = getattr(self.first, kind)[number]
        if first is None:
            return [None] * columns
        found = [first]
        if columns > 1:
            joined = _joined(self.parts.pop((kind, number)))
            steps, rows = torch.tensor(self.cells, device=joined.device).unbind(1)
            kept = steps < columns
            all_steps = joined.new_zeros(columns, self.rows, *joined.shape[1:])
            all_steps[steps[kept], rows[kept]] = joined[kept]
            shapes = [self._shape(kind, number, step) for step in range(columns)]
            found += [_cut(all_steps[step], shapes[step]) for step in range(1, columns)]
        if kind == "hidden_states" and has_copies(self.notes.config):
            return [copies_first(x) for x in found]
        return found

    def _shape(self, kind: str, number: int, step: int) -> list[int]:
        """[B, ...] of a layer's entry at a step behind the first, by that of its first."""
        shape = list(getattr(self.first, kind)[number].shape)
        query = 1 if kind == "hidden_states" else 2
        shape[query] = shape[query] + step if self.notes.reads_all else 1
        return [*shape[:3], self._columns(kind, number, step) or shape[3]] if query == 2 else shape

    def _columns(self, kind: str, number: int, step: int) -> int:
        """Columns of the text that a layer sees; 0 where it sees something else."""
        if kind != "attentions":
            return 0
        layers: Any = self.first.attentions
        return self.notes.visible(number, len(layers), layers[number].shape[3] + step)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Values [n, ...] below each other; those that are shorter in a dimension lie at its end."""
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padding = [
        [x for size, own in zip(shape[::-1], part.shape[:0:-1], strict=True) for x in (size - own, 0)]
        for part in parts
    ]
    return torch.cat([torch.nn.functional.pad(part, pad) for part, pad in zip(parts, padding, strict=True)])


def _cut(values: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """The end of values in every dimension."""
    return values[tuple(slice(have - size, None) for have, size in zip(values.shape, shape, strict=True))].contiguous()
