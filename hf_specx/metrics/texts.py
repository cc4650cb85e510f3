"""What a check generates: a pair with prompts, and the texts of each way to generate."""

import json
import operator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.bench.inputs import Inputs, emitted, encode
from hf_specx.common.errors import require
from hf_specx.common.round import Round
from hf_specx.drafting.auto import Costs
from hf_specx.engine.call import DOES_NOT_PAY
from hf_specx.engine.report import PLAINLY
from hf_specx.engine.strategy import SpeculativeDecoding
from hf_specx.pairs.complete import token_ids
from hf_specx.pairs.pair import DraftTargetPair

from .equality import Reference, StepScores, Text, measure_rounding
from .settings import Settings, plain_of


LIKELY = 4  # tokens of a candidate's distribution that are looked at
MEASURED = 16  # rows in which rounding is measured


@dataclass
class Subject:
    """What is checked, and how; `ids` are those of each prompt, without pads."""

    pair: DraftTargetPair  # with a tokenizer
    prompts: list[str]
    settings: Settings

    def __post_init__(self) -> None:
        self.ids = [token_ids(self.tokenizer, text) for text in self.prompts]

    @property
    def target(self) -> PreTrainedModel:
        return self.pair.target

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        assert self.pair.tokenizer is not None
        return self.pair.tokenizer

    def strategy(self, verification: str) -> SpeculativeDecoding:
        """Like the pair's own, but for what is checked; nothing that was learned elsewhere counts."""
        options = {"num_draft_tokens": self.settings.num_draft_tokens, "costs": Costs()}
        return self.pair.strategy_for(options | {"verification": None if verification == "greedy" else verification})

    def call(self, way: str) -> dict[str, Any]:
        """What `generate` is given besides its inputs; with a strategy where it is not plain."""
        options = self.settings.generation(way)
        return options if way == plain_of(way) else options | {"custom_generate": self.strategy(way)}

    def prompt_indices(self, way: str, batch: int) -> list[int]:
        """The index of each row's prompt, over all batches."""
        return [i for indices in self.settings.batches(way, batch, len(self.prompts)) for i in indices]

    def encoded(self, indices: list[int]) -> Inputs:
        return encode(self.tokenizer, self.target, [self.prompts[i] for i in indices], self.settings.max_new_tokens)

    def text(self, way: str, batch: int, row: int, emitted: list[int]) -> Text:
        """A row of all batches as `generate` had it."""
        run, place = divmod(row, batch)
        indices = self.settings.batches(way, batch, len(self.prompts))[run]
        return Text(self.encoded(indices)["input_ids"][place].tolist(), self.ids[indices[place]], emitted)

    def decoded(self, texts: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(texts, skip_special_tokens=True)


class Offers:
    """Listens to a call for what the draft gave most chance at each emitted token that was judged by its candidate.

    Given that it was, and the text before, each token still comes with the target's probability. `rows` has the ids
    and chances for each row and token, none where there was no such candidate.
    """

    def __init__(self, rows: int):
        self.rows = [list[tuple[list[int], list[float]]]() for _ in range(rows)]

    def observe(self, done: Round) -> None:
        """Note a round."""
        draft, known = done.draft, [0] * len(done.rows)
        if draft.probs is not None:
            likely = draft.probs.topk(min(LIKELY, draft.probs.shape[-1]))
            tokens, chances = likely.indices.tolist(), likely.values.double().round(decimals=3).tolist()
            known = [min(pair) for pair in zip(done.emitted, draft.lengths, strict=True)]
        for index, row in enumerate(done.rows):
            self.rows[row] += [(tokens[index][place], chances[index][place]) for place in range(known[index])]
            self.rows[row] += [([], [])] * (done.emitted[index] - known[index])


class Candidates:
    """Listens to a call for the candidate that was judged at each emitted token, kept or not; -1 if there was none."""

    def __init__(self, rows: int):
        self.rows = [list[int]() for _ in range(rows)]

    def observe(self, done: Round) -> None:
        """Note a round."""
        for index, row in enumerate(done.rows):
            judged = min(done.emitted[index], done.draft.lengths[index])
            self.rows[row] += done.draft.tokens[index, :judged].tolist() + [-1] * (done.emitted[index] - judged)


def generate_texts(subject: Subject, way: str, batch: int) -> dict[str, Any]:
    """The "texts", emitted ids of each row; of ours also "acceptance", by position of a candidate as well.

    Of ours also "heard" of each row: where the distribution is compared what `Offers` has, else what `Candidates` has.
    Of plain text, where tokens are compared, also "rounding".
    """
    settings, options, reports, heard = subject.settings, subject.call(way), [], list[str]()
    strategy: SpeculativeDecoding | None = options.get("custom_generate")
    measured, texts, steps = way in settings.measured, list[list[int]](), []
    listeners = () if strategy is None else strategy.listeners
    for run, indices in enumerate(settings.batches(way, batch, len(subject.prompts))):
        inputs = subject.encoded(indices)
        listener: Any = (Offers if way in settings.in_distribution else Candidates)(len(indices))
        if strategy is not None:
            strategy.listeners = (*listeners, listener)
        if measured:
            steps.append(StepScores())
            options |= {"stopping_criteria": [steps[-1]], "output_scores": True, "return_dict_in_generate": True}
        torch.manual_seed(settings.run_seed(way, batch, run))
        output = subject.target.generate(**inputs, **options)  # type: ignore[operator]
        texts += emitted(subject.target, inputs, output.sequences if measured else output, options)
        if strategy is not None and strategy.report is not None:
            reports.append(strategy.report)
            plainly = strategy.report.layout == PLAINLY and not strategy.report.layout_reason.endswith(DOES_NOT_PAY)
            require(not plainly, f"nothing is speculated that could be checked: {strategy.report.layout_reason}.")
        rows = zip(listener.rows, texts[-len(indices) :], strict=True)
        heard += [json.dumps(row[: len(text)]) for row, text in rows]  # one short string each, in a file of a check
    if measured:
        return {"texts": texts, "rounding": rounding_of(subject, way, batch, texts, steps)}
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
    return {"texts": texts, "acceptance": acceptance, "heard": heard}


def rounding_of(
    subject: Subject, way: str, batch: int, texts: list[list[int]], steps: list[StepScores]
) -> dict[str, float]:
    """By how much plain scores differ from one shape of a forward to another, in nats: "mean", "most", "positions"."""
    sizes = list[float]()
    for row, text in enumerate(texts[:MEASURED]):
        reference = Reference(subject.target, subject.settings.generation(way), subject.text(way, batch, row, text))
        sizes += measure_rounding(reference, steps[row // batch].steps, row % batch)
    mean = sum(sizes) / max(1, len(sizes))
    return {"mean": mean, "most": max(sizes, default=0.0), "positions": len(sizes)}
