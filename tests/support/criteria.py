"""Stopping criteria of tests."""

from transformers.generation.stopping_criteria import StoppingCriteria


class RowSumIs(StoppingCriteria):
    """Stops a row where the ids of its text sum to 0 modulo 7."""

    stateless = True

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.sum(-1) % 7 == 0
