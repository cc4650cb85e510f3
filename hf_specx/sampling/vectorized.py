"""transformers' processors that read the text, computed for all rows and positions at once.

`VECTORIZED` has a function for each type of processor. It takes the processor, the prefixes of P positions and their
scores [R, P, V], and returns what the processor itself would give for each row and prefix, to the bit; or None where
the processor itself has to be called, since it may raise an error. Subclasses are not looked up. The formulas are
those of `transformers/generation/logits_process.py`.

What is kept from round to round depends on the processor and the prompts alone, so a rejected candidate leaves no
trace.
"""

import copy
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessor

from hf_specx.common.batch import Batch
from hf_specx.common.devices import to_device_async


class Prefixes:
    """The text before each of P consecutive positions of the R decoding rows, the first after `ahead` candidates.

    Attributes:
        num_rows: B, rows that have ended among them; `row_numbers` [R] are those that decode.
        shortest, longest: the columns of the shortest and of the longest prefix, pads on the left among them.
        cache: what depends on a processor and the prompts alone, by key; it lasts for a call.
    """

    def __init__(self, batch: Batch, ahead: int, positions: int, cache: dict[Hashable, Any]):
        self.batch = batch
        self.ahead = ahead
        self.positions = positions
        self.cache = cache
        self.num_rows = len(batch.counts)
        self.row_numbers = batch.index
        counts = [batch.counts[row] for row in batch.rows]
        fewest, most = self.candidates_before
        self.shortest = batch.width + min(counts) + fewest
        self.longest = batch.width + max(counts) + most

    @property
    def candidates_before(self) -> tuple[int, int]:
        """How many candidates there are before a position, at least and at most."""
        if self.batch.tree is None:
            return self.ahead, self.ahead + self.positions - 1
        nodes = slice(self.ahead, self.ahead + self.positions)
        depths = [depth for row in self.batch.tree.rows for depth in row.node_depths[nodes]]
        return min(depths, default=1), max(depths, default=1)  # fillers stand at the beginning of a tree

    @cached_property
    def lengths(self) -> torch.Tensor:
        """The columns of each prefix, [R, P] int64."""
        return self._columns(self.ahead, self.positions) if self.nodes is None else self._end + self.nodes.node_depths

    @cached_property
    def nodes(self) -> "PrefixNodes | None":
        """What stands before the nodes of a tree; None in a chain, where the candidates of a prefix are one text."""
        tree = self.batch.tree
        if tree is None:
            return None
        numbers = slice(self.ahead, self.ahead + self.positions)
        return PrefixNodes(tree.node_depths[:, numbers], tree.node_paths[:, numbers])

    def _columns(self, first: int, count: int) -> torch.Tensor:
        """[R, count], the columns from `first` after the end of each row on."""
        return self.batch.columns(first, count)

    @property
    def _end(self) -> torch.Tensor:
        """[R, 1], the columns of each row's text."""
        return self._columns(0, 1)

    def last(self, count: int) -> torch.Tensor:
        """The last `count` tokens of each prefix, also pads: [R, P, count]; arbitrary where it has fewer columns."""
        self.batch.reserve(self.ahead + self.positions)
        if self.nodes is not None:
            behind = self.nodes.node_depths[..., None] + torch.arange(-count, 0, device=self.nodes.node_depths.device)
            columns = self._columns(0, 1)[..., None] + self.nodes.behind_end(behind)
            return self.batch.ids[self.row_numbers[:, None, None], columns.clamp_(min=0)]
        columns = self._columns(self.ahead - count, count + self.positions - 1)
        return self.batch.ids[self.row_numbers[:, None], columns.clamp_(min=0)].unfold(1, count, 1)

    def tokens(self, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of columns `start` up to the longest prefix, [R, 1, C], and the numbers of these columns, [C].

        In a tree those of each prefix, [R, P, C].
        """
        self.batch.reserve(self.ahead + self.positions - 1)
        columns = torch.arange(start, self.longest, device=self.row_numbers.device)
        if self.nodes is not None:
            end = self._end[..., None]
            places = end + self.nodes.behind_end((columns - end).expand(-1, self.positions, -1))
            places = places.clamp_(max=self.batch.ids.shape[1] - 1)
            return self.batch.ids[self.row_numbers[:, None, None], places], columns
        ids = self.batch.ids[:, start : self.longest]
        if len(self.row_numbers) < self.num_rows:
            ids = ids[self.row_numbers]
        return ids[:, None], columns

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result of `make`, called when this key is first asked for in the call."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]


class PrefixNodes(NamedTuple):
    """What stands before P nodes of a tree: `node_depths` [R, P] and `node_paths` [R, P, D + 1], as in `Tree`."""

    node_depths: torch.Tensor
    node_paths: torch.Tensor

    def behind_end(self, columns: torch.Tensor) -> torch.Tensor:
        """Where the tokens of prefixes stand, as columns behind the end of the text, [R, P, n].

        `columns` [R, P, n] are those in which they would stand if the candidates before each node were a chain.
        """
        depths = (1 + columns).clamp(0, self.node_paths.shape[2] - 1)
        return torch.where(columns < 0, columns, self.node_paths.gather(2, depths) - 1)


def repetition(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor | None:
    """`RepetitionPenaltyLogitsProcessor`: penalise tokens that stand in columns [first, length) of each prefix."""
    ignored = processor.prompt_ignore_length
    batch = prefixes.batch
    prompts = batch.ids[:, : batch.width]  # emitted tokens are in the vocabulary, but prompts may have images
    highest_id = prefixes.cached("highest prompt id", lambda: int(prompts.max()) if prompts.numel() else 0)
    if max(highest_id, batch.pad_token_id) >= scores.shape[-1]:
        return None
    if isinstance(ignored, torch.Tensor):  # of each row, such as its pads
        if len(ignored) != prefixes.num_rows:
            return None
        start = prefixes.cached((processor, "start"), lambda: int(ignored.min()))
        first = ignored.to(prefixes.lengths)[prefixes.row_numbers][:, None].expand_as(prefixes.lengths)  # [R, P]
    else:
        start = ignored or 0
        first = torch.full_like(prefixes.lengths, start)
    if prefixes.longest <= start:
        return scores
    tokens, columns = prefixes.tokens(start)
    lengths = prefixes.lengths[..., None]
    is_counted = (columns < lengths) & (columns >= first[..., None])  # [R, P, C]
    # a column that does not count stands for the last token, which does if any does
    ids = torch.where(is_counted, tokens, prefixes.last(1))
    old = scores.gather(-1, ids)
    penalised = torch.where(old < 0, old * processor.penalty, old / processor.penalty)
    return scores.scatter(-1, ids, torch.where(lengths > first[..., None], penalised, old))


def no_repeat_ngram(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor:
    """`NoRepeatNGramLogitsProcessor`: exclude tokens that would end an n-gram which the prefix already has."""
    size = processor.ngram_size
    vocab_size = scores.shape[-1]
    if prefixes.longest < size:
        return scores
    tokens, columns = prefixes.tokens()
    ngrams = tokens.unfold(2, size, 1)  # [R, 1, C - n + 1, n], or of each prefix
    matches = (ngrams[..., :-1] == prefixes.last(size - 1)[:, :, None]).all(-1)  # [R, P, C - n + 1]
    matches &= columns[size - 1 :] < prefixes.lengths[..., None]
    if scores.device.type == "cpu" and not matches.any():  # on other devices the question would wait for them
        return scores
    excluded = torch.zeros(*scores.shape[:2], vocab_size + 1, dtype=torch.bool, device=scores.device)
    # others, and ids outside of the vocabulary, go to a column of their own
    excluded.scatter_(-1, torch.where(matches, ngrams[..., -1].clamp(max=vocab_size), vocab_size), True)
    return scores.masked_fill(excluded[..., :vocab_size], -torch.inf)


def sequence_bias(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor | None:
    """`SequenceBiasLogitsProcessor`: bias a sequence's last token where the prefix ends with its other tokens."""
    vocab_size, device = scores.shape[-1], scores.device
    is_grouped = hasattr(processor, "multi_token_biases")  # older versions of transformers add them in another order
    if not is_grouped or max(map(max, processor.sequence_bias)) >= vocab_size:
        return None

    def make_tables() -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
        """The bias of each token [V], the last tokens [E] of longer sequences, and these sequences by length.

        These are for each length the tokens before the last [G, n], which of the E is the last [G], and biases [G].
        """
        prepared = copy.copy(processor)  # so that the processor itself is left unused
        prepared._prepare_bias_variables(scores[:, 0])
        groups = prepared.multi_token_biases  # of sequences of one length: their starts [G, n], ends and biases [G]
        ends = torch.cat([last for _, last, _ in groups]).unique() if groups else prepared.length_1_bias[:0]
        sequences = [(starts, torch.searchsorted(ends, last), biases) for starts, last, biases in groups]
        return prepared.length_1_bias.to(scores.dtype), ends, sequences

    of_tokens, ends, sequences = prefixes.cached((processor, vocab_size, scores.dtype, device), make_tables)
    biased = scores + of_tokens
    if not sequences:
        return biased
    of_ends = of_tokens[ends].repeat(scores.shape[0] * scores.shape[1], 1)  # [R * P, E], summed in transformers' order
    for starts, end_numbers, biases in sequences:
        size = starts.shape[1]
        matches = (prefixes.last(size)[:, :, None] == starts).all(-1) & (prefixes.lengths[..., None] >= size)
        of_ends.index_add_(1, end_numbers, torch.where(matches.flatten(0, 1), biases, 0.0).to(scores.dtype))
    return biased.index_copy_(-1, ends, scores[..., ends] + of_ends.view(*scores.shape[:2], -1))


def min_length(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor:
    """`MinLengthLogitsProcessor`: exclude end tokens while the text, with its pads, is too short."""
    return _without_ends(processor, processor.min_length, prefixes, scores)


def min_new_tokens(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor:
    """`MinNewTokensLengthLogitsProcessor`: exclude end tokens while too few tokens are new."""
    return _without_ends(processor, processor.prompt_length_to_skip + processor.min_new_tokens, prefixes, scores)


def _without_ends(processor: Any, min_columns: int, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor:
    """Scores without end tokens after a prefix of fewer than `min_columns` columns."""
    if prefixes.shortest >= min_columns:
        return scores
    return _without(processor, processor.eos_token_id, prefixes, scores, prefixes.lengths < min_columns)


def suppress(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor:
    """`SuppressTokensLogitsProcessor`: exclude some tokens everywhere."""
    return _without(processor, processor.suppress_tokens, prefixes, scores, prefixes.lengths >= 0)


def suppress_at_begin(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor:
    """`SuppressTokensAtBeginLogitsProcessor`: exclude some tokens at one length of the text."""
    length = processor.begin_index
    if not prefixes.shortest <= length <= prefixes.longest:
        return scores
    return _without(processor, processor.begin_suppress_tokens, prefixes, scores, prefixes.lengths == length)


def _without(
    processor: Any, tokens: torch.Tensor, prefixes: Prefixes, scores: torch.Tensor, is_excluded: torch.Tensor
) -> torch.Tensor:
    """The scores with -inf for `tokens` where `is_excluded` [R, P]; ids beyond the vocabulary are ignored."""
    size, device = scores.shape[-1], scores.device
    ids = prefixes.cached((processor, size), lambda: tokens[(tokens >= 0) & (tokens < size)].to(device))
    return scores.index_copy(-1, ids, scores[..., ids].masked_fill(is_excluded[..., None], -torch.inf))


def forced_bos(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor | None:
    """`ForcedBOSTokenLogitsProcessor`: allow one token only, after a prefix of one token."""
    return _forced(1, processor.bos_token_id, prefixes, scores)


def forced_eos(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor | None:
    """`ForcedEOSTokenLogitsProcessor`: allow end tokens only, as the last token that the length has room for."""
    return _forced(processor.max_length - 1, processor.eos_token_id, prefixes, scores)


def _forced(length: int, tokens: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor | None:
    """The scores; after a prefix of `length` columns instead 0 for these tokens and -inf for all others."""
    if not prefixes.shortest <= length <= prefixes.longest:
        return scores
    if not _all_in_vocabulary(torch.as_tensor(tokens, device="cpu"), scores.shape[-1]):
        return None
    forced = scores.new_full(scores.shape[-1:], -torch.inf)
    forced[tokens] = 0
    return torch.where(prefixes.lengths[..., None] == length, forced, scores)


def length_penalty(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor | None:
    """`ExponentialDecayLengthPenalty`: let the scores of end tokens grow exponentially from a length on."""
    start, growth, ends = processor.regulation_start, processor.regulation_factor, processor.eos_token_id.flatten()
    if prefixes.longest <= start:
        return scores

    def keeps_infinite_scores() -> bool:
        """Whether the ends have scores, and -inf stays -inf, which older versions of transformers make NaN."""
        zeros = torch.zeros(1, max(start, 0) + 1, dtype=torch.int64, device=scores.device)
        if not _all_in_vocabulary(ends, scores.shape[-1]):
            return False
        return not processor(zeros, torch.full_like(scores[:1, 0], -torch.inf)).isnan().any()

    is_full_precision = scores.dtype in (torch.float32, torch.float64)  # a number and a tensor's element round alike
    if not is_full_precision or not prefixes.cached((processor, scores.shape[-1]), keeps_infinite_scores):
        return None
    try:
        factors = [pow(growth, max(n - start, 0)) - 1 for n in range(prefixes.shortest, prefixes.longest + 1)]
    except OverflowError:  # an error in transformers too, but a prefix of this length may never be reached
        return None
    ends = ends.to(scores.device)
    factor = to_device_async(factors, scores.device, torch.float64)
    old = scores[..., ends]
    added = old.abs() * factor[prefixes.lengths - prefixes.shortest].to(scores.dtype)[..., None]
    return scores.index_copy(-1, ends, old + added.masked_fill(~old.isfinite(), 0.0))


def _all_in_vocabulary(ids: torch.Tensor, vocab_size: int) -> bool:
    """Whether all ids have scores."""
    return bool(((ids >= 0) & (ids < vocab_size)).all())


VECTORIZED: dict[type[LogitsProcessor], Callable[[Any, Prefixes, torch.Tensor], torch.Tensor | None]] = {
    logits_process.RepetitionPenaltyLogitsProcessor: repetition,
    logits_process.NoRepeatNGramLogitsProcessor: no_repeat_ngram,
    logits_process.SequenceBiasLogitsProcessor: sequence_bias,
    logits_process.NoBadWordsLogitsProcessor: sequence_bias,
    logits_process.MinLengthLogitsProcessor: min_length,
    logits_process.MinNewTokensLengthLogitsProcessor: min_new_tokens,
    logits_process.SuppressTokensLogitsProcessor: suppress,
    logits_process.SuppressTokensAtBeginLogitsProcessor: suppress_at_begin,
    logits_process.ForcedBOSTokenLogitsProcessor: forced_bos,
    logits_process.ForcedEOSTokenLogitsProcessor: forced_eos,
    logits_process.ExponentialDecayLengthPenalty: length_penalty,
}
