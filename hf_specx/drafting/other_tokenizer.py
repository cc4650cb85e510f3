"""Drafts of a model with another tokenizer, which reads the text in tokens of its own.

From Timor et al. 2025 (arXiv 2502.05202), Algorithms 4 and 2: by the tokens that both have, or by text.
"""

from collections.abc import Callable
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.architectures import vocabulary
from hf_specx.common.batch import Batch
from hf_specx.common.padding import padded_rows
from hf_specx.common.round import Draft, Round
from hf_specx.layouts.choose import make_decoder
from hf_specx.layouts.decoder import Decoder
from hf_specx.layouts.prompts import UNLIMITED, prepare

from .candidates import SampledCandidateGenerator
from .drafter import Drafter, Reading, TokenizerMatch, no_candidates
from .row_by_row import ROW_BY_ROW, RowByRowDecoder
from .vocabulary_map import VocabularyMap


LONGEST_OPEN = 32  # bytes that are written anew when more follow


class Translation:
    """The tokens that one row of the target has emitted, in the draft's tokens, while it grows and is taken back.

    Each token of the target that the draft has as well is one of its own. Others are written in the draft's tokens
    from their bytes, together with such bytes directly before them; a boundary lies after each common token and before
    each space. Nothing before the last boundary changes when more is added.

    Args:
        vocabularies: what the tokens mean.
        to_draft: by the target's ids, the draft's token that stands for it wherever it is; -1 for none.

    Attributes:
        ids: the draft's tokens.
        states: after each token of the target how many of the draft's come before the last boundary, and the bytes
            after it.
    """

    def __init__(self, vocabularies: VocabularyMap, to_draft: list[int]):
        self.draft, self.target, self.to_draft = vocabularies.draft, vocabularies.target, to_draft
        self.ids: list[int] = []
        self.states: list[tuple[int, bytes]] = [(0, b"")]

    @property
    def count(self) -> int:
        """How many tokens of the target it has."""
        return len(self.states) - 1

    def extend(self, tokens: list[int]) -> int:
        """Add tokens of the target; returns how many of the draft's tokens from before have stayed."""
        start, text = self.states[-1]
        found: list[int] = []
        for token in tokens:
            own, content = self.to_draft[token], self.target.joined([token])
            if text and (own >= 0 or content[:1].isspace() or len(text) > LONGEST_OPEN):
                found += self.draft.encode(text)
                text = b""
            if own >= 0:
                found.append(own)
            else:
                text += content
            self.states.append((start + len(found), text))
        found += self.draft.encode(text) if text else []
        pairs = zip(self.ids[start:], found, strict=False)
        kept = start + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.ids[kept:] = found[kept - start :]
        return kept

    def keep(self, count: int) -> None:
        """Only the first `count` tokens of the target are its text; `ids` follow when more is added."""
        del self.states[count + 1 :]


class OwnText(Decoder):
    """The decoder of a draft over a text of its own, which follows that of the target token by token.

    Where the translation of what was fed changes, the cache is rolled back to the first token that differs.

    Args:
        inner: the decoder of the draft; it reads `own`.
        own: the draft's text: prompts so far.
        vocabularies, to_draft: as for `Translation`.
    """

    def __init__(self, inner: Decoder | RowByRowDecoder, own: Batch, vocabularies: VocabularyMap, to_draft: list[int]):
        self.inner, self.own, self.vocabularies, self.to_draft = inner, own, vocabularies, to_draft
        self.translations = [Translation(vocabularies, to_draft) for _ in own.counts]  # of all B rows

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
        wanted = [batch.counts[row] + ahead - self.translations[row].count for row in batch.rows]
        most = max(wanted)
        texts = batch.last(most, ahead).tolist() if most else [[] for _ in wanted]
        new, counts = [], list(self.own.counts)
        for row, number, text in zip(batch.rows, wanted, texts, strict=True):
            translation = self.translations[row]
            counts[row] = translation.extend(text[most - number :])
            new.append(translation.ids[counts[row] :])
            self.inner.keep(row, counts[row])
        if counts != self.own.counts:
            self.own.rewind(counts)
        numbers = [len(tokens) for tokens in new]
        if longest := max(numbers):
            device = self.own.ids.device
            tokens = torch.tensor([row + [0] * (longest - len(row)) for row in new], device=device)
            self.own.emit(tokens, numbers)

    def keep(self, row: int, count: int) -> None:
        """Of the target's tokens that a row was fed, only the first `count` after its prompt are its text."""
        translation = self.translations[row]
        translation.keep(count)
        if isinstance(self.inner, RowByRowDecoder):
            self.inner.settle(row, translation.states[-1][0])

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
            self.translations[row] = Translation(self.vocabularies, self.to_draft)
        assert isinstance(self.inner, Decoder)  # prompts come in other places in the ragged layout only
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
    prompts = [vocabularies.prompt(batch.row(row).tolist()) for row in batch.rows]
    given = {name: tensor.to(batch.ids) for name, tensor in padded_rows(prompts, "left").items()}
    own = Batch(given["input_ids"], given["attention_mask"], 0)
    if reading.layout == ROW_BY_ROW:
        return OwnText(RowByRowDecoder(model, own), own, vocabularies, to_draft)
    # one token of the target may be several of the draft's, so there is no limit on these
    inner = make_decoder(reading.layout, prepare(model, UNLIMITED, given), vocabulary(model))
    return OwnText(inner, own, vocabularies, to_draft)


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
        self.special = set(vocabularies.draft.special.values())
        self.text: OwnText | None = None

    def read(self, reading: Reading) -> None:
        """Read the prompts of all rows."""
        special = set(self.vocabularies.target.special.values())
        both = [own if number in special else -1 for number, own in enumerate(self.vocabularies.to_draft)]
        self.threshold, self.vocab_size = reading.threshold, reading.vocab_size
        self.decoder = self.text = own_text(self.model, reading, self.vocabularies, both)
        self.text.read()

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """What the draft writes in so many steps as `lengths` [R] says of each row, at most that many tokens."""
        if not any(lengths):
            return no_candidates(batch)
        assert self.text is not None
        drafted = self._write(self.text, batch, max(lengths))
        # of its own number of steps alone: with seeds, what a row proposes must not depend on other rows
        pairs = zip(drafted, lengths, strict=True)
        found = [self._in_target(tokens[:length])[:length] for tokens, length in pairs]
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
        end = next((index for index, token in enumerate(tokens) if token in self.special), len(tokens))
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
