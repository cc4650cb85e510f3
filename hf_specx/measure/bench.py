"""How fast: plain `generate` and ours in turns on the same batch, in medians. It does not know who shows it."""

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_specx
from hf_specx.common.devices import execution_device, hardware
from hf_specx.engine.report import SpeculationReport
from hf_specx.layouts.decoder import synchronize
from hf_specx.strategy import SpeculativeDecoding


RATIOS = ("alpha", "mean_acceptance_length", "expected_speedup", "forward_limited_speedup", "measured_speedup")


@dataclass
class Timing:
    """Runs of one way to generate.

    Attributes:
        seconds: wall time of each run.
        tokens: emitted tokens of each run over all rows, each row's first end token included.
    """

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each run."""
        return [n / s for n, s in zip(self.tokens, self.seconds, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        """The median of `rates`."""
        return statistics.median(self.rates)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"seconds": self.seconds, "tokens": self.tokens, "tokens_per_second": self.tokens_per_second}

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_second:8.1f} tokens/s ({min(self.rates):.1f} to {max(self.rates):.1f}), "
            f"{statistics.median(self.seconds):.2f} s a run"
        )


@dataclass
class Comparison:
    """Plain `generate` beside ours; every ratio is a median over the runs.

    Attributes:
        plain: runs of `model.generate(...)`.
        ours: runs of `model.generate(..., custom_generate=strategy)`.
        reports: what each of ours did.
    """

    plain: Timing = field(default_factory=Timing)
    ours: Timing = field(default_factory=Timing)
    reports: list[SpeculationReport] = field(default_factory=list)

    @property
    def measured_speedup(self) -> float:
        """Our median tokens a second over plain's."""
        return self.ours.tokens_per_second / self.plain.tokens_per_second

    @property
    def alpha(self) -> float:
        return statistics.median(report.alpha for report in self.reports)

    @property
    def mean_acceptance_length(self) -> float:
        return statistics.median(report.mean_acceptance_length for report in self.reports)

    @property
    def expected_speedup(self) -> float | None:
        """Theorem 3.8; None where no costs were measured."""
        return _median_known([report.expected_speedup for report in self.reports])

    @property
    def forward_limited_speedup(self) -> float | None:
        """The bound by the forwards themselves; None where no costs were measured."""
        return _median_known([report.forward_limited_speedup for report in self.reports])

    def to_dict(self) -> dict[str, Any]:
        """Times and ratios as plain values."""
        return {
            "plain": self.plain.to_dict(),
            "ours": self.ours.to_dict(),
            # "auto" learns from each run, so these may differ
            "num_draft_tokens": [report.num_draft_tokens for report in self.reports],
            **{name: getattr(self, name) for name in RATIOS},
        }

    def __str__(self) -> str:
        lines = [
            f"medians of {len(self.reports)} runs each, in turns; tokens up to and including each row's end token",
            f"plain generate {self.plain}",
            f"speculative    {self.ours}",
            f"alpha {self.alpha:.3f}, {self.mean_acceptance_length:.2f} tokens a row and round",
        ]
        if self.expected_speedup is not None and self.forward_limited_speedup is not None:
            lines.append(
                f"predicted speed-up {self.expected_speedup:.2f} (Theorem 3.8), {self.forward_limited_speedup:.2f} "
                "limited by the forwards"
            )
        return "\n".join([*lines, f"measured speed-up {self.measured_speedup:.2f}"])


def compare(
    target: PreTrainedModel,
    strategy: SpeculativeDecoding,
    inputs: dict[str, torch.Tensor] | Sequence[dict[str, torch.Tensor]],
    options: dict[str, Any],
    repeats: int = 5,
    seed: int = 0,
    advance: Callable[[], object] = lambda: None,
) -> Comparison:
    """Run plain and ours in turns, after one warm-up of both.

    Args:
        target: the model whose `generate` is timed.
        strategy: ours; gets a row of costs for this batch where it has none, so that predictions exist.
        inputs: input_ids and attention_mask [B, L]; of several, all of B rows, the runs take one after another.
        options: what `generate` takes besides, the same for both.
        repeats: timed runs of each.
        seed: run i of both starts from `torch.manual_seed(seed + i)`.
        advance: called after each run, `2 * (repeats + 1)` times.
    """
    batches = [inputs] if isinstance(inputs, dict) else inputs
    if len(batches[0]["input_ids"]) not in strategy.costs.table:
        strategy.calibrate(target, batches[0]["input_ids"])
    device = execution_device(target)
    eos_token_id = options.get("eos_token_id", target.generation_config.eos_token_id)
    comparison = Comparison()
    for run in range(-1, repeats):
        batch = batches[max(run, 0) % len(batches)]
        for timing, extra in ((comparison.plain, {}), (comparison.ours, {"custom_generate": strategy})):
            torch.manual_seed(seed + max(run, 0))
            synchronize(device)
            started = time.perf_counter()
            output = target.generate(**batch, **options, **extra)  # type: ignore[operator]
            synchronize(device)
            seconds = time.perf_counter() - started
            advance()
            if run >= 0:
                timing.seconds.append(seconds)
                timing.tokens.append(sum(emitted_per_row(output, prompt_width(target, batch), eos_token_id)))
        if run >= 0:
            assert strategy.report is not None
            comparison.reports.append(strategy.report)
    return comparison


def encode(
    tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel, prompts: list[str], max_new_tokens: int
) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask [B, L] of a batch of prompts, where the target takes them.

    They are padded on the left, for an encoder on the right, also where the tokenizer has no pad token.

    Raises:
        ValueError: for a prompt without tokens, or one that leaves no room for `max_new_tokens`.
    """
    device, encodes = execution_device(target), target.config.is_encoder_decoder
    rows = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    for number, row in enumerate(rows, 1):
        if not row:
            raise ValueError(f"prompt {number} is empty, and the tokenizer puts nothing before it; write something.")
    width = max(map(len, rows))
    limit = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and width + (0 if encodes else max_new_tokens) > limit:
        raise ValueError(
            f"{width} prompt tokens and {max_new_tokens} new ones are more than the {limit} positions of the model; "
            "give fewer new tokens or shorter prompts."
        )
    pad_token_id = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
    ids = torch.full((len(rows), width), pad_token_id)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        columns = slice(0, len(row)) if encodes else slice(width - len(row), width)
        ids[place, columns], mask[place, columns] = torch.tensor(row), 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def prompt_width(target: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> int:
    """Tokens at the start of an output that were not generated: the prompt, or the one that a decoder starts from."""
    return 1 if target.config.is_encoder_decoder else inputs["input_ids"].shape[1]


def emitted_per_row(output: torch.Tensor, width: int, eos_token_id: int | list[int] | None) -> list[int]:
    """Tokens of each row of output [B, width + N] behind the prompt, up to and including the first end token."""
    new = output[:, width:]
    if eos_token_id is None or not new.shape[1]:
        return [new.shape[1]] * len(new)
    ends = torch.isin(new, torch.tensor(eos_token_id, device=new.device))
    return torch.where(ends.any(-1), ends.int().argmax(-1) + 1, new.shape[1]).tolist()


def provenance(place: PreTrainedModel | torch.device) -> dict[str, Any]:
    """Where a number was made: versions, device, and the precision of a model."""
    device = place if isinstance(place, torch.device) else execution_device(place)
    made = {
        "hf_specx": hf_specx.__version__,  # also where it is not installed
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": f"{device.type} ({hardware(device)})",
        "threads": torch.get_num_threads(),
    }
    return made if isinstance(place, torch.device) else made | {"dtype": str(place.dtype).removeprefix("torch.")}


def _median_known(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
