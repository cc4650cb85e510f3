"""Scores and logits of a call, one entry for each emitted column, as in `generate`.

Up to the end of a row its values are those of `generate`. After it `generate` has values of the pads that it feeds to
the row; here are zeros of the same shape. A call that wants attentions or hidden states is decoded in `plain.py`.
"""

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from hf_specx.common.round import Round


class Outputs:
    """Collects what a call returns for each emitted token besides the token.

    Args:
        generation_config: of the call; without `return_dict_in_generate` nothing is kept.
        rows: B.
    """

    def __init__(self, generation_config: GenerationConfig, rows: int):
        config = generation_config if generation_config.return_dict_in_generate else GenerationConfig()
        self.scores = Steps(rows) if config.output_scores else None
        self.logits = Steps(rows) if config.output_logits else None

    def observe(self, done: Round) -> None:
        """Keep what belongs to the tokens that a round emitted."""
        if self.scores is None and self.logits is None:
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

    def finish(
        self, sequences: torch.Tensor, columns: int, past: Cache | None, is_encoder_decoder: bool, report: Any
    ) -> GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
        """The output of `generate`.

        Args:
            sequences: [B, L + columns] int64.
            columns: emitted columns to return; rows may have emitted more.
            past: the cache to return.
            is_encoder_decoder: of the model.
            report: becomes the attribute `speculation_report`, but no item, since Whisper splits every item by row.
        """
        kind = GenerateEncoderDecoderOutput if is_encoder_decoder else GenerateDecoderOnlyOutput
        output = kind(
            sequences=sequences,  # type: ignore[arg-type]
            scores=None if self.scores is None else tuple(self.scores.entries[:columns]),  # type: ignore[arg-type]
            logits=None if self.logits is None else tuple(self.logits.entries[:columns]),  # type: ignore[arg-type]
            past_key_values=past,
        )
        output.speculation_report = report
        return output


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
