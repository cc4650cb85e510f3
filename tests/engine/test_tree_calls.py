"""Calls that ask for trees and cannot have them are decoded by the chain of first choices, and the report says why."""

from typing import Any

import pytest
import torch
import zoo
from plain import assert_plain
from random_trees import RandomTrees
from tiny import VOCAB_SIZE, near, prompts, tiny
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from unheard import unheard_of

from hf_specx import SpeculativeDecoding, generate
from hf_specx.common.round import Draft
from hf_specx.drafting.drafter import Drafter


SETTINGS = {"max_new_tokens": 16, "pad_token_id": 0}
GREEDY, SAMPLED = SETTINGS | {"do_sample": False}, SETTINGS | {"do_sample": True, "top_k": 0}


def assert_chain(reason: str, strategy: SpeculativeDecoding, target: Any = None, inputs: Any = None, **settings: Any):
    target = tiny() if target is None else target
    assert_plain(target, strategy, inputs, **GREEDY | settings)
    report = strategy.report
    assert report.nodes == report.drafted > 0
    assert reason in report.tree_reason
    assert report.tree_reason in str(report)
    assert report.to_dict()["tree_reason"] == report.tree_reason


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
@pytest.mark.parametrize("layout", ["padded", "packed", "lockstep"])
def test_other_layouts_take_chains(layout: str):
    strategy = SpeculativeDecoding(near(tiny(), 0.1), num_draft_tokens=3, tree=8, layout=layout)
    assert_chain(f"the layout of LlamaForCausalLM is {layout!r}", strategy)


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
def test_recurrent_states_and_encoder_decoders_take_chains():
    target = zoo.build("causal", "mamba2")
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=3, tree=8)
    assert_chain("is 'lockstep'", strategy, target, zoo.inputs(target, 3))
    target = zoo.build("seq2seq", "t5")
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=3, tree=8)
    assert_chain("is 'padded'", strategy, target, zoo.inputs(target, 3))


@pytest.mark.parametrize("verification", ["token", "block"])
def test_rejection_takes_chains(verification: str):
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.1), num_draft_tokens=3, tree=8, verification=verification)
    target.generate(**prompts(3), **SAMPLED, custom_generate=strategy)
    assert strategy.report.verification == verification
    assert "judges a chain" in strategy.report.tree_reason
    assert strategy.report.nodes == strategy.report.drafted
    assert_plain(target, strategy, **GREEDY)  # where it judges nothing
    assert strategy.report.nodes > strategy.report.drafted


def test_a_draft_without_other_choices_takes_chains():
    lookup = PromptLookupCandidateGenerator(num_output_tokens=3, max_matching_ngram_size=1, max_length=64)
    strategy = SpeculativeDecoding(lookup, num_draft_tokens=3, tree=8)
    target = tiny(vocab_size=12)
    inputs = prompts(3)
    inputs["input_ids"] %= 12
    assert_chain("does not know what else", strategy, target, inputs)


def test_a_target_that_is_measured_takes_chains():
    target = unheard_of(tiny())
    strategy = SpeculativeDecoding(near(tiny(), 0.1), num_draft_tokens=3, tree=8)
    assert_chain("was measured with chains", strategy, target)
    target.generate(**prompts(3), **SAMPLED, custom_generate=strategy)
    assert strategy.report.verification == "block"  # that of a call that has asked for no tree
    with_seeds = {"seeds": [1, 2, 3], "custom_generate": strategy}
    target.generate(**prompts(3), **SAMPLED, **with_seeds)
    assert strategy.report.verification == "block"
    asked = SpeculativeDecoding(near(tiny(), 0.1), num_draft_tokens=3, tree=8, verification="coupled")
    target.generate(**prompts(3), **SAMPLED, custom_generate=asked)
    assert asked.report.verification == "coupled"


def test_trees_that_nobody_asked_for_are_chains():
    """The branch of first children, without any word in the report."""
    target, texts = tiny(), {}
    for row, mask in zip(*prompts(4).values(), strict=True):
        texts[tuple(row[mask.bool()].tolist())] = []
    strategy = SpeculativeDecoding(RandomTrees(texts, VOCAB_SIZE))
    assert_plain(target, strategy, **SAMPLED)
    assert strategy.report.verification == "coupled"
    assert strategy.report.nodes == strategy.report.drafted > 0
    assert strategy.report.tree_reason == ""


class Wrong(Drafter):
    proposes_trees = True

    def __init__(self, parents: Any):
        self.parents = parents

    def propose(self, batch, lengths):
        return Draft(torch.ones(len(batch.rows), 2, dtype=torch.int64), [2], None, "wrong", parents=self.parents)


@pytest.mark.parametrize(
    ("parents", "message"),
    [([(-1,)], "the parents of \\[1\\] candidates"), ([(0, -1)], "candidate 0 has the parent 0")],
)
def test_parents_that_do_not_fit_are_an_error(parents: Any, message: str):
    strategy = SpeculativeDecoding(Wrong(parents), tree=4)
    with pytest.raises(ValueError, match=message):
        tiny().generate(**prompts(1), **GREEDY, custom_generate=strategy)


class Long(Drafter):
    """A tree of 40 candidates a row, in which what comes first is a chain of 20."""

    proposes_trees = True

    def propose(self, batch, lengths):
        rows, parents = len(batch.rows), (*range(-1, 19), *range(-1, 19))
        ids = torch.arange(40, device=batch.ids.device).repeat(rows, 1) % VOCAB_SIZE
        acceptance = [[0.5**place for place in range(40)]] * rows
        return Draft(ids, [40] * rows, None, "long", prefix_acceptance=acceptance, parents=[parents] * rows)


@pytest.mark.parametrize(("tree", "most"), [(7, 7), (25, 25), ("auto", 40), (False, 20)])
def test_no_row_has_more_nodes_than_were_asked_for(tree: Any, most: int):
    """Whoever proposes them."""
    strategy = SpeculativeDecoding(Long(), tree=tree)
    assert_plain(tiny(), strategy, **GREEDY)
    records = [record for row in strategy.report.history for record in row]
    assert max(record.nodes for record in records) == most
    assert max(record.drafted for record in records) == min(most, 20)


def test_forced_tokens_are_not_counted():
    parents = [(-1, 0, 1, -1), (-1, 0)]
    tokens, forced = torch.arange(8).view(2, 4), [[False, True, False], [False, False]]
    draft = Draft(tokens, [4, 2], None, "given", forced, parents=parents)
    cut = draft.cut(2)
    assert (cut.lengths, cut.parents, cut.tokens.tolist()) == ([3, 2], [(-1, 0, 1), (-1, 0)], [[0, 1, 2], [4, 5, 6]])
    assert cut.first_choices().lengths == [3, 2]
    assert draft.cut(4) is draft


class Shallow(Drafter):
    """The text of plain `generate` behind a second choice, and a first one that is wrong."""

    proposes_trees = True

    def __init__(self, text: list[int]):
        self.text = text

    def propose(self, batch, lengths):
        right = self.text[len(batch.row_states[0].emitted_ids) :][: min(3, lengths[0])]
        if not right:
            return Draft(batch.index.new_zeros(1, 0), [0])
        tokens = torch.tensor([[(right[0] + 1) % VOCAB_SIZE, *right]])
        return Draft(tokens, [1 + len(right)], None, "shallow", parents=[(-1, -1, *range(1, len(right)))])


def test_no_more_is_accepted_than_was_proposed():
    target, inputs = tiny(), prompts(1)
    text = target.generate(**inputs, **GREEDY)[0, inputs["input_ids"].shape[1] :].tolist()
    strategy = SpeculativeDecoding(Shallow(text), num_draft_tokens=3, tree=8)
    assert_plain(target, strategy, inputs, **GREEDY)
    report = strategy.report
    assert report.accepted > report.drafted  # of first choices
    assert report.acceptance_rate == report.accepted / report.nodes < 1
    assert all(each["accepted"] <= each["drafted"] for each in report.sources.values())


def test_the_report_counts_nodes_and_ranks():
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.3), num_draft_tokens=3, tree=12)
    target.generate(**prompts(3), **GREEDY, custom_generate=strategy)
    report = strategy.report
    assert report.num_draft_tokens == 3
    assert sum(report.accepted_per_rank) == report.accepted
    records = [record for row in report.history for record in row]
    assert sum(record.nodes for record in records if record.drafted) == report.nodes
    assert max(record.nodes for record in records) == 12
    for record in records:
        assert len(record.ranks) == record.accepted
    assert any(any(record.ranks) for record in records)
    assert f"{report.nodes} with branches" in str(report)
    both = report + report
    assert both.nodes == 2 * report.nodes
    assert both.accepted_per_rank == [2 * number for number in report.accepted_per_rank]


def test_the_function_takes_a_tree():
    target = tiny()
    output = generate(
        **prompts(3),
        **GREEDY,
        model=target,
        assistant_model=near(target, 0.3),
        num_draft_tokens=3,
        tree=12,
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, target.generate(**prompts(3), **GREEDY))
    assert output.speculation_report.nodes > output.speculation_report.drafted
