"""SynthID, transformers' watermark of that name (SynthID-Text, Nature 2024), for all rows and positions at once."""

from collections.abc import Iterator
from typing import Any

import torch

from .vectorized import Prefixes


FEW = 8  # where warpers have left less than one token in so many, only these are computed
LARGEST_TABLE = 1 << 16  # of g-values, for each key; the default of transformers


def is_usual_synthid(processor: Any) -> bool:
    """Whether `synthid` can stand in for a processor: an unused one without rare settings or those for tests."""
    size = len(processor.sampling_table)
    has_table = size & (size - 1) == 0 and size <= LARGEST_TABLE  # by the lowest bits of a hash
    is_usual = not (processor.debug_mode or processor.skip_first_ngram_calls)
    return processor.state is None and has_table and is_usual


def synthid(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor:
    """The watermarked scores [R, P, V]: changed by the g-values of the last n - 1 tokens, unless these stood before.

    The processor's own state after k emitted tokens is a function of these: zeros and then the tokens, of which the
    last n - 1 are the context, and the hashes of the contexts so far, of which it keeps the last
    `context_history_size`, zeros at first.
    """
    emitted = prefixes.lengths - prefixes.batch.width  # [R, P]
    history_size = processor.context_history_size
    context_size = processor.ngram_len - 1
    tokens = prefixes.tokens(prefixes.batch.width)[0]
    # of the contexts after 0, 1, 2, ... emitted tokens
    contexts = torch.nn.functional.pad(tokens, (context_size, 0)).unfold(2, context_size, 1)  # [R, 1 or P, C, n - 1]
    flat = contexts.flatten(0, 1)
    hashes = processor.accumulate_hash(flat.new_ones(flat.shape[:2]), flat).view(contexts.shape[:3])
    hashes = hashes.expand(-1, emitted.shape[1], -1)  # [R, P, C]
    current = hashes.gather(2, emitted[..., None])[..., 0]  # [R, P]
    number = torch.arange(hashes.shape[2], device=hashes.device)
    in_history = (number < emitted[..., None]) & (number >= (emitted - history_size)[..., None])  # [R, P, C]
    is_repeated = (in_history & (hashes == current[..., None])).any(-1)
    is_repeated |= (current == 0) & (emitted < history_size)  # a place of the history that is empty is 0
    marked = _marked(processor, prefixes, current.flatten(), scores.flatten(0, 1)).view_as(scores)
    return torch.where(is_repeated[..., None], scores, marked)


def _marked(processor: Any, prefixes: Prefixes, context: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Scores [N, V] as `update_scores` of transformers has them after contexts with these hashes [N].

    Where warpers have left few tokens, only these are computed, and sums may be rounded otherwise.
    """
    vocab_size = scores.shape[1]
    lowest_score = torch.finfo(scores.dtype).min
    num_left = int((scores > -torch.inf).sum(1).amax()) if scores.device.type == "cpu" else vocab_size
    few_left = num_left < vocab_size // FEW
    if few_left:
        values, ids = scores.topk(max(num_left, 1))
    else:
        values, ids = scores, torch.arange(vocab_size, device=context.device)
    probs = values.softmax(1)
    hashes = processor.accumulate_hash(context[:, None], ids[..., None])  # [N, V], or of the few tokens
    for g_values in _g_values(processor, prefixes, hashes):
        probs = probs * (1 + g_values - (g_values * probs).sum(1, keepdim=True))
    log_probs = probs.log()
    log_probs = torch.where(log_probs.isfinite(), log_probs, lowest_score)
    if few_left:
        return torch.full_like(scores, lowest_score).scatter_(1, ids, log_probs)
    return log_probs


def _g_values(processor: Any, prefixes: Prefixes, hashes: torch.Tensor) -> Iterator[torch.Tensor]:
    """0 or 1 for each hash of a context and a token, key by key."""
    size, keys = len(processor.sampling_table), processor.keys

    def make_tables() -> torch.Tensor:
        """By key and by the lowest bits of the hash, on which alone those of the next hash depend: [depth, size]."""
        lowest_bits = torch.arange(size, device=keys.device)
        return processor.sampling_table.float()[processor.accumulate_hash(lowest_bits, keys[:, None, None]) % size]

    lowest_bits = (hashes & (size - 1)).flatten()
    for table in prefixes.cached((processor, "g-values"), make_tables):
        yield table.index_select(0, lowest_bits).view_as(hashes)  # on a CPU four times as fast as indexing
