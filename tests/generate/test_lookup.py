"""transformers' options of prompt lookup, wherever they may stand: a suffix draft, at any batch size."""

from functools import partial
from pathlib import Path

import pytest
import torch
from all_pairs import each_value
from tiny import Forwards, prompts, tiny
from transformers import GenerationConfig, PreTrainedModel

import hf_specx
from hf_specx.hub.publish import write_code
from hf_specx.pairs.generate import lookup_draft


NUMBER = {"prompt_lookup_num_tokens": 4}
ASKED = NUMBER | {"max_matching_ngram_size": 3}
GREEDY = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}


def repetitive(rows: int) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    inputs = prompts(rows)
    return tiny("llama", vocab_size=8), inputs | {"input_ids": inputs["input_ids"] % 8}


@pytest.mark.parametrize(("asked", "matches"), [(NUMBER, {}), (ASKED, {"min_match": 1, "max_match": 3})])
def test_what_is_looked_up(asked: dict, matches: dict):
    draft = lookup_draft(tiny(), dict(asked))
    assert draft is not None
    assert draft.options == hf_specx.SuffixDraft(4, **matches).options


@pytest.mark.parametrize(
    ("rows", "where", "asked"), each_value([1, 4], ["call", "config", "model", "folder"], [NUMBER, ASKED])
)
def test_in_the_call_and_in_configs(rows: int, where: str, asked: dict, tmp_path: Path):
    target, inputs = repetitive(rows)
    expected, call = target.generate(**inputs, **GREEDY), partial(hf_specx.generate, model=target)
    settings = {"config": {"generation_config": GenerationConfig(**GREEDY, **asked)}, "model": GREEDY}
    if where == "model":
        target.generation_config.update(**asked)
    elif where == "folder":
        write_code(tmp_path, str(tmp_path))
        call = partial(target.generate, custom_generate=str(tmp_path), trust_remote_code=True)
    with Forwards(target) as forwards:
        assert torch.equal(call(**inputs, **settings.get(where, GREEDY | asked)), expected)
    assert len(forwards.lengths) < 40
    assert 1 < max(forwards.lengths[1:]) <= 5
