"""Traces: each token with its origin, each candidate with p, q and its chance, as they were."""

from functools import partial

import pytest
import torch
from tiny import near, tiny
from tiny_tokenizer import tiny_tokenizer
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hf_specx import SpeculativeDecoding
from hf_specx.bench.trace import Recorder, text_added, trace


SIZES = {"vocab_size": 280, "eos_token_id": None, "pad_token_id": 1}
PROMPT = torch.tensor([[5, 9, 30, 7]])
INPUTS = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
OPTIONS = {"do_sample": True, "top_k": 0, "temperature": 0.8, "max_new_tokens": 24}
MODES = ("greedy", "coupled", "token", "block")


@pytest.fixture(scope="module")
def models():
    target = tiny(**SIZES)
    return target, near(target, 0.2)


def options_of(mode: str) -> dict:
    return {"do_sample": False, "max_new_tokens": 24} if mode == "greedy" else OPTIONS


def strategy(draft, mode: str) -> SpeculativeDecoding:
    return SpeculativeDecoding(draft, num_draft_tokens=3, verification=None if mode == "greedy" else mode)


def traced(models, mode: str, **more):
    target, draft = models
    torch.manual_seed(3)
    used = strategy(draft, mode)
    return trace(target, used, INPUTS, options_of(mode) | more, tiny_tokenizer()), used.report


def plain_distribution(target, ids: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        return (target(torch.tensor([ids])).logits[0, -1] / temperature).softmax(-1)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_origins_and_rejections_are_those_of_the_text(models, mode):
    found, report = traced(models, mode)
    target, draft = models
    torch.manual_seed(3)
    output = target.generate(**INPUTS, **options_of(mode), custom_generate=strategy(draft, mode))
    tokens = [token["token"] for each in found["rounds"] for token in each["tokens"]]
    assert tokens == output[0, 4:].tolist()
    assert found["prompt"] == PROMPT[0].tolist()
    assert found["verification"] == mode
    assert [len(each["candidates"]) for each in found["rounds"]] == [r.drafted for r in report.history[0]]
    assert [len(each["tokens"]) for each in found["rounds"]] == [r.emitted for r in report.history[0]]
    assert {token["text"] for token in found["rounds"][0]["tokens"]} <= {tiny_tokenizer().decode([t]) for t in tokens}
    origins = set()
    for each in found["rounds"][:-1]:  # the last may be cut
        kept = [candidate["accepted"] for candidate in each["candidates"]]
        number = sum(kept)
        assert kept == [True] * number + [False] * (len(kept) - number)
        assert each["rejected"] == (None if number == len(kept) else number)
        assert [token["origin"] for token in each["tokens"][:-1]] == ["accepted"] * number
        assert each["tokens"][-1]["origin"] == ("bonus" if each["rejected"] is None else "recovered")
        assert [c["token"] for c in each["candidates"][:number]] == [t["token"] for t in each["tokens"][:-1]]
        origins |= {token["origin"] for token in each["tokens"]}
    assert origins == {"accepted", "recovered", "bonus"}


@pytest.mark.parametrize("mode", ["coupled", "token", "block"])
def test_p_and_q_are_those_of_plain_forwards(models, mode):
    """Also of tokens that were no candidates; behind the last candidate the draft was not asked."""
    found, _ = traced(models, mode)
    text, close = PROMPT[0].tolist(), partial(pytest.approx, rel=1e-3, abs=1e-7)
    for each in found["rounds"]:
        ids = list(text)
        for candidate in each["candidates"]:
            p, q = (plain_distribution(model, ids, 0.8) for model in models)
            token = candidate["token"]
            assert (candidate["p"], candidate["q"]) == (close(float(p[token])), close(float(q[token])))
            assert candidate["overlap"] == close(float(torch.minimum(p, q).sum()))
            assert candidate["acceptance"] == min(1.0, candidate["p"] / candidate["q"])
            ids.append(token)
        for token in each["tokens"]:
            p, q = (float(plain_distribution(model, text, 0.8)[token["token"]]) for model in models)
            assert token["p"] == close(p)
            assert token["q"] == (None if token["origin"] == "bonus" else close(q))
            text.append(token["token"])


def test_greedy_candidates_have_no_q(models):
    for each in traced(models, "greedy")[0]["rounds"]:
        assert {entry["q"] for entry in each["candidates"] + each["tokens"]} == {None}
        for candidate in each["candidates"][: 1 + (each["rejected"] or 0)]:
            assert candidate["acceptance"] == float(candidate["accepted"])


def test_a_strategy_keeps_the_listeners_that_it_had(models):
    """They hear the rounds as well, and nobody listens to later calls of the strategy."""
    target, draft = models
    used, mine = strategy(draft, "token"), Recorder(tiny_tokenizer(), [7])
    used.listeners = (mine,)
    found = trace(target, used, INPUTS, OPTIONS, tiny_tokenizer())
    assert len(mine.rounds) == len(found["rounds"])
    assert used.listeners == (mine,)


def test_spaces_that_tokenizers_strip_are_in_the_text():
    """As by SentencePiece: the space before a word belongs to it, and is lost where a text begins with it."""
    words = Tokenizer(WordLevel({"▁the": 0, "▁cat": 1, "s": 2}, unk_token="s"))
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.decode([1]) == "cat"
    assert [text_added(tokenizer, [0], 1), text_added(tokenizer, [1], 2)] == [" cat", "s"]
