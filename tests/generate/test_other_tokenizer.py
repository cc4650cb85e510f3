"""Drafts with another tokenizer than their target: the tokens are those of plain `generate`, in all kinds of calls.

Equality is met by any draft, so what the draft reads is compared with its own forward of the same text, and how much
it is fed is counted by hooks.
"""

import json
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from many import alone, assert_alone
from other_tokens import KINDS, draft_of, pair_of, target_of, texts, tokenizer_of, vocabularies_of
from plain import assert_plain
from tiny import Forwards
from transformers import BartConfig, BartForConditionalGeneration

from hf_specx import DraftTargetPair, Request, SpeculativeDecoding, generate
from hf_specx.common.drafts import PAIR_CONFIG_NAME
from hf_specx.drafting import other_tokenizer
from hf_specx.drafting.drafter import no_candidates
from hf_specx.drafting.other_tokenizer import OtherTokenizerDrafter, OtherTokenizerRunner


KIND, OTHER = "byte-level", "byte-level, other merges"
BOTH = {"tokenizer": tokenizer_of(KIND), "draft_tokenizer": tokenizer_of(OTHER)}
SAMPLED = {"do_sample": True, "top_k": 0, "temperature": 0.7}
NEW_TOKENS = 24


def run(strategy: SpeculativeDecoding | None = None, target=None, rows: int = 4, **settings) -> torch.Tensor:
    torch.manual_seed(4)
    custom = {} if strategy is None else {"custom_generate": strategy}
    options = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 1} | SAMPLED | settings
    return (target or target_of(KIND)).generate(**texts(KIND, rows), **options, **custom)


def made(draft=None, **options) -> SpeculativeDecoding:
    options = {"num_draft_tokens": 4, "verification": "coupled"} | BOTH | options
    return SpeculativeDecoding(draft or draft_of(KIND, OTHER), **options)


SETTINGS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 0, "temperature": 0.7},
    "warped": {"do_sample": True, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
}
NAMES = [*KINDS]
PAIRS = [(kind, NAMES[(n + shift) % len(NAMES)]) for n, kind in enumerate(NAMES) for shift in (1, 3)]


@pytest.fixture
def read_again(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How far the draft's logits in each step are from those of a forward of all that it has read, without a cache."""
    distances = []
    step = OtherTokenizerRunner.decode_step

    def checked(text, batch, ahead, num_unfed=0):
        logits = step(text, batch, ahead, num_unfed)
        for index, row in enumerate(batch.rows):
            plain = text.runner.model(text.draft_batch.row(row)[None]).logits[:, -1:]
            expected = text.vocabularies.logits(plain)[0]
            distances.append((logits[index] - expected).nan_to_num(0).abs().max().item())
        return logits

    monkeypatch.setattr(OtherTokenizerRunner, "decode_step", checked)
    return distances


@pytest.mark.parametrize(("kind", "draft_kind"), PAIRS)
def test_equals_plain(kind: str, draft_kind: str, read_again: list[float]):
    """With prompts of unequal length, special tokens, emoji, and what the target emits: bytes that are no UTF-8."""
    both = {"tokenizer": tokenizer_of(kind), "draft_tokenizer": tokenizer_of(draft_kind)}
    options = {"max_new_tokens": 20, "pad_token_id": 0}
    accepted = 0
    for rows, name in zip((1, 4, 8), SETTINGS, strict=True):
        strategy = made(draft_of(kind, draft_kind), **both)
        with Forwards(target_of(kind)) as forwards:
            assert_plain(target_of(kind), strategy, texts(kind, rows), seed=4, **options, **SETTINGS[name])
        assert sum(n > 1 for n in forwards.lengths) > 3  # candidates were judged, beside both prompts
        assert strategy.report.tokenizer_match["match"] == "tokens"
        accepted += strategy.report.accepted
    assert accepted > 0
    assert len(read_again) > 40
    assert max(read_again) < 1e-3


@pytest.mark.parametrize("rows", [1, 8])
def test_the_draft_never_reads_its_text_again(rows: int):
    """Over 250 tokens it is fed little more than what it drafts and what the target has put in other tokens."""
    strategy, draft = made(), draft_of(KIND, OTHER, max_position_embeddings=350)
    strategy.draft_model = draft
    target = target_of(KIND, max_position_embeddings=350)
    with Forwards(draft) as forwards:
        run(strategy, target, rows, max_new_tokens=250)
    _, *steps = forwards.lengths
    report = strategy.report
    assert report.accepted > 25
    # tokens of a row: each candidate, and in each round the last two of the text, of which one may be several
    assert sum(steps) < 4 * report.rounds + 4 * report.rounds
    assert sum(length > 4 for length in steps) < len(steps) / (10 if rows == 1 else 3)
    assert max(steps) < 40


def test_many_prompts():
    prompts = ["The cat", "12 dogs and the other cats sat there", "🙂", "naïve", "def count", "a", "in the house"]
    asked = [Request(tokenizer_of(KIND)(text)["input_ids"], 5 + 3 * n, seed=n) for n, text in enumerate(prompts)]
    strategy = made()
    assert_alone(strategy, target_of(KIND), asked, batch_size=3, pad_token_id=1, **SAMPLED)
    assert strategy.report.accepted > 0


def test_new_prompts_are_read_when_candidates_are_wanted(monkeypatch: pytest.MonkeyPatch):
    """By then one row has tokens of its own, and the other, whose prompt has just come, has none."""
    ask, rounds = OtherTokenizerDrafter.propose, count()

    def late(drafter, batch, lengths):
        return no_candidates(batch) if next(rounds) < 4 else ask(drafter, batch, lengths)

    monkeypatch.setattr(OtherTokenizerDrafter, "propose", late)
    ids = tokenizer_of(KIND)("the dog ran")["input_ids"]
    asked = [Request(ids, number) for number in (1, 1, 3, 9, 9)]
    strategy = made(draft_of(KIND, "unigram"), draft_tokenizer=tokenizer_of("unigram"))
    assert_alone(strategy, target_of(KIND), asked, batch_size=2, pad_token_id=1, do_sample=False)
    assert strategy.report.drafted > 0


def test_a_row_has_left_when_the_draft_reads_prompts(monkeypatch: pytest.MonkeyPatch):
    """And another one has come in a place that was free from the first."""
    ask, rounds = OtherTokenizerDrafter.propose, count()

    def late(drafter, batch, lengths):
        return no_candidates(batch) if next(rounds) < 8 else ask(drafter, batch, lengths)

    monkeypatch.setattr(OtherTokenizerDrafter, "propose", late)
    ids = [tokenizer_of(KIND)(text)["input_ids"] for text in ("The cat", "def count", "a", "in the house")]
    limits = (1, 40, 1, 40)
    asked = [Request(prompt, limit, seed=n) for n, (prompt, limit) in enumerate(zip(ids, limits, strict=True))]

    def arriving() -> Iterator[Request | None]:
        yield from asked[:2]
        yield None
        yield from asked[2:]
        yield from [None] * 30

    strategy, target = made(), target_of(KIND)
    options = {"pad_token_id": 1, "eos_token_id": None} | SAMPLED
    done = list(strategy.generate_many(target, arriving(), batch_size=3, ordered=True, **options))
    assert [each.tokens for each in done] == [alone(target, request, **options) for request in asked]
    assert strategy.report.accepted > 0


def test_masks_and_ids_are_the_targets():
    """A function of the text and of target ids, and options that name ids; the draft is held to them as well."""
    allowed = [number for number, own in enumerate(vocabularies_of(KIND, OTHER).to_draft) if number % 3][5:]
    settings = {
        "prefix_allowed_tokens_fn": lambda row, ids: allowed if len(ids) % 4 else allowed[:1],
        "suppress_tokens": allowed[10:20],
        "sequence_bias": {(allowed[30],): 2.0},
    }
    strategy = made()
    assert torch.equal(run(strategy, **settings), run(**settings))
    assert strategy.report.forced > 0


def test_where_no_common_token_is_allowed(draft_pays):
    common = set(vocabularies_of(KIND, OTHER).to_target)
    allowed = [number for number in range(len(tokenizer_of(KIND))) if number not in common][:5]
    settings = {"prefix_allowed_tokens_fn": lambda row, ids: allowed, "do_sample": False}
    strategy = made(num_draft_tokens="auto")
    assert torch.equal(run(strategy, **settings), run(**settings))
    assert strategy.report.drafted > 0


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
def test_the_arguments_of_transformers(verification: str):
    """Which takes one row at a time."""
    models = {"model": target_of(KIND), "assistant_model": draft_of(KIND, OTHER)}
    both = {"tokenizer": tokenizer_of(KIND), "assistant_tokenizer": tokenizer_of(OTHER)}
    options = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 1, "num_draft_tokens": 4, "verification": verification}
    torch.manual_seed(4)
    text = generate(**texts(KIND, 1), **SAMPLED, **options, **models, **both)
    assert torch.equal(text, run(made(verification=verification), rows=1))


@pytest.mark.parametrize("layout", ["ragged", "padded", "packed", "lockstep"])
def test_layouts_of_the_target(layout: str):
    strategy = made(layout=layout)
    assert torch.equal(run(strategy), run())
    assert strategy.report.layout == layout


def test_of_an_encoder_decoder_target():
    sizes = {"vocab_size": len(tokenizer_of(KIND)), "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 2)
    sizes |= dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 32)
    torch.manual_seed(0)
    special = {"decoder_start_token_id": 0, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1}
    config = BartConfig(**sizes, **special, init_std=0.4, forced_eos_token_id=None)
    target = BartForConditionalGeneration(config).eval()
    strategy = made()
    assert torch.equal(run(strategy, target), run(target=target))


@pytest.mark.parametrize("verification", ["token", "block"])
def test_rows_with_little_room_left_stand_alone(verification: str):
    """What a row that is nearly done proposes is not changed by rows that go on; a word is several of the draft's."""
    kind, other = "word pieces in lower case", "byte-level, other merges"
    options = {"tokenizer": tokenizer_of(kind), "draft_tokenizer": tokenizer_of(other), "num_draft_tokens": 8}
    strategy = partial(made, draft_of(kind, other), **options, verification=verification)
    prompts = [tokenizer_of(kind)(text)["input_ids"] for text in ["the cat", "a", "in the house", "dogs sat"]]
    asked = [Request(ids, 6 + 9 * (row % 2), seed=row) for row, ids in enumerate(prompts * 6)]
    assert_alone(strategy(), target_of(kind), asked, by=strategy, pad_token_id=1, **SAMPLED)


def test_too_few_common_tokens_are_refused(monkeypatch: pytest.MonkeyPatch):
    """No two tokenizers of these tests have less than a half in common, so the limit goes up instead."""
    few = "word pieces in lower case"
    strategy = made(draft_of(KIND, few), draft_tokenizer=tokenizer_of(few))
    assert torch.equal(run(strategy), run())
    assert strategy.report.accepted > 0
    assert 0.5 < strategy.report.tokenizer_match["coverage"] < 0.6
    monkeypatch.setattr(other_tokenizer, "MIN_COVERAGE", 0.6)
    with pytest.raises(ValueError, match="tokenizer_match='tokens'"):
        run(strategy)
    strategy.tokenizer_match = "tokens"
    assert torch.equal(run(strategy), run())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    pair_of(KIND, OTHER).save_pretrained(tmp_path / "pair")
    return tmp_path / "pair"


def test_pairs_keep_both_tokenizers(saved: Path):
    config = json.loads((saved / PAIR_CONFIG_NAME).read_text())
    assert config["tokenizers"]["method"] == "own"
    assert config["draft_tokenizer"]["tokens"] == len(tokenizer_of(OTHER))
    assert 0.9 < config["draft_tokenizer"]["overlap"] < 1
    pair = DraftTargetPair.from_pretrained(saved, dtype=torch.float32)
    assert pair.draft_tokenizer.get_vocab() == tokenizer_of(OTHER).get_vocab()
    torch.manual_seed(4)
    given = texts(KIND, 4) | SAMPLED | {"max_new_tokens": NEW_TOKENS, "pad_token_id": 1}
    output = pair.generate(**given, num_draft_tokens=4, verification="coupled")
    assert torch.equal(output, run())
    assert pair.report.tokenizer_match["match"] == "tokens"
    pair.save_pretrained(saved.parent / "again")
    assert json.loads((saved.parent / "again" / PAIR_CONFIG_NAME).read_text()) == config
