"""Drafts of a model with another tokenizer whose text is proposed, in the target's tokens.

From Timor et al. 2025 (arXiv 2502.05202), Algorithm 2: the draft writes freely, and its candidates are judged by what
the target itself chooses.
"""

from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel

from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft, Round

from .drafter import Drafter, Reading, TokenizerMatch, no_candidates
from .other_tokenizer import OwnText, own_text
from .vocabulary_map import VocabularyMap


class TextDrafter(Drafter):
    """Writes the most probable text in the draft's tokens, and proposes it in the target's.

    The processors of a call act on the target alone, since the draft's tokens have other ids.

    Args:
        draft_model: the draft.
        vocabularies: what the tokens mean.
        matching: how the tokenizers are matched, and why.
    """

    own_text, source = True, "text"

    def __init__(self, draft_model: PreTrainedModel, vocabularies: VocabularyMap, matching: TokenizerMatch):
        self.model: PreTrainedModel = draft_model
        self.vocabularies, self.matching = vocabularies, matching
        self.text: OwnText | None = None

    def read(self, reading: Reading) -> None:
        """Read the prompts of all rows."""
        special = set(self.vocabularies.target.special.values())
        both = [own if number in special else -1 for number, own in enumerate(self.vocabularies.to_draft)]
        self.threshold, self.vocab_size = reading.threshold, reading.vocab_size
        self.decoder = self.text = own_text(self.model, reading, self.vocabularies, both)
        self.text.read()

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """What the draft writes in as many steps as the longest of `lengths` [R], at most that many tokens a row."""
        if not any(lengths):
            return no_candidates(batch)
        assert self.text is not None
        drafted = self._write(self.text, batch, max(lengths))
        found = [self._in_target(tokens)[:length] for tokens, length in zip(drafted, lengths, strict=True)]
        most = max(map(len, found))
        tokens = batch.index.new_tensor([row + [0] * (most - len(row)) for row in found]).view(len(found), most)
        return Draft(tokens, [len(row) for row in found], None, self.source)

    def _write(self, text: OwnText, batch: Batch, steps: int) -> list[list[int]]:
        """The draft's own next tokens of each row, as far as it is sure of them."""
        text.follow(batch, 0)
        own, columns = text.own, list[torch.Tensor]()
        sure = torch.ones(len(batch.rows), dtype=torch.int64, device=own.ids.device)
        numbers = torch.zeros_like(sure)
        for ahead in range(steps):
            logits = text.inner.step(own, ahead)[:, -1].float()
            token = logits.argmax(-1)
            numbers, columns = numbers + sure, [*columns, token]
            own.put(token[:, None], ahead)
            if self.threshold:
                chance = logits.softmax(-1).gather(-1, token[:, None])[:, 0]
                sure = sure * (chance >= self.threshold)
                if not sure.any():
                    break
        written = torch.stack(columns, 1).tolist()
        for row, tokens in zip(batch.rows, written, strict=True):
            text.translations[row].ids += tokens  # kept as far as they turn out to be the text
        return [tokens[:number] for tokens, number in zip(written, numbers.tolist(), strict=True)]

    def _in_target(self, tokens: list[int]) -> list[int]:
        """Tokens of the draft as those of the target, up to the first special one."""
        draft, target = self.vocabularies.draft, self.vocabularies.target
        special = set(draft.special.values())
        end = next((index for index, token in enumerate(tokens) if token in special), len(tokens))
        content = draft.joined(tokens[:end])
        found = [number for number in target.encode(content) if number < self.vocab_size] if content else []
        meant = self.vocabularies.to_target[tokens[end]] if end < len(tokens) else -1
        return [*found, meant] if meant >= 0 else found

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """Read new prompts."""
        assert self.text is not None
        self.text.admit(batch, rows)

    def observe(self, done: Round) -> None:
        """Note how much of what was read is the text by now, and drop rows that have left."""
        assert self.text is not None
        for row, before in zip(done.rows, done.before, strict=True):
            self.text.keep(row, before)
        if done.stay is not None:
            self.text.leave(done.rows, done.stay)

    def cost(self, batch: Batch) -> Callable[[int], object] | None:
        return None if self.text is None else partial(self.text.rehearse, batch)
