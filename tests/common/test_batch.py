"""The growing text of a batch, as stock lays it out."""

import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft, Judgement
from hf_specx.sampling.stopping import Stopping


def two_rows() -> Batch:
    return Batch(torch.tensor([[9, 9, 5], [1, 2, 3]]), torch.tensor([[0, 0, 1], [1, 1, 1]]), pad_token_id=9)


def test_a_row_leaves_pads_out():
    batch = two_rows()
    assert batch.row(0).tolist() == [5]
    assert batch.last(2).tolist() == [[5, 5], [2, 3]]


def test_emit_keeps_some_and_pads_the_rest():
    batch = two_rows()
    batch.put(torch.tensor([[4, 4], [6, 6]]))
    assert batch.last(2, ahead=2).tolist() == [[4, 4], [6, 6]]
    batch.emit(torch.tensor([[4, 7, 8], [6, 7, 8]]), [1, 3])
    assert batch.counts == [1, 3]
    assert batch.output(3).tolist() == [[9, 9, 5, 4, 9, 9], [1, 2, 3, 6, 7, 8]]
    assert batch.last(2).tolist() == [[5, 4], [7, 8]]


def test_rows_leave_and_the_others_keep_their_numbers():
    batch = two_rows()
    assert batch.retire([]) is None
    assert batch.retire([0]).tolist() == [1]
    batch.emit(torch.tensor([[7]]), [1])
    assert batch.rows == [1]
    assert batch.counts == [0, 1]
    batch.truncate(1, 0)
    assert batch.output(1).tolist() == [[9, 9, 5, 9], [1, 2, 3, 9]]


def test_room_grows_without_losing_text():
    batch = two_rows()
    for i in range(40):
        batch.emit(torch.full((2, 1), i), [1, 1])
    assert batch.output(40)[1, 3:].tolist() == list(range(40))


UNEVEN = Draft(torch.tensor([[4, 6, 7], [5, 0, 0]]), [3, 1])  # row 1 has one candidate, and two fillers
CHANCES = torch.tensor([[0.5, 0.25, 0.125], [0.75, 9.0, 9.0]])


def judged(accepted: list[int], undefined: list[list[bool]] | None = None) -> Judgement:
    """On that draft; 8 and 2 are the tokens after it."""
    nowhere = torch.zeros(2, 4, dtype=torch.bool) if undefined is None else torch.tensor(undefined)
    return Judgement(torch.tensor(accepted), torch.tensor([8, 2]), CHANCES, CHANCES / 2, nowhere)


def at_most(emitted: int, batch: Batch) -> Stopping:
    batch.limits = [emitted] * 2
    return Stopping(StoppingCriteriaList(), width=3, max_length=3 + emitted)


def test_append_emits_what_was_accepted_and_the_next_token():
    batch = two_rows()
    done = batch.append(UNEVEN, judged([1, 1], [[False, False, True, True], [False] * 4]), at_most(9, batch))
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
    batch = two_rows()
    done = batch.append(UNEVEN, judged([3, 0]), at_most(3, batch))
    assert batch.output(3)[:, 3:].tolist() == [[4, 6, 7], [2, 9, 9]]
    assert (done.emitted, done.accepted, done.judged, done.gained) == ([3, 1], [3, 0], [3, 1], [4, 1])
    assert (done.rows, done.ended) == ([0, 1], [0])


def test_in_lockstep_all_rows_gain_what_the_least_one_does():
    batch = Batch(torch.tensor([[1, 2, 3], [4, 5, 6]]), None, pad_token_id=9, lockstep=True)
    done = batch.append(UNEVEN, judged([3, 1]), at_most(9, batch))
    assert batch.output(2)[:, 3:].tolist() == [[4, 6], [5, 2]]
    assert (done.accepted, done.gained, done.emitted) == ([3, 1], [2, 2], [2, 2])
    assert batch.counts == [2, 2]
