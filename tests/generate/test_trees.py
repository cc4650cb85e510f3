"""Candidates that branch, through `generate`: the text of plain `generate` whatever the tree."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from all_pairs import each_value, once
from automaton import Automaton
from criteria import RowSumIs
from many import alone, completed, requests
from plain import assert_plain
from processor_settings import SETTINGS
from random_trees import RandomTrees, emitted_texts
from rounds import Heard
from tiny import VOCAB_SIZE, WINDOW, near, prompts, tiny
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding
from hf_specx.common.architectures import LAYOUTS_OF, NO_TREES
from hf_specx.common.batch import Batch
from hf_specx.models.ragged import RaggedRunner
from hf_specx.sampling.vectorized import Prefixes
from hf_specx.sampling.verifiers import CoupledVerifier


MODELS = {
    "llama": {},
    "gpt2": {},
    "mistral": {},
    "smollm3": {},
    "qwen2": {},
    "gpt_neox": {},
    "llama4_text": {
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention", "full_attention"],
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
    },
}
SAMPLED = {"do_sample": True, "top_k": 0}
GREEDY = {"do_sample": False}


def trees_of(target: PreTrainedModel, inputs: dict[str, torch.Tensor], seed: int = 0, **settings: Any) -> RandomTrees:
    """Random trees, in which the text of the call under seed 1 is planted."""
    torch.manual_seed(1)
    text = target.generate(**inputs, **settings)
    return RandomTrees(emitted_texts(inputs, text), target.config.get_text_config().vocab_size, seed)


def assert_branches(strategy: SpeculativeDecoding, branches: Heard) -> None:
    """Some rounds left the chain of first choices, and some went deep."""
    taken = [branch for of_round in branches for branch in of_round]
    assert any(any(branch) for branch in taken)
    assert max(map(len, taken)) >= 3
    assert strategy.report.nodes > strategy.report.drafted


def listened(strategy: SpeculativeDecoding) -> Heard:
    """The branches of each round of a strategy's calls."""
    branches = Heard(lambda done: done.accepted_ranks)
    strategy.listeners = (*strategy.listeners, branches)
    return branches


@pytest.mark.parametrize(("rows", "settings", "model_type"), each_value([1, 3, 8], [GREEDY, SAMPLED], MODELS))
def test_random_trees_give_the_text_of_plain(rows: int, settings: dict, model_type: str):
    target, inputs = tiny(model_type, **MODELS[model_type]).double(), prompts(rows)
    settings = settings | {"max_new_tokens": 40, "pad_token_id": 0}
    strategy = SpeculativeDecoding(trees_of(target, inputs, **settings), tree=9)
    branches = listened(strategy)
    done = assert_plain(target, strategy, inputs, **settings)
    assert done.forwards < done.plain
    assert_branches(strategy, branches)


@pytest.mark.parametrize(("rows", "settings", "nodes"), each_value([1, 3, 8], [GREEDY, SAMPLED], [5, 16, 64]))
def test_combs_give_the_text_of_plain(rows: int, settings: dict, nodes: int):
    target, inputs = tiny().double(), prompts(rows)
    settings = settings | {"max_new_tokens": 40, "pad_token_id": 0}
    strategy = SpeculativeDecoding(near(target, 0.1), num_draft_tokens=4, tree=nodes)
    branches = listened(strategy)
    done = assert_plain(target, strategy, inputs, **settings)
    chain = SpeculativeDecoding(near(target, 0.1), num_draft_tokens=4, verification="coupled")
    assert nodes < 16 or done.forwards < assert_plain(target, chain, inputs, **settings).forwards
    assert nodes < 16 or any(any(branch) for of_round in branches for branch in of_round)
    assert strategy.report.verification == ("coupled" if settings["do_sample"] else "greedy")


@pytest.mark.parametrize(("name", "do_sample", "rows"), once(SETTINGS, [False, True], [4, 1, 8]))
def test_each_node_has_its_own_prefix(name: str, do_sample: bool, rows: int):
    """All processors that are speculated, among them stateless ones, which are called once for each length."""
    target, inputs = tiny(), prompts(rows)
    settings = {"do_sample": do_sample, "top_k": 0, "max_new_tokens": 24, "pad_token_id": 0} | SETTINGS[name]
    strategy = SpeculativeDecoding(trees_of(target, inputs, **settings), tree=9)
    assert_plain(target, strategy, inputs, **settings)
    assert strategy.report.nodes > strategy.report.drafted > 0


class Strict(Automaton):
    """Is never shown a token that it excludes."""

    strict = True

    def accept(self, row, token):
        assert self.table[self.state(row, self.texts.get(row, [])), token] or row in self.free
        super().accept(row, token)


@pytest.mark.parametrize("automaton", [Automaton, Strict])
@pytest.mark.parametrize(("do_sample", "rows"), each_value([False, True], [1, 4]))
def test_a_grammar_follows_the_branches(automaton: type, do_sample: bool, rows: int):
    target, inputs = tiny(), prompts(rows)
    settings = {"do_sample": do_sample, "top_k": 0, "max_new_tokens": 30, "pad_token_id": 0}
    fresh = lambda: {"logits_processor": [automaton(VOCAB_SIZE, 11, free=(2,))]}  # noqa: E731
    strategy = SpeculativeDecoding(trees_of(target, inputs, **settings, **fresh()), tree=9)
    assert_plain(target, strategy, inputs, fresh, **settings)
    assert strategy.report.nodes > strategy.report.drafted
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=3, tree=12)
    assert_plain(target, strategy, inputs, fresh, **settings)
    assert rows == 1 or strategy.report.nodes > strategy.report.drafted


@pytest.mark.parametrize("do_sample", [False, True])
def test_an_error_of_a_prefix_function_counts_where_the_text_goes(do_sample: bool):
    """It raises on branches that the text does not take."""
    target, inputs = tiny(), prompts(3)
    settings = {"do_sample": do_sample, "top_k": 0, "max_new_tokens": 30, "pad_token_id": 0, "eos_token_id": None}

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        if ids[-1] % 4 == 3 and len(ids) > 11:
            raise RuntimeError("not after this token")
        return [token for token in range(VOCAB_SIZE) if token % 4 != 3]

    settings["prefix_allowed_tokens_fn"] = allowed
    strategy = SpeculativeDecoding(trees_of(target, inputs, **settings), tree=9)
    assert_plain(target, strategy, inputs, **settings)
    assert strategy.report.nodes > strategy.report.drafted


@pytest.mark.parametrize(("do_sample", "rows"), each_value([False, True], [1, 3, 8]))
def test_rows_stop_inside_of_a_branch(do_sample: bool, rows: int):
    target, inputs = tiny(), prompts(rows)
    settings = {"do_sample": do_sample, "top_k": 0, "max_new_tokens": 40, "pad_token_id": 0}
    ends = [{"eos_token_id": [3, 9, 17, 30]}, {"eos_token_id": 9, "stopping_criteria": [RowSumIs()]}]
    for ending in ends:
        trees = trees_of(target, inputs, **settings)  # which go on behind the end
        strategy = SpeculativeDecoding(trees, tree=9)
        assert_plain(target, strategy, inputs, **settings | ending)
        outputs = settings | ending | {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        found = []
        for one in (None, SpeculativeDecoding(trees, tree=9)):
            torch.manual_seed(1)
            found.append(target.generate(**inputs, **outputs, custom_generate=one))
        plain, ours = found
        emitted = (plain.sequences[:, 11:] != 0).cumprod(1).bool()
        for name in ("scores", "logits"):
            for column, (one, other) in enumerate(zip(plain[name], ours[name], strict=True)):
                assert torch.allclose(one[emitted[:, column]], other[emitted[:, column]], atol=1e-4)
        for layer, ours_layer in zip(plain.past_key_values.layers, ours.past_key_values.layers, strict=True):
            if rows == 1:
                assert torch.allclose(layer.keys, ours_layer.keys, atol=1e-4)


@pytest.mark.parametrize(("do_sample", "draft"), each_value([False, True], ["random trees", "combs"]))
def test_rows_of_a_queue(do_sample: bool, draft: str):
    target, asked = tiny(), requests(9)
    options = {"do_sample": do_sample, "eos_token_id": [5, 6], "pad_token_id": 0, "max_new_tokens": 24, "top_k": 12}
    options |= {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 4}
    texts = [alone(target, request, **options) for request in asked]
    drafts: Any = near(target, 0.1)
    if draft == "random trees":
        by_prompt = {tuple(ask.input_ids.tolist()): text for ask, text in zip(asked, texts, strict=True)}
        drafts = RandomTrees(by_prompt, VOCAB_SIZE)
    strategy = SpeculativeDecoding(drafts, num_draft_tokens=4, tree=9)
    found = completed(strategy, target, asked, batch_size=3, logprobs=True, **options)
    assert [found[index].tokens for index in range(len(asked))] == texts
    assert strategy.report.nodes > strategy.report.drafted


@pytest.mark.filterwarnings("ignore:compile=True compiles")
@pytest.mark.parametrize(("do_sample", "model_type", "rows"), each_value([False, True], ["smollm3", "llama"], [1, 3]))
def test_compiled_forwards(request: pytest.FixtureRequest, do_sample: bool, model_type: str, rows: int):
    request.getfixturevalue("traced" if model_type == "llama" else "untraced")
    target = tiny(model_type, **{} if model_type == "smollm3" else {"num_hidden_layers": 1}).double()
    inputs, settings = prompts(rows), {"do_sample": do_sample, "top_k": 0, "max_new_tokens": 30, "pad_token_id": 0}
    for draft in (trees_of(target, inputs, **settings), near(target, 0.1)):
        strategy = SpeculativeDecoding(draft, num_draft_tokens=3, tree=9, compile=True)
        assert_plain(target, strategy, inputs, **settings)
        assert strategy.report.nodes > strategy.report.drafted


@pytest.mark.parametrize("draft", ["random trees", "combs"])
def test_rows_with_seeds(draft: str):
    target, inputs, seeds = tiny(), prompts(3), [5, 6, 7]
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 24, "pad_token_id": 0}
    texts = {}
    for ids, mask, seed in zip(*inputs.values(), seeds, strict=True):
        torch.manual_seed(seed)
        text = ids[mask.bool()]
        new = target.generate(text[None], attention_mask=torch.ones_like(text[None]), **settings)[0, len(text) :]
        texts[tuple(text.tolist())] = new.tolist()
    drafts: Any = RandomTrees(texts, VOCAB_SIZE) if draft == "random trees" else near(target, 0.1)
    strategy = SpeculativeDecoding(drafts, num_draft_tokens=4, tree=9)
    output = target.generate(**inputs, **settings, custom_generate=strategy, seeds=seeds)
    assert output[:, 11:].tolist() == list(texts.values())
    assert strategy.report.nodes > strategy.report.drafted


def test_greedy_rows_of_a_sampling_queue_have_the_next_likeliest_tokens():
    """As many forwards as in a queue of greedy rows alone, and fewer than with chains."""
    target, rounds = tiny(), {}
    asked = [replace(request, generate_kwargs={"do_sample": False}) for request in requests(6)]
    for do_sample, tree in ((True, 12), (False, 12), (True, False)):
        options = {"do_sample": do_sample, "eos_token_id": [5, 6], "pad_token_id": 0, "max_new_tokens": 24, "top_k": 0}
        strategy = SpeculativeDecoding(near(target, 0.25), num_draft_tokens=3, tree=tree, verification="coupled")
        found = completed(strategy, target, asked, batch_size=3, **options)
        greedy = options | {"do_sample": False}
        assert [found[index].tokens for index in range(6)] == [alone(target, ask, **greedy) for ask in asked]
        rounds[do_sample, tree] = strategy.report.rounds
    assert rounds[True, 12] == rounds[False, 12] < rounds[True, False]


def seen_by_sibling(*call: Any, right: Any = RaggedRunner._tree_attention) -> Any:
    """Wrong: a node sees all that stand before it."""
    nodes = right(*call)
    if nodes is None:
        return None
    numbers = torch.arange(nodes.node_mask.shape[-1])
    return nodes._replace(node_mask=(numbers <= numbers[:, None]).expand_as(nodes.node_mask))


def positions_by_slot(runner: RaggedRunner, batch: Batch, emitted: Any, right: Any = RaggedRunner._positions) -> Any:
    """Wrong: a node has the position of its slot."""
    count = emitted.shape[1]
    if batch.tree is not None and count > 1:
        emitted = emitted[:, :1] + torch.arange(count)
    return right(runner, batch, emitted)


def not_moved(runner: RaggedRunner, done: Any, right: Any = RaggedRunner.observe) -> None:
    """Wrong: what was accepted stays where it was fed."""
    done.accepted_candidates, paths = [], done.accepted_candidates
    right(runner, done)
    done.accepted_candidates = paths


def sibling_shown(prefixes: Prefixes) -> None:
    """Wrong: a processor is shown the nodes in their order."""


def noise_by_node(verifier: CoupledVerifier, batch: Batch, probs: Any, ahead: int) -> Any:
    """Wrong: a node has the noise of the position of its slot."""
    return verifier._noise_at(batch, probs, ahead)


FAULTS = {
    "a node sees its sibling": (RaggedRunner, "_tree_attention", seen_by_sibling),
    "a position by slot": (RaggedRunner, "_positions", positions_by_slot),
    "an accepted node is not moved": (RaggedRunner, "observe", not_moved),
    "a processor is shown the sibling's prefix": (Prefixes, "nodes", property(sibling_shown)),
    "noise by slot": (CoupledVerifier, "noise", noise_by_node),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_variants_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch):
    target, inputs = tiny().double(), prompts(4)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 40, "pad_token_id": 0, "no_repeat_ngram_size": 2}
    right = SpeculativeDecoding(trees_of(target, inputs, **settings), tree=9)
    assert_plain(target, right, inputs, **settings)
    monkeypatch.setattr(*FAULTS[fault])
    strategy = SpeculativeDecoding(trees_of(target, inputs, **settings), tree=9)
    with pytest.raises(AssertionError, match="another text"):
        assert_plain(target, strategy, inputs, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_two_thousand_trees(seed: int):
    """About 100 trees of each seed, over all models, batch sizes and modes."""
    model_type, rows = list(MODELS)[seed % len(MODELS)], (1, 3, 8)[seed % 3]
    target, inputs = tiny(model_type, **MODELS[model_type]).double(), prompts(rows, seed=seed)
    settings = (SAMPLED, GREEDY)[seed % 2] | {"max_new_tokens": 100, "pad_token_id": 0}
    trees, judged = trees_of(target, inputs, seed, **settings), 0
    trees.nodes = 4 + seed
    for _ in range(100):
        strategy = SpeculativeDecoding(trees, tree=64)
        assert_plain(target, strategy, inputs, **settings)
        judged += sum(strategy.report.rounds_per_row)
        if judged >= 100:
            break
    assert judged >= 100


EVERY = 6  # one type in so many is in the default run
RAGGED = [name for name, layouts in LAYOUTS_OF.items() if layouts[0] == "ragged" and name in zoo.KINDS["causal"]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.slow if n % EVERY else ()) for n, name in enumerate(RAGGED)]
)
def test_every_architecture_of_the_ragged_layout(model_type: str):
    """A tree is taken, or the report says why not."""
    target = zoo.build("causal", model_type)
    inputs = zoo.inputs(target)
    for settings in (GREEDY, SAMPLED):
        settings = settings | {"max_new_tokens": 20}
        strategy = SpeculativeDecoding(trees_of(target, inputs, **settings), tree=9)
        assert_plain(target, strategy, inputs, **settings)
        branched = strategy.report.nodes > strategy.report.drafted
        assert branched == (not strategy.report.tree_reason)
        assert branched or target.config.model_type in NO_TREES or target.config.model_type not in LAYOUTS_OF
