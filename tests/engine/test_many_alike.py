"""Prompts that begin alike: what they share is read once, and each request has the text of `generate`."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from all_pairs import all_pairs
from many import DRAFTS, MODES, PENALTIES, SAMPLED, alone, assert_alone
from plain import assert_plain, coupled
from tiny import VOCAB_SIZE, Forwards, near, tiny

from hf_specx import Request, SpeculativeDecoding
from hf_specx.common.tokenizers import padded_rows
from hf_specx.models import ragged
from hf_specx.models.prompts import prepare


OPTIONS = MODES | {"penalties": PENALTIES}


@pytest.fixture(autouse=True)
def copies_all(monkeypatch: pytest.MonkeyPatch):
    """However short what is alike, and where windows have lost nothing yet."""
    monkeypatch.setattr(ragged, "MIN_COPIED_COLUMNS", 1)
    monkeypatch.setattr(ragged, "MIN_SAVED_TOKENS", 1)
    monkeypatch.setattr(ragged, "MARGIN", 64)


def words(number: int, seed: int) -> list[int]:
    return torch.randint(1, VOCAB_SIZE, (number,), generator=torch.Generator().manual_seed(seed)).tolist()


def requests(order: int = 0) -> list[Request]:
    """Two beginnings that have one in common and a third one; prompts that are a beginning, and that are one token."""
    one, third = words(20, 0), words(14, 1)
    other = one[:9] + words(11, 2)
    begins = [one] * 5 + [other, one, third, other, one[:9], third, one + other, one, other, one[:1]]
    texts = [begin + words(number % 7, number) for number, begin in enumerate(begins)]
    random.Random(order).shuffle(texts)
    return [Request(text, 4 + 5 * number % 11, seed=number) for number, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("model_type", "order", "batch_size", "options"),
    all_pairs(("llama", "mistral", "gpt2"), range(3), [1, 2, 8], OPTIONS),
)
def test_each_has_its_own_text(model_type: str, order: int, batch_size: int, options: str):
    """Windows of 8 tokens end within a beginning. The draft is the target, so all is kept if its keys are right."""
    target = tiny(model_type)
    strategy = coupled(target, 0.0)
    assert_alone(strategy, target, requests(order), batch_size=batch_size, **OPTIONS[options])
    assert strategy.report.copied > 30
    assert strategy.report.acceptance_rate > 0.999


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("options", MODES)
def test_a_place_that_was_free_has_no_prompt_to_copy(model_type: str, options: str):
    """The next turn of a chat comes in the place that the turn before has left, rounds ago, and in that of another."""
    target, one, other = tiny(model_type), words(20, 0), words(20, 1)

    def arriving() -> Iterator[Request | None]:
        yield from (Request(one, 24, seed=1), Request(other, 2, seed=2), Request(words(9, 3), 3, seed=3))
        yield from [None] * 8
        yield from (Request(other + words(5, 4), 12, seed=4), Request(one + words(3, 5), 12, seed=5))

    asked = [request for request in arriving() if request is not None]
    expected = [alone(target, request, **MODES[options] | {"eos_token_id": None}) for request in asked]
    strategy = coupled(target, 0.0, num_draft_tokens=1)
    done = strategy.generate_many(target, arriving(), batch_size=3, **MODES[options] | {"eos_token_id": None})
    assert [each.tokens for each in sorted(done, key=lambda each: each.index)] == expected
    assert strategy.report.acceptance_rate > 0.999


@pytest.mark.parametrize("options", MODES)
def test_a_draft_that_reads_late_copies_nothing_of_who_has_left(options: str):
    """A row ends with its first token, before the draft has read anything, and comes back with the same beginning."""
    target, one, other = tiny(), words(20, 0), words(20, 1)

    def arriving() -> Iterator[Request | None]:
        yield from (Request(one, 40, seed=1), Request(other, 1, seed=2))
        yield from [None] * 4
        yield Request(other + words(5, 4), 12, seed=3)

    strategy = coupled(target, 0.0, num_draft_tokens=4)
    options_of_call = MODES[options] | {"eos_token_id": None}
    done = list(strategy.generate_many(target, arriving(), batch_size=2, ordered=True, **options_of_call))
    asked = [request for request in arriving() if request is not None]
    assert [each.tokens for each in done] == [alone(target, request, **options_of_call) for request in asked]
    assert strategy.report.acceptance_rate > 0.999


def after(row: int, ids: torch.Tensor) -> list[int]:
    """What may follow, by the last token."""
    return [int(i) for i in (ids[-1] + torch.arange(1, 20)) % VOCAB_SIZE]


@pytest.mark.parametrize("kind", ["early exit", "suffix", "mixture"])
def test_other_drafts_under_a_mask(kind: str):
    target = tiny()
    strategy = SpeculativeDecoding(DRAFTS[kind](target), num_draft_tokens=3, verification="coupled")
    assert_alone(strategy, target, requests(), batch_size=3, **SAMPLED | {"prefix_allowed_tokens_fn": after})
    assert strategy.report.copied > 30


@pytest.mark.parametrize("verification", ["token", "block"])
def test_seeds_with_rejection(verification: str):
    target = tiny()
    strategy = lambda: SpeculativeDecoding(near(target, 0.2), num_draft_tokens=3, verification=verification)  # noqa: E731
    assert_alone(strategy(), target, requests(), by=strategy, **SAMPLED)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:compile=True compiles")
def test_compiled_forwards(traced: None):
    target = tiny(num_hidden_layers=1)
    strategy = coupled(target, 0.0, num_draft_tokens=2, compile=True)
    assert_alone(strategy, target, requests(), batch_size=3, **SAMPLED)
    assert strategy.report.copied > 30
    assert strategy.report.acceptance_rate > 0.999


@pytest.mark.parametrize("batch_size", [1, 4, 12])
def test_what_all_begin_with_is_read_once(batch_size: int):
    """By both models; the last seven tokens of each are read in any case."""
    target, begin = tiny(), words(40, 3)
    strategy = coupled(target, 0.1)
    asked = [Request(begin + words(7, n), 8, seed=n) for n in range(12)]
    with Forwards(target) as of_target, Forwards(strategy.draft_model) as of_draft:
        list(strategy.generate_many(target, asked, batch_size=batch_size, **SAMPLED))
    for forwards in (of_target, of_draft):
        assert sum(ids.numel() for ids in forwards.ids if ids.shape[1] > 5) == 40 + 12 * 7


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt2"])
def test_rows_of_one_call(model_type: str):
    """The scores and the cache as well."""
    target, begin = tiny(model_type), words(20, 0)
    inputs = padded_rows([begin + words(3, 1), begin + words(9, 2), begin, begin[:12] + words(2, 3)], "left")
    strategy = coupled(target, 0.0)
    settings = SAMPLED | {"return_dict_in_generate": True, "output_logits": True, "num_return_sequences": 2}
    with Forwards(target) as forwards:
        assert_plain(target, strategy, inputs, **settings)
    assert forwards.lengths.count(29) == 1  # plain's own
    assert strategy.report.copied == 2 * (12 + 12 - 6 + 12 - 9 + 12 - 15 + 15 - 12)
    assert strategy.report.acceptance_rate > 0.999


@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
def test_tokens_that_are_not_counted_from_the_first(name: str):
    """Gaps and positions of the user's own: nothing is copied, and each row has its text."""
    target, begin = tiny(), words(20, 0)
    inputs = padded_rows([begin + words(3, 1), begin + words(9, 2)], "left")
    inputs[name] = inputs["attention_mask"].clone() if name == "attention_mask" else torch.arange(29).expand(2, -1)
    inputs["attention_mask"][0, 12] = inputs["attention_mask"][0, 12] * (name != "attention_mask")
    strategy = coupled(target, 0.0)
    assert_plain(target, strategy, inputs, **SAMPLED)
    assert not strategy.report.copied


def test_ranks_that_keep_step_run_no_forward_more():
    """Each has texts of its own."""
    target, inputs = tiny(), padded_rows([words(20, 0)] * 3, "left")
    alone = []
    for synced_gpus in (False, True):
        prompt = replace(prepare(target, 8, inputs), synced_gpus=synced_gpus)
        with Forwards(target) as forwards:
            ragged.RaggedRunner(prompt).prefill()
        alone.append(forwards.lengths)
    assert alone == [[20, 1], [20]]
