"""Trees where something else is unusual as well: the text of plain `generate`, and rows that leave first choices."""

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from head_files import random_head, write
from many import alone, completed, requests
from other_tokens import draft_of, target_of, texts, tokenizer_of
from plain import assert_plain
from random_trees import RandomTrees, emitted_texts
from rounds import Heard
from tiny import VOCAB_SIZE, WINDOW, near, prompts, tiny
from transformers import DynamicCache

from hf_specx import DraftHead, SpeculativeDecoding, SuffixDraft
from hf_specx.models import compiled, ragged


GREEDY = {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0}
SAMPLED = GREEDY | {"do_sample": True, "top_k": 0}
MODES = pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def listened(strategy: SpeculativeDecoding) -> Heard:
    ranks = Heard(lambda done: done.accepted_ranks)
    strategy.listeners = (*strategy.listeners, ranks)
    return ranks


def assert_left(ranks: Heard) -> None:
    """Some rows left the chain of first choices."""
    assert any(any(of_row) for of_round in ranks for of_row in of_round)


def planted(target: Any, inputs: dict, seed: int = 0, **settings: Any) -> RandomTrees:
    torch.manual_seed(1)
    return RandomTrees(emitted_texts(inputs, target.generate(**inputs, **settings)), VOCAB_SIZE, seed)


@MODES
def test_a_draft_with_another_tokenizer(settings: dict):
    kind, other = "byte-level", "byte-level, other merges"
    both = {"tokenizer": tokenizer_of(kind), "draft_tokenizer": tokenizer_of(other)}
    strategy = SpeculativeDecoding(draft_of(kind, other), num_draft_tokens=3, tree=16, **both)
    ranks = listened(strategy)
    assert_plain(target_of(kind), strategy, texts(kind, 4), **settings | {"pad_token_id": 1})
    assert strategy.report.nodes > strategy.report.drafted
    assert_left(ranks)


@MODES
def test_a_recurrent_draft(settings: dict):
    """Which is rolled back where a row leaves what it was fed."""
    target = zoo.build("causal", "llama")
    strategy = SpeculativeDecoding(zoo.build("causal", "mamba2"), num_draft_tokens=3, tree=48)
    ranks = listened(strategy)
    assert_plain(target, strategy, zoo.inputs(target, 3), **settings)
    assert strategy.report.nodes > strategy.report.drafted
    assert_left(ranks)


@MODES
def test_a_cache_is_continued_and_returned(settings: dict):
    """What rows have accepted on branches is in the cache that the next turn goes by."""
    target, first = tiny().double(), prompts(1)
    settings = settings | {"max_new_tokens": 12, "return_dict_in_generate": True}
    texts_of, caches, taken = [], [], []
    for is_plain in (True, False):
        torch.manual_seed(1)
        ids, cache = first["input_ids"], DynamicCache()
        for turn in range(3):
            by: dict[str, Any] = {}
            if not is_plain:
                trees = RandomTrees({}, VOCAB_SIZE, turn)
                whole = texts_of[0]
                trees.texts = {tuple(ids[0].tolist()): whole[0, ids.shape[1] :].tolist()}
                strategy = SpeculativeDecoding(trees, tree=9)
                ranks = listened(strategy)
                by = {"custom_generate": strategy}
            mask = torch.ones_like(ids)
            output = target.generate(ids, attention_mask=mask, past_key_values=cache, **settings, **by)
            ids = torch.cat([output.sequences, torch.tensor([[5 + turn, 7]])], -1)
            if not is_plain:
                taken += [rank for of_round in ranks for of_row in of_round for rank in of_row]
        texts_of.append(output.sequences)
        caches.append(output.past_key_values)
    assert any(taken)  # some round left the chain of first choices
    assert torch.equal(*texts_of)
    for plain, ours in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.allclose(plain.keys, ours.keys, atol=1e-6)


@pytest.mark.parametrize("nodes", [9, 64])
@MODES
def test_a_ring_that_64_nodes_outgrow(settings: dict, nodes: int, monkeypatch: pytest.MonkeyPatch):
    """The buffers of layers with a window are as long as the window and what a round of few tokens feeds."""
    monkeypatch.setattr(ragged, "MARGIN", 4)
    for model_type in ("mistral", "smollm3"):
        target, inputs = tiny(model_type).double(), prompts(3, width=3 * WINDOW)
        more = settings | {"max_new_tokens": 5 * WINDOW, "eos_token_id": None}
        trees = planted(target, inputs, **more)
        trees.nodes = nodes
        strategy = SpeculativeDecoding(trees, tree=nodes)
        ranks = listened(strategy)
        assert_plain(target, strategy, inputs, **more)
        assert_left(ranks)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:compile=True compiles")
@MODES
def test_compiled_with_a_window_or_a_queue(settings: dict, traced: None, monkeypatch: pytest.MonkeyPatch):
    for module in (ragged, compiled):
        monkeypatch.setattr(module, "MARGIN", 4)
    monkeypatch.setattr(compiled, "AGAIN", 2)
    target, inputs = tiny("smollm3").double(), prompts(3, width=3 * WINDOW)
    more = settings | {"max_new_tokens": 3 * WINDOW, "eos_token_id": None}
    strategy = SpeculativeDecoding(planted(target, inputs, **more), tree=15, compile=True)
    ranks = listened(strategy)
    assert_plain(target, strategy, inputs, **more)
    assert_left(ranks)
    target, asked = tiny().double(), requests(5)
    options = settings | {"eos_token_id": [5, 6], "max_new_tokens": 12}
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=3, tree=15, compile=True)
    found = completed(strategy, target, asked, batch_size=2, **options)
    assert [found[index].tokens for index in range(len(asked))] == [alone(target, ask, **options) for ask in asked]
    assert strategy.report.nodes > strategy.report.drafted


@pytest.mark.filterwarnings("ignore:compile=True compiles")
def test_later_compiled_calls_compile_nothing(traced: None):
    """Whatever the depth of trees, and where the text ends; chains and trees have sizes of their own."""
    target, inputs, compilations = tiny(num_hidden_layers=1), prompts(1), []
    strategy = SpeculativeDecoding(near(target, 0.2), num_draft_tokens=3, tree=7, compile=True)
    for seed in range(3):
        torch.manual_seed(seed)
        target.generate(**inputs, **SAMPLED, custom_generate=strategy)
        compilations.append(strategy.report.compilations)
    assert compilations[0] > compilations[1] == compilations[2] == 0


@MODES
def test_a_list_of_suffixes_and_a_head(settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SuffixDraft, "_best", lambda self, chances: max(map(len, chances)))
    target, inputs = tiny(vocab_size=12, num_hidden_layers=4), prompts(3, 17)
    inputs["input_ids"] %= 12
    files = write(random_head("eagle3", vocab=12, layer_ids=(1, 2, 3)), tmp_path)
    head = DraftHead.from_pretrained(files, target=target)
    strategy = SpeculativeDecoding([SuffixDraft(min_match=1), head], num_draft_tokens=3, tree=12)
    ranks = listened(strategy)
    assert_plain(target, strategy, inputs, **settings | {"max_new_tokens": 60})
    assert_left(ranks)
    assert strategy.report.nodes > strategy.report.drafted
    assert len(strategy.report.sources) > 1
