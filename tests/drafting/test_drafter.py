"""Drafters of a user's own: one that has `propose` alone, and one that reads the target's last hidden states."""

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from counting import counting
from tiny import prompts, tiny
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding
from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft, Round
from hf_specx.drafting.drafter import Drafter
from hf_specx.models.decoder import HiddenStates


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


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_text_of_generate_in_fewer_forwards(layout: str, settings: str, rows: int):
    strategy, found = SpeculativeDecoding(Bigrams(), layout=layout), []
    for custom in (None, strategy):
        torch.manual_seed(0)
        with counting(target()) as forwards:
            call = repetitive(rows) | SETTINGS[settings] | {"max_new_tokens": 40}
            found.append((target().generate(**call, custom_generate=custom), forwards))
    (expected, plain), (output, ours) = found
    assert torch.equal(output, expected)
    assert len(ours) < len(plain)
    assert strategy.report.verification == settings
    rounds = zip(*strategy.report.history, strict=False)
    assert any(len({record.drafted for record in records}) > 1 for records in rounds) == (rows > 1)


class Misshapen(Bigrams):
    """Claims more candidates than it has."""

    def propose(self, batch, lengths):
        draft = super().propose(batch, lengths)
        return draft._replace(lengths=[draft.tokens.shape[1] + 1] * len(lengths))


def test_a_draft_is_what_it_claims_to_be():
    with pytest.raises(ValueError, match="has tokens of shape .* for lengths"):
        target().generate(**repetitive(2), **SETTINGS["greedy"], custom_generate=SpeculativeDecoding(Misshapen()))


ENDS = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": [5, 6], "pad_token_id": 0}


class Heads(Drafter):
    """Linear heads on the state that the last token was chosen by, one for each candidate (Medusa, 2401.10774)."""

    needs_hidden = True

    def __init__(self, target: torch.nn.Module, number: int = 3):
        torch.manual_seed(3)
        self.heads = [torch.nn.Linear(32, 48, bias=False) for _ in range(number)]
        self.target, self.alike = target, 0

    def read(self, reading):
        self.states = None

    def propose(self, batch, lengths):
        number = 0 if self.states is None else min(max(lengths), len(self.heads))
        chosen = [head(self.states).argmax(-1) for head in self.heads[:number]]
        tokens = torch.stack(chosen, 1) if chosen else batch.index.new_empty(len(batch.rows), 0)
        return Draft(tokens, [min(length, number) for length in lengths], None, "heads")

    def observe(self, done: Round):
        hidden = done.forward.hidden
        assert hidden.shape == (len(done.rows), done.draft.tokens.shape[1] + 1, 32)
        torch.testing.assert_close(self.target.lm_head(hidden), done.forward.logits, atol=1e-4, rtol=1e-4)
        states = hidden[torch.arange(len(hidden)), torch.tensor(done.accepted)]
        self.states = states if done.stay is None else states[done.stay]


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_are_those_that_logits_come_from(layout: str, rows: int):
    target = tiny()
    expected = target.generate(**prompts(rows), **ENDS)
    strategy = SpeculativeDecoding(Heads(target), layout=layout)
    assert torch.equal(target.generate(**prompts(rows), **ENDS, custom_generate=strategy), expected)
    assert strategy.report.drafted > 0


@pytest.mark.filterwarnings("ignore:compile=True compiles")
def test_states_of_compiled_forwards(traced: None):
    """Those of a later call have been compiled, also while hooks of another thread's forward are there."""
    target = tiny(num_hidden_layers=3, seed=1)
    other = HiddenStates([(target.model.layers[0], False)], target.device)
    expected, compilations = target.generate(**prompts(4), **ENDS), []
    for context in (contextlib.nullcontext(), other):
        strategy = SpeculativeDecoding(Heads(target), num_draft_tokens=3, compile=True)
        with context, ThreadPoolExecutor(1) as pool:
            found = pool.submit(target.generate, **prompts(4), **ENDS, custom_generate=strategy).result()
        assert torch.equal(found, expected)
        assert strategy.report.drafted > 0
        compilations.append(strategy.report.compilations > 0)
    assert compilations == [True, False]
    assert other.found == [[]]


def test_states_of_a_layer():
    """As `output_hidden_states` has them, of this thread's forwards alone; no hook is left, also after an error."""
    target, ids = tiny(num_hidden_layers=4), prompts(2)["input_ids"]
    layer = target.model.layers[2]
    hidden = HiddenStates([(layer, False), (layer, True)], torch.device("cpu"))
    with torch.no_grad():
        expected = target(ids, output_hidden_states=True).hidden_states
        before = dict(layer._forward_hooks)  # transformers leaves some of its own
        with ThreadPoolExecutor(1) as pool, contextlib.suppress(KeyError), hidden:
            target(ids)
            raise KeyError(pool.submit(target, ids[:1, :2]).result())
    states = torch.cat([expected[3], expected[2]], -1)
    assert torch.equal(hidden.last(), states)
    assert torch.equal(hidden.last(2), states[:, -2:])
    assert dict(layer._forward_hooks) == before
