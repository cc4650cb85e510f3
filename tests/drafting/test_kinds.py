"""For every kind of draft: the text is plain's, rows with seeds do not depend on mates, and threads may share it."""

import copy
import itertools
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import zoo
from all_pairs import each_value, once
from plain import assert_plain
from repeating import GREEDY, LAYOUTS, few_tokens, repetitive, run
from tiny import near, tiny
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_specx import Drafter, EarlyExitDraft, SpeculativeDecoding, SuffixDraft, SuffixPool
from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft


SAMPLED = {"do_sample": True, "top_k": 4, "temperature": 0.5, "eos_token_id": 3}
CALLS = (GREEDY, {"do_sample": True, "top_k": 6, "temperature": 0.5})
MODEL_TYPES = ("llama", "gpt2", "mistral", "qwen3", "gpt_neox")


class Bigrams(Drafter):
    """A drafter of a user's own: what followed the last token when it was in the row before, and so on."""

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        candidates = [following(batch.row(row).tolist(), most) for row, most in zip(batch.rows, lengths, strict=True)]
        tokens = [torch.tensor(ids, dtype=torch.int64) for ids in candidates]
        return Draft(pad_sequence(tokens, batch_first=True), list(map(len, candidates)))


def following(text: list[int], most: int) -> list[int]:
    follower, candidates = dict(itertools.pairwise(text)), text[-1:]
    while len(candidates) <= most and candidates[-1] in follower:
        candidates.append(follower[candidates[-1]])
    return candidates[1:]


DRAFTS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "suffix": lambda _: SuffixDraft(pool=SuffixPool()),
    "early exit": lambda _: EarlyExitDraft(1),
    "several": lambda target: [SuffixDraft(), near(target, 0.2)],
    "generator": lambda _: PromptLookupCandidateGenerator(
        num_output_tokens=4, max_matching_ngram_size=3, max_length=200
    ),
    "own": lambda _: Bigrams(),
}
MODEL: Callable = lambda target: near(target, 0.2)  # noqa: E731
KINDS: dict[str, tuple[Callable, dict[str, Any]]] = {  # draft made for a target; settings
    "suffix": (DRAFTS["suffix"], {}),
    "early exit": (DRAFTS["early exit"], {"num_assistant_tokens": 3}),
    "several": (DRAFTS["several"], {}),
    "model": (MODEL, {"num_assistant_tokens_schedule": "heuristic"}),
    "unsure": (MODEL, {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.3}),
}


def assert_drafted(target: PreTrainedModel, kind: str, layout: str, rows: int, settings: dict) -> None:
    """The text is plain's in fewer forwards, also with what an earlier call has left in a pool."""
    draft = DRAFTS[kind](target)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=5, layout=layout, verification="coupled")
    call, counts = settings | {"max_new_tokens": 40, "pad_token_id": 0}, None
    for _ in range(2):
        counts = assert_plain(target, strategy, few_tokens(rows), before=counts, **call)
    assert strategy.report.accepted > 0
    # an early exit is counted by layers, in its own file
    assert layout == "lockstep" or kind == "early exit" or counts.forwards < counts.plain


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
@pytest.mark.parametrize(
    ("kind", "layout", "model_type", "rows", "settings"), each_value(DRAFTS, LAYOUTS, MODEL_TYPES, [1, 4, 8], CALLS)
)
def test_equals_plain(kind: str, layout: str, model_type: str, rows: int, settings: dict):
    assert_drafted(repetitive(model_type), kind, layout, rows, settings)


@pytest.mark.parametrize("settings", CALLS, ids=["greedy", "coupled"])
@pytest.mark.parametrize(("kind", "model_type"), [("suffix", "t5"), ("several", "bart")])
def test_equals_plain_with_an_encoder(kind: str, model_type: str, settings: dict):
    assert_drafted(zoo.build("seq2seq", model_type), kind, "padded", 4, settings)


@pytest.mark.parametrize(("kind", "verification"), once(KINDS, ["coupled", "token", "block"]))
def test_a_row_under_its_seed_is_the_same_in_any_batch(kind: str, verification: str):
    """Among mates that draft more or less, or end sooner."""
    target, inputs, drafted = tiny(vocab_size=12), few_tokens(4), []
    make, settings = KINDS[kind]

    def texts(rows: list[int]) -> list[list[int]]:
        strategy = SpeculativeDecoding(make(target), verification=verification)
        of_rows = {name: value[rows] for name, value in inputs.items()}
        output = run(target, of_rows, strategy, **SAMPLED, **settings, seeds=[7 + row for row in rows])
        drafted.append(strategy.report.drafted)
        new = output[:, inputs["input_ids"].shape[1] :].tolist()
        return [text[: text.index(3)] if 3 in text else text for text in new]

    alone = [texts([row])[0] for row in range(4)]
    assert texts([0, 1, 2, 3]) == alone
    assert len({len(text) for text in alone}) > 1
    assert sum(drafted[:4]) > 0


def copy_of(strategy: SpeculativeDecoding, how: str) -> SpeculativeDecoding:
    return pickle.loads(pickle.dumps(strategy)) if how == "pickled" else copy.deepcopy(strategy)


@pytest.mark.parametrize(("kind", "how"), each_value(KINDS, ["pickled", "copied"]))
def test_a_strategy_that_has_served_is_copied_with_what_it_has_learned(kind: str, how: str):
    """As Ray does, or a process that is spawned; it then goes its own way."""
    target, inputs = repetitive(), few_tokens(2)
    strategy = SpeculativeDecoding(KINDS[kind][0](target), num_draft_tokens=3)
    expected = run(target, inputs, strategy, do_sample=False)
    other = copy_of(strategy, how)
    learned = [vars(one.costs) | {"texts": texts_of(one.draft_model)} for one in (strategy, other)]
    assert learned[0] == learned[1]
    assert other.report.to_dict() == strategy.report.to_dict()
    again = [
        run(target, inputs, one, do_sample=False) for one in (other, strategy)
    ]  # texts of a pool count from here on
    assert torch.equal(again[0], expected)
    assert torch.equal(again[1], expected)
    assert other.report.drafted == strategy.report.drafted
    assert other.costs.alpha == strategy.costs.alpha


def texts_of(draft: Any) -> list:
    return draft.pool.texts if isinstance(draft, SuffixDraft) else []


@pytest.mark.parametrize("draft", [SuffixDraft(pool=SuffixPool(500)), EarlyExitDraft(1)], ids=["suffix", "early exit"])
def test_calls_at_once_with_one_draft(draft: Any):
    target, rows = tiny(vocab_size=12), (1, 2, 3, 4)

    def text(number: int, drafts: bool = True) -> torch.Tensor:
        strategy = SpeculativeDecoding(draft) if drafts else None
        return run(target, few_tokens(number), strategy, do_sample=False)

    expected = [text(number, drafts=False) for number in rows]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(text, rows))
    assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))
