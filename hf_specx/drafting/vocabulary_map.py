"""Which tokens of two tokenizers mean the same, so that a draft of one can propose tokens of the other.

From Timor et al. 2025 (arXiv 2502.05202), Algorithm 4: the draft's distribution is restricted to the common tokens.
"""

import itertools
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedTokenizerBase

from .token_bytes import TokenBytes


SAMPLE_TEXT = """The quick brown fox jumped over 13 lazy dogs; then it slept. "Why?" she asked, and nobody in the old
house could answer that question, because everyone had already left for the summer (it was the 21st of June 2024).

def mean(values: list[float], default=0.0) -> float:
    total = sum(value for value in values if value is not None)
    return total / len(values) if values else default

La société française a été fondée en 1871. Die Straße führt über den Fluss. 日本語の文章。Привет, мир!
"""


class VocabularyMap:
    """The tokens of a target and a draft by what they mean.

    Tokens mean the same if they add the same bytes to a text; special tokens if they are written alike or play the
    same role (end, start, unknown). Several of the draft may mean one of the target.

    Attributes:
        sizes: V of the target's logits and of the draft's; ids from there on are left out.
        to_target: by the draft's ids, the target's; -1 if it has no such token. `to_draft`: the other way.
        overlap: the part of the target's tokens that the draft can propose.
        coverage: the part of the tokens of a sample text that these are.
    """

    def __init__(self, target: TokenBytes, draft: TokenBytes, sizes: tuple[int, int]):
        self.target, self.draft, self.sizes = target, draft, sizes
        self.to_target = _meaning(draft, target, *reversed(sizes))
        self.to_draft = _meaning(target, draft, *sizes)
        common = set(self.to_target) - {-1}
        self.overlap = len(common) / max(1, sum(map(bool, target.contents[: sizes[0]])))
        sample = target.encode(SAMPLE_TEXT.encode())
        self.coverage = sum(number in common for number in sample) / len(sample)
        common_pairs = [pair for pair in enumerate(self.to_target) if pair[1] >= 0]
        on_cpu = torch.tensor(common_pairs, dtype=torch.int64, device="cpu").view(-1, 2).T
        # [2, n] on each device: ids of the draft that mean one of the target, and what they mean
        self.pairs = {on_cpu.device: on_cpu}

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft's logits [..., V_draft] by the target's ids: [..., V_target] float32, -inf where it has no token.

        Their softmax is the draft's distribution restricted to the common tokens; what several tokens of the draft
        have, that mean the same, is added.
        """
        device = logits.device
        if device not in self.pairs:  # another thread may have another device
            self.pairs[device] = self.pairs[torch.device("cpu")].to(device)
        draft_ids, target_ids = self.pairs[device]
        common = logits.index_select(-1, draft_ids).float()
        highest = common.amax(-1, keepdim=True)
        sums = highest.new_zeros(*logits.shape[:-1], self.sizes[0])
        sums.index_add_(-1, target_ids, (common - highest).exp())
        return sums.log() + highest

    def prompt(self, ids: list[int]) -> list[int]:
        """A prompt of the target as the draft's tokenizer writes its text, with what it puts before a text."""
        target = self.target
        draft_ids = list(self.draft.prefix_ids)
        if target.prefix_ids and ids[: len(target.prefix_ids)] == target.prefix_ids:
            ids = ids[len(target.prefix_ids) :]
        special = [number for number in target.special.values() if number < len(self.to_draft)]
        common_special = {number for number in special if self.to_draft[number] >= 0}
        opens = True
        for is_special, numbers in itertools.groupby(ids, common_special.__contains__):
            if is_special:
                draft_ids += [self.to_draft[number] for number in numbers]
            else:
                text = target.joined(numbers)
                if opens and target.opens_with_space:
                    text = text.removeprefix(b" ") or text  # the tokenizer has put it before the text
                if text:
                    draft_ids += self.draft.encode(text, opens)
            opens = False
        return draft_ids or [self.draft.filler]


def _meaning(tokens: TokenBytes, others: TokenBytes, size: int, other_size: int) -> list[int]:
    """For each of the first `size` ids the one of the others, below `other_size`, that means the same; else -1."""
    special = set(tokens.special.values())
    pairs: list[tuple[int | None, int | None]] = []
    for number, content in enumerate(tokens.contents):
        pairs.append((number, None if number in special else others.ids_by_bytes.get(content)))
    pairs += [(number, others.special.get(token)) for token, number in tokens.special.items()]
    # one token may play several roles; the first of these counts
    pairs += [(getattr(tokens, role), getattr(others, role)) for role in ("end", "start", "unknown")]
    meanings = [-1] * size
    for own, other in pairs:
        if own is None or other is None or own >= size or other >= other_size:
            continue
        if meanings[own] < 0:
            meanings[own] = other
    return meanings


MAPS: WeakKeyDictionary[PreTrainedTokenizerBase, Any] = WeakKeyDictionary()  # by the target's, the draft's, and sizes


def vocabulary_map(
    tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase, sizes: tuple[int, int]
) -> VocabularyMap:
    """The map between two tokenizers, made once for each pair of them as long as no tokens are added.

    `sizes` are V of the target's logits and of the draft's.

    Raises:
        ValueError: if a tokenizer does not tell which bytes its tokens stand for.
    """
    maps: dict[Any, VocabularyMap] = MAPS.setdefault(tokenizer, WeakKeyDictionary()).setdefault(draft_tokenizer, {})
    key = (len(tokenizer), len(draft_tokenizer), *sizes)
    if key not in maps:
        maps[key] = VocabularyMap(TokenBytes(tokenizer), TokenBytes(draft_tokenizer), sizes)
    return maps[key]
