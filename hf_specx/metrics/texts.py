"""Generate the texts of a check: by each verification, and plainly."""

import json
import operator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.bench.inputs import Inputs, emitted, encode
from hf_specx.common.chats import token_ids
from hf_specx.common.errors import require
from hf_specx.common.round import Round
from hf_specx.drafting.costs import Costs
from hf_specx.engine.reasons import DOES_NOT_PAY
from hf_specx.engine.report import PLAINLY
from hf_specx.engine.strategy import SpeculativeDecoding
from hf_specx.pairs.pair import DraftTargetPair

from .equality import Reference, StepScores, Text, measure_rounding
from .settings import Settings, plain_of


LIKELY_TOKENS = 4  # of a candidate's distribution that are looked at
ROUNDING_ROWS = 16  # in which rounding is measured


@dataclass
class Subject:
    """A pair and prompts that are checked, and the settings; `prompt_ids` are the token ids of each prompt."""

    pair: DraftTargetPair  # with a tokenizer
    prompts: list[str]
    settings: Settings

    def __post_init__(self) -> None:
        self.prompt_ids = [token_ids(self.tokenizer, text) for text in self.prompts]

    @property
    def target(self) -> PreTrainedModel:
        """The target of the pair."""
        return self.pair.target

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the pair."""
        assert self.pair.tokenizer is not None
        return self.pair.tokenizer

    def strategy(self, verification: str) -> SpeculativeDecoding:
        """A strategy like the pair's, with this verification and without costs that were learned earlier."""
        options = {"num_draft_tokens": self.settings.num_draft_tokens, "costs": Costs()}
        return self.pair.strategy_for(options | {"verification": None if verification == "greedy" else verification})

    def generate_arguments(self, method: str) -> dict[str, Any]:
        """The arguments of `generate` for a method, without inputs; with a strategy unless it is plain."""
        options = self.settings.generate_options(method)
        if method == plain_of(method):
            return options
        return options | {"custom_generate": self.strategy(method)}

    def prompt_indices(self, method: str, batch: int) -> list[int]:
        """The index of each row's prompt, over all batches."""
        return [i for indices in self.settings.batches(method, batch, len(self.prompts)) for i in indices]

    def encoded(self, indices: list[int]) -> Inputs:
        """The prompts of these indices as a batch."""
        return encode(self.tokenizer, self.target, [self.prompts[i] for i in indices], self.settings.max_new_tokens)

    def text(self, method: str, batch: int, row: int, emitted: list[int]) -> Text:
        """The row of this number, counted over all batches: its prompt with and without pads, and its text."""
        batch_index, row_in_batch = divmod(row, batch)
        indices = self.settings.batches(method, batch, len(self.prompts))[batch_index]
        padded = self.encoded(indices)["input_ids"][row_in_batch].tolist()
        return Text(padded, self.prompt_ids[indices[row_in_batch]], emitted)

    def decoded(self, texts: list[list[int]]) -> list[str]:
        """The texts of ids, without special tokens."""
        return self.tokenizer.batch_decode(texts, skip_special_tokens=True)


class DraftOffers:
    """A listener that records, for each emitted token that a candidate was judged for, the draft's likeliest tokens.

    Given the text before it, and that a candidate was judged there, an emitted token still has the target's
    probability. `rows` has ids and probabilities for each row and token; both are empty where none was judged.
    """

    def __init__(self, num_rows: int):
        self.rows = [list[tuple[list[int], list[float]]]() for _ in range(num_rows)]

    def observe(self, round_: Round) -> None:
        """Record a round."""
        draft = round_.draft
        num_offers = [0] * len(round_.rows)
        if draft.probs is not None:
            likely = draft.probs.topk(min(LIKELY_TOKENS, draft.probs.shape[-1]))
            tokens = likely.indices.tolist()
            chances = likely.values.double().round(decimals=3).tolist()
            num_offers = [min(pair) for pair in zip(round_.emitted, round_.judged, strict=True)]
        for index, row in enumerate(round_.rows):
            for position in range(num_offers[index]):
                self.rows[row].append((tokens[index][position], chances[index][position]))
            self.rows[row] += [([], [])] * (round_.emitted[index] - num_offers[index])


class JudgedCandidates:
    """A listener that records the candidate judged at each emitted token, accepted or not; -1 if there was none."""

    def __init__(self, num_rows: int):
        self.rows = [list[int]() for _ in range(num_rows)]

    def observe(self, round_: Round) -> None:
        """Record a round."""
        for index, row in enumerate(round_.rows):
            judged = min(round_.emitted[index], round_.judged[index])
            self.rows[row] += round_.draft.tokens[index, :judged].tolist()
            self.rows[row] += [-1] * (round_.emitted[index] - judged)


def generate_texts(subject: Subject, method: str, batch: int) -> dict[str, Any]:
    """Generate the texts of a method at one batch size; returns a dict with "texts", the emitted ids of each row.

    With a draft it also has "acceptance", and "observed", what `DraftOffers` (where distributions are compared) or
    `JudgedCandidates` (where tokens are) has recorded of each row. Plain text that tokens are compared with has
    "rounding".
    """
    settings, arguments = subject.settings, subject.generate_arguments(method)
    strategy: SpeculativeDecoding | None = arguments.get("custom_generate")
    listeners = () if strategy is None else strategy.listeners
    listener_class: Any = DraftOffers if method in settings.in_distribution else JudgedCandidates
    measures_rounding = method in settings.measures_rounding
    texts, observed, reports, steps = list[list[int]](), list[str](), [], []
    for batch_index, indices in enumerate(settings.batches(method, batch, len(subject.prompts))):
        inputs = subject.encoded(indices)
        listener = listener_class(len(indices))
        if strategy is not None:
            strategy.listeners = (*listeners, listener)
        if measures_rounding:
            steps.append(StepScores())
            arguments |= {"stopping_criteria": [steps[-1]], "output_scores": True, "return_dict_in_generate": True}
        torch.manual_seed(settings.batch_seed(method, batch, batch_index))
        output = subject.target.generate(**inputs, **arguments)  # type: ignore[operator]
        sequences = output.sequences if measures_rounding else output
        new_texts = emitted(subject.target, inputs, sequences, arguments)
        texts += new_texts
        if strategy is not None and strategy.report is not None:
            reports.append(strategy.report)
            reason = strategy.report.layout_reason
            decoded_plainly = strategy.report.layout == PLAINLY and not reason.endswith(DOES_NOT_PAY)
            require(not decoded_plainly, f"nothing is speculated that could be checked: {reason}.")
        for row, text in zip(listener.rows, new_texts, strict=True):
            observed.append(json.dumps(row[: len(text)]))  # one short string each, in a file of a check
    if measures_rounding:
        return {"texts": texts, "rounding": rounding_of(subject, method, batch, texts, steps)}
    if not reports:
        return {"texts": texts}
    report = reduce(operator.add, reports)
    acceptance = {
        "acceptance_rate": report.acceptance_rate,
        "tokens_per_round": report.mean_acceptance_length,
        "rounds": sum(report.rounds_per_row),
        "alpha": report.alpha,
        "layout": report.layout,
        "judged_per_position": report.judged_per_position,
        "accepted_per_position": report.accepted_per_position,
    }
    return {"texts": texts, "acceptance": acceptance, "observed": observed}


def rounding_of(
    subject: Subject, method: str, batch: int, texts: list[list[int]], steps: list[StepScores]
) -> dict[str, float]:
    """By how much plain scores differ between shapes of a forward: "mean" and "most" in nats, and "positions"."""
    sizes = list[float]()
    for row, emitted_ids in enumerate(texts[:ROUNDING_ROWS]):
        text = subject.text(method, batch, row, emitted_ids)
        reference = Reference(subject.target, subject.settings.generate_options(method), text)
        sizes += measure_rounding(reference, steps[row // batch].steps, row % batch)
    mean = sum(sizes) / max(1, len(sizes))
    return {"mean": mean, "most": max(sizes, default=0.0), "positions": len(sizes)}
