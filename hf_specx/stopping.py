"""Stopping criteria, evaluated at every emitted token: a row ends inside an accepted run where stock would end it."""

import torch
from transformers.generation import stopping_criteria as host
from transformers.generation.stopping_criteria import StoppingCriteriaList

from .sequences import Sequences


PREFIX_CRITERIA = frozenset({host.StopStringCriteria, host.MaxTimeCriteria})


class Stopping:
    """When rows end.

    Under an end-of-sequence criterion a row that any criterion stops is finished and padded. Without one, stock goes
    on writing into a stopped row until all rows are stopped, and so does this.

    Attributes:
        pads_finished_rows: whether there is an end-of-sequence criterion.
    """

    def __init__(self, criteria: StoppingCriteriaList, width: int, max_length: int):
        """
        Args:
            criteria: as `generate` prepared them.
            width: columns of the prompt.
            max_length: columns of the whole output.

        Raises:
            ValueError: for a criterion that mixes rows or counts calls, or may.
        """
        self.criteria, ends = [], []
        for criterion in criteria:
            if type(criterion) is host.EosTokenCriteria:
                ends.append(criterion.eos_token_id)
            elif type(criterion) is host.MaxLengthCriteria:  # stock looks at it after a token, so one there always is
                max_length = min(max_length, max(criterion.max_length, width + 1))
            elif type(criterion) in PREFIX_CRITERIA or getattr(criterion, "stateless", False) is True:
                self.criteria.append(criterion)
            else:
                raise ValueError(
                    f"{type(criterion).__name__} may count calls or mix rows, so it cannot be evaluated inside a "
                    "round. If each row's result depends on nothing but its prefix, set `stateless = True` on it; "
                    "else call generate without speculative decoding."
                )
        self.eos_token_id = torch.cat([e.flatten() for e in ends]) if ends else None
        self.pads_finished_rows = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.max_new_tokens = max_length - width
        self.stopped_at: dict[int, int] = {}  # row -> emitted tokens at its first stop

    def cut(
        self, sequences: Sequences, tokens: torch.Tensor, num_new: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the length or an end token ends a row among its new tokens.

        Args:
            tokens: [R, n], of which the first num_new [R] are real.

        Returns:
            kept [R], how many of them the row emits, and ended [R] bool, whether the last of these ends it.
        """
        room = self.max_new_tokens + sequences.width - sequences.ends
        kept = torch.minimum(num_new, room)
        if self.eos_token_id is None:
            return kept, kept == room
        hit = torch.isin(tokens, self.eos_token_id.to(tokens.device))
        first = torch.where(hit.any(-1), hit.int().argmax(-1) + 1, tokens.shape[1] + 1)
        return torch.minimum(kept, first), (first <= kept) | (kept == room)

    def update(self, sequences: Sequences, new: list[int], ended: list[int]) -> list[int]:
        """Note which rows stopped within their last `new` tokens; returns the rows that leave the batch."""
        for row, end in zip(sequences.rows, ended, strict=True):
            if end:
                self.stopped_at.setdefault(row, sequences.counts[row])
        if self.criteria:
            self._update_prefix_criteria(sequences, new)
        if self.pads_finished_rows:
            ends = self.stopped_at
        elif len(self.stopped_at) == len(sequences.counts):
            ends = dict.fromkeys(sequences.rows, self.columns)
        else:
            ends = dict.fromkeys(sequences.rows, self.max_new_tokens)
        leaving = [row for row in sequences.rows if sequences.counts[row] >= ends.get(row, sequences.counts[row] + 1)]
        for row in leaving:
            sequences.truncate(row, ends[row])
        return leaving

    def _update_prefix_criteria(self, sequences: Sequences, new: list[int]) -> None:
        """Call each criterion with the whole batch at every length that some row has just passed."""
        passed = {}
        for row, number in zip(sequences.rows, new, strict=True):
            passed[row] = range(sequences.counts[row] - number + 1, sequences.counts[row] + 1)
        for emitted in sorted({n for lengths in passed.values() for n in lengths}):
            prefix = sequences.ids[:, : sequences.width + emitted]
            stops = torch.stack([c(prefix, None) for c in self.criteria]).any(0).tolist()
            for row, lengths in passed.items():
                if emitted in lengths and stops[row]:
                    self.stopped_at[row] = min(emitted, self.stopped_at.get(row, emitted))

    @property
    def columns(self) -> int:
        """Columns that stock has emitted when the last row stops."""
        return max(self.stopped_at.values())
