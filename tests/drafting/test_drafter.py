"""Drafts that are not what they claim to be, and the hidden states of the target that drafters read.

Which states they are in every layout is seen by what heads make of them, in `heads/test_alignment`.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from head_files import random_head, write
from tiny import prompts, tiny

from hf_specx import DraftHead, SpeculativeDecoding
from hf_specx.common.round import Draft
from hf_specx.drafting.drafter import Drafter
from hf_specx.models.decoder import HiddenStates


ENDS = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": [5, 6], "pad_token_id": 0}


class Misshapen(Drafter):
    """Claims more candidates than it has."""

    def propose(self, batch, lengths):
        return Draft(batch.index.new_zeros(len(lengths), 1), [2] * len(lengths))


def test_a_draft_is_what_it_claims_to_be():
    with pytest.raises(ValueError, match="has tokens of shape .* for lengths"):
        tiny().generate(**prompts(2), **ENDS, custom_generate=SpeculativeDecoding(Misshapen()))


@pytest.mark.filterwarnings("ignore:compile=True compiles")
def test_states_of_compiled_forwards(traced: None, tmp_path: Path):
    """Those of a later call have been compiled, also while hooks of another thread's forward are there."""
    target = tiny(num_hidden_layers=3, seed=1)
    draft = DraftHead.from_pretrained(write(random_head("medusa"), tmp_path), target=target)
    other = HiddenStates([(target.model.layers[0], False)], target.device)
    expected, compilations = target.generate(**prompts(4), **ENDS), []
    for context in (contextlib.nullcontext(), other):
        strategy = SpeculativeDecoding(draft, num_draft_tokens=3, compile=True)
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
