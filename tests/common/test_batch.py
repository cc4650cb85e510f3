"""The record of a round, as the text of a batch grows by it."""

import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft, Judgement
from hf_specx.sampling.stopping import Stopping


UNEVEN = Draft(torch.tensor([[4, 6, 7], [5, 0, 0]]), [3, 1])  # row 1 has one candidate, and two fillers
CHANCES = torch.tensor([[0.5, 0.25, 0.125], [0.75, 9.0, 9.0]])


def judged(accepted: list[int], undefined: list[list[bool]] | None = None) -> Judgement:
    """On that draft; 8 and 2 are the tokens after it."""
    nowhere = torch.zeros(2, 4, dtype=torch.bool) if undefined is None else torch.tensor(undefined)
    return Judgement(torch.tensor(accepted), torch.tensor([8, 2]), CHANCES, CHANCES / 2, nowhere)


def two_rows(limit: int, lockstep: bool = False) -> tuple[Batch, Stopping]:
    """That may emit so many tokens each."""
    batch = Batch(torch.tensor([[9, 9, 5], [1, 2, 3]]), torch.tensor([[0, 0, 1], [1, 1, 1]]), 9, lockstep=lockstep)
    batch.limits = [limit] * 2
    return batch, Stopping(StoppingCriteriaList(), width=3, max_length=3 + limit)


def test_append_emits_what_was_accepted_and_the_next_token():
    batch, stopping = two_rows(9)
    done = batch.append(UNEVEN, judged([1, 1], [[False, False, True, True], [False] * 4]), stopping)
    assert batch.output(2)[:, 3:].tolist() == [[4, 8], [5, 2]]
    assert batch.counts == [2, 2]
    assert (done.batch, done.rows, done.draft) == (batch, [0, 1], UNEVEN)
    assert (done.before, done.emitted, done.gained) == ([0, 0], [2, 2], [2, 2])
    assert (done.accepted, done.judged) == ([1, 1], [2, 1])
    assert done.survival == [[0.5, 0.25, 0.125], [0.75]]  # of candidates, not of fillers
    assert done.overlap == [[0.25, 0.125, 0.0625], [0.375]]
    assert done.undefined == [2, 4]
    assert done.ended == []


def test_append_cuts_at_a_stop():
    batch, stopping = two_rows(3)
    done = batch.append(UNEVEN, judged([3, 0]), stopping)
    assert batch.output(3)[:, 3:].tolist() == [[4, 6, 7], [2, 9, 9]]
    assert (done.emitted, done.accepted, done.judged, done.gained) == ([3, 1], [3, 0], [3, 1], [4, 1])
    assert (done.rows, done.ended) == ([0, 1], [0])


def test_in_lockstep_all_rows_gain_what_the_least_one_does():
    batch, stopping = two_rows(9, lockstep=True)
    done = batch.append(UNEVEN, judged([3, 1]), stopping)
    assert batch.output(2)[:, 3:].tolist() == [[4, 6], [5, 2]]
    assert (done.accepted, done.gained, done.emitted) == ([3, 1], [2, 2], [2, 2])
    assert batch.counts == [2, 2]


def test_candidates_that_were_not_judged_are_no_output():
    batch = Batch(torch.tensor([[1, 2]]), None, 0)
    batch.emit(torch.tensor([[3]]), [1])
    batch.put(torch.tensor([[4]]))
    assert batch.output(2).tolist() == [[1, 2, 3, 0]]
