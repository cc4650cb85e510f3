"""Prompts that are copied, and the contenders of the bench that have no draft model."""

import pytest
import torch
from bench_cases import small, tiny_pair
from tiny import Forwards
from tiny_tokenizer import tiny_tokenizer
from transformers import AutoTokenizer

from hf_specx.bench.cells import Cell, suffix_cells
from hf_specx.bench.contenders import Contender
from hf_specx.bench.copying import BEGUN, KINDS, MODULES, copying_prompts
from hf_specx.bench.grid import take_turns
from hf_specx.hub.flatten import PACKAGE


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_prompt_stands_in_it_before(kind: str):
    tokenizer, size = AutoTokenizer.from_pretrained(PACKAGE / "embedded"), 160
    prompts = copying_prompts(kind, tokenizer, len(MODULES), size)
    assert prompts.shape == (len(MODULES), size)
    assert len({tuple(row) for row in prompts.tolist()}) == len(MODULES)
    for row in prompts.tolist():
        end = row[-size // BEGUN :]
        assert any(row[n : n + len(end)] == end for n in range(size - 2 * len(end) + 1))


def test_prompts_that_cannot_be_made():
    with pytest.raises(ValueError, match="this pair has no tokenizer"):
        copying_prompts("rewrite", None, 1, 20)
    with pytest.raises(ValueError, match="kind 'poem' are unknown; give one of rewrite, answer, second turn"):
        copying_prompts("poem", tiny_tokenizer(), 1, 20)
    with pytest.raises(ValueError, match="too short for 1000000 tokens; ask for fewer"):
        copying_prompts("rewrite", tiny_tokenizer(), 1, 1_000_000)


def test_cells_of_the_bench():
    cells = suffix_cells("embedded")
    assert {cell.texts for cell in cells} == {*KINDS, ""}
    assert all("lookup-10" in cell.contenders for cell in cells)  # at batch 8 it is listed with its reason
    assert all(cell.temperature == (0 if cell.texts else 1) for cell in cells)
    known = [dict(cell.to_dict(), contenders=cell.contenders, bare=cell.bare) for cell in cells]
    assert [Cell(**each) for each in known] == cells


def test_contenders_without_a_model_give_the_same_text():
    pair = tiny_pair(vocab_size=8)
    inputs = pair.inputs(1, 12, 20, 0)
    texts = {}
    for name in ("plain", "lookup-3", "suffix-auto", "several-3"):
        contender = Contender(name, pair.target, pair.draft)
        texts[name] = contender(inputs, {"do_sample": False, "max_new_tokens": 20}).tolist()
    assert all(text == texts["plain"] for text in texts.values())
    assert contender.report.sources


def test_a_cell_with_prompts_of_a_kind():
    tokenizer = AutoTokenizer.from_pretrained(PACKAGE / "embedded")
    pair = tiny_pair(vocab_size=len(tokenizer))
    pair.tokenizer, pair.prompts = tokenizer, ["def main("]
    cell = small("plain", "suffix-2", batch=2, prompt_tokens=40, texts="answer", temperature=0.0, experiment="suffix")
    with Forwards(pair.target) as forwards:
        made = take_turns(cell, pair, lambda: None)
    assert all("tokens_per_second" in noted for noted in made["contenders"].values())
    assert torch.equal(forwards.ids[0], copying_prompts("answer", tokenizer, 2, 40))
