"""What several files of this room use: a target, a draft near it, prompts, and a training of a second."""

import signal
from typing import Any

import torch
from tiny import near, tiny
from transformers import PreTrainedModel, TrainerCallback

from hf_specx import Request, SpeculationReport, SpeculativeDecoding
from hf_specx.training.distill import distill
from hf_specx.training.result import Distilled


QUICK = {"loss": "jsd", "max_new_tokens": 12, "texts_per_phase": 16, "phases": 3, "passes": 2, "learning_rate": 5e-3}
QUICK |= {"do_sample": True, "top_k": 0}


def silent(*progress: object) -> None:
    """Shows nothing."""


def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target with a wide distribution, and a draft that is moved away from it."""
    target = tiny(initializer_range=0.2)
    return target, near(target, 0.8)


def some_prompts(count: int = 40, seed: int = 0) -> list[list[int]]:
    """Prompts of 4 to 7 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 48, (4 + number % 4,), generator=generator).tolist() for number in range(count)]


def trained(**options: Any) -> Distilled:
    """A short training of these models."""
    target, draft = models()
    arguments = {"progress": silent} | QUICK | options
    target, draft = arguments.pop("target", target), arguments.pop("draft", draft)
    prompts = arguments.pop("prompts", some_prompts())
    return distill(target, draft, prompts, **arguments)


def report_of(result: Distilled, prompts: list[list[int]], number: int = 1) -> SpeculationReport:
    """That of texts of 32 tokens, sampled with so many candidates of the trained draft under token verification."""
    strategy = SpeculativeDecoding(result.pair.draft, num_draft_tokens=number, verification="token")
    requests = [Request(ids, seed=seed) for seed, ids in enumerate(prompts)]
    list(strategy.generate_many(result.pair.target, requests, do_sample=True, top_k=0, max_new_tokens=32))
    return strategy.report


def weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Copies of all weights."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether all weights are equal, bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Stop(TrainerCallback):
    """Ends a training in a step: as Ctrl-C does, by another error, or by a signal."""

    def __init__(self, step: int, by: Any = KeyboardInterrupt):
        self.step, self.by = step, by

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            if isinstance(self.by, signal.Signals):
                signal.raise_signal(self.by)
            raise self.by
