"""Logits processors with the meaning they have in stock `generate`, at several positions of several rows at once.

A warper reads nothing but the scores, so it is applied once to all of them. A processor that reads the prefix is
called as stock would call it: on the whole batch, with the exact prefix of that step, once a length that occurs.
"""

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
    }
)


class Processors:
    """A prepared `LogitsProcessorList`, applied to [R, P, V] logits in its own order.

    A processor of the user's own that depends on nothing but its arguments may set `stateless = True`; it is then
    called with full batches, also for positions that are rejected later.
    """

    def __init__(self, processors: LogitsProcessorList):
        """
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
        self.processors = processors

    def __call__(self, sequences: Sequences, logits: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        """
        Args:
            sequences: the text so far; candidates are written behind each row's end.
            logits: [R, P, V] of the decoding rows, at P positions in a row from `ahead` tokens behind the end.

        Returns:
            [R, P, V] float32 scores, as stock's at each of these prefixes.
        """
        scores = logits.float()
        for processor in self.processors:
            if type(processor) in WARPERS:
                flat = scores.flatten(0, 1)  # [R * P, V]
                scores = processor(flat.new_zeros(len(flat), 1, dtype=torch.int64), flat).view_as(scores)
            else:
                scores = _by_length(processor, sequences, scores, ahead)
        return scores


def _is_stateless(processor: LogitsProcessor) -> bool:
    return type(processor) in STATELESS or getattr(processor, "stateless", False) is True


def _by_length(processor: LogitsProcessor, sequences: Sequences, scores: torch.Tensor, ahead: int) -> torch.Tensor:
    """One full-batch call for each prefix length that occurs among the positions of scores [R, P, V]."""
    members: dict[int, list[tuple[int, int]]] = {}
    for i, number in enumerate(sequences.rows):
        for j in range(scores.shape[1]):
            members.setdefault(sequences.counts[number] + ahead + j, []).append((i, j))
    result = torch.empty_like(scores)
    for emitted, cells in members.items():
        place, position = torch.tensor(cells, device=scores.device).unbind(-1)
        row = sequences.index[place]
        batch = scores.new_zeros(len(sequences.ids), scores.shape[2])  # [B, V], the rows that are elsewhere stay 0
        batch[row] = scores[place, position]
        sequences.reserve(max(0, emitted - max(sequences.counts)))
        result[place, position] = processor(sequences.ids[:, : sequences.width + emitted], batch)[row]
    return result
