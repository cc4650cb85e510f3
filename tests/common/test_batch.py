"""The growing text of a batch, as stock lays it out."""

import torch

from hf_specx.common.batch import Batch


def two_rows() -> Batch:
    return Batch(torch.tensor([[9, 9, 5], [1, 2, 3]]), torch.tensor([[0, 0, 1], [1, 1, 1]]), pad_token_id=9)


def test_a_row_leaves_pads_out():
    sequences = two_rows()
    assert sequences.row(0).tolist() == [5]
    assert sequences.last(2).tolist() == [[9, 5], [2, 3]]


def test_append_keeps_some_and_pads_the_rest():
    sequences = two_rows()
    sequences.put(torch.tensor([[4, 4], [6, 6]]))
    assert sequences.last(2, ahead=2).tolist() == [[4, 4], [6, 6]]
    sequences.append(torch.tensor([[4, 7, 8], [6, 7, 8]]), torch.tensor([1, 3]), [1, 3])
    assert sequences.counts == [1, 3]
    assert sequences.output(3).tolist() == [[9, 9, 5, 4, 9, 9], [1, 2, 3, 6, 7, 8]]
    assert sequences.last(2).tolist() == [[5, 4], [7, 8]]


def test_rows_leave_and_the_others_keep_their_numbers():
    sequences = two_rows()
    assert sequences.retire([]) is None
    assert sequences.retire([0]).tolist() == [1]
    sequences.append(torch.tensor([[7]]), torch.tensor([1]), [1])
    assert sequences.rows == [1]
    assert sequences.counts == [0, 1]
    sequences.truncate(1, 0)
    assert sequences.output(1).tolist() == [[9, 9, 5, 9], [1, 2, 3, 9]]


def test_all_rows_can_be_taken_as_decoding_again():
    sequences = two_rows()
    sequences.retire([0])
    sequences.revive()
    assert sequences.rows == [0, 1]
    assert sequences.ends.tolist() == [3, 3]


def test_room_grows_without_losing_text():
    sequences = two_rows()
    for i in range(40):
        sequences.append(torch.full((2, 1), i), torch.ones(2, dtype=torch.int64), [1, 1])
    assert sequences.output(40)[1, 3:].tolist() == list(range(40))


def test_extend_takes_a_longer_text():
    sequences = two_rows()
    sequences.extend(torch.tensor([[9, 9, 5, 4, 4], [1, 2, 3, 4, 5]]))
    assert sequences.counts == [2, 2]
    assert sequences.row(0).tolist() == [5, 4, 4]
