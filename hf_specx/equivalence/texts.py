"""What a check generates: a pair with prompts, and the texts of each way to generate."""

from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.bench.inputs import Inputs, emitted, encode
from hf_specx.bench.timer import Advance
from hf_specx.engine.report import SpeculationReport
from hf_specx.pairs.pair import DraftTargetPair
from hf_specx.strategy import SpeculativeDecoding

from .settings import PLAIN_GREEDY, PLAIN_SAMPLED, Settings


@dataclass
class Subject:
    """A pair with prompts.

    Attributes:
        pair: with a tokenizer.
        prompts: texts.
        settings: of the check.
        ids: of each prompt, without pads.
    """

    pair: DraftTargetPair
    prompts: list[str]
    settings: Settings

    def __post_init__(self) -> None:
        self.ids = [list(self.tokenizer(text)["input_ids"]) for text in self.prompts]

    @property
    def target(self) -> PreTrainedModel:
        return self.pair.target

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        assert self.pair.tokenizer is not None
        return self.pair.tokenizer

    def strategy(self, verification: str, num_draft_tokens: int | None = None) -> SpeculativeDecoding:
        """Like the pair's own, but for what is checked; a new one, so that nothing learned elsewhere counts."""
        own = self.pair.strategy
        return SpeculativeDecoding(
            self.pair.draft,
            num_draft_tokens=num_draft_tokens or self.settings.num_draft_tokens,
            verification=None if verification == "greedy" else verification,
            layout=own.layout,
            compile=own.compile,
            tokenizer=own.tokenizer,
            draft_tokenizer=own.draft_tokenizer,
            tokenizer_match=own.tokenizer_match,
        )

    def prompt_indices(self, way: str, batch: int) -> list[int]:
        """The index of each row's prompt, over all batches."""
        return [index for indices in self.settings.batches(way, batch, len(self.prompts)) for index in indices]

    def encoded(self, indices: list[int]) -> Inputs:
        """The prompts at these indices as a batch."""
        return encode(self.tokenizer, self.target, [self.prompts[i] for i in indices], self.settings.new_tokens)

    def decoded(self, texts: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(texts, skip_special_tokens=True)


class Reached(Exception):
    """A forward was about to begin."""


def ask_first(subject: Subject) -> None:
    """Call every way to generate, so that it raises what it has to raise, and stop it as its first forward begins."""

    def stop(*_: Any) -> None:
        raise Reached

    settings = subject.settings
    handles = [model.register_forward_pre_hook(stop) for model in subject.pair.models]
    try:
        for way, batch in product(settings.ways, settings.batch_sizes):
            inputs = subject.encoded(settings.batches(way, batch, len(subject.prompts))[0])
            with suppress(Reached):
                subject.target.generate(**inputs, **call_of(subject, way))  # type: ignore[operator]
    finally:
        for handle in handles:
            handle.remove()


def call_of(subject: Subject, way: str) -> dict[str, Any]:
    """What `generate` is given besides its inputs; with a strategy where it is not plain."""
    options = subject.settings.generation(sampled=way not in (PLAIN_GREEDY, "greedy"))
    plain = way in (PLAIN_GREEDY, PLAIN_SAMPLED)
    return options if plain else options | {"custom_generate": subject.strategy(way)}


def generate_texts(subject: Subject, way: str, batch: int, advance: Advance) -> dict[str, Any]:
    """All texts of one way to generate.

    Returns:
        "texts", emitted ids of each row up to and including its end token; of a speculative way also "accepted" and
        "drafted" of each row and round, "alpha" (mean sum min(p, q) of judged candidates) and "layout".
    """
    settings, options = subject.settings, call_of(subject, way)
    strategy: SpeculativeDecoding | None = options.get("custom_generate")
    texts: list[list[int]] = []
    reports: list[SpeculationReport] = []
    for run, indices in enumerate(settings.batches(way, batch, len(subject.prompts))):
        inputs = subject.encoded(indices)
        torch.manual_seed(settings.run_seed(way, batch, run))
        output = subject.target.generate(**inputs, **options)  # type: ignore[operator]
        texts += emitted(subject.target, inputs, output, options)
        if strategy is not None:
            assert strategy.report is not None
            reports.append(strategy.report)
        advance()
    return {"texts": texts} | (_acceptance(reports) if reports else {})


def _acceptance(reports: list[SpeculationReport]) -> dict[str, Any]:
    rows = [[record for record in row if record.drafted] for report in reports for row in report.history]
    judged = sum(report.judged for report in reports)
    return {
        "accepted": [[record.accepted for record in row] for row in rows],
        "drafted": [[record.drafted for record in row] for row in rows],
        "alpha": sum(float(report.overlap) for report in reports) / judged if judged else 0.0,
        "layout": reports[0].layout,
    }
