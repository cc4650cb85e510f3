"""Any number of requests: who waits, who has the place of a row that ends, and what became of each."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_specx.common.batch import Batch
from hf_specx.common.errors import require
from hf_specx.common.round import Round
from hf_specx.models.prompts import Prompt
from hf_specx.sampling.per_request import RequestStopping

from .ranks import synced_by_default
from .requests import CancelCriteria, Completion, Entry, Piece, Preparing, Request, as_ids


KEPT_ROUNDS = 256  # of each row, in the report of a queue that may have no end
LEFT_OVER = 4096  # columns before all prompts that are left over from a longer one, at most


class RequestQueue:
    """Requests, taken from an iterable as they are needed: when a batch begins, and after each round for free places.

    `models` are the target, and the draft if it is a model; `options` are arguments of `generate` for all requests;
    `most` is how many slots a cache may have, rows times their length. With `streams` tokens are told round by round.

    Attributes:
        entries: the requests with which a batch has begun; `stopping` is of its rows, `most_rows` at most.
        is_over: whether the iterable has ended, or failed; a None that it yields says that there is nothing yet.
        failed: an error of the iterable; it is raised once what was taken before is done.
    """

    stopping: RequestStopping

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        requests: Any,
        options: dict[str, Any],
        most: int | None = None,
        logprobs: bool = False,
        streams: bool = False,
    ):
        message = "a model is spread over processes (FSDP or ZeRO-3), which would read prompts at different times; "
        require(not synced_by_default(*models), message + "load a copy on each process, or call generate for batches.")
        self.requests, self.preparing = iter(requests), Preparing(models[0], options)
        self.max_batch_tokens, self.logprobs, self.streams = most, logprobs, streams
        self.num_requests = 0
        self.most_rows = 1
        self.is_over = False
        self.entries: list[Entry] = []
        self.next: Entry | None = None
        self.returned: list[Entry] = []  # taken for a batch that was not decoded
        self.each_alone = False
        self.completed: list[Completion] = []
        self.new_tokens: dict[int, list[int]] = {}  # by request, since they were told
        self.failed: Exception | None = None

    def begin(self, rows: int) -> bool:
        """Take as many requests as may share a batch of at most so many rows; False if there is none now."""
        self.entries, self.most_rows = [], rows
        while len(self.entries) < rows and (entry := self._peek()) is not None and self._fits([*self.entries, entry]):
            if self.entries and entry.alone:
                break
            self.entries.append(self._take())
            rows = 1 if entry.alone else rows
        if self.entries:
            longest = max(entry.limit for entry in self.entries)
            self.stopping = RequestStopping(self.entries[0].stopping.eos_token_ids, longest)
        return bool(self.entries)

    def decode_each_alone(self) -> None:
        """Let the requests of the batch that has begun wait again, and decode all requests in batches of one."""
        self.returned, self.each_alone = self.entries, True

    def prepared(self) -> Prompt:
        """The prompts of all rows, as `generate` prepares them with pads; one alone as any call of `generate`."""
        first = self.entries[0]
        if first.alone:
            prompt = self.preparing.alone(first)
        else:
            prompt = self.preparing.batch([entry.text for entry in self.entries], self.stopping.max_new_tokens)
        prompt.seeds = [entry.seed for entry in self.entries] if prompt.generation_config.do_sample else None
        if first.alone:
            config, prompt.criteria = prompt.generation_config, StoppingCriteriaList(first.stopping.all)
            if first.request.cancelled is not None:
                prompt.criteria.append(CancelCriteria(first.request.cancelled))
            config.return_dict_in_generate = True
            config.output_scores = config.output_logits = self.logprobs
            config.output_attentions = config.output_hidden_states = False
            # it copies the logits of the model, to which a processor may write
            copying = [TemperatureLogitsWarper(1.0)] if self.logprobs else []
            prompt.processors = LogitsProcessorList([*copying, *first.processors])
        return prompt

    def next_requests(self, batch: Batch, ended: list[int]) -> dict[int, Entry]:
        """Take the next requests for the places of rows that have ended, and for those that are free; by row."""
        entries: dict[int, Entry] = {}
        free = [row for row in range(self.most_rows) if row not in batch.rows]
        for row in [*ended, *free]:
            entry = self._peek()
            if entry is None or entry.alone:
                break
            others = [entries.get(number, batch.table[number].request) for number in batch.rows if number != row]
            widest = max(len(each.input_ids) for each in [entry, *others])
            # if a prompt was much longer than those that are left, forwards would go on reading that width
            too_wide = batch.width - widest > max(LEFT_OVER, widest)
            if not too_wide and self._fits([entry, *others], max(len(batch.table), row + 1), batch.width):
                entries[row] = self._take()
        return entries

    def observe(self, done: Round) -> None:
        """Take up what rows have emitted."""
        table = done.batch.table
        for index, row in enumerate(done.rows if self.logprobs else ()):
            table[row].logprobs += _logprobs(done, index, row)
        for row, tokens in zip(done.rows, done.tokens, strict=True) if self.streams else ():
            self.new_tokens.setdefault(table[row].request.index, []).extend(tokens)
        for row in done.ended:
            state = table[row]
            if state.dead_end is None:
                self.close(state.request, list(state.emitted), done.batch.row(row)[None], state.logprobs)
            else:
                _, error = state.dead_end
                state.dead_end = None
                self.refuse(state.request.index, error)

    def close(
        self, entry: Entry, tokens: list[int], text: torch.Tensor, logprobs: Sequence[tuple[float, float]] = ()
    ) -> None:
        """A request has ended; its tokens are the end of its text [1, L]."""
        processed = [of_processed for of_processed, _ in logprobs] if self.logprobs else None
        raw = [of_model for _, of_model in logprobs] if self.logprobs else None
        reason = "length" if entry.stopping.by_limit(text, tokens) else "stop"
        if reason == "stop" and entry.is_cancelled() and not entry.stopping.stops(text, tokens):
            reason = "cancelled"
        self.completed.append(Completion(entry.index, tokens, reason, processed, raw))

    def is_request_error(self, error: Exception) -> bool:
        """Whether the own processors of one request alone made an error, as where they exclude every token."""
        by_processors = isinstance(error, ValueError) or "probability tensor contains" in str(error)  # of multinomial
        return by_processors and self.entries[0].has_processors

    def refuse(self, index: int, error: Exception) -> None:
        """A request cannot be served; the others go on."""
        self.completed.append(Completion(index, None, "refused", error=f"request {index}: {error}"))

    def take_up(self, output: Any) -> None:
        """What the call of one request alone has returned."""
        output.speculation_report.keeps = KEPT_ROUNDS
        (entry,) = self.entries
        new = output.sequences[:, len(entry.input_ids) :]
        logprobs: list[tuple[float, float]] = []
        if self.logprobs:
            tokens = new.mT  # [n, 1]
            logprobs = _of_tokens(tokens, torch.cat(output.scores), torch.cat(output.logits))
        tokens_of_row = new[0].tolist()
        if self.streams:
            self.new_tokens[entry.index] = tokens_of_row
        self.close(entry, tokens_of_row, output.sequences, logprobs)

    def pop(self) -> list[Any]:
        """What is done or was refused since the last time; pieces, if it `streams`."""
        done, self.completed = self.completed, []
        if not self.streams:
            return done
        new_tokens, self.new_tokens = self.new_tokens, {}
        last = [Piece(each.index, new_tokens.pop(each.index, []), each) for each in done]
        return [*(Piece(index, tokens) for index, tokens in new_tokens.items() if tokens), *last]

    def _peek(self) -> Entry | None:
        """The next request that can be served; None if there is none now. Those that never can be are refused."""
        if self.next is None and self.returned:
            self.next = replace(self.returned.pop(0), alone=True)
        while self.next is None and not self.is_over:
            try:
                asked = next(self.requests)
            except StopIteration:
                self.is_over = True
                return None
            except Exception as error:
                self.failed, self.is_over = error, True
                return None
            if asked is None:
                return None
            index, self.num_requests = self.num_requests, self.num_requests + 1
            request = asked if isinstance(asked, Request) else Request(asked)
            if request.is_cancelled():
                self.completed.append(Completion(index, [], "cancelled"))
                continue
            if index == 0:  # the type of the first is that of all
                as_ids(request.input_ids)
            try:
                entry = self.preparing.entry(index, request)
                message = (
                    f"the prompt has {len(entry.text)} tokens and may get {entry.limit} new ones, more than there "
                )
                message += f"is room for: max_batch_tokens={self.max_batch_tokens} (by default, what half of the free "
                message += "memory holds); raise it, lower max_new_tokens, or shorten the prompt."
                require(self._fits([entry]), message)
                self.next = replace(entry, alone=entry.alone or self.each_alone)
            except ValueError as error:
                self.refuse(index, error)
        return self.next

    def _take(self) -> Entry:
        """The request that `_peek` has shown."""
        entry, self.next = self.next, None
        assert entry is not None
        return entry

    def _fits(self, entries: Sequence[Entry], rows: int = 0, width: int = 0) -> bool:
        """Whether a batch of `rows` or more rows with prompts of `width` or more columns has place for entries."""
        width = max(width, *(entry.width for entry in entries))
        longest = width + max(entry.limit for entry in entries)
        return self.max_batch_tokens is None or max(rows, len(entries)) * longest <= self.max_batch_tokens


def _logprobs(done: Round, index: int, row: int) -> list[tuple[float, float]]:
    """Log-probabilities of the tokens that a row has emitted in a round: after all processors, and of the model."""
    number, first = done.emitted[index], done.batch.width + done.before[index]
    tokens = done.batch.ids[row, first : first + number, None]
    return _of_tokens(tokens, done.scores[index, :number], done.forward.logits[index, :number])


def _of_tokens(tokens: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor) -> list[tuple[float, float]]:
    """The log-probabilities of tokens [n, 1] by scores and by logits [n, V]."""
    pairs = []
    for values in (scores, logits):
        chosen = values.float().log_softmax(-1).gather(-1, tokens.to(values.device))
        pairs.append(chosen[:, 0].tolist())
    return list(zip(*pairs, strict=True))


def in_order(completions: Iterator[Completion]) -> Iterator[Completion]:
    """Completions in the order in which their requests were given."""
    early: dict[int, Completion] = {}
    number = 0
    for completion in completions:
        early[completion.index] = completion
        while number in early:
            yield early.pop(number)
            number += 1
