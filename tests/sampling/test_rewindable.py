"""Processors whose state is taken back: the text and the law of plain `generate`, in every layout, without its calls.

Each p-value is that of a chi-square test of goodness of fit. The seeds are fixed; over all choices of them, some test
of the right law would fail with probability 1e-4.
"""

from contextlib import nullcontext
from functools import partial
from threading import Thread

import pytest
import torch
import zoo
from all_pairs import all_pairs, each_value
from automaton import Automaton
from enumerated import NUM_DRAFT_TOKENS, PROMPT, exact_distribution, first_tokens, models, p_values
from enumerated import VOCAB_SIZE as FEW
from plain import assert_plain
from rounds import Heard
from tiny import VOCAB_SIZE, Forwards, near, prompts, tiny
from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitsProcessor

from hf_specx import SpeculativeDecoding
from hf_specx.common.batch import Batch
from hf_specx.drafting.suffix import SuffixDraft
from hf_specx.sampling import rewindable
from hf_specx.sampling.rewindable import TokenMasks, in_use
from hf_specx.sampling.verifiers import RejectionVerifier


NUM_TESTS, END, NEW = 4, 7, 24


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny()


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    return near(target, 0.1)


def automaton(**options) -> list[Automaton]:
    return [Automaton(VOCAB_SIZE, 11, **options)]


def compare(target, strategy, rows=4, make_processors=None, **options) -> int:
    """Assert that the text is plain's, with new processors for each call; returns the forwards of the target."""
    make_processors = make_processors or partial(automaton, always=END)
    options = {"max_new_tokens": NEW, "eos_token_id": END, "pad_token_id": 0, "top_k": 0, **options}
    fresh = lambda: {"logits_processor": make_processors()}  # noqa: E731
    return assert_plain(target, strategy, prompts(rows), fresh, seed=3, **options).forwards


def kinds(draft, **options) -> dict[str, object]:
    suffix = SuffixDraft(**options)
    return {"model": draft, "suffix": suffix, "both": [suffix, draft]}


AUTOMATA = {
    "of each row": {},
    "of some rows": {"free": (1, 4), "always": END},
    "rows that end": {"always": END},
    "of little rollback": {"always": 6, "max_rollback": 2},
}


@pytest.mark.parametrize(
    ("layout", "drafts", "options", "sampled"),
    each_value(["ragged", "padded", "packed", "lockstep"], ["model", "suffix", "both"], AUTOMATA, [False, True]),
)
def test_text_is_that_of_plain_generate(target, draft, layout: str, drafts: str, options: str, sampled: bool):
    """Nothing is left after the ends of rows, and no more is proposed than can be taken back."""
    make_processors = partial(automaton, **AUTOMATA[options])
    for number in (3, "auto"):
        chosen = {"num_draft_tokens": number, "layout": layout, "verification": "coupled"}
        strategy = SpeculativeDecoding(kinds(draft, min_match=1)[drafts], **chosen)
        forwards = compare(target, strategy, 6, make_processors, do_sample=sampled, max_new_tokens=40)
        assert strategy.report.layout == layout
        assert number == "auto" or strategy.report.forced > 0
        rejected = drafts == "suffix" or (layout, options) == ("lockstep", "of some rows")  # nearly always
        assert number == "auto" or rejected or forwards < 40


def test_forced_tokens_take_no_forward_of_the_draft(target, draft):
    strategy = SpeculativeDecoding(draft, num_draft_tokens=2)
    with Forwards(draft) as forwards:
        compare(target, strategy, rows=1, make_processors=partial(automaton, states=3), eos_token_id=None)
    report = strategy.report
    assert report.forced > 0
    assert len(forwards.ids) - 1 <= report.drafted - report.forced


@pytest.mark.parametrize("num_draft_tokens", [1, 6])
def test_rollback_may_be_limited(target, draft, num_draft_tokens: int):
    """Where it takes back 2 tokens, no row has more candidates."""
    strategy = SpeculativeDecoding(draft, num_draft_tokens=num_draft_tokens)
    compare(target, strategy, make_processors=partial(automaton, max_rollback=2))
    assert 0 < strategy.report.num_draft_tokens <= 2
    reason = strategy.report.limit_reason
    assert bool(reason) == ("Automaton takes back 2 tokens" in reason) == (num_draft_tokens > 2)
    assert reason in str(strategy.report)


@pytest.mark.parametrize("verification", ["coupled", "block"])
@pytest.mark.parametrize("drafts", ["model", "suffix", "both"])
def test_seeded_rows_stand_alone(target, draft, drafts: str, verification: str):
    """Also in how many forced tokens they propose."""
    inputs, seeds = prompts(5), [4, 5, 6, 7, 8]
    options = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}

    def texts(rows: list[int]) -> list[list[int]]:
        strategy = SpeculativeDecoding(kinds(draft)[drafts], num_draft_tokens=3, verification=verification)
        of_rows = {name: value[rows] for name, value in inputs.items()}
        of_rows |= {"logits_processor": [OfOneRow(VOCAB_SIZE, 11)], "seeds": [seeds[row] for row in rows]}
        text = target.generate(**of_rows, **options, custom_generate=strategy)
        assert strategy.report.forced > 0
        return text.tolist()

    assert texts([0, 1, 2, 3, 4]) == [texts([row])[0] for row in range(5)]


class Fails(LogitsProcessor):
    """Raises where the text has grown to so many columns: while candidates are drafted, or judged."""

    stateless = True

    def __init__(self, columns):
        self.columns = columns

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.columns:
            raise OSError("the disk is full")
        return scores


@pytest.mark.parametrize(("drafts", "fails"), [("model", True), ("suffix", True), ("model", False)])
def test_a_processor_is_left_where_the_text_is(target, draft, drafts: str, fails: bool):
    """With all emitted tokens but the last, as plain `generate` leaves it; also after an exception within a round."""
    processor = Automaton(VOCAB_SIZE, 11, states=5)
    texts = Heard(lambda done: [done.batch.row(row).tolist()[-done.batch.counts[row] :] for row in range(3)])
    strategy = SpeculativeDecoding(kinds(draft, min_match=1)[drafts], num_draft_tokens=3)
    strategy.listeners = (texts,)
    inputs = prompts(3)
    processors = [processor, Fails(inputs["input_ids"].shape[1] + 16)] if fails else [processor]
    options = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0, "logits_processor": processors}
    with pytest.raises(OSError, match="the disk is full") if fails else nullcontext():
        target.generate(**inputs, **options, custom_generate=strategy)
    assert max(map(len, texts[-1])) > 1
    assert [processor.texts.get(row, []) for row in range(3)] == [text[:-1] for text in texts[-1]]


@pytest.mark.parametrize("sampled", [False, True])
def test_an_encoder_decoder(sampled: bool):
    target = zoo.build("seq2seq", "t5")
    strategy = SpeculativeDecoding(near(target, 0.1), num_draft_tokens=3, verification="coupled")
    assert compare(target, strategy, make_processors=lambda: [Automaton(96, 1, always=END)], do_sample=sampled) < NEW
    assert strategy.report.forced > 0


@pytest.mark.slow
def test_compiled_forwards(target, draft):
    """Masks act on the draft; forced tokens add no candidates."""
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, compile=True)
    compare(target, strategy, do_sample=False)
    assert strategy.report.accepted > 0
    assert strategy.report.forced == 0


def test_of_two_calls_that_begin_at_once_one_is_refused(monkeypatch: pytest.MonkeyPatch):
    inputs, ends = prompts(2), []
    batch = Batch(inputs["input_ids"], inputs["attention_mask"], 0)
    automaton = Automaton(VOCAB_SIZE, 11)
    masks = [TokenMasks(automaton, VOCAB_SIZE, shared=automaton)]

    def call() -> None:
        try:
            with in_use(masks, batch):
                ends.append("begun")
        except ValueError:
            ends.append("refused")

    class Busy(dict):
        """While the first call looks whether a processor is in use, the second begins."""

        def __contains__(self, number: object) -> bool:
            if not other.ident:
                other.start()
                other.join(0.1)  # it waits for the first
            return super().__contains__(number)

    other = Thread(target=call)
    monkeypatch.setattr(rewindable, "USED_PROCESSORS", Busy())
    with in_use(masks, batch):
        other.join()
    assert ends == ["refused"]


class Budget(LogitsProcessor):
    """Every fourth token is 20, whatever the processors before it say; elsewhere 18 is brought back."""

    stateless = True

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        if input_ids.shape[1] % 4:
            scores[:, 18] = scores[:, 18].clamp(min=1.0)
        else:
            scores[:] = -torch.inf
            scores[:, 20] = 0
        return scores


def by_parity(row, text):
    return (3, 4, 5, 6, 8, 9) if int(text[-1]) % 2 else (8, 10, 11, 12, 13)


@pytest.mark.parametrize(
    ("sampled", "drafts", "mask"), all_pairs([False, True], ["model", "suffix", "both"], ["automaton", "function"])
)
def test_tokens_that_a_later_processor_brings_back(target, draft, sampled: bool, drafts: str, mask: str):
    """The state goes on after a token that the mask excludes, if that is what the text has."""
    strategy = SpeculativeDecoding(kinds(draft, min_match=1)[drafts], num_draft_tokens=3, verification="coupled")
    options = {"prefix_allowed_tokens_fn": by_parity} if mask == "function" else {}
    make_masks = automaton if mask == "automaton" else list
    compare(target, strategy, make_processors=lambda: [*make_masks(), Budget()], do_sample=sampled, **options)


AFTER = {"prefix_allowed_tokens_fn": by_parity, "suppress_tokens": [3, 4, 5, 6, 8, 9], "do_sample": False}
BEFORE = {"prefix_allowed_tokens_fn": lambda row, text: [(int(text[-1]) + 1) % 5], "no_repeat_ngram_size": 2}


@pytest.mark.parametrize("options", [AFTER, BEFORE | {"do_sample": False}, BEFORE], ids=["after", "greedy", "sampled"])
@pytest.mark.parametrize("drafts", ["model", "suffix"])
def test_where_everything_is_excluded(target, draft, drafts: str, options: dict):
    """Greedily `generate` emits token 0 there; where that was done before the function, what the function allows."""
    strategy = SpeculativeDecoding(kinds(draft, min_match=1)[drafts], num_draft_tokens=3, verification="coupled")
    compare(target, strategy, make_processors=list, **{"do_sample": True} | options)


class OfRows(Automaton):
    """Its masks are of a fixed number of rows."""

    rows = 1

    def mask(self, rows):
        return super().mask(range(self.rows))


def test_a_processor_that_was_refused_is_as_new(target, draft):
    """Also one that was given beside it; only what was shown a token is in the middle of a text."""
    refused, beside = OfRows(VOCAB_SIZE, 11), Automaton(VOCAB_SIZE, 11)
    call = {"max_new_tokens": 6, "custom_generate": SpeculativeDecoding(draft, num_draft_tokens=3)}
    with Forwards(target) as forwards, pytest.raises(ValueError, match="shape"):
        target.generate(**prompts(2), logits_processor=[beside, refused], **call)
    assert not forwards.ids
    target.generate(**prompts(1), logits_processor=[refused], **call)
    target.generate(**prompts(2), logits_processor=[beside], **call)
    with pytest.raises(ValueError, match="Automaton is used"):
        target.generate(**prompts(2), logits_processor=[beside], **call)


class OfOneRow(Automaton):
    """The same automaton for all rows."""

    def state(self, row, text):
        return super().state(0, text)


def drawn(verification: str) -> torch.Tensor:
    """`first_tokens`, with a new automaton in each call, the same for all rows."""
    strategy = SpeculativeDecoding(models()[1], num_draft_tokens=NUM_DRAFT_TOKENS, verification=verification)
    fresh = lambda: {"logits_processor": [OfOneRow(FEW, PROMPT.shape[1], states=4)]}  # noqa: E731
    return first_tokens(strategy, batches=20, rows=1024, fresh=fresh)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_law(verification: str):
    tokens = drawn(verification)
    exact = exact_distribution([OfOneRow(FEW, PROMPT.shape[1], states=4)])
    assert min(p_values(tokens, exact)) > 1e-4 / NUM_TESTS
    assert max(p_values(tokens, exact_distribution([]))) < 1e-8


def unmasked_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are drawn from the masked distribution, and judged by the one without a mask."""
    right, draw, seen = TokenMasks.__call__, RejectionVerifier.draw_candidates, []

    def masked(self, batch, draft, scores, ahead):
        seen.append(scores)
        return right(self, batch, draft, scores, ahead)

    def wrong(self, batch, scores, ahead, lengths):
        token, probs = draw(self, batch, scores, ahead, lengths)
        return token, seen[-1][:, 0].softmax(-1) if seen and len(seen[-1]) == len(probs) else probs

    monkeypatch.setattr(TokenMasks, "__call__", masked)
    monkeypatch.setattr(RejectionVerifier, "draw_candidates", wrong)


def no_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was rejected stays in the state."""
    monkeypatch.setattr(OfOneRow, "rollback", lambda self, row, count: None)


def forced_as_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forced token is judged as if it had been drawn from all tokens alike."""
    draw = RejectionVerifier.draw_candidates

    def wrong(self, batch, scores, ahead, lengths):
        token, probs = draw(self, batch, scores, ahead, lengths)
        return token, torch.where(probs.amax(-1, keepdim=True) == 1, 1 / probs.shape[-1], probs)

    monkeypatch.setattr(RejectionVerifier, "draw_candidates", wrong)


@pytest.mark.parametrize(
    ("verification", "wrong"),
    [("token", unmasked_q), pytest.param("token", no_rollback, marks=pytest.mark.slow), ("block", forced_as_drawn)],
)
def test_wrong_variants_are_seen(monkeypatch: pytest.MonkeyPatch, verification: str, wrong):
    wrong(monkeypatch)
    exact = exact_distribution([OfOneRow(FEW, PROMPT.shape[1], states=4)])
    assert min(p_values(drawn(verification), exact)) < 1e-8
