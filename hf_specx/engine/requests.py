"""Many requests in one batch: each is prepared as in a batch of one, and has the place of a row that ended."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_specx.common.batch import Batch
from hf_specx.common.errors import is_int, require
from hf_specx.common.round import Round
from hf_specx.layouts.decoder import position_table
from hf_specx.layouts.prompts import UNKNOWN, Prompt
from hf_specx.sampling.per_request import RequestProcessors, RequestStopping
from hf_specx.sampling.processors import can_look_ahead
from hf_specx.sampling.stopping import Stopping
from hf_specx.validation.models import check_target


MAX_SEED = 2**62  # of seeds that are drawn


@dataclass(frozen=True)
class Request:
    """One prompt for `SpeculativeDecoding.generate_many`.

    Attributes:
        input_ids: the prompt, [L] ints, without pads.
        max_new_tokens: its own limit; None is that of the call.
        seed: its text is that of a batch of one under `seeds=[seed]`; None draws one from the default generator.
        stop_strings: its own; None are those of the call. They need a tokenizer.
    """

    input_ids: Sequence[int] | torch.Tensor
    max_new_tokens: int | None = None
    seed: int | None = None
    stop_strings: str | list[str] | None = None


@dataclass(frozen=True)
class Completion:
    """What became of a request.

    Attributes:
        index: the number of the request, counted from 0.
        tokens: the new tokens, an end token among them.
        finish_reason: "stop" at an end token or another stopping criterion, "length" at the limit, or "refused".
        logprobs: of each token, under the distribution after all processors; None unless asked for.
        raw_logprobs: of each token, under the model's own distribution; None unless asked for.
        error: why the request was refused; None if it was not.
    """

    index: int
    tokens: list[int]
    finish_reason: str
    logprobs: list[float] | None = None
    raw_logprobs: list[float] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Entry:
    """A request as `generate` prepared it for a batch of one."""

    index: int
    input_ids: torch.Tensor
    seed: int
    processors: LogitsProcessorList
    stopping: Stopping

    @property
    def limit(self) -> int:
        """The most tokens that it may emit."""
        return self.stopping.max_new_tokens

    @property
    def longest(self) -> int:
        """Tokens of its prompt and its limit."""
        return len(self.input_ids) + self.limit


class Waiting:
    """Requests that are still to be read, taken from an iterable as they are needed.

    Args:
        model: the target.
        requests: lists of tokens, or `Request`.
        options: arguments of `generate` for all of them.
        max_batch_tokens: the most slots of a cache, rows times their length; None is no limit.
    """

    def __init__(
        self, model: PreTrainedModel, requests: Iterable[Any], options: dict[str, Any], max_batch_tokens: int | None
    ):
        self.model, self.requests, self.options = model, enumerate(requests), options
        self.max_batch_tokens = max_batch_tokens
        self.next: Entry | None = None
        self.refused: list[Completion] = []

    def peek(self) -> Entry | None:
        """The next request that can be served; those before it that never can be are refused. None at the end."""
        while self.next is None:
            index, request = next(self.requests, (0, None))
            if request is None:
                return None
            try:
                self.next = self._prepare(index, request if isinstance(request, Request) else Request(request))
            except ValueError as error:
                self.refused.append(Completion(index, [], "refused", error=f"request {index}: {error}"))
        return self.next

    def take(self) -> Entry:
        """The request that `peek` has shown."""
        entry, self.next = self.next, None
        assert entry is not None
        return entry

    def take_while_fits(self, rows: int) -> list[Entry]:
        """As many requests as may share a batch of at most so many rows."""
        entries: list[Entry] = []
        while len(entries) < rows and (entry := self.peek()) is not None and self.fits([*entries, entry]):
            entries.append(self.take())
        return entries

    def hand_on(self) -> Iterator[Completion]:
        """What was refused since the last time."""
        refused, self.refused = self.refused, []
        yield from refused

    def fits(self, entries: Sequence[Entry], rows: int = 0, width: int = 0) -> bool:
        """Whether a batch of `rows` or more rows with prompts of `width` or more columns has place for entries."""
        width = max(width, *(len(entry.input_ids) for entry in entries))
        longest = width + max(entry.limit for entry in entries)
        return self.max_batch_tokens is None or max(rows, len(entries)) * longest <= self.max_batch_tokens

    def _prepare(self, index: int, request: Request) -> Entry:
        """Have `generate` prepare a request for a batch of one.

        Raises:
            ValueError: if it cannot be served.
        """
        ids = torch.as_tensor(request.input_ids)
        given = str(request.input_ids)[:40]
        ok = ids.ndim == 1 and len(ids) > 0 and not ids.is_floating_point() and ids.dtype != torch.bool
        require(ok, f"input_ids={given} is no list of token ids; give at least one int.")
        own = {"max_new_tokens": request.max_new_tokens, "stop_strings": request.stop_strings}
        options = self.options | {name: value for name, value in own.items() if value is not None}
        ids = ids.to(self.model.device, torch.int64)
        prompt, processors, criteria = prepared(self.model, ids[None], torch.ones_like(ids[None]), options)
        stopping = Stopping(criteria, len(ids), prompt.generation_config.max_length)
        seed = request.seed
        require(seed is None or (is_int(seed) and 0 <= seed < 2**63), f"seed={seed!r} is no int from 0, below 2**63.")
        if seed is None:
            seed = int(torch.randint(MAX_SEED, ()))
        entry = Entry(index, ids, seed, processors, stopping)
        check_target(self.model, entry.longest)
        table = position_table(self.model)  # the last token is not fed
        told = f"{len(ids)} tokens and {entry.limit} new ones are beyond the {table} positions of the target."
        require(table is None or entry.longest - 1 <= table, told)
        told = f"{len(ids)} tokens and {entry.limit} new ones are more than max_batch_tokens={self.max_batch_tokens}."
        require(self.fits([entry]), told)
        return entry


def prepared(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor, options: dict[str, Any]
) -> tuple[Prompt, LogitsProcessorList, StoppingCriteriaList]:
    """What `generate` would decode with: the prompt, processors and stopping criteria for [B, L] ids."""
    found: list[tuple[Prompt, LogitsProcessorList, StoppingCriteriaList]] = []

    def hold(
        _: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> torch.Tensor:
        found.append((Prompt(model, input_ids, generation_config, inputs, 0), logits_processor, stopping_criteria))
        return input_ids

    model.generate(input_ids, attention_mask=attention_mask, **options, custom_generate=hold)  # type: ignore[operator]
    return found[0]


@dataclass
class Queue:
    """The requests of one batch, and those that wait for a place.

    Attributes:
        places: the request of each of the B rows.
        waiting: what follows.
        logprobs: whether completions have them.
        coming: the requests for the rows that ended in this round.
        completed: what is done, and was not handed on yet.
        ended: rows that ended in this round, and whether they did so at their limits.
    """

    places: list[Entry]
    waiting: Waiting
    logprobs: bool = False
    coming: dict[int, Entry] = field(default_factory=dict)
    completed: list[Completion] = field(default_factory=list)
    ended: dict[int, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chances: list[list[tuple[float, float]]] = [[] for _ in self.places]
        self.stopping = QueueStopping(self)

    @property
    def seeds(self) -> list[int]:
        """Of the rows."""
        return [entry.seed for entry in self.places]

    def processors(self, look_ahead: bool = False) -> RequestProcessors:
        """Those of the rows; `look_ahead` leaves out those that keep state, for a draft."""
        own = [_ahead(entry.processors) if look_ahead else entry.processors for entry in self.places]
        return RequestProcessors(own, self.stopping.eos_token_id, list(self.stopping.limits))

    def prompt(self, options: dict[str, Any]) -> Prompt:
        """The prompts of all rows, as `generate` prepares them with pads on the left."""
        rows = [entry.input_ids for entry in self.places]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
        lengths = torch.tensor([len(row) for row in rows], device=ids.device)
        mask = (torch.arange(ids.shape[1], device=ids.device) >= ids.shape[1] - lengths[:, None]).long()
        prompt, *_ = prepared(
            self.waiting.model, ids, mask, options | {"max_new_tokens": self.stopping.max_new_tokens}
        )
        prompt.max_new_tokens = UNKNOWN
        return prompt

    def replace(self, batch: Batch) -> dict[int, Entry]:
        """Put the prompts that are coming into the text; returns them by row."""
        coming, self.coming = self.coming, {}
        widest = max((len(entry.input_ids) for entry in coming.values()), default=0)
        if widest > batch.width:
            batch.widen(widest - batch.width)
        for row, entry in coming.items():
            self.places[row] = entry
            batch.replace(row, entry.input_ids)
            self.stopping.admit(row, entry.stopping)
        return coming

    def refill(self, batch: Batch, row: int) -> bool:
        """Whether a request waits that can have the place of a row; it is then about to come."""
        entry = self.waiting.peek()
        if entry is None:
            return False
        live = [self.coming.get(number, self.places[number]) for number in batch.rows if number != row]
        if not self.waiting.fits([*live, entry], len(self.places), batch.width):
            return False
        self.coming[row] = self.waiting.take()
        return True

    def observe(self, done: Round) -> None:
        """Take up what rows have emitted."""
        if self.logprobs:
            for index, row in enumerate(done.rows):
                self.chances[row] += _chances(done, index, row)
        for row, by_limit in self.ended.items():
            self.close(row, done.batch.row(row)[done.batch.prompt_lengths[row] :].tolist(), by_limit)
        self.ended = {}

    def close(self, row: int, tokens: list[int], by_limit: bool) -> None:
        """A row has ended."""
        processed, raw = zip(*self.chances[row], strict=True) if self.logprobs and tokens else ((), ())
        given = (list(processed), list(raw)) if self.logprobs else (None, None)
        reason = "length" if by_limit else "stop"
        self.completed.append(Completion(self.places[row].index, tokens, reason, *given))
        self.chances[row] = []

    def handed_on(self) -> Iterator[Completion]:
        """What is done since the last time."""
        done, self.completed = self.completed, []
        yield from done
        yield from self.waiting.hand_on()


class QueueStopping(RequestStopping):
    """Closes requests whose rows have ended; a row leaves the batch only if no other request can have its place."""

    def __init__(self, queue: Queue):
        super().__init__([entry.stopping for entry in queue.places])
        self.queue = queue

    def update(self, batch: Batch, new: list[int], ended: list[int]) -> list[int]:
        leaving = super().update(batch, new, ended)
        self.queue.ended = {row: self.by_limit(batch, row) for row in leaving}
        return [row for row in leaving if not self.queue.refill(batch, row)]


def _ahead(processors: Sequence[LogitsProcessor]) -> list[LogitsProcessor]:
    return [processor for processor in processors if can_look_ahead(processor)]


def _chances(done: Round, index: int, row: int) -> list[tuple[float, float]]:
    """Log-probabilities of the tokens that a row has emitted in a round: after all processors, and of the model."""
    number, end = done.emitted[index], done.batch.width + done.before[index]
    tokens = done.batch.ids[row, end : end + number, None]
    kinds = (done.scores[index, :number], done.forward.logits[index, :number])
    found = [logits.float().log_softmax(-1).gather(-1, tokens)[:, 0].tolist() for logits in kinds]
    return list(zip(*found, strict=True))
