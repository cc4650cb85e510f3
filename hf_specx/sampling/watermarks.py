"""transformers' watermarks, for all rows and positions at once, as in `vectorized`."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers.generation import logits_process

from .vectorized import Prefixes


MOST_GREENLISTS = 256  # kept for one call, [V] bool each
FEW = 8  # where warpers have left less than one token in so many, only these are computed
LARGEST_TABLE = 1 << 16  # of g-values that is made for each key


def watermark(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor | None:
    """A bias is added to the tokens of a list that depends on the last token only ("lefthash").

    The list is drawn as transformers does, by a generator of the device whose seed is made of this token on the host.
    """
    if processor.seeding_scheme != "lefthash" or prefixes.shortest < processor.context_width:
        return None
    lists: dict[int, torch.Tensor] = prefixes.kept((processor, scores.shape[-1]), dict)
    tokens = prefixes.last_ids()
    if len(lists) + len(tokens) > max(MOST_GREENLISTS, len(tokens)):
        lists.clear()
    for token in set(tokens) - lists.keys():
        processor.set_seed(torch.tensor([token], device="cpu"))
        order = torch.randperm(processor.vocab_size, device=scores.device, generator=processor.rng)
        chosen = torch.zeros_like(scores[0, 0], dtype=torch.bool)
        lists[token] = chosen.index_fill(0, order[: processor.greenlist_size], True)
    green = torch.stack([lists[token] for token in tokens]).view_as(scores)
    return torch.where(green, scores + processor.bias, scores)


def synthid(processor: Any, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor:
    """Scores follow g-values of the last n - 1 tokens, but not where these stood before (SynthID-Text, Nature 2024).

    A processor whose `state` is None has seen nothing of the prompt. Its state after k emitted tokens is a function of
    these: zeros and then the tokens, of which the last n - 1 are the context, and the hashes of the contexts so far,
    of which it keeps the last `context_history_size`, zeros at first.
    """
    if processor.debug_mode:
        scores = torch.ones_like(scores)
    emitted, kept = prefixes.lengths - prefixes.batch.width, processor.context_history_size  # [R, P]
    first = processor.ngram_len - 1 if processor.skip_first_ngram_calls else 0  # contexts before this one are left out
    tokens, size = prefixes.tokens(prefixes.batch.width)[0], processor.ngram_len - 1
    # of the contexts after 0, 1, 2, ... emitted tokens
    contexts = torch.nn.functional.pad(tokens, (size, 0)).unfold(1, size, 1)  # [R, C, n - 1]
    hashes = processor.accumulate_hash(contexts.new_ones(contexts.shape[:2]), contexts)  # [R, C]
    own = hashes.gather(1, emitted)  # [R, P]
    earlier = torch.arange(hashes.shape[1], device=hashes.device)
    seen = (earlier < emitted[..., None]) & (earlier >= (emitted - kept).clamp(min=first)[..., None])  # [R, P, C]
    repeated = (seen & (hashes[:, None] == own[..., None])).any(-1)
    repeated |= (own == 0) & (emitted - first < kept)
    marked = _marked(processor, prefixes, own.flatten(), scores.flatten(0, 1)).view_as(scores)
    return torch.where((repeated | (emitted < first))[..., None], scores, marked)


def _marked(processor: Any, prefixes: Prefixes, context: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Scores [N, V] as `update_scores` of transformers has them after contexts with these hashes [N].

    Where warpers have left few tokens, only these are computed, and sums may be rounded otherwise.
    """
    vocab_size, least = scores.shape[1], torch.finfo(scores.dtype).min
    left = int((scores > -torch.inf).sum(1).amax()) if scores.device.type == "cpu" else vocab_size
    few = left < vocab_size // FEW
    values, ids = scores.topk(max(left, 1)) if few else (scores, torch.arange(vocab_size, device=context.device))
    probs = values.softmax(1)
    hashes = processor.accumulate_hash(context[:, None], ids[..., None])  # [N, V], or of the few tokens
    for g_values in _g_values(processor, prefixes, hashes):
        probs = probs * (1 + g_values - (g_values * probs).sum(1, keepdim=True))
    logs = probs.log()
    logs = torch.where(logs.isfinite(), logs, least)
    return torch.full_like(scores, least).scatter_(1, ids, logs) if few else logs


def _g_values(processor: Any, prefixes: Prefixes, hashes: torch.Tensor) -> Iterator[torch.Tensor]:
    """0 or 1 for each hash of a context and a token, key by key."""
    size, keys = len(processor.sampling_table), processor.keys
    if size & (size - 1) or size > LARGEST_TABLE:
        for key in keys.split(1):
            yield processor.sampling_table[processor.accumulate_hash(hashes, key) % size]
        return

    def make() -> torch.Tensor:
        """By key and by the lowest bits of the hash, on which alone those of the next hash depend: [depth, size]."""
        lowest = torch.arange(size, device=keys.device)
        return processor.sampling_table.float()[processor.accumulate_hash(lowest, keys[:, None, None]) % size]

    lowest = (hashes & (size - 1)).flatten()
    for table in prefixes.kept((processor, "g-values"), make):
        yield table.index_select(0, lowest).view_as(hashes)  # on a CPU four times as fast as indexing


WATERMARKS: dict[type[logits_process.LogitsProcessor], Any] = {
    logits_process.WatermarkLogitsProcessor: watermark,
    logits_process.SynthIDTextWatermarkLogitsProcessor: synthid,
}
