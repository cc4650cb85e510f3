"""A drafter of a user's own that has `propose` alone: the text is that of plain `generate`, in fewer forwards."""

import itertools
from functools import cache

import pytest
import torch
from tiny import Forwards, tiny
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding
from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft
from hf_specx.drafting.drafter import Drafter


LAYOUTS = ("ragged", "padded", "packed", "lockstep")
SETTINGS = {"greedy": {"do_sample": False}, "coupled": {"do_sample": True, "temperature": 0.3, "top_k": 0}}


class Bigrams(Drafter):
    """Proposes what followed the last token when it was in the row before, then what followed that, and so on."""

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        found = [
            torch.tensor(following(batch.row(row).tolist(), length), dtype=torch.int64)
            for row, length in zip(batch.rows, lengths, strict=True)
        ]
        return Draft(pad_sequence(found, batch_first=True), [len(candidates) for candidates in found])


def following(text: list[int], most: int) -> list[int]:
    follower, candidates = dict(itertools.pairwise(text)), text[-1:]
    while len(candidates) <= most and candidates[-1] in follower:
        candidates.append(follower[candidates[-1]])
    return candidates[1:]


def repetitive(rows: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts that repeat themselves, the first one most."""
    texts = [torch.tensor([5, 9, 30] * 5), torch.arange(3, 11).repeat(2), torch.arange(20, 30), torch.tensor([4] * 4)]
    ids = pad_sequence([text.flip(0) for text in texts[:rows]], batch_first=True).flip(1)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


@cache
def target() -> PreTrainedModel:
    """It hardly attends and goes by the last token, so that its texts soon repeat themselves."""
    model = tiny(seed=2)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.01
    return model


def generated(rows: int, **call) -> tuple[torch.Tensor, int]:
    """The text and how many forwards it took."""
    torch.manual_seed(0)
    with Forwards(target()) as forwards:
        output = target().generate(**repetitive(rows), max_new_tokens=40, **call)
    return output, len(forwards.ids)


def check_equal_and_fewer(rows: int, options: dict, **call) -> SpeculativeDecoding:
    expected, plain = generated(rows, **call)
    strategy = SpeculativeDecoding(Bigrams(), **options)
    output, forwards = generated(rows, **call, custom_generate=strategy)
    assert torch.equal(output, expected)
    assert forwards < plain
    return strategy


def lengths_differ(strategy: SpeculativeDecoding) -> bool:
    """Whether rows had unequal numbers of candidates in one round, and in all."""
    report = strategy.report
    rounds = zip(*report.history, strict=False)
    in_a_round = any(len({record.drafted for record in records}) > 1 for records in rounds)
    return in_a_round and len(set(report.drafted_per_row)) > 1


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_text_of_generate_in_fewer_forwards(layout: str, settings: str, rows: int):
    strategy = check_equal_and_fewer(rows, {"layout": layout}, **SETTINGS[settings])
    assert strategy.report.verification == settings
    assert lengths_differ(strategy) == (rows > 1)


class Misshapen(Bigrams):
    """Claims more candidates than it has."""

    def propose(self, batch, lengths):
        draft = super().propose(batch, lengths)
        return draft._replace(lengths=[draft.tokens.shape[1] + 1] * len(lengths))


def test_a_draft_is_what_it_claims_to_be():
    with pytest.raises(ValueError, match="has tokens of shape .* for lengths"):
        target().generate(**repetitive(2), **SETTINGS["greedy"], custom_generate=SpeculativeDecoding(Misshapen()))
