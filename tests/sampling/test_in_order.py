"""Processors and criteria that keep state are shown each emitted token once, in order, with all rows, as in stock."""

import math

import pytest
import torch
import zoo
from all_pairs import all_pairs
from enumerated import END, NUM_DRAFT_TOKENS, PAD, draw, exact_distribution, p_values
from tiny import Forwards, near, prompts, tiny
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria

from hf_specx import SpeculativeDecoding
from hf_specx.common.round import Draft


NEW_TOKENS = 24


class CallCount(LogitsProcessor):
    """Favours one token a call, counted from the first."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, (5 * self.calls) % scores.shape[1]] += 6
        return scores


class Mates(LogitsProcessor):
    """Mixes rows: each is pushed by the scores and by the last tokens of all, the finished ones among them."""

    def __call__(self, input_ids, scores):
        scores = scores + 0.5 * scores.roll(1, 0)
        scores[:, input_ids[:, -1]] -= 3
        return scores


class Trail(LogitsProcessor):
    """Keeps a moving average of what it was shown, and every prefix."""

    def __init__(self):
        self.average, self.prefixes = 0.0, []

    def __call__(self, input_ids, scores):
        self.average = 0.5 * self.average + scores
        self.prefixes.append(input_ids.clone())
        return scores - 0.3 * self.average


class Precise(LogitsProcessor):
    """Does not say that it keeps no state, and gives another precision than that of the draft's scores."""

    def __call__(self, input_ids, scores):
        return scores.double() + 0.1


class Patience(StoppingCriteria):
    """Counts its calls; stops every third row a call from the seventh on."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        rows = torch.arange(len(input_ids))
        return (self.calls >= 7) & (rows <= (self.calls - 7) // 3)


class Together(StoppingCriteria):
    """Mixes rows: stops those that just emitted what another row did."""

    def __call__(self, input_ids, scores, **kwargs):
        last = input_ids[:, -1]
        return (last[:, None] == last).sum(1) > 1


class MeanUnsure(StoppingCriteria):
    """Reads the scores of all rows, those that are finished among them."""

    def __call__(self, input_ids, scores, **kwargs):
        done = scores[-1].softmax(-1).amax(-1).mean() < 0.17
        return torch.full((len(input_ids),), bool(done))


class Unsure(StoppingCriteria):
    """Reads the scores, as transformers' own `ConfidenceCriteria`."""

    def __call__(self, input_ids, scores, **kwargs):
        return scores[-1].softmax(-1).amax(-1) < 0.12


PROCESSORS = {
    "calls": lambda: {"logits_processor": [CallCount()]},
    "mates": lambda: {"logits_processor": [Mates()]},
    "trail": lambda: {"logits_processor": [Trail()], "repetition_penalty": 1.3},
    "in float64": lambda: {"logits_processor": [Precise()]},
    "and stateless ones": lambda: {"logits_processor": [CallCount()], "no_repeat_ngram_size": 2, "min_new_tokens": 5},
    "guided as well": lambda: {"logits_processor": [CallCount()], "guidance_scale": 1.4},
}
CRITERIA = {
    "calls": lambda: {"stopping_criteria": [Patience()]},
    "mates": lambda: {"stopping_criteria": [Together()]},
    "scores": lambda: {"stopping_criteria": [Unsure()], "output_scores": True, "return_dict_in_generate": True},
}
CRITERIA["scores of all"] = lambda: CRITERIA["scores"]() | {"stopping_criteria": [MeanUnsure()]}
CASES = {f"processor: {k}": v for k, v in PROCESSORS.items()} | {f"criterion: {k}": v for k, v in CRITERIA.items()}


def run(model: PreTrainedModel, inputs: dict, settings: dict, **strategy):
    """A text and the state that the generator is left in."""
    torch.manual_seed(5)
    output = model.generate(**inputs, **settings, **strategy)
    return getattr(output, "sequences", output), torch.get_rng_state()


ENDS = [2, 7, 11, 19, 23, 33, 41, 46]


@pytest.mark.parametrize(("case", "do_sample", "eos_token_id"), all_pairs(CASES, [False, True], [None, ENDS]))
def test_equals_stock(case: str, do_sample: bool, eos_token_id: list | None):
    target = tiny()
    settings = {"do_sample": do_sample, "max_new_tokens": NEW_TOKENS, "eos_token_id": eos_token_id, "pad_token_id": 3}
    settings |= {"top_k": 0} if do_sample else {}
    expected, state = run(target, prompts(4), settings | CASES[case]())
    ends = torch.isin(expected[:, 11:], torch.tensor(eos_token_id or [])).int().argmax(-1)
    assert eos_token_id is None or len(set(ends.tolist())) > 1
    for draft in (target, near(target, 0.05), tiny(seed=9)):
        strategy = SpeculativeDecoding(draft, num_draft_tokens=4, verification="coupled" if do_sample else None)
        output, left = run(target, prompts(4), settings | CASES[case](), custom_generate=strategy)
        assert torch.equal(output, expected)
        assert torch.equal(left, state)
        assert strategy.report.layout == "lockstep"
        assert "must be shown each token once, in order" in strategy.report.layout_reason


@pytest.mark.parametrize("model_type", ["gpt2", "t5", "bart", "mamba2", "bamba"])
def test_any_architecture(model_type: str):
    """Positions, encoders, and states that are put back."""
    target = zoo.build("seq2seq" if model_type in ("t5", "bart") else "causal", model_type)
    inputs, settings = zoo.inputs(target, 4), {"do_sample": True, "top_k": 0, "max_new_tokens": 14}
    expected, _ = run(target, inputs, settings | {"logits_processor": [Trail()]})
    strategy = SpeculativeDecoding(near(target, 0.03), num_draft_tokens=3, verification="coupled")
    output, _ = run(target, inputs, settings | {"logits_processor": [Trail()]}, custom_generate=strategy)
    assert torch.equal(output, expected)


def test_each_prefix_is_shown_once():
    target, trail = tiny(), Trail()
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=4)
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "logits_processor": [trail]}
    output, _ = run(target, prompts(4), settings, custom_generate=strategy)
    assert len(trail.prefixes) == NEW_TOKENS
    for seen, prefix in enumerate(trail.prefixes):
        assert torch.equal(prefix, output[:, : 11 + seen])


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 7])
def test_equal_draft_needs_few_target_forwards(num_draft_tokens: int):
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.0), num_draft_tokens=num_draft_tokens)
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "logits_processor": [AsBefore()]}
    with Forwards(target) as forwards:
        run(target, prompts(2), settings, custom_generate=strategy)
    _, *rounds = forwards.lengths
    assert len(rounds) <= math.ceil((NEW_TOKENS - 1) / (num_draft_tokens + 1))
    assert strategy.report.acceptance_rate == 1


class AsBefore(LogitsProcessor):
    """Changes nothing, but does not say so."""

    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.parametrize(("end", "batches", "rows"), [(None, 150, 2), (END, 80, 64)])
def test_law_of_sampled_drafts(end: int | None, batches: int, rows: int):
    """Token verification position by position. False alarms with probability 1e-4 over both; see test_law.py.

    A round goes on only while all rows keep their candidates, so that of many rows it judges but the first ones.
    """
    processors = [AsBefore()]
    tokens = draw(None, batches=batches, rows=rows, eos_token_id=end, pad_token_id=PAD, logits_processor=processors)
    assert min(p_values(tokens, exact_distribution([], end))) > 1e-4 / 4


def acceptance_of_an_equal_draft() -> float:
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.0), num_draft_tokens=4, verification="token")
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS, "logits_processor": [AsBefore()]}
    run(target, prompts(4), settings, custom_generate=strategy)
    return strategy.report.acceptance_rate


def test_each_candidate_is_judged_by_its_own_probabilities(monkeypatch: pytest.MonkeyPatch):
    """If draft and target are equal, all are kept; but not where the probabilities are those of the first one."""
    assert acceptance_of_an_equal_draft() == 1
    at = Draft.at

    def wrong(draft: Draft, position: int) -> Draft:
        one = at(draft, position)
        return one._replace(probs=draft.probs[:, :1]) if one.tokens.shape[1] else one

    monkeypatch.setattr(Draft, "at", wrong)
    assert acceptance_of_an_equal_draft() < 0.9


class Gumbel(LogitsProcessor):
    """Draws from the default generator, as a careless watermark might."""

    def __call__(self, input_ids, scores):
        return scores - torch.empty_like(scores).exponential_().log()


def test_noise_that_would_be_used_twice_is_an_error():
    target = tiny()
    settings = {"do_sample": True, "max_new_tokens": 4, "logits_processor": [Gumbel()]}
    with pytest.raises(RuntimeError, match="draws from torch's default generator.*verification='token'"):
        run(target, prompts(2), settings, custom_generate=SpeculativeDecoding(target, verification="coupled"))
    output, _ = run(target, prompts(2), settings, custom_generate=SpeculativeDecoding(target))
    assert output.shape == (2, 15)


def test_finished_rows_do_not_ask_a_generator():
    """Their pads would match anything, and set how many candidates the others draft."""
    target = tiny()
    lookup = PromptLookupCandidateGenerator(num_output_tokens=4, max_matching_ngram_size=1, max_length=200)
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": [2, 7, 11, 19], "pad_token_id": 3}
    settings["logits_processor"] = [AsBefore()]
    expected, _ = run(target, prompts(4), settings)
    asked = []
    ask = lookup.get_candidates
    lookup.get_candidates = lambda ids: asked.append(ids) or ask(ids)
    output, _ = run(target, prompts(4), settings, custom_generate=SpeculativeDecoding(lookup))
    assert torch.equal(output, expected)
    assert asked
    assert not any(torch.isin(ids[0, -1], torch.tensor([2, 7, 11, 19])) for ids in asked if ids.shape[1] > 11)


def test_the_report_counts_what_was_judged():
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=NUM_DRAFT_TOKENS)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS, "logits_processor": [AsBefore()]}
    output, _ = run(target, prompts(4), settings | {"eos_token_id": 5}, custom_generate=strategy)
    report = strategy.report
    assert report.verification == "token"
    assert 0 < report.accepted < report.judged < report.drafted
    assert 0 < report.alpha < 1
    for row, emitted in enumerate(report.emitted_per_row):
        text = output[row, 11:].tolist()
        assert emitted == (text.index(5) + 1 if 5 in text else len(text))
    assert all(record.judged <= record.accepted + 1 for row in report.history for record in row)
