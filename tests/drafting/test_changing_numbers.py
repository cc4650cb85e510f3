"""Numbers of candidates that change from round to round and row to row, through `generate`: exact, the draft in step.

The chi-square tests at the end fail by chance with probability 1e-6.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import zoo
from all_pairs import once
from enumerated import ENOUGH, draw, exact_distribution, p_values
from repeating import LAYOUTS, run
from tiny import Forwards, near, prompts, tiny

from hf_specx import Costs, SpeculativeDecoding
from hf_specx.common.batch import Batch
from hf_specx.common.round import Round
from hf_specx.drafting.schedule import DraftLengthSchedule


KNOWN = {"target": {1: 1.0, 9: 1.6}, "draft": 0.1}
GREEDY = {"do_sample": False, "max_new_tokens": 60}
COUPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 60}
NUMBERS = (0, 3, 0, 0, 5, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 1, 1, 0, 8)
EXACT = [("llama", layout) for layout in LAYOUTS]
EXACT += [(name, "auto") for name in ("gpt2", "mistral", "gemma2", "mamba2", "qwen3_next", "lfm2")]
EXACT += [("t5", "padded"), ("t5", "lockstep")]


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
@pytest.mark.parametrize(("how", "model"), once(product([0, 4], [GREEDY, COUPLED]), EXACT))
def test_numbers_that_change_give_the_text_of_stock(in_turns: Callable, how: tuple, model: tuple):
    """Rows end at different steps, so that some leave while the draft is away."""
    (between, settings), (model_type, layout) = how, model
    in_turns(NUMBERS, between)
    kind = {"t5": "seq2seq", "mamba2": "causal", "qwen3_next": "causal", "lfm2": "causal"}.get(model_type)
    target = tiny(model_type) if kind is None else zoo.build(kind, model_type)
    inputs = prompts(4) if kind is None else zoo.inputs(target, 4)
    free = run(target, inputs, **settings)
    early, late, rejected = int(free[0, -50]), int(free[1, -9]), 0
    for end in (None, [early, late]):
        ending = settings | {"eos_token_id": end, "pad_token_id": 0}
        expected, state = run(target, inputs, **ending), torch.get_rng_state()
        strategy = SpeculativeDecoding(near(target, 0.05), verification="coupled", layout=layout)
        assert torch.equal(run(target, inputs, strategy, **ending), expected)
        assert torch.equal(torch.get_rng_state(), state)
        rejected += strategy.report.drafted - strategy.report.accepted
        if end is None:
            rounds = [tuple(record.drafted for record in row[1:6]) for row in strategy.report.history]
            assert any(0 in row for row in rounds)
            assert (len(set(rounds)) == 1) is not bool(between)
    assert rejected > 0


def test_a_long_absence_costs_one_forward(in_turns: Callable):
    """And none when it begins."""
    in_turns((4, *[0] * 30, 3, *[0] * 100))
    target = tiny()
    for noise in (0.0, 0.5):
        draft = near(target, noise)
        with Forwards(draft) as forwards:
            run(target, prompts(4), SpeculativeDecoding(draft), **GREEDY)
        prompt, first, *others = forwards.lengths
        assert (prompt, first) == (11, 1)
        assert len([length for length in others if length > 28]) == 1
        assert sum(forwards.lengths) < 11 + 4 + 3 + 30 + 3 + 3 * (noise > 0)
        assert len(forwards.lengths) == 1 + 4 + 3


class Wild:
    """A clock that makes no sense, otherwise each time."""

    def __init__(self, seed: int):
        self.generator, self.now = torch.Generator().manual_seed(seed), 0.0

    def __call__(self) -> float:
        self.now += float(torch.rand((), generator=self.generator)) ** 8 * 100
        return self.now


@pytest.mark.parametrize("mode", ["token", "block"])
def test_costs_and_seed_decide_what_is_drawn_and_the_clock_of_the_call_does_not(mode: str):
    """Costs that calls have filled, after a way through text; what a call sees is kept for later ones.

    There it changes numbers of candidates: rounds that take otherwise than plain steps would count.
    """
    target = tiny()
    draft, texts, numbers = near(target, 0.05), [], []
    teacher = Costs({4: KNOWN}, rounds={4: {0: 1.0}}, clock=Wild(9))
    run(target, prompts(4), SpeculativeDecoding(draft, verification=mode, costs=teacher), **COUPLED)
    saved = teacher.to_dict()
    for seed in range(3):
        costs = Costs.from_dict(saved)
        costs.clock = Wild(seed)
        strategy = SpeculativeDecoding(draft, verification=mode, costs=costs)
        texts.append(run(target, prompts(4), strategy, **COUPLED))
        numbers.append([record.drafted for record in strategy.report.history[0][1:]])
        assert costs.to_dict()["rounds"] != saved["rounds"]
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
    assert numbers[0] == numbers[1] == numbers[2]
    assert len(set(numbers[0])) > 1


class ByThePast(DraftLengthSchedule):
    """Goes by what was kept, as "auto" does: three after a round that kept all, then none, then one."""

    is_idle = staticmethod(lambda: False)

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(2)

    def observe(self, done: Round) -> None:
        mean_kept = sum(map(sum, done.prefix_acceptance)) / len(done.prefix_acceptance)
        self.num_draft_tokens = 3 if mean_kept > 1.0 else int(max(done.draft.lengths) != 1)


class EachByItsPast(ByThePast):
    """The same for each row alone."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments)
        self.of_rows = dict[int, int]()

    def wanted_length(self, batch: Batch, row: int) -> int:
        return self.of_rows.get(row, self.num_draft_tokens)

    def observe(self, done: Round) -> None:
        for row, chances in zip(done.rows, done.prefix_acceptance, strict=True):
            self.of_rows[row] = 3 if sum(chances) > 1.0 else int(len(chances) != 1)


@pytest.mark.parametrize(("verification", "numbers"), once(["token", "block"], [ByThePast, EachByItsPast]))
def test_rounds_by_the_past_keep_the_law(monkeypatch: pytest.MonkeyPatch, verification: str, numbers: Callable):
    """The joint distribution of the first tokens, where later rounds are as long as earlier ones were good."""
    draws = ENOUGH if numbers is EachByItsPast else {"batches": 200, "rows": 64}
    monkeypatch.setattr("hf_specx.engine.run.AutoDraftLength", numbers)
    monkeypatch.setattr(Costs, "measure", lambda costs, batch, *_: costs.forward_times.update({batch: KNOWN}))
    tokens = draw(verification, **draws, num_draft_tokens="auto")
    assert min(p_values(tokens, exact_distribution([]))) > 1e-6 / 8
