"""Rows end where stock would end them, also inside an accepted run."""

import logging
from types import SimpleNamespace

import pytest
import torch
import transformers
from criteria import RowSumIs
from plain import assert_plain, coupled
from tiny import prompts, tiny
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList


@pytest.mark.parametrize("eos_token_id", [None, 5])
@pytest.mark.parametrize("do_sample", [False, True])
def test_criteria_are_evaluated_at_every_token(do_sample: bool, eos_token_id: int | None):
    """With an end token stopped rows are padded; without one stock writes on until the last row stops."""
    target, criteria = tiny(), StoppingCriteriaList([RowSumIs()])
    settings = {"do_sample": do_sample, "top_k": 0, "max_new_tokens": 40, "eos_token_id": eos_token_id}
    for noise in (0.0, 0.05, 2.0):
        strategy = coupled(target, noise)
        text = assert_plain(target, strategy, seed=8, **settings, stopping_criteria=criteria).text
        assert 11 + 1 < text.shape[1] < 11 + 40
        ends = [criteria[0](text[:, : 11 + n], None) for n in range(1, text.shape[1] - 10)]
        stops = torch.stack(ends).int().argmax(0) + 1
        assert eos_token_id is not None or max(stops) == text.shape[1] - 11
        assert max(strategy.report.emitted_per_row) == text.shape[1] - 11


class StopAt(StoppingCriteria):
    stateless = True

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], torch.arange(5, 12))


class NothingBehind(LogitsProcessor):
    """Excludes every token behind those that stop a row."""

    stateless = True

    def __call__(self, input_ids, scores):
        dead = torch.isin(input_ids[:, -1], torch.arange(5, 12)) & (input_ids.shape[1] > 11)
        return scores.masked_fill(dead[:, None], -torch.inf)


@pytest.mark.parametrize("eos_token_id", [None, 4])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_behind_a_stop_matters(seed: int, eos_token_id: int | None):
    """No law there is an error only where the text gets there; a row alone does not, with or without an end token."""
    target = tiny()
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 20, "eos_token_id": eos_token_id, "pad_token_id": 0}
    settings |= {"stopping_criteria": [StopAt()], "logits_processor": [NothingBehind()]}
    assert_plain(target, coupled(target, 0.0), prompts(1), seed=seed, **settings)
    target.generate(**prompts(1), **settings, custom_generate=coupled(target, 0.0, verification="block"))


class OddEnd(StoppingCriteria):
    """Says what an end token is, so stock pads the rows that are finished."""

    stateless, eos_token_id = True, None

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 11 == 3


def test_any_criterion_with_an_end_token_pads_finished_rows():
    target, criteria = tiny(), StoppingCriteriaList([OddEnd()])
    settings = {"do_sample": False, "max_new_tokens": 30, "stopping_criteria": criteria}
    text = assert_plain(target, coupled(target, 0.05), **settings).text
    assert (text[:, -1] == 0).any()


def test_each_row_drafts_no_more_than_it_can_emit():
    """With the token that follows; so a row near its end does not shorten the drafts of others."""
    target = tiny()
    strategy = coupled(target, 0.3)
    target.generate(**prompts(8), do_sample=True, max_new_tokens=30, custom_generate=strategy)
    assert len(set(map(len, strategy.report.history))) > 1
    for first, *rounds in strategy.report.history:
        left = 30 - first.emitted
        for record in rounds:
            assert record.drafted == min(4, left - 1)
            left -= record.emitted
        assert left == 0


BEYOND = {  # positions of the model, new tokens, and an end token of a text that never comes to it
    "within": (32, 20),
    "up to the limit": (31, 20),
    "beyond, but for the last token": (30, 20),
    "beyond": (29, 20),
    "the prompt already": (8, 3),
}


def reminders(model, **options) -> list[str]:
    """What transformers says of texts beyond a model's positions in a call."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("transformers.generation.stopping_criteria")
    transformers.logging.warning_once.cache_clear()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    try:
        model.generate(**options)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return said


@pytest.mark.parametrize("eos_token_id", [None, 5])
@pytest.mark.parametrize("case", BEYOND)
def test_transformers_own_warning_of_a_text_beyond_the_positions(case: str, eos_token_id: int | None):
    """It is given where plain `generate` gives it, in the same words, once."""
    positions, new_tokens = BEYOND[case]
    target = tiny(max_position_embeddings=positions)
    options = prompts(3) | {"max_new_tokens": new_tokens, "do_sample": True, "eos_token_id": eos_token_id}
    torch.manual_seed(0)
    plain = reminders(target, **options)
    for noise in (0.0, 0.5):
        torch.manual_seed(0)
        assert reminders(target, **options, custom_generate=coupled(target, noise)) == plain
    assert eos_token_id is not None or len(plain) == (case in ("beyond", "the prompt already"))


def test_requests_beyond_the_positions():
    """Each by its own prompt and limit, as each alone would say it."""
    target = tiny(max_position_embeddings=20)
    for limit, count in ((6, 0), (20, 1)):
        run = SimpleNamespace(
            generate=lambda **options: list(coupled(target, 0.1).generate_many(target, [[1] * 5, [2] * 9], **options))
        )
        assert len(reminders(run, max_new_tokens=limit, batch_size=2, do_sample=True)) == count
