"""Drafts with another tokenizer that take rows of equally many tokens only: each row is fed by itself."""

import copy

import pytest
import torch
import zoo
from other_tokens import draft_of, target_of, texts, tokenizer_of, vocabularies_of
from tiny import Forwards

from hf_specx import Request, SpeculativeDecoding, SuffixDraft
from hf_specx.drafting.row_by_row import RowByRowDecoder


KIND, OTHER = "byte-level", "byte-level, other merges"
NEW_TOKENS = 16
SAMPLED = {"do_sample": True, "top_k": 0, "temperature": 0.7, "pad_token_id": 1, "max_new_tokens": NEW_TOKENS}
UNKNOWN = "never_heard_of"  # a type without a row in the table; it agrees with the target mostly
KINDS = [("mamba2", "tokens"), ("qwen3_next", "text"), ("lfm2", "tokens"), (UNKNOWN, "tokens"), (UNKNOWN, "text")]


def draft_model(model_type: str):
    if model_type == UNKNOWN:
        model = copy.deepcopy(draft_of(KIND, OTHER))
        model.config.model_type = UNKNOWN
    else:
        model = zoo.build("causal", model_type)
        model.resize_token_embeddings(len(tokenizer_of(OTHER)), mean_resizing=False)
    return model


def strategy_of(drafts, match: str = "tokens", **options) -> SpeculativeDecoding:
    both = {"tokenizer": tokenizer_of(KIND), "draft_tokenizer": tokenizer_of(OTHER), "tokenizer_match": match}
    return SpeculativeDecoding(drafts, **{"num_draft_tokens": 4, "verification": "coupled"} | both | options)


def run(strategy: SpeculativeDecoding | None = None, rows: int = 4, **settings) -> torch.Tensor:
    torch.manual_seed(4)
    given = {} if strategy is None else {"custom_generate": strategy}
    return target_of(KIND).generate(**texts(KIND, rows), **SAMPLED | settings, **given)


@pytest.fixture
def differences(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How far the logits of each step are from those of a forward of the row's whole text, without a cache."""
    found = []
    step = RowByRowDecoder.step

    def checked(decoder, own, ahead):
        logits = step(decoder, own, ahead)
        for index, row in enumerate(own.rows):
            text = own.ids[row, own.starts[row] : own.width + own.counts[row] + ahead]
            plain = decoder.model(text[None], use_cache=False).logits[0, -1]
            found.append((logits[index, -1] - plain).abs().max().item())
        return logits

    monkeypatch.setattr(RowByRowDecoder, "step", checked)
    return found


@pytest.mark.parametrize(("model_type", "match"), KINDS)
def test_equals_plain_and_has_read_its_own_text(model_type: str, match: str, differences: list[float]):
    for rows in (1, 4):
        strategy = strategy_of(draft_model(model_type), match)
        with Forwards(target_of(KIND)) as forwards:
            output = run(strategy, rows)
        assert torch.equal(output, run(rows=rows))
        assert any(length > 1 for length in forwards.lengths[1:])  # candidates were judged
    assert len(differences) > 60
    assert max(differences) < 1e-3
    assert strategy.report.layout == "ragged"  # of the target, whose rows advance each by its own number
    if model_type == UNKNOWN:
        assert strategy.report.accepted > 5
        assert len(set(strategy.report.rounds_per_row)) > 1


def test_what_the_draft_is_fed():
    """Never its text again: in each round what came after the last boundary but one, and its candidates."""
    model = draft_model("mamba2")
    strategy = strategy_of(model)
    with Forwards(model) as forwards:
        run(strategy, rows=1, max_new_tokens=100)
    _, *steps = forwards.lengths
    report = strategy.report
    assert sum(steps) < report.drafted + 8 * report.rounds
    assert max(steps) < 40


def test_rows_end_one_after_another(differences: list[float]):
    settings = {"eos_token_id": [*range(60, 75)], "max_new_tokens": 40}
    strategy = strategy_of(draft_model(UNKNOWN))
    assert torch.equal(run(strategy, 8, **settings), run(rows=8, **settings))
    assert len(set(strategy.report.emitted_per_row)) > 3
    assert max(differences) < 1e-3


@pytest.mark.parametrize("match", ["tokens", "text"])
def test_candidates_that_are_forced(match: str, differences: list[float]):
    """Some of them are no tokens of the draft's, so that what it reads changes within a round."""
    mapped = vocabularies_of(KIND, OTHER).to_draft
    common = [number for number, own in enumerate(mapped) if own >= 0][5:60]
    others = [number for number, own in enumerate(mapped) if own < 0][3:5]
    turns = [others[:1], others[1:], common, common, others[:1], common]
    settings = {"prefix_allowed_tokens_fn": lambda row, ids: turns[len(ids) % len(turns)]}
    strategy = strategy_of(draft_model("mamba2"), match)
    assert torch.equal(run(strategy, **settings), run(**settings))
    assert strategy.report.forced > 0
    assert max(differences) < 1e-3


def test_beside_a_suffix_draft(differences: list[float]):
    """It is asked in some rounds only."""
    strategy = strategy_of([SuffixDraft(), draft_model(UNKNOWN)])
    assert torch.equal(run(strategy, max_new_tokens=40), run(max_new_tokens=40))
    assert strategy.report.sources.keys() == {"suffix", "model"}
    assert max(differences) < 1e-3


@pytest.mark.parametrize("verification", ["token", "block"])
def test_rows_with_seeds_stand_alone(verification: str):
    strategy = strategy_of(draft_model("lfm2"), verification=verification)
    together = run(strategy, seeds=[3, 4, 5, 6])
    given = {name: values[2:3] for name, values in texts(KIND, 4).items()}
    alone = target_of(KIND).generate(**given, **SAMPLED, seeds=[5], custom_generate=strategy)
    assert torch.equal(together[2], alone[0])


def test_many_prompts_in_whole_batches():
    tokenizer, prompts = tokenizer_of(KIND), ["The cat", "12 dogs and the other cats", "🙂", "naïve", "def count"]
    asked = [Request(tokenizer(text)["input_ids"], 5 + 3 * n, seed=n) for n, text in enumerate(prompts)]

    def completed(strategy: SpeculativeDecoding, size: int) -> list[list[int]]:
        settings = {name: value for name, value in SAMPLED.items() if name != "max_new_tokens"}
        done = strategy.generate_many(target_of(KIND), asked, batch_size=size, ordered=True, **settings)
        return [one.tokens for one in done]

    strategy = strategy_of(draft_model(UNKNOWN))
    assert completed(strategy, 3) == completed(strategy_of(target_of(KIND), tokenizer=None, draft_tokenizer=None), 1)
    assert "whole batches" in strategy.report.layout_reason
    assert strategy.report.accepted > 0
