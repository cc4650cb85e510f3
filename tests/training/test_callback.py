"""A callback for trainers whose model samples: attached while it trains, and it says when the draft has gone stale."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import near, prompts, tiny

from hf_specx import DraftTargetPair, SpeculationCallback, SpeculativeDecoding
from hf_specx.training import callback as module


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means are of few candidates."""
    monkeypatch.setattr(module, "MIN_JUDGED", 40)


class Loop:
    """Calls the callback as a trainer does."""

    def __init__(self, target: Any, callback: SpeculationCallback):
        self.target, self.callback, self.state = target, callback, SimpleNamespace(global_step=0)
        callback.on_train_begin(None, self.state, None, model=target)

    def steps(self, count: int) -> None:
        """Sample, and end a step, so many times."""
        for _ in range(count):
            torch.manual_seed(self.state.global_step)
            self.target.generate(**prompts(3), do_sample=True, max_new_tokens=16, pad_token_id=0)
            self.callback.on_substep_end(None, self.state, None)
            self.state.global_step += 1
            self.callback.on_step_end(None, self.state, None)


def train(target: torch.nn.Module, by: float) -> None:
    """Move the weights."""
    generator = torch.Generator().manual_seed(5)
    for weight in target.parameters():
        weight.data += by * weight.std() * torch.randn(weight.shape, generator=generator) if weight.ndim > 1 else 0


@pytest.mark.usefixtures("few")
def test_a_draft_goes_stale_once_the_target_has_moved():
    """It is said once, and not before; the model is then as it was."""
    target = tiny()
    before = dict(vars(target))
    callback = SpeculationCallback(SpeculativeDecoding(near(target, 0.05), num_draft_tokens=4), window=3)
    loop = Loop(target, callback)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.steps(8)
    assert len(callback.history) == 8
    assert (callback.start_alpha > 0.5, callback.is_stale) == (True, False)
    train(target, 3.0)
    with pytest.warns(UserWarning, match=r"stale by step \d+: α was 0\.\d\d over the first 3 calls") as caught:
        loop.steps(8)
    assert len(caught) == 1
    assert callback.is_stale
    assert callback.alpha < 0.8 * callback.start_alpha
    callback.on_train_end(None, loop.state, None)
    assert vars(target) == before
    assert callback.strategy.report.emitted == 48


def test_too_few_candidates_are_said_once():
    """At the end of a training, or where a draft that drafted does so no more."""
    target = tiny()
    callback = SpeculationCallback(SpeculativeDecoding(near(target, 0.05), num_draft_tokens=4), window=2)
    loop = Loop(target, callback)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.steps(1)
        train(target, 3.0)
        loop.steps(3)
    assert (callback.start_alpha, callback.alpha, callback.is_stale) == (None, None, False)
    with pytest.warns(
        UserWarning, match="of the last 4 calls of generate 4 drafted, and [0-9]+ candidates were"
    ) as caught:
        callback.on_train_end(None, loop.state, None)
    assert len(caught) == 1
    assert "generate" not in vars(target)


@pytest.mark.usefixtures("few")
def test_a_draft_that_drafts_no_more_is_said():
    target = tiny()
    callback = SpeculationCallback(SpeculativeDecoding(near(target, 0.05), num_draft_tokens=4), window=2)
    loop = Loop(target, callback)
    loop.steps(4)
    assert callback.alpha is not None
    callback.strategy.num_draft_tokens = 0
    with pytest.warns(UserWarning, match="of the last 16 calls of generate 0 drafted, and 0 candidates") as caught:
        loop.steps(17)
    assert len([each for each in caught if "too few" in str(each.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_train_end(None, loop.state, None)
    assert len(callback.history) == 4


def test_false_alarms_and_misses(monkeypatch: pytest.MonkeyPatch):
    """At the share itself 5 of 100 runs may be called stale; 12 or more would be by chance once in 200 tests."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    from stale import first_alarm

    def alarms(fall: float, runs: int, comparisons: int, **options) -> int:
        return sum(first_alarm(run, fall, comparisons, false_alarm=0.05, **options) is not None for run in range(runs))

    assert alarms(0.8, runs=100, comparisons=6) < 12
    assert alarms(1.0, runs=50, comparisons=6) == 0
    assert alarms(0.6, runs=50, comparisons=2) == 50
    monkeypatch.setattr(module.StaleTest, "_is_below", lambda _, start, now: now.alpha < 0.8 * start.alpha)
    assert alarms(0.8, runs=100, comparisons=6) > 50  # what compares means alone


@pytest.mark.parametrize(
    "options", [{"window": 1}, {"window": 2.0}, {"stale_below": 1.0}, {"stale_below": "half"}, {"false_alarm": 0.5}]
)
def test_misuse(options: dict):
    with pytest.raises(ValueError, match=next(iter(options))):
        SpeculationCallback("suffix", **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("learning_rate", "goes_stale"), [(0.0, False), (0.003, True)])
def test_grpo_trains_with_it(few: None, tmp_path: Path, learning_rate: float, goes_stale: bool):
    """Every rollout is drafted; a target that stands still keeps its draft, and one that moves far does not."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    pair = DraftTargetPair.embedded()
    callback = SpeculationCallback(SpeculativeDecoding(pair.draft, num_draft_tokens=4), window=8)
    attached: list[bool] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        attached.append("generate" in vars(pair.target))
        return [float(len(set(text))) for text in completions]

    sizes = {"max_steps": 32, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 24}
    plain = {"gradient_checkpointing": False, "bf16": False, "use_cpu": True, "report_to": [], "save_strategy": "no"}
    trainer = trl.GRPOTrainer(
        model=pair.target,
        reward_funcs=reward,
        args=trl.GRPOConfig(output_dir=str(tmp_path), learning_rate=learning_rate, **sizes, **plain),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["def read(", "import os", "class A", "for line in"]}),
        processing_class=pair.tokenizer,
        callbacks=[callback],
    )
    trainer.train()
    assert len(callback.history) >= 4
    assert attached
    assert all(attached)
    assert callback.is_stale == goes_stale
    assert "generate" not in vars(pair.target)
