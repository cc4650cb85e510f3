"""The record of a round, as the text of a batch grows by it."""

import pytest
import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_specx.common.batch import Batch, RowState
from hf_specx.common.round import Draft, Verdict
from hf_specx.sampling.stopping import Stopping


UNEVEN = Draft(torch.tensor([[4, 6, 7], [5, 0, 0]]), [3, 1])  # row 1 has one candidate, and two fillers
CHANCES = torch.tensor([[0.5, 0.25, 0.125], [0.75, 9.0, 9.0]])
UNDEFINED = torch.tensor([[False, False, True, True], [False] * 4])
ROUNDS = {  # most tokens of a row, whether in lockstep, accepted; judged, the text, emitted, gained, rows that end
    "what was accepted and the next token": (9, False, [1, 1], [2, 1], [[4, 8], [5, 2]], [2, 2], [2, 2], []),
    "up to a stop": (3, False, [3, 0], [3, 1], [[4, 6, 7], [2, 9, 9]], [3, 1], [4, 1], [0]),
    "in lockstep what the least row does": (9, True, [3, 1], [3, 1], [[4, 6], [5, 2]], [2, 2], [2, 2], []),
}


@pytest.mark.parametrize("case", ROUNDS)
def test_append_emits(case: str):
    most, lockstep, accepted, judged, text, emitted, gained, ended = ROUNDS[case]
    prompts, mask = torch.tensor([[9, 9, 5], [1, 2, 3]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    batch = Batch(prompts, mask, 9, lockstep, [RowState(limit=most) for _ in range(2)])
    verdict = Verdict(torch.tensor(accepted), torch.tensor([8, 2]), CHANCES, CHANCES / 2, UNDEFINED)
    done = batch.append(UNEVEN, verdict, Stopping(StoppingCriteriaList(), width=3, max_length=3 + most))
    assert batch.output(max(emitted))[:, 3:].tolist() == text
    assert batch.counts == done.emitted == emitted
    assert (done.batch, done.rows, done.draft, done.emitted_before) == (batch, [0, 1], UNEVEN, [0, 0])
    assert (done.accepted, done.judged, done.num_new_tokens, done.ended) == (accepted, judged, gained, ended)
    assert done.prefix_acceptance == [[0.5, 0.25, 0.125], [0.75]]  # of candidates, not of fillers
    assert done.overlap == [[0.25, 0.125, 0.0625], [0.375]]
    assert done.undefined == [2, 4]


def test_candidates_that_were_not_judged_are_no_output():
    batch = Batch(torch.tensor([[1, 2]]), None, 0)
    batch.emit(torch.tensor([[3]]), [1])
    batch.write(torch.tensor([[4]]))
    assert batch.output(2).tolist() == [[1, 2, 3, 0]]
