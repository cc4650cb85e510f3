"""Texts as batches, and what both models say where the target wrote: also a draft with tokens of its own."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hf_specx.common.padding import padded_rows
from hf_specx.common.wrappers import unwrapped_draft
from hf_specx.drafting.other_tokenizer import Translation
from hf_specx.drafting.vocabulary_map import VocabularyMap

from .texts import Text


Asked = tuple[int, int] | None  # a row of the draft's tokens and a position in it, whose logits are for a token


def collate(texts: Sequence[Text]) -> dict[str, torch.Tensor]:
    """A batch, padded on the right with 0: ids, mask, and labels [B, L] int64, -100 at the prompt and the pads."""
    batch = padded_rows([text.prompt + text.new for text in texts], "right")
    labels = torch.full_like(batch["input_ids"], -100)
    for row, (prompt, new) in enumerate(texts):
        labels[row, len(prompt) : len(prompt) + len(new)] = torch.tensor(new)
    return batch | {"labels": labels}


def logits_where_written(model: torch.nn.Module, device: torch.device, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits [N, V] in float32 at the N positions of a batch whose next token was written by the target."""
    logits, wanted = last_logits(model, device, batch)
    return logits[wanted.to(logits.device)].float()


def last_logits(
    model: torch.nn.Module, device: torch.device, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, K, V] after the first token that has a label next, and where [B, K] there is one.

    A head that can is not asked for more: for long prompts that would be most of a step's memory.
    """
    wanted = batch["labels"][:, 1:] != -100
    wanted = wanted[:, int(wanted.any(0).int().argmax()) :]
    kept = wanted.shape[1] + 1  # the last of them has no next token
    inputs: dict[str, Any] = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
    inner = unwrapped_draft(model)
    inner = unwrapped_draft(inner.module) if isinstance(inner, DistributedDataParallel) else inner
    if "logits_to_keep" in inspect.signature(inner.forward).parameters:
        inputs["logits_to_keep"] = kept
    return model(**inputs, use_cache=False).logits[:, -kept:-1], wanted


class Reader:
    """How a draft reads what the target wrote: in the target's tokens, or in its own.

    A draft with another tokenizer reads a text as when text is generated, by `Translation`: after a token that it does
    not have, the bytes since the last boundary are written in its tokens, and anew when more follow. So one row of its
    tokens has all that it reads at boundaries, and much of the rest; where it reads something else, that is a row of
    its own.

    Args:
        vocabularies: what the tokens of both mean; None if they are the same.
        learn_from_prompts: whether training asks inside the prompts too, as if the target had written all but the
            first token.

    Attributes:
        common: ids of the target [C] that the draft can propose; None for all.
    """

    def __init__(self, vocabularies: VocabularyMap | None = None, learn_from_prompts: bool = False):
        self.vocabularies, self.learn_from_prompts = vocabularies, learn_from_prompts
        self.common: torch.Tensor | None = None
        if vocabularies is not None:
            self.common = torch.tensor(sorted(set(vocabularies.to_target) - {-1}))

    def collate(self, texts: Sequence[Text], everywhere: bool = False) -> dict[str, torch.Tensor]:
        """A batch for the target, by `collate`, and what the draft reads of it.

        Args:
            texts: B of them.
            everywhere: whether it is asked for every token that the target wrote, and for no others, as α is
                measured. In training a draft with another tokenizer is asked where what it reads is a part of the
                whole text in its tokens; other labels are -100.

        Returns:
            As `collate`; with another tokenizer also `draft_input_ids` and `draft_attention_mask` [R, M], and
            `draft_positions` [N, 2], row and position of each label in turn. Without `everywhere` R is B.
        """
        if self.learn_from_prompts and not everywhere:
            texts = [Text(prompt[:1], prompt[1:] + new) for prompt, new in texts]
        batch = collate(texts)
        if self.vocabularies is None:
            return batch
        rows, others, positions = [], list[list[int]](), list[tuple[int, int]]()
        for row, text in enumerate(texts):
            (whole, *opened), asked = own_tokens(text, self.vocabularies, everywhere)
            for number, place in enumerate(asked, len(text.prompt)):
                if place is None:
                    batch["labels"][row, number] = -100
                else:
                    index = row if place[0] == 0 else len(texts) + len(others) + place[0] - 1
                    positions.append((index, place[1]))
            rows.append(whole)
            others += opened
        own = {f"draft_{name}": tensor for name, tensor in padded_rows(rows + others, "right").items()}
        return batch | own | {"draft_positions": torch.tensor(positions)}

    def draft_logits(
        self, draft: torch.nn.Module, device: torch.device, batch: dict[str, torch.Tensor], rows: int | None = None
    ) -> torch.Tensor:
        """The draft's logits [N, V] in float32 by the target's ids, for each label of a batch in turn.

        Args:
            draft: in whichever mode.
            device: of its inputs.
            batch: of `collate`.
            rows: of its own tokens in a forward; None for all at once.
        """
        if self.vocabularies is None:
            return logits_where_written(draft, device, batch)
        ids, mask, positions = (
            batch[f"draft_{name}"].to(device) for name in ("input_ids", "attention_mask", "positions")
        )
        found, order, rows = [], [], rows or len(ids)
        for start in range(0, len(ids), rows):
            part = slice(start, start + rows)
            logits = draft(input_ids=ids[part], attention_mask=mask[part], use_cache=False).logits
            here = ((positions[:, 0] >= start) & (positions[:, 0] < start + rows)).nonzero()[:, 0]
            row, position = (positions[here] - positions.new_tensor([start, 0])).T
            found.append(self.vocabularies.logits(logits[row, position]))
            order.append(here)
        return torch.cat(found)[torch.cat(order).argsort()]


def own_tokens(text: Text, vocabularies: VocabularyMap, everywhere: bool) -> tuple[list[list[int]], list[Asked]]:
    """A text in the tokens of a draft, and where that is asked for each new token of the target.

    Args:
        text: of the target.
        vocabularies: what the tokens mean.
        everywhere: also where what the draft reads is written anew later.

    Returns:
        Rows of the draft's tokens: the whole text, and one for each position that is asked for and is not in it. For
        each new token the row and the position; None where it is not asked for.
    """
    prompt = vocabularies.prompt(text.prompt)
    whole, growing = (Translation(vocabularies, vocabularies.to_draft) for _ in range(2))
    whole.extend(text.new)
    rows, asked, alike = [prompt + whole.ids], list[Asked](), 0  # so many tokens of both are the same
    for token in text.new:
        while alike < min(len(growing.ids), len(whole.ids)) and growing.ids[alike] == whole.ids[alike]:
            alike += 1
        inside = alike == len(growing.ids)
        if not inside and everywhere:
            rows.append(prompt + growing.ids)
        known, last = inside or everywhere, len(prompt) + len(growing.ids) - 1
        asked.append((0 if inside else len(rows) - 1, last) if known else None)
        alike = min(alike, growing.extend([token]))
    return rows, asked
