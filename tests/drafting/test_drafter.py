"""Drafters of a user's own that read the target's hidden states, and drafts that are not what they claim to be."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from all_pairs import each_value
from plain import assert_plain
from tiny import prompts, tiny

from hf_specx import SpeculativeDecoding
from hf_specx.common.round import Draft, Round
from hf_specx.drafting.drafter import Drafter
from hf_specx.models.runner import HiddenStates


LAYOUTS = ("ragged", "padded", "packed", "lockstep")


class Misshapen(Drafter):
    """Claims more candidates than it has."""

    def propose(self, batch, lengths):
        return Draft(batch.index.new_zeros(len(lengths), 1), [2] * len(lengths))


def test_a_draft_is_what_it_claims_to_be():
    with pytest.raises(ValueError, match="has tokens of shape .* for lengths"):
        tiny().generate(**prompts(2), **ENDS, custom_generate=SpeculativeDecoding(Misshapen()))


ENDS = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": [5, 6], "pad_token_id": 0}


class Heads(Drafter):
    """Linear heads on the state that the last token was chosen by, one for each candidate (Medusa, 2401.10774)."""

    needs_hidden = True

    def __init__(self, target: torch.nn.Module, number: int = 3):
        torch.manual_seed(3)
        self.heads = [torch.nn.Linear(32, 48, bias=False) for _ in range(number)]
        self.target = target

    def start(self, context):
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
        self.states = states if done.keep_indices is None else states[done.keep_indices]


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
@pytest.mark.parametrize(("layout", "rows"), each_value(LAYOUTS, [1, 4]))
def test_states_are_those_that_logits_come_from(layout: str, rows: int):
    target = tiny()
    strategy = SpeculativeDecoding(Heads(target), layout=layout)
    assert_plain(target, strategy, prompts(rows), **ENDS)
    assert strategy.report.drafted > 0


@pytest.mark.filterwarnings("ignore:compile=True compiles")
def test_states_of_compiled_forwards(traced: None):
    """Those of a later call have been compiled, also while hooks of another thread's forward are there."""
    target = tiny(num_hidden_layers=3, seed=1)
    other = HiddenStates([(target.model.layers[0], False)], target.device, target)
    expected, compilations = target.generate(**prompts(4), **ENDS), []
    for context in (contextlib.nullcontext(), other):
        strategy = SpeculativeDecoding(Heads(target), num_draft_tokens=3, compile=True)
        with context, ThreadPoolExecutor(1) as pool:
            output = pool.submit(target.generate, **prompts(4), **ENDS, custom_generate=strategy).result()
        assert torch.equal(output, expected)
        assert strategy.report.drafted > 0
        compilations.append(strategy.report.compilations > 0)
    assert compilations == [True, False]
    assert other.outputs == [[]]


def test_states_of_a_layer():
    """As `output_hidden_states` has them, of this thread's forwards alone; no hook is left, also after an error."""
    target, ids = tiny(num_hidden_layers=4), prompts(2)["input_ids"]
    layer = target.model.layers[2]
    hidden = HiddenStates([(layer, False), (layer, True)], torch.device("cpu"), target)
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
