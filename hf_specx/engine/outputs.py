"""Scores, logits, hidden states and attentions of a call, one entry for each emitted column, as in `generate`.

Up to the end of a row its values are those of `generate`. After it `generate` has values of the pads that it feeds to
the row; here are zeros of the same shape.
"""

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from hf_specx.common.round import Round
from hf_specx.layouts.forward_outputs import Extras, Layers, Notes, copies_first, has_copies


class Outputs:
    """Collects what a call returns for each emitted token besides the token.

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
        cells = [(index, n) for index, number in enumerate(done.emitted) for n in range(number)]
        if not cells:
            return
        index, position = torch.tensor(cells).unbind(1)  # [N]
        row = [done.rows[i] for i, _ in cells]
        step = [done.before[i] + n for i, n in cells]
        for steps, values in ((self.scores, done.scores), (self.logits, done.forward.logits)):
            if steps is not None:
                steps.put(row, step, values[index, position].float())
        if self.layers is not None:
            self.layers.put(row, step, index, position)

    def shown_in_order(self, scores: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """What criteria see after a column: scores [B, V] of each column so far; None if the call wants none."""
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
        """The output of `generate`.

        Args:
            sequences: [B, L + columns] int64.
            columns: emitted columns to return; rows may have emitted more.
            past: the cache to return.
            kwargs: inputs of the model, with `encoder_outputs` where it has an encoder.
            is_encoder_decoder: of the model.
            report: becomes the attribute `speculation_report`, but no item, since Whisper splits every item by row.
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
    """Values [V] of rows at their steps. A step is the number of tokens that a row has emitted before.

    Attributes:
        entries: of each step [B, V], zeros in rows that had none.
    """

    def __init__(self, rows: int):
        self.rows = rows
        self.entries: list[torch.Tensor] = []

    def put(self, rows: list[int], steps: list[int], values: torch.Tensor) -> None:
        """Keep values [N, V] of rows [N] at steps [N]."""
        while len(self.entries) <= max(steps):
            self.entries.append(values.new_zeros(self.rows, values.shape[1]))
        for step in set(steps):
            here = [n for n, other in enumerate(steps) if other == step]
            self.entries[step][[rows[n] for n in here]] = values[here]


class LayerOutputs:
    """Hidden states and attentions of each layer at each step, put together at the end of the call."""

    first: Extras

    def __init__(self, rows: int, notes: Notes):
        self.rows, self.notes = rows, notes
        self.cells: list[tuple[int, int]] = []  # (step, row)
        self.parts: dict[tuple[str, int], list[torch.Tensor]] = {}  # by kind and layer, in the order of cells

    def put(self, rows: list[int], steps: list[int], index: torch.Tensor, position: torch.Tensor) -> None:
        """Keep what the last forward gave for N tokens of `rows` at `steps`; see `Seen.states`."""
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
                    found = seen.states(layer, index, position, shape[1])
                else:
                    columns = shape[3] if self._columns(kind, number, 1) else None
                    found = seen.weights(layer, index, position, shape[2], columns)
                self.parts.setdefault((kind, number), []).append(found)

    def entries(self, kind: str, columns: int) -> tuple[Layers, ...]:
        """What `generate` returns of a kind: for each column its layers [B, ...]."""
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
        """The shape [B, ...] of a layer's entry at a step after the first."""
        shape = list(getattr(self.first, kind)[number].shape)
        query = 1 if kind == "hidden_states" else 2  # the dimension of the tokens
        shape[query] = shape[query] + step if self.notes.reads_all else 1
        if kind != "hidden_states":
            shape[3] = self._columns(kind, number, step) or shape[3]
        return shape

    def _columns(self, kind: str, number: int, step: int) -> int:
        """Columns of the text that a layer attends to; 0 if it attends to something else."""
        if kind != "attentions":
            return 0
        layers: Any = self.first.attentions
        return self.notes.visible(number, len(layers), layers[number].shape[3] + step)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Values [n, ...] joined along n; those that are shorter in another dimension get zeros before them."""
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padding = [
        [x for size, own in zip(shape[::-1], part.shape[:0:-1], strict=True) for x in (size - own, 0)]
        for part in parts
    ]
    return torch.cat([torch.nn.functional.pad(part, pad) for part, pad in zip(parts, padding, strict=True)])


def _cut(values: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """The last entries of values in every dimension, so that they have a shape."""
    return values[tuple(slice(have - size, None) for have, size in zip(values.shape, shape, strict=True))].contiguous()
