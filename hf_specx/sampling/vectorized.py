"""transformers' processors of the text, for all rows and positions at once.

`ONE_PASS` has a function for each type: from a processor, the prefixes of the positions and scores [R, P, V] to what
the processor itself gives for each row and prefix, to the bit; or to None where the processor itself has to be called,
since it may raise. A subclass is not its type. The formulas are those of `transformers/generation/logits_process.py`.

Nothing is carried from round to round but what depends on the processor and the prompts alone. So a rejected candidate
leaves nothing behind.
"""

import copy
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessor

from hf_specx.common.batch import Batch
from hf_specx.common.devices import sent


class Prefixes:
    """The text before each of P consecutive positions of the R decoding rows, the first `ahead` candidates behind.

    `memory` is what `kept` has made; it lasts for a call. Columns count pads on the left: `shortest` and `longest` are
    those of these prefixes, `lengths` [R, P] int64 of each.
    """

    def __init__(self, batch: Batch, ahead: int, positions: int, memory: dict[Hashable, Any]):
        self.batch, self.ahead, self.positions, self.memory = batch, ahead, positions, memory
        self.rows, self.index = len(batch.counts), batch.index
        counts = [batch.counts[row] for row in batch.rows]
        self.shortest = batch.width + min(counts) + ahead
        self.longest = batch.width + max(counts) + ahead + positions - 1

    @cached_property
    def lengths(self) -> torch.Tensor:
        return self.batch.columns(self.ahead, self.positions)

    def last(self, count: int) -> torch.Tensor:
        """The last tokens of each prefix, also pads: [R, P, count]; without meaning where it has fewer columns."""
        self.batch.reserve(self.ahead + self.positions)
        columns = self.batch.columns(self.ahead - count, count + self.positions - 1)
        return self.batch.ids[self.index[:, None], columns.clamp_(min=0)].unfold(1, count, 1)

    def last_ids(self) -> list[int]:
        """The last token of each prefix, [R * P]; only candidates are read back, and the ends of prompts."""
        batch = self.batch
        if not all(batch.counts[row] for row in batch.rows):
            return self.last(1).flatten().tolist()
        found = []
        for row, candidates in zip(batch.rows, batch.candidates(self.ahead + self.positions - 1), strict=True):
            found += [batch.emitted[row][batch.counts[row] - 1], *candidates][self.ahead :]
        return found

    def tokens(self, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of columns `start` up to the longest prefix, [R, C], and the numbers of these columns, [C]."""
        self.batch.reserve(self.ahead + self.positions - 1)
        ids = self.batch.ids[:, start : self.longest]
        if len(self.index) < self.rows:
            ids = ids[self.index]
        return ids, torch.arange(start, self.longest, device=ids.device)

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gave when it was first asked for under this key."""
        if key not in self.memory:
            self.memory[key] = make()
        return self.memory[key]


def repetition(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor | None:
    """The scores of the tokens in columns [first, length) of each prefix are penalised."""
    ignored, batch = processor.prompt_ignore_length, prefixes.batch
    prompts = batch.ids[:, : batch.width]  # emitted tokens are in the vocabulary, but prompts may have images
    highest = prefixes.kept("highest prompt id", lambda: int(prompts.max()) if prompts.numel() else 0)
    if max(highest, batch.pad_token_id) >= scores.shape[-1]:
        return None
    if isinstance(ignored, torch.Tensor):  # of each row, such as its pads
        if len(ignored) != prefixes.rows:
            return None
        start = prefixes.kept((processor, "start"), lambda: int(ignored.min()))
        first = ignored.to(prefixes.lengths)[prefixes.index][:, None].expand_as(prefixes.lengths)  # [R, P]
    else:
        start = ignored or 0
        first = torch.full_like(prefixes.lengths, start)
    if prefixes.longest <= start:
        return scores
    tokens, columns = prefixes.tokens(start)  # [R, C] and [C]
    lengths = prefixes.lengths[..., None]
    counts = (columns < lengths) & (columns >= first[..., None])  # [R, P, C]
    # a column that does not count stands for the last token, which does if any does
    index = torch.where(counts, tokens[:, None], prefixes.last(1))
    found = scores.gather(-1, index)
    return scores.scatter(-1, index, torch.where(lengths > first[..., None], _penalised(found, processor), found))


def encoder_repetition(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor | None:
    """The scores of the tokens that are in the input of the encoder, or in the prompt, are penalised."""
    ids: torch.Tensor = processor.encoder_input_ids  # [B, L]
    known = prefixes.kept((processor, scores.shape[-1]), lambda: _inside(ids, scores.shape[-1]))
    if not known or len(ids) != prefixes.rows:
        return None
    index = ids[prefixes.index][:, None].expand(-1, scores.shape[1], -1)
    return scores.scatter(-1, index, _penalised(scores.gather(-1, index), processor))


def _penalised(scores: torch.Tensor, processor: Any) -> torch.Tensor:
    return torch.where(scores < 0, scores * processor.penalty, scores / processor.penalty)


def no_repeat_ngram(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor:
    """Excluded is the last token of each n-gram of the prefix that begins with the last n - 1 tokens."""
    size = processor.ngram_size
    if prefixes.longest < size:
        return scores
    tokens, columns = prefixes.tokens()
    ngrams = tokens.unfold(1, size, 1)[:, None]  # [R, 1, C - n + 1, n]
    alike = (ngrams[..., :-1] == prefixes.last(size - 1)[:, :, None]).all(-1)  # [R, P, C - n + 1]
    alike &= columns[size - 1 :] < prefixes.lengths[..., None]
    return _without_last(ngrams, alike, scores)


def encoder_no_repeat_ngram(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor | None:
    """As `no_repeat_ngram`, with the n-grams of the input of the encoder, or of the prompt."""
    size, texts = processor.ngram_size, processor.generated_ngrams
    if prefixes.rows % len(texts):
        return None

    def make() -> tuple[torch.Tensor, bool]:
        """[T, N, n], and whether the last of each is in the vocabulary."""
        every = [[(*start, token) for start, tokens in known.items() for token in tokens] for known in texts]
        found = torch.tensor(every, dtype=torch.int64, device=scores.device).view(len(texts), len(every[0]), size)
        return found, _inside(found[..., -1], scores.shape[-1])

    known, inside = prefixes.kept((processor, scores.shape[-1]), make)
    if not inside:
        return None
    ngrams = known[prefixes.index // (prefixes.rows // len(texts))][:, None]  # [R, 1, N, n]
    alike = (ngrams[..., :-1] == prefixes.last(size - 1)[:, :, None]).all(-1)  # [R, P, N]
    return _without_last(ngrams, alike & (prefixes.lengths[..., None] >= size - 1), scores)


def _without_last(ngrams: torch.Tensor, where: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Scores [R, P, V] without the last tokens of n-grams [R, 1, N, n] where [R, P, N] says so."""
    if scores.device.type == "cpu" and not where.any():  # on other devices the question would wait for them
        return scores
    vocab_size = scores.shape[-1]
    banned = torch.zeros(*scores.shape[:2], vocab_size + 1, dtype=torch.bool, device=scores.device)
    # others, and ids outside of the vocabulary, go to a column of their own
    banned.scatter_(-1, torch.where(where, ngrams[..., -1].clamp(max=vocab_size), vocab_size), True)
    return scores.masked_fill(banned[..., :vocab_size], -torch.inf)


def sequence_bias(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor | None:
    """A bias is added to the last token of each sequence of which the prefix ends with the others."""
    vocab_size, device = scores.shape[-1], scores.device
    grouped = hasattr(processor, "multi_token_biases")  # older versions of transformers add them in another order
    if not grouped or max(map(max, processor.sequence_bias)) >= vocab_size:
        return None

    def make() -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
        own = copy.copy(processor)  # which is left unused
        own._prepare_bias_variables(scores[:, 0])
        tables = own.multi_token_biases  # of G sequences their starts [G, n], ends and biases [G]
        ends = torch.cat([last for _, last, _ in tables]).unique() if tables else own.length_1_bias[:0]
        columns = [(starts, torch.searchsorted(ends, last), amounts) for starts, last, amounts in tables]
        return own.length_1_bias.to(scores.dtype), ends, columns

    single, ends, tables = prefixes.kept((processor, vocab_size, scores.dtype, device), make)
    biased = scores + single
    if not tables:
        return biased
    added = single[ends].repeat(scores.shape[0] * scores.shape[1], 1)  # [R * P, E], summed in transformers' order
    for starts, columns, amounts in tables:
        size = starts.shape[1]
        ending = (prefixes.last(size)[:, :, None] == starts).all(-1) & (prefixes.lengths[..., None] >= size)
        added.index_add_(1, columns, torch.where(ending.flatten(0, 1), amounts, 0.0).to(scores.dtype))
    return biased.index_copy_(-1, ends, scores[..., ends] + added.view(*scores.shape[:2], -1))


def _without_ends(processor: Any, least: int, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor:
    """No end token in a prefix of fewer than `least` columns."""
    if prefixes.shortest >= least:
        return scores
    return _without(processor, processor.eos_token_id, prefixes, scores, prefixes.lengths < least)


def suppress_at_begin(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor:
    """Some tokens are excluded at one length."""
    length = processor.begin_index
    if not prefixes.shortest <= length <= prefixes.longest:
        return scores
    return _without(processor, processor.begin_suppress_tokens, prefixes, scores, prefixes.lengths == length)


def _without(
    processor: Any, tokens: torch.Tensor, prefixes: Prefixes, scores: torch.Tensor, where: torch.Tensor
) -> torch.Tensor:
    """Scores without `tokens` where [R, P] says so; ids outside of the vocabulary are left out."""
    size, device = scores.shape[-1], scores.device
    ids = prefixes.kept((processor, size), lambda: tokens[(tokens >= 0) & (tokens < size)].to(device))
    return scores.index_copy(-1, ids, scores[..., ids].masked_fill(where[..., None], -torch.inf))


def _forced(length: int, tokens: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor | None:
    """Only these tokens after a prefix of this length."""
    if not prefixes.shortest <= length <= prefixes.longest:
        return scores
    if not _inside(torch.as_tensor(tokens, device="cpu"), scores.shape[-1]):
        return None
    only = scores.new_full(scores.shape[-1:], -torch.inf)
    only[tokens] = 0
    return torch.where(prefixes.lengths[..., None] == length, only, scores)


def length_penalty(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor | None:
    """The scores of end tokens grow exponentially from a length on."""
    start, growth, ends = processor.regulation_start, processor.regulation_factor, processor.eos_token_id.flatten()
    if prefixes.longest <= start:
        return scores

    def as_here() -> bool:
        """Whether -inf stays -inf, which older versions of transformers make NaN."""
        inside = _inside(ends, scores.shape[-1])
        text = torch.zeros(1, max(start, 0) + 1, dtype=torch.int64, device=scores.device)
        return inside and not processor(text, torch.full_like(scores[:1, 0], -torch.inf)).isnan().any()

    full = scores.dtype in (torch.float32, torch.float64)  # where a number and a tensor's element round alike
    if not full or not prefixes.kept((processor, scores.shape[-1]), as_here):
        return None
    try:
        factors = [pow(growth, max(n - start, 0)) - 1 for n in range(prefixes.shortest, prefixes.longest + 1)]
    except OverflowError:  # an error in transformers too, but a prefix of this length may never be reached
        return None
    ends, factor = ends.to(scores.device), sent(factors, scores.device, torch.float64)
    found = scores[..., ends]
    added = found.abs() * factor[prefixes.lengths - prefixes.shortest].to(scores.dtype)[..., None]
    return scores.index_copy(-1, ends, found + added.masked_fill(~found.isfinite(), 0.0))


def _inside(ids: torch.Tensor, vocab_size: int) -> bool:
    """Whether all ids are in the vocabulary."""
    return bool(((ids >= 0) & (ids < vocab_size)).all())


ONE_PASS: dict[type[LogitsProcessor], Callable[[Any, Prefixes, torch.Tensor], torch.Tensor | None]] = {
    logits_process.RepetitionPenaltyLogitsProcessor: repetition,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor: encoder_repetition,
    logits_process.NoRepeatNGramLogitsProcessor: no_repeat_ngram,
    logits_process.EncoderNoRepeatNGramLogitsProcessor: encoder_no_repeat_ngram,
    logits_process.SequenceBiasLogitsProcessor: sequence_bias,
    logits_process.NoBadWordsLogitsProcessor: sequence_bias,
    logits_process.MinLengthLogitsProcessor: lambda x, *given: _without_ends(x, x.min_length, *given),
    logits_process.MinNewTokensLengthLogitsProcessor: lambda x, *given: _without_ends(
        x, x.prompt_length_to_skip + x.min_new_tokens, *given
    ),
    logits_process.SuppressTokensLogitsProcessor: lambda x, prefixes, scores: _without(
        x, x.suppress_tokens, prefixes, scores, prefixes.lengths >= 0
    ),
    logits_process.SuppressTokensAtBeginLogitsProcessor: suppress_at_begin,
    logits_process.ForcedBOSTokenLogitsProcessor: lambda x, *given: _forced(1, x.bos_token_id, *given),
    logits_process.ForcedEOSTokenLogitsProcessor: lambda x, *given: _forced(x.max_length - 1, x.eos_token_id, *given),
    logits_process.ExponentialDecayLengthPenalty: length_penalty,
}
