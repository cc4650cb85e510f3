"""What limits a measurement: its forwards and nothing else, and how fast memory can be read.

Bare forwards are those of the same models at the same batch, lengths and query lengths, with a `DynamicCache`, without
padding and without a mask: a prompt forward of each model, then γ draft steps and a target step of γ+1 tokens a round.
"""

import inspect
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_specx.common.devices import execution_device, synchronize
from hf_specx.engine.history import RoundRecord


BUFFER = 2**28  # bytes that are copied to see how fast memory is
COPIES = 5


@dataclass
class BareRound:
    """The forwards of one round.

    Attributes:
        rows: R, those that took part.
        drafted: γ; 0 for a plain step.
        draft, target: seconds of the draft's steps and of the target's.
        length: slots that the target's attention saw.
    """

    rows: int
    drafted: int
    draft: float
    target: float
    length: int


@dataclass
class Bare:
    """The forwards of one call.

    Attributes:
        prompt: seconds of the prompt forwards.
        rounds: one by one.
        kv_bytes: of keys and values for each token of a row, in the target and in the draft.
    """

    prompt: float = 0.0
    rounds: list[BareRound] = field(default_factory=list)
    kv_bytes: tuple[float, float] = (0.0, 0.0)

    @property
    def decoding(self) -> float:
        """Seconds of all forwards but the prompts'."""
        return sum(each.draft + each.target for each in self.rounds)

    def full(self, rows: int) -> list[BareRound]:
        """The rounds in which all rows took part and drafted the number that most rounds drafted."""
        whole = [each for each in self.rounds if each.rows == rows]
        numbers = [each.drafted for each in whole]
        usual = max(set(numbers), key=numbers.count, default=0)
        return [each for each in whole if each.drafted == usual]

    def mean_round(self, rows: int) -> float:
        """Mean seconds of the rounds in which all rows took part, whatever they drafted; of all if there are none.

        Each counts as the median of those with as many candidates, since a few slow forwards would decide a mean.
        """
        whole = [each for each in self.rounds if each.rows == rows] or self.rounds
        seconds: dict[int, list[float]] = {}
        for each in whole:
            seconds.setdefault(each.drafted, []).append(each.draft + each.target)
        return sum(statistics.median(own) * len(own) for own in seconds.values()) / len(whole)


class BareModel:
    """A model with a cache, fed tokens that mean nothing."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.cache = model, DynamicCache(config=model.config)
        self.keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.device = execution_device(model)

    def forward(self, ids: torch.Tensor, keep: int) -> None:
        """Feed ids [R, q] after what the cache holds, for logits of the last `keep`."""
        kept: dict[str, Any] = {"logits_to_keep": keep} if self.keeps else {}
        self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, **kept)

    def cut(self, length: int, rows: list[int] | None) -> None:
        """Hold no more than `length` tokens, of these rows of the cache alone; None is all of them."""
        if rows is not None:
            self.cache.batch_select_indices(torch.tensor(rows, device=self.device))
        surplus = self.cache.get_seq_length() - length
        if surplus > 0:
            self.cache.crop(-surplus)

    def kv_bytes(self) -> float:
        """Bytes of keys and values for each token of a row."""
        layers: list[Any] = self.cache.layers
        held = sum(states.nbytes for layer in layers for states in (layer.keys, layer.values))
        return held / (len(layers[0].keys) * self.cache.get_seq_length())


@torch.no_grad()
def replay(
    target: PreTrainedModel, draft: PreTrainedModel | None, input_ids: torch.Tensor, history: list[list[RoundRecord]]
) -> Bare:
    """Time the forwards of a call, and nothing else; caches are cut and rows leave outside of the timed regions.

    The draft's first step of a round is fed what the row that misses most has to be fed: one token, two where a row
    accepted all candidates, more after plain steps.

    Args:
        target, draft: decoder-only models; without a draft candidates took no forwards.
        input_ids: [B, L] int64, the prompts.
        history: of a report, each row's first record being the prompt's.
    """
    models = [BareModel(model) for model in (target, draft) if model is not None]
    bare = Bare()
    for model in models:
        bare.prompt += _seconds(model, [(input_ids, 1)])
    rows, width = list(range(len(input_ids))), input_ids.shape[1]
    counts, fed = [1] * len(rows), [0] * len(rows)  # emitted tokens, and those of them that the draft was fed
    for step in range(1, max(map(len, history))):
        staying = [row for row in rows if len(history[row]) > step]
        kept = None if staying == rows else [rows.index(row) for row in staying]
        rows = staying
        drafted, longest = max(history[row][step].drafted for row in rows), max(counts[row] for row in rows)
        missing = max(counts[row] - min(fed[row], counts[row] - 1) for row in rows)
        models[0].cut(width + longest - 1, kept)
        for model in models[1:]:
            model.cut(width + longest - (missing if drafted else 1), kept)
        seconds = _round(models, len(rows), drafted, missing)
        bare.rounds.append(BareRound(len(rows), drafted, *seconds, width + longest + drafted))
        for row in rows:
            fed[row] = counts[row] + drafted - 1 if drafted else fed[row]
            counts[row] += history[row][step].gained
    sizes = [model.kv_bytes() for model in models]
    bare.kv_bytes = sizes[0], (sizes[1] if len(sizes) > 1 else 0.0)
    return bare


def _round(models: list[BareModel], rows: int, drafted: int, missing: int) -> tuple[float, float]:
    """Seconds of the draft's steps and of the target's."""
    device = models[0].device
    steps = [(_ids(rows, missing if step == 0 else 1, models[-1].device), 1) for step in range(drafted)]
    draft = _seconds(models[-1], steps) if drafted and len(models) > 1 else 0.0
    return draft, _seconds(models[0], [(_ids(rows, drafted + 1, device), drafted + 1)])


def _ids(rows: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, count, dtype=torch.int64, device=device)


def _seconds(model: BareModel, steps: Sequence[tuple[torch.Tensor, int]]) -> float:
    synchronize(model.device)
    started = time.perf_counter()
    for ids, keep in steps:
        model.forward(ids, keep)
    synchronize(model.device)
    return time.perf_counter() - started


def plain_history(rows: int, new_tokens: int) -> list[list[RoundRecord]]:
    """What a report of plain decoding would say: one token of the prompt's forward, then one of each step."""
    return [[RoundRecord(0, 0, 1, 0, 1)] * new_tokens] * rows


def bandwidth(device: torch.device) -> float:
    """Bytes per second that this machine reads and writes when it copies, the best of a few copies."""
    source = torch.ones(BUFFER // 4, device=device)
    copied, seconds = torch.empty_like(source), []
    for _ in range(1 + COPIES):
        synchronize(device)
        started = time.perf_counter()
        copied.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * BUFFER / min(seconds)


def read_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that one forward reads: all but the embeddings, unless they are the head as well."""
    sizes = {id(weight): weight.nbytes for weight in model.parameters()}
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and table is not None and head.weight is not table.weight:
        sizes.pop(id(table.weight), None)
    return sum(sizes.values())


def round_bytes(target: PreTrainedModel, draft: PreTrainedModel | None, bare: Bare) -> float:
    """Bytes that an average round has to read at least: the weights at each forward, and what attention sees."""
    total = 0.0
    for each in bare.rounds:
        tokens = each.rows * each.length
        total += read_bytes(target) + tokens * bare.kv_bytes[0]
        if draft is not None:
            total += each.drafted * (read_bytes(draft) + tokens * bare.kv_bytes[1])
    return total / len(bare.rounds)
