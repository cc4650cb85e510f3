"""For models without a usable cache: every forward reads the whole text again, so there is nothing to roll back."""

from typing import Any

import torch

from .decoders import Decoder, Prompt
from .sequences import Sequences


class WholeDecoder(Decoder):
    """Rows lie in stock's columns, and each row's logits are picked where it ends; its past is never kept."""

    def __init__(self, prompt: Prompt, known_ids: int | None = None):
        super().__init__(prompt, known_ids)
        if self.cache is not None and self.cache.get_seq_length():
            raise ValueError(
                f"past_key_values= cannot be continued by {type(self.model).__name__}, which is exact without a cache "
                "only; pass the whole text as input_ids."
            )

    def _first(self) -> torch.Tensor:
        self.kwargs |= {"use_cache": False}
        rows = len(self.held)
        ids = self.prompt.input_ids
        ends = torch.full((rows,), ids.shape[1], device=ids.device)
        every = torch.arange(rows, device=ids.device)
        return self._picked(self._known(ids), self.kwargs.get(self.mask_name), every, ends, 1)

    def _forward(self, sequences: Sequences, tokens: torch.Tensor, ahead: int, keep: int) -> torch.Tensor:
        emitted = sequences.ends - sequences.width + ahead  # [R]
        last = self.prompt.max_new_tokens - 1  # emitted tokens that stock feeds; a table may have no more
        prompt = self.prompt.input_ids[sequences.index]
        most = min(last, max(sequences.counts[row] for row in sequences.rows) + ahead)
        columns = torch.arange(sequences.width, sequences.width + most, device=tokens.device)
        sequences.reserve(ahead)
        text = self._known(torch.cat([prompt, sequences.ids[sequences.index[:, None], columns]], -1))
        mask = torch.arange(text.shape[1], device=tokens.device) >= self.pads[sequences.index][:, None]
        return self._picked(text, mask.long(), sequences.index, self.width + emitted, keep)

    def leave(self, rows: list[int], places: torch.Tensor | None) -> None:
        if places is not None and len(places):
            self.select(places)

    def select(self, places: torch.Tensor) -> None:
        self._select_inputs(places)

    def past(self, sequences: Sequences, emitted: int) -> None:
        return None

    def _picked(
        self, ids: torch.Tensor, mask: torch.Tensor | None, rows: torch.Tensor, ends: torch.Tensor, keep: int
    ) -> torch.Tensor:
        """Logits [R, keep, V] of the last tokens before columns ends [R] in a forward over ids [R, n]."""
        given: dict[str, Any] = dict(self.kwargs)
        given[self.mask_name] = torch.ones_like(ids) if mask is None else mask
        if self.position_name in self.parameters and not self.model.config.is_encoder_decoder:
            columns = torch.arange(ids.shape[1], device=ids.device)
            given[self.position_name] = (columns - (given[self.mask_name] == 0).sum(-1, keepdim=True)).clamp(min=0)
        inputs = self.model.prepare_inputs_for_generation(  # type: ignore[operator]
            ids, is_first_iteration=True, **given
        )
        inputs.pop("logits_to_keep", None)
        if self.model.config.is_encoder_decoder:
            inputs["input_ids"] = ids  # FSMT hides later tokens only where it sees these; its encodings are given
        with self.tables.at([0] * len(ids), self.last_column):
            logits = self.model(**inputs, return_dict=True).logits
        places = (ends[:, None] + torch.arange(-keep, 0, device=ends.device)).to(logits.device)  # [R, keep]
        places = places.clamp(max=logits.shape[1] - 1)  # behind it lie candidates that nobody looks at
        return logits[torch.arange(len(ids), device=logits.device)[:, None], places]
