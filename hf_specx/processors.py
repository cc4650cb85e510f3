"""Logits processors with the meaning they have in stock `generate`, at several positions of several rows at once.

A warper reads nothing but the scores, so it is applied once to all of them. A processor that reads the prefix is
called as stock would call it: on the whole batch, with the exact prefix of that step, once a length that occurs.
"""

from functools import partial

import torch
from transformers.generation import logits_process as host
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from .sequences import Sequences


WARPERS = frozenset(
    {
        host.TemperatureLogitsWarper,
        host.TopKLogitsWarper,
        host.TopPLogitsWarper,
        host.TopHLogitsWarper,
        host.MinPLogitsWarper,
        host.TypicalLogitsWarper,
        host.EpsilonLogitsWarper,
        host.EtaLogitsWarper,
        host.LogitNormalization,
        host.InfNanRemoveLogitsProcessor,
        host.SuppressTokensLogitsProcessor,
    }
)
STATELESS = frozenset(
    {
        host.RepetitionPenaltyLogitsProcessor,
        host.EncoderRepetitionPenaltyLogitsProcessor,
        host.NoRepeatNGramLogitsProcessor,
        host.EncoderNoRepeatNGramLogitsProcessor,
        host.SequenceBiasLogitsProcessor,
        host.NoBadWordsLogitsProcessor,
        host.PrefixConstrainedLogitsProcessor,
        host.MinLengthLogitsProcessor,
        host.MinNewTokensLengthLogitsProcessor,
        host.ForcedBOSTokenLogitsProcessor,
        host.ForcedEOSTokenLogitsProcessor,
        host.ExponentialDecayLengthPenalty,
        host.SuppressTokensAtBeginLogitsProcessor,
        host.WatermarkLogitsProcessor,
        host.WhisperTimeStampLogitsProcessor,
    }
)


class Processors:
    """A prepared `LogitsProcessorList`, applied to [R, P, V] logits in its own order.

    A processor of the user's own whose result for a row depends on nothing but the row's place, its text and its
    scores may set `stateless = True`. It is then called with full batches, also for positions that are rejected later,
    and the text of rows that are elsewhere at that moment means nothing.
    """

    def __init__(self, processors: LogitsProcessorList, eos_token_id: torch.Tensor | None = None):
        """
        Args:
            processors: as `generate` prepared them.
            eos_token_id: [E]; what lies behind a candidate that ends its row is not looked at.

        Raises:
            ValueError: for a processor that keeps state between calls, or may.
        """
        for processor in processors:
            if not (type(processor) in WARPERS or _is_stateless(processor)):
                raise ValueError(
                    f"{type(processor).__name__} may keep state between calls, so it cannot judge candidates that are "
                    "rejected later. If its result depends on nothing but its arguments, set `stateless = True` on "
                    "it; else call generate without speculative decoding."
                )
        self.processors, self.eos_token_id = processors, eos_token_id

    def __call__(self, sequences: Sequences, logits: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        """
        Args:
            sequences: the text so far; candidates are written behind each row's end.
            logits: [R, P, V] of the decoding rows, at P positions in a row from `ahead` tokens behind the end.

        Returns:
            [R, P, V] float32 scores, as stock's at each of these prefixes.
        """
        scores, cells = logits.float(), None
        for processor in self.processors:
            if type(processor) in WARPERS:
                flat = scores.flatten(0, 1)  # [R * P, V]
                scores = processor(flat.new_zeros(len(flat), 1, dtype=torch.int64), flat).view_as(scores)
            else:
                cells = self._cells(sequences, scores.shape[1], ahead) if cells is None else cells
                scores = _by_length(processor, sequences, scores, cells)
        return scores

    def _cells(self, sequences: Sequences, positions: int, ahead: int) -> dict[int, list[tuple[int, int]]]:
        """The (place, position) pairs that stock could reach, by the number of tokens emitted before them."""
        drafted = sequences.last(ahead + positions - 1, ahead + positions - 1)  # [R, ahead + P - 1]
        over = torch.zeros_like(drafted)
        if self.eos_token_id is not None:
            over = torch.isin(drafted, self.eos_token_id.to(drafted.device)).cumsum(-1)
        reached = torch.nn.functional.pad(over == 0, (1, 0), value=True)[:, ahead:].tolist()
        cells: dict[int, list[tuple[int, int]]] = {}
        for place, row in enumerate(sequences.rows):
            for position in range(positions):
                if reached[place][position]:
                    cells.setdefault(sequences.counts[row] + ahead + position, []).append((place, position))
        return cells


def _is_stateless(processor: LogitsProcessor) -> bool:
    return type(processor) in STATELESS or getattr(processor, "stateless", False) is True


def _by_length(
    processor: LogitsProcessor, sequences: Sequences, scores: torch.Tensor, cells: dict[int, list[tuple[int, int]]]
) -> torch.Tensor:
    """One call for each prefix length that occurs among the cells of scores [R, P, V]."""
    result = scores.clone()
    sequences.reserve(max(cells, default=0) - max(sequences.counts))
    for emitted, members in cells.items():
        place, position = torch.tensor(members, device=scores.device).unbind(-1)
        row = sequences.index[place]
        batch = scores.new_zeros(len(sequences.ids), scores.shape[2])  # [B, V], the rows that are elsewhere stay 0
        batch[row] = scores[place, position]
        prefix = sequences.ids[:, : sequences.width + emitted]
        if type(processor) is host.PrefixConstrainedLogitsProcessor:
            result[place, position] = _constrained(processor, prefix, batch, row.tolist())
        else:
            result[place, position] = processor(prefix, batch)[row]
    return result


def _answer(allowed: list[int], batch_id: int, input_ids: torch.Tensor) -> list[int]:
    return allowed


def _constrained(
    processor: host.PrefixConstrainedLogitsProcessor, prefix: torch.Tensor, batch: torch.Tensor, rows: list[int]
) -> torch.Tensor:
    """The scores of `rows` only: the user's function may know no answer for the texts of the others.

    Nor may it for a candidate that is rejected later, so a prefix without any allowed token has no law, which matters
    only if the row gets there.
    """
    result = torch.full_like(batch[rows], -torch.inf)
    for place, row in enumerate(rows):
        allowed = processor._prefix_allowed_tokens_fn(row, prefix[row])
        if len(allowed):
            alone = host.PrefixConstrainedLogitsProcessor(partial(_answer, allowed), 1)
            result[place] = alone(prefix[row : row + 1], batch[row : row + 1])[0]
    return result
