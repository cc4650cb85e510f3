"""Processors and criteria of tests."""

import torch
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria


class RowSumIs(StoppingCriteria):
    """Stops a row where the ids of its text sum to 0 modulo 7."""

    stateless = True

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.sum(-1) % 7 == 0


class Counting(LogitsProcessor):
    """Keeps state: each call raises another token."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + 4.0 * torch.nn.functional.one_hot(torch.tensor(self.calls % 7), scores.shape[-1])


class Raising(LogitsProcessor):
    """Raises one token; another one for each request."""

    stateless = True

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores):
        return scores + 4.0 * torch.nn.functional.one_hot(torch.tensor(self.token), scores.shape[-1])


class RowAndPrefix(LogitsProcessor):
    """Depends on the row's place in the batch, the length and the last token."""

    stateless = True

    def __call__(self, input_ids, scores):
        rows = torch.arange(len(scores))
        scores = scores.clone()
        scores[rows, (input_ids[:, -1] + rows + input_ids.shape[1]) % scores.shape[1]] += 4
        return scores
