"""A small rewindable processor, as a user may write one."""

import torch
from transformers.generation.logits_process import LogitsProcessor


class Automaton(LogitsProcessor):
    """Allows tokens by a state that each token changes; in every third state there is one token only.

    Args:
        vocab_size: V.
        width: columns of the prompts, for plain `generate`.
        states: how many.
        free: rows in which everything is allowed.
        always: a token that is allowed wherever there are several.
        max_rollback: how many tokens it takes back.
    """

    def __init__(self, vocab_size, width, states=6, free=(), always=None, max_rollback=10**6):
        self.vocab_size, self.width, self.free, self.max_rollback = vocab_size, width, free, max_rollback
        generator, plain = torch.Generator("cpu").manual_seed(5), {"dtype": torch.float32, "device": "cpu"}
        table = torch.rand(states, vocab_size, generator=generator, **plain) < 0.5
        table[:, -2:] = True
        if always is not None:
            table[:, always] = True
        for state in range(0, states, 3):
            table[state] = torch.arange(vocab_size, device="cpu") == (5 * state + 2) % vocab_size
        self.table, self.texts = table, {}
        self.buffer = None  # all masks have the same memory, as those of a library may have

    def state(self, row, text):
        state = 1 + row % (len(self.table) - 1)
        for token in text:
            state = (3 * state + token + 1) % len(self.table)
        return state

    def accept(self, row, token):
        self.texts.setdefault(row, []).append(token)

    def rollback(self, row, count):
        assert 0 < count <= min(self.max_rollback, len(self.texts[row]))
        del self.texts[row][-count:]

    def mask(self, rows):
        masks = torch.stack([self.table[self.state(row, self.texts.get(row, []))] for row in rows])
        masks |= torch.tensor([row in self.free for row in rows], device="cpu")[:, None]
        self.buffer = masks if self.buffer is None or len(self.buffer) < len(rows) else self.buffer
        return self.buffer[: len(rows)].copy_(masks)

    def __call__(self, input_ids, scores):
        states = [self.state(row, text) for row, text in enumerate(input_ids[:, self.width :].tolist())]
        free = torch.tensor([row in self.free for row in range(len(input_ids))])
        return scores.masked_fill(~(self.table[states] | free[:, None]), -torch.inf)
