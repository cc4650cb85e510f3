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
from hf_specx.bench.trace import text_added, trace
from hf_specx.cli.coloured import TokenDecoder


SIZES = {"vocab_size": 280, "eos_token_id": None, "pad_token_id": 1}
PROMPT = torch.tensor([[5, 9, 30, 7]])
INPUTS = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
OPTIONS = {"do_sample": True, "top_k": 0, "temperature": 0.8, "max_new_tokens": 24}
MODES = ("greedy", "coupled", "token", "block")


@pytest.fixture(scope="module")
def models():
    target = tiny(**SIZES)
    return target, near(target, 0.2)


def traced(models, mode: str):
    """The trace of a call, its report, and the text of the same call without a trace."""
    target, draft = models
    options = {"do_sample": False, "max_new_tokens": 24} if mode == "greedy" else OPTIONS
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification=None if mode == "greedy" else mode)
    torch.manual_seed(3)
    values = trace(target, strategy, INPUTS, options, tiny_tokenizer())
    report = strategy.report
    torch.manual_seed(3)
    return values, report, target.generate(**INPUTS, **options, custom_generate=strategy)[0, 4:].tolist()


def plain_distribution(target, ids: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        return (target(torch.tensor([ids])).logits[0, -1] / temperature).softmax(-1)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_origins_and_rejections_are_those_of_the_text(models, mode):
    values, report, text = traced(models, mode)
    assert [token["token"] for each in values["rounds"] for token in each["tokens"]] == text
    assert (values["prompt"], values["verification"]) == (PROMPT[0].tolist(), mode)
    assert [len(each["candidates"]) for each in values["rounds"]] == [r.drafted for r in report.history[0]]
    origins = set()
    for each in values["rounds"][:-1]:  # the last may be cut
        accepted = [candidate["accepted"] for candidate in each["candidates"]]
        number = sum(accepted)
        assert accepted == [True] * number + [False] * (len(accepted) - number)
        assert each["rejected"] == (None if number == len(accepted) else number)
        last = "bonus" if each["rejected"] is None else "recovered"
        assert [token["origin"] for token in each["tokens"]] == ["accepted"] * number + [last]
        assert [c["token"] for c in each["candidates"][:number]] == [t["token"] for t in each["tokens"][:-1]]
        assert mode != "greedy" or {entry["q"] for entry in each["candidates"] + each["tokens"]} <= {None}
        origins |= {token["origin"] for token in each["tokens"]}
    assert origins == {"accepted", "recovered", "bonus"}


@pytest.mark.parametrize("mode", ["coupled", "token", "block"])
def test_p_and_q_are_those_of_plain_forwards(models, mode):
    """Also of tokens that were no candidates; behind the last candidate the draft was not asked."""
    values, _, _ = traced(models, mode)
    text, close = PROMPT[0].tolist(), partial(pytest.approx, rel=1e-3, abs=1e-7)
    for each in values["rounds"]:
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


def test_spaces_that_tokenizers_strip_are_in_the_text():
    """As by SentencePiece: the space before a word belongs to it, and is lost where a text begins with it."""
    words = Tokenizer(WordLevel({"▁the": 0, "▁cat": 1, "s": 2}, unk_token="s"))
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.decode([1]) == "cat"
    assert [text_added(tokenizer, [0], 1), text_added(tokenizer, [1], 2)] == [" cat", "s"]
    assert TokenDecoder(tokenizer, [0]).push(1) == " cat"


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_the_branch_that_was_taken_is_shown(models, mode):
    target, draft = models
    options = {"do_sample": False, "max_new_tokens": 24} if mode == "greedy" else OPTIONS
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, tree=12)
    torch.manual_seed(3)
    values = trace(target, strategy, INPUTS, options, tiny_tokenizer())
    torch.manual_seed(3)
    text = target.generate(**INPUTS, **options)[0, 4:].tolist()
    assert [token["token"] for each in values["rounds"] for token in each["tokens"]] == text
    ranks, origins = set(), set()
    for each, record in zip(values["rounds"][:-1], strategy.report.history[0], strict=False):
        accepted = [candidate for candidate in each["candidates"] if candidate["accepted"]]
        if record.nodes > record.drafted:
            assert tuple(candidate["rank"] for candidate in accepted) == record.ranks
        assert [candidate["token"] for candidate in accepted] == [token["token"] for token in each["tokens"][:-1]]
        assert each["tokens"][-1]["origin"] == ("bonus" if record.is_bonus else "recovered")
        ranks |= set(record.ranks)
        origins |= {token["origin"] for token in each["tokens"]}
    assert max(ranks) > 0
    assert {"accepted", "bonus"} <= origins
