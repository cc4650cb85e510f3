"""For models without a usable cache: every forward reads the whole text again, so there is nothing to roll back."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import ModelOutput

from hf_specx.common.batch import Batch
from hf_specx.common.errors import refusal

from .decoder import Decoder
from .prompts import Prompt


@refusal
def past_without_a_cache(model: PreTrainedModel, past: Cache | None) -> str | None:
    if past is None or not past.get_seq_length():
        return None
    return (
        f"past_key_values= cannot be continued by {type(model).__name__}, which is exact without a cache only; pass "
        "the whole text as input_ids."
    )


@refusal
def chunks_without_a_cache(model: PreTrainedModel, size: int | None) -> str | None:
    if size is None:
        return None
    return (
        f"prefill_chunk_size={size} cannot be honoured by {type(model).__name__}, which is exact without a cache "
        "only; leave it out."
    )


@refusal
def decoder_prompt_without_a_cache(model: PreTrainedModel, width: int) -> str | None:
    if width < 2 or not model.config.is_encoder_decoder:
        return None
    return (
        f"decoder_input_ids of {width} tokens a row cannot be continued exactly by {type(model).__name__}, which is "
        "read without a cache; give one token a row, or leave it out."
    )


class WholeDecoder(Decoder):
    """Reads each row's whole text in the columns of `generate`, and picks its logits at its end; keeps no cache."""

    def __init__(self, prompt: Prompt, known_ids: int | None = None):
        super().__init__(prompt, known_ids)
        self.notes.reads_all = not self.model.config.is_encoder_decoder  # in `generate` FSMT has a cache
        past_without_a_cache(self.model, self.cache)
        decoder_prompt_without_a_cache(self.model, prompt.input_ids.shape[1])
        chunks_without_a_cache(self.model, prompt.generation_config.prefill_chunk_size)

    def _first(self) -> torch.Tensor:
        self.kwargs |= {"use_cache": False}
        rows, ids = len(self.held), self.prompt.input_ids
        self.width = ids.shape[1]
        ends = torch.full((rows,), ids.shape[1], device=ids.device)
        every = torch.arange(rows, device=ids.device)
        logits, output = self._picked(self._known(ids), self.kwargs.get(self.mask_name), every, ends, 1)
        self.notes.note_first(output)
        return logits

    def _unmasked_width(self) -> int:
        return self.prompt.input_ids.shape[1]

    def _forward(self, batch: Batch, tokens: torch.Tensor, ahead: int, keep: int) -> torch.Tensor:
        emitted = batch.ends - batch.width + ahead  # [R]
        last = self.prompt.max_new_tokens - 1  # emitted tokens that `generate` feeds; position tables may end there
        prompt = self.prompt.input_ids[batch.index]
        most = min(last, max(batch.counts[row] for row in batch.rows) + ahead)
        columns = torch.arange(batch.width, batch.width + most, device=tokens.device)
        batch.reserve(ahead)
        text = self._known(torch.cat([prompt, batch.ids[batch.index[:, None], columns]], -1))
        mask = torch.arange(text.shape[1], device=tokens.device) >= self.pads[batch.index][:, None]
        if self.holes is not None:
            mask &= ~torch.nn.functional.pad(self.holes[batch.index], (0, most))
        return self._picked(text, mask.long(), batch.index, self.width + emitted, keep)[0]

    def leave(self, rows: list[int], stay: torch.Tensor) -> None:
        if len(stay):
            self.select(stay)

    def select(self, stay: torch.Tensor) -> None:
        self._select_inputs(stay)

    def past(self, batch: Batch, emitted: int) -> None:
        return None

    def _picked(
        self, ids: torch.Tensor, mask: torch.Tensor | None, rows: torch.Tensor, ends: torch.Tensor, keep: int
    ) -> tuple[torch.Tensor, ModelOutput]:
        """A forward over ids [R, n]: logits [R, keep, V] of the `keep` columns before `ends` [R], and its output."""
        given: dict[str, Any] = self.kwargs | self.notes.asked
        given[self.mask_name] = torch.ones_like(ids) if mask is None else mask
        if self.position_name in self.parameters and not self.model.config.is_encoder_decoder:
            given[self.position_name] = (given[self.mask_name].long().cumsum(-1) - 1).clamp(min=0)
        inputs = self.model.prepare_inputs_for_generation(  # type: ignore[operator]
            ids, is_first_iteration=True, **given
        )
        inputs.pop("logits_to_keep", None)
        if self.model.config.is_encoder_decoder:
            inputs["input_ids"] = ids  # FSMT makes a causal mask only if it gets these besides the encoder's output
        with self.tables.at([0] * len(ids), self.last_column):
            output = self.model(**inputs, return_dict=True)
        columns = (ends[:, None] + torch.arange(-keep, 0, device=ends.device)).to(output.logits.device)  # [R, keep]
        columns = columns.clamp(max=ids.shape[1] - 1)  # logits of candidates beyond the longest text are never used
        self.notes.note(output, columns, ids.shape[1], columns)
        return output.logits[torch.arange(len(ids), device=columns.device)[:, None], columns], output
