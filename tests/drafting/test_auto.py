"""Numbers of candidates that change from round to round, through `generate`: exact, the draft in step, a fake clock.

The chi-square test at the end fails by chance with probability 1e-6.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import zoo
from enumerated import draw, exact_distribution, p_values
from tiny import Forwards, near, prompts, tiny
from transformers import PreTrainedModel

from hf_specx import Costs, SpeculativeDecoding
from hf_specx.drafting.candidates import SampledCandidateGenerator
from hf_specx.drafting.draft_length import MAX_DRAFT_TOKENS, Outcome
from hf_specx.drafting.schedule import Auto, Schedule
from hf_specx.engine import prefill


FORCED = (0, 3, 0, 0, 5, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 1, 1, 0, 8)
KNOWN = {"target": {1: 1.0, 9: 1.6}, "draft": 0.1}
GREEDY, COUPLED = {"do_sample": False}, {"do_sample": True, "top_k": 0}
NEW_TOKENS = 60
LAYOUTS = ("ragged", "padded", "packed", "lockstep")
EXACT = [("llama", layout) for layout in LAYOUTS]
EXACT += [(name, "auto") for name in ("gpt2", "mistral", "gemma2", "mamba2", "qwen3_next", "lfm2")]
EXACT += [("t5", "padded"), ("t5", "lockstep")]


class Forced(Schedule):
    """Drafts given numbers in turns."""

    most = MAX_DRAFT_TOKENS

    def __init__(self, *_: object, numbers: Iterable[int] = FORCED):
        super().__init__()
        self.numbers = itertools.cycle(numbers)
        self.wanted = next(self.numbers)

    def update(self, outcome: Outcome, rows: int) -> None:
        self.wanted = next(self.numbers)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "Auto", Forced)


def known(rows: int = 4) -> Costs:
    return Costs({rows: KNOWN})


def run(target: PreTrainedModel, inputs: dict, strategy: SpeculativeDecoding | None = None, **settings: Any):
    torch.manual_seed(5)
    return target.generate(**inputs, **{"max_new_tokens": NEW_TOKENS} | settings, custom_generate=strategy)


def drafted(strategy: SpeculativeDecoding) -> list[int]:
    """Candidates of each step of row 0 behind its prompt."""
    return [record.drafted for record in strategy.report.history[0][1:]]


@pytest.mark.filterwarnings("ignore:all rows advance by the batch minimum")
@pytest.mark.parametrize("settings", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize(("model_type", "layout"), EXACT)
def test_numbers_that_change_give_the_text_of_stock(forced: None, model_type: str, layout: str, settings: dict):
    """Rows end at different steps, so that some leave while the draft is away."""
    kind = {"t5": "seq2seq", "mamba2": "causal", "qwen3_next": "causal", "lfm2": "causal"}.get(model_type)
    target = tiny(model_type) if kind is None else zoo.build(kind, model_type)
    inputs = prompts(4) if kind is None else zoo.inputs(target, 4)
    free = run(target, inputs, **settings)
    ends = [int(free[0, -50]), int(free[1, -9])]
    for end in (None, ends):
        given = settings | {"eos_token_id": end, "pad_token_id": 0}
        expected, state = run(target, inputs, **given), torch.get_rng_state()
        strategy = SpeculativeDecoding(near(target, 0.05), verification="coupled", layout=layout, costs=known())
        assert torch.equal(run(target, inputs, strategy, **given), expected)
        assert torch.equal(torch.get_rng_state(), state)
        assert 0 in drafted(strategy)
        assert strategy.report.drafted > strategy.report.accepted


class Spied(SampledCandidateGenerator):
    """Compares greedy candidates with those of a draft that reads the whole text anew."""

    proposed = 0

    def propose(self, sequences, num_draft_tokens, threshold=0.0):
        draft = super().propose(sequences, num_draft_tokens, threshold)
        for row, candidates in zip(sequences.rows, draft.tokens, strict=True):
            text = sequences.row(row)[None]
            for candidate in candidates[: max(0, NEW_TOKENS - 2 - sequences.counts[row])]:  # behind it nobody looks
                scores = self.draft_model(text).logits[0, -1]
                assert scores[candidate] > scores.max() - 1e-3
                text = torch.cat([text, candidate[None, None]], 1)
            type(self).proposed += 1
        return draft


@pytest.mark.filterwarnings("ignore:all rows advance by the batch minimum")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_draft_knows_the_text_after_an_absence(forced: None, monkeypatch: pytest.MonkeyPatch, layout: str):
    """The candidates that it had proposed and that were rejected are not taken for text."""
    monkeypatch.setattr(prefill, "SampledCandidateGenerator", Spied)
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.1), layout=layout, costs=known())
    Spied.proposed = 0
    run(target, prompts(4), strategy, **GREEDY)
    assert Spied.proposed > 20
    assert strategy.report.accepted < strategy.report.drafted


def test_stale_candidates_would_be_seen(forced: None, monkeypatch: pytest.MonkeyPatch):
    """A control of the test above."""
    monkeypatch.setattr("hf_specx.engine.decode._rest", lambda run: None)
    with pytest.raises(AssertionError):
        test_the_draft_knows_the_text_after_an_absence(None, monkeypatch, "ragged")


def test_a_long_absence_costs_one_forward(monkeypatch: pytest.MonkeyPatch):
    """And one when it begins, for what was rejected; none where nothing was."""
    numbers = (4, *[0] * 30, 3, *[0] * 100)
    monkeypatch.setattr(prefill, "Auto", lambda *_: Forced(numbers=numbers))
    target = tiny()
    for noise, rests in ((0.0, 0), (0.5, 2)):
        draft = near(target, noise)
        with Forwards(draft) as forwards:
            run(target, prompts(4), SpeculativeDecoding(draft, costs=known()), **GREEDY)
        prompt, first, *others = forwards.lengths
        assert (prompt, first) == (11, 1)
        assert len([length for length in others if length > 28]) == 1
        assert sum(forwards.lengths) < 11 + 4 + 3 + 30 + 2 * rests + 3
        assert len(forwards.lengths) == 1 + 4 + 3 + rests


def test_one_number_travels_to_the_host_a_round(monkeypatch: pytest.MonkeyPatch):
    """All that a round decides is read at once, survival among it."""
    target, counts, whole = tiny(), [], torch.Tensor.tolist
    monkeypatch.setattr(prefill, "Auto", lambda *_: Forced(numbers=[0, 3]))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: counts.append(1) or whole(tensor))
    for name in ("item", "__bool__", "__int__", "__float__"):
        method = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda tensor, own=method: counts.append(1) or own(tensor))
    seen = []
    for new_tokens in (20, 60):
        counts.clear()
        strategy = SpeculativeDecoding(near(target, 0.0), costs=known())
        run(target, prompts(4), strategy, **GREEDY, max_new_tokens=new_tokens)
        seen.append((len(counts), len(strategy.report.history[0])))
    assert seen[1][0] - seen[0][0] == seen[1][1] - seen[0][1] == 16


class Clock:
    """Time passes in forwards alone: by seconds for each, and for each token and row of it."""

    def __init__(self, *models: tuple[PreTrainedModel, float, float]):
        self.now, self.models = 0.0, models
        for model, each, token in models:
            model.register_forward_pre_hook(self.hook(each, token), with_kwargs=True)

    def hook(self, each: float, token: float) -> Callable:
        def passes(module: object, args: object, kwargs: dict) -> None:
            self.now += each + token * kwargs["input_ids"].numel()

        return passes

    def __call__(self) -> float:
        return self.now


def clocked(noise: float, draft_step: float, **options: Any) -> tuple[PreTrainedModel, SpeculativeDecoding, Clock]:
    target = tiny(max_position_embeddings=1024)
    draft = near(target, noise) if noise < 1 else tiny(seed=8, max_position_embeddings=1024)
    clock = Clock((target, 1.0, 0.01), (draft, draft_step, 0.001))
    return target, SpeculativeDecoding(draft, costs=Costs(clock=clock), **options), clock


@pytest.mark.parametrize("mode", ["greedy", "coupled", "token", "block"])
@pytest.mark.parametrize(("noise", "draft_step"), [(0.02, 0.05), (0.2, 0.2)])
def test_a_fake_clock_makes_it_deterministic(mode: str, noise: float, draft_step: float):
    runs = []
    for _ in range(2):
        target, strategy, clock = clocked(noise, draft_step, verification=None if mode == "greedy" else mode)
        texts = [run(target, prompts(4), strategy, **(GREEDY if mode == "greedy" else COUPLED)) for _ in range(2)]
        runs.append((torch.stack(texts), strategy.report.history, strategy.costs.to_dict(), clock.now))
    first, second = runs
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]
    assert len({record.drafted for row in first[1] for record in row}) > 1


@pytest.mark.parametrize(("mode", "rows"), [("greedy", 1), ("block", 1), ("coupled", 8)])
def test_an_unrelated_draft_is_let_rest(mode: str, rows: int):
    """Of 512 tokens from the first call on, whose calibration does not count: at most 3 % slower than plain."""
    target, strategy, clock = clocked(1.0, 0.3, verification=None if mode == "greedy" else mode)
    settings = (GREEDY if mode == "greedy" else COUPLED) | {"max_new_tokens": 512}
    strategy.calibrate(target, prompts(rows)["input_ids"])
    seconds, texts = [], []
    for chosen in (None, strategy, strategy):
        started = clock.now
        texts.append(run(target, prompts(rows), chosen, **settings))
        seconds.append(clock.now - started)
        assert mode == "block" or torch.equal(texts[0], texts[-1])
    assert seconds[1] < seconds[0] / 0.97
    assert seconds[2] < seconds[0] / 0.98
    assert 0 < strategy.report.rounds < 20
    assert strategy.report.plain_steps > 480


def test_a_good_cheap_draft_is_asked_for_much():
    target, strategy, _ = clocked(0.0, 0.02)
    run(target, prompts(4), strategy, **COUPLED)
    assert drafted(strategy).count(MAX_DRAFT_TOKENS) >= 4
    assert 0 not in drafted(strategy)[:-1]


class Wild:
    """A clock that makes no sense, otherwise each time."""

    def __init__(self, seed: int):
        self.generator, self.now = torch.Generator().manual_seed(seed), 0.0

    def __call__(self) -> float:
        self.now += float(torch.rand((), generator=self.generator)) ** 8 * 100
        return self.now


@pytest.mark.parametrize("mode", ["token", "block"])
def test_the_clock_of_a_call_does_not_change_what_it_draws(mode: str):
    """What it saw is kept for later calls; there it does. Rounds that take otherwise than plain steps would count."""
    target = tiny()
    draft, texts, numbers = near(target, 0.05), [], []
    for seed in range(3):
        costs = Costs({4: KNOWN}, rounds={4: {0: 1.0}}, clock=Wild(seed))
        strategy = SpeculativeDecoding(draft, verification=mode, costs=costs)
        texts.append(run(target, prompts(4), strategy, **COUPLED))
        numbers.append(drafted(strategy))
        assert costs.rounds
        assert 4 in costs.table
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
    assert numbers[0] == numbers[1] == numbers[2]
    assert len(set(numbers[0])) > 2


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_the_clock_counts_at_once_where_the_text_is_the_same_anyway(mode: str):
    target = tiny()
    draft, texts, numbers = near(target, 0.05), [], []
    for seed in range(3):
        costs = Costs({4: KNOWN}, rounds={4: {0: 1.0}}, clock=Wild(seed))
        strategy = SpeculativeDecoding(draft, verification="coupled", costs=costs)
        texts.append(run(target, prompts(4), strategy, **(GREEDY if mode == "greedy" else COUPLED)))
        numbers.append(tuple(drafted(strategy)))
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
    assert len(set(numbers)) > 1


@pytest.mark.filterwarnings("ignore:all rows advance by the batch minimum")
@pytest.mark.parametrize(("layout", "expected"), [("ragged", 0.8), ("lockstep", 0.8**4)])
def test_what_a_call_begins_with(monkeypatch: pytest.MonkeyPatch, layout: str, expected: float):
    """The acceptance of earlier calls, of all rows at once where they advance together; the rows and the room."""
    made: list[Auto] = []

    def note(*args: Any) -> Auto:
        assert args[1:4] == ("block", 4, NEW_TOKENS)
        made.append(Auto(*args))
        assert made[0].chooser.survival.expected_tokens()[1] == pytest.approx(1 + expected)
        return made[0]

    monkeypatch.setattr(prefill, "Auto", note)
    target = tiny()
    costs = Costs({4: KNOWN}, {"block": 0.8})
    run(target, prompts(4), SpeculativeDecoding(near(target, 0.05), layout=layout, costs=costs), **COUPLED)
    assert len(made) == 1


@pytest.mark.parametrize("mode", ["token", "block"])
def test_two_strategies_with_the_same_costs_emit_the_same(mode: str):
    """Costs that calls have filled, one of them after a way through text."""
    target = tiny()
    draft, costs = near(target, 0.2), Costs({4: KNOWN})
    teacher = SpeculativeDecoding(draft, verification=mode, costs=costs)
    for _ in range(3):
        run(target, prompts(4), teacher, **COUPLED)
    saved, texts, numbers = costs.to_dict(), [], []
    assert saved["rounds"]
    for _ in range(2):
        strategy = SpeculativeDecoding(draft, verification=mode, costs=Costs.from_dict(saved))
        texts.append([run(target, prompts(4), strategy, **COUPLED)])
        numbers.append(drafted(strategy))
    assert torch.equal(texts[0][0], texts[1][0])
    assert numbers[0] == numbers[1]


class ByThePast(Forced):
    """Goes by what was kept, as "auto" does: three after a round that kept all, then none, then one."""

    def update(self, outcome: Outcome, rows: int) -> None:
        kept = sum(map(sum, outcome.survival)) / max(1, len(outcome.survival))
        self.wanted = 3 if kept > 1.0 else int(outcome.drafted != 1)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_rounds_by_the_past_keep_the_law(monkeypatch: pytest.MonkeyPatch, verification: str):
    """The joint law of the first tokens, where later rounds are as long as earlier ones were good."""
    monkeypatch.setattr(prefill, "Auto", lambda *_: ByThePast(numbers=[2]))
    monkeypatch.setattr(Costs, "measure", lambda costs, batch, *_: costs.table.update({batch: KNOWN}))
    tokens = draw(verification, batches=200, rows=64, num_draft_tokens="auto")
    assert min(p_values(tokens, exact_distribution([]))) > 1e-6 / 4
