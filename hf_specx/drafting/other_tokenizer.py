"""Drafts of a model with another tokenizer, which reads the text in tokens of its own."""

from itertools import takewhile
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.architectures import vocabulary
from hf_specx.common.batch import Batch
from hf_specx.layouts.choose import make_decoder
from hf_specx.layouts.decoder import Decoder
from hf_specx.layouts.prompts import UNLIMITED, prepare

from .candidates import SampledCandidateGenerator
from .drafter import Reading, TokenizerMatch
from .vocabulary_map import VocabularyMap


LONGEST_OPEN = 32  # bytes that are written anew when more follow


class OwnText(Decoder):
    """The decoder of a draft over a text of its own, which follows that of the target token by token.

    Each token of the target that the draft has as well is one of its own. Others are written in the draft's tokens
    from their bytes, together with such bytes directly before them; a boundary lies after each common token and before
    each space. Where that changes what was fed, the cache is rolled back to the first token that differs, never before
    the last boundary.

    Args:
        inner: the decoder of the draft; it reads `own`.
        own: the draft's text: prompts so far.
        vocabularies: what the tokens mean.
        to_draft: by the target's ids, the draft's token that stands for it wherever it is; -1 for none.
    """

    def __init__(self, inner: Decoder, own: Batch, vocabularies: VocabularyMap, to_draft: list[int]):
        self.inner, self.own, self.vocabularies, self.to_draft = inner, own, vocabularies, to_draft
        rows = len(own.counts)
        self.ids: list[list[int]] = [[] for _ in range(rows)]  # of each row, the draft's tokens after its prompt
        # of each row, after each token of the target: the last boundary, and the bytes after it
        self.states: list[list[tuple[int, bytes]]] = [[(0, b"")] for _ in range(rows)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self) -> None:
        self.inner.read()

    def step(self, batch: Batch, ahead: int, skipped: int = 0) -> torch.Tensor:
        """Logits [R, 1, V] by the target's ids after `ahead` candidates of the target."""
        self.follow(batch, ahead)
        return self.vocabularies.logits(self.inner.step(self.own, 0))

    def follow(self, batch: Batch, ahead: int) -> None:
        """Write what the draft has not read of the target's text, with `ahead` candidates, in the draft's tokens."""
        wanted = [batch.counts[row] + ahead + 1 - len(self.states[row]) for row in batch.rows]
        most = max(wanted)
        texts = batch.last(most, ahead).tolist() if most else [[] for _ in wanted]
        new, counts = [], list(self.own.counts)
        for row, number, text in zip(batch.rows, wanted, texts, strict=True):
            new.append(self._continue(row, text[most - number :]))
            counts[row] = len(self.ids[row]) - len(new[-1])
        self._write(new, counts)

    def _continue(self, row: int, tokens: list[int]) -> list[int]:
        """Add tokens of the target to a row; returns the draft's that stand after those that stay."""
        states, draft = self.states[row], self.vocabularies.draft
        start, text = states[-1]
        boundary, found = start, list[int]()
        for token in tokens:
            own, content = self.to_draft[token], self.vocabularies.target.joined([token])
            if text and (own >= 0 or content[:1].isspace() or len(text) > LONGEST_OPEN):
                found += draft.encode(text)
                text = b""
            if own >= 0:
                found.append(own)
            else:
                text += content
            boundary = start + len(found)
            states.append((boundary, text))
        found += draft.encode(text) if text else []
        before = self.ids[row][start:]
        kept = start + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, found, strict=False)))
        self.ids[row][kept:] = found[kept - start :]
        self.inner.keep(row, kept)
        return self.ids[row][kept:]

    def _write(self, new: list[list[int]], counts: list[int]) -> None:
        """Put the draft's new tokens after the first `counts` [B] of the rows."""
        numbers = [len(tokens) for tokens in new]
        if counts != self.own.counts:
            self.own.rewind(counts)
        if most := max(numbers):
            device = self.own.ids.device
            tokens = torch.tensor([row + [0] * (most - len(row)) for row in new], device=device)
            self.own.emit(tokens, torch.tensor(numbers, device=device), numbers)

    def keep(self, row: int, count: int) -> None:
        """Of the target's tokens that a row was fed, only the first `count` after its prompt are its text."""
        del self.states[row][count + 1 :]

    def leave(self, rows: list[int], stay: torch.Tensor) -> None:
        self.inner.leave(rows, stay)
        staying = set(stay.tolist())
        self.own.retire([row for index, row in enumerate(rows) if index not in staying])

    def admit(self, batch: Batch, rows: list[int]) -> None:
        prompts = [self.vocabularies.prompt(batch.row(row).tolist()) for row in rows]
        widest = max(map(len, prompts))
        if widest > self.own.width:
            self.own.widen(widest - self.own.width)
        for row, prompt in zip(rows, prompts, strict=True):
            self.own.replace(row, torch.tensor(prompt, device=self.own.ids.device))
            self.ids[row], self.states[row] = [], [(0, b"")]
        self.inner.admit(self.own, rows)

    def rehearse(self, batch: Batch, count: int) -> None:
        self.inner.rehearse(self.own, count)


class OtherTokenizerDrafter(SampledCandidateGenerator):
    """Samples candidates from a draft with another tokenizer, among the tokens that both have.

    Args:
        draft_model: the draft.
        vocabularies: what the tokens mean.
        matching: how the tokenizers are matched, and why.
    """

    own_text = True

    def __init__(self, draft_model: PreTrainedModel, vocabularies: VocabularyMap, matching: TokenizerMatch):
        super().__init__(draft_model)
        self.vocabularies, self.matching = vocabularies, matching

    def _decoder(self, reading: Reading) -> Decoder:
        return own_text(self.model, reading, self.vocabularies, self.vocabularies.to_draft)


def own_text(model: PreTrainedModel, reading: Reading, vocabularies: VocabularyMap, to_draft: list[int]) -> OwnText:
    """The decoder of a draft with the prompts of a call in its own tokens; nothing is read yet."""
    batch = reading.batch
    prompts = [torch.tensor(vocabularies.prompt(batch.row(row).tolist())) for row in batch.rows]
    ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    mask = (torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]).long()
    given = {"input_ids": ids.to(batch.ids), "attention_mask": mask.to(batch.ids)}
    # one token of the target may be several of the draft's, so there is no limit on these
    inner = make_decoder(reading.layout, prepare(model, UNLIMITED, given), vocabulary(model))
    return OwnText(inner, Batch(given["input_ids"], given["attention_mask"], 0), vocabularies, to_draft)
