"""Any number of requests: who waits, and who has the place of a row that ends."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_specx.common.batch import Batch
from hf_specx.common.errors import require
from hf_specx.models.prompts import PreparedInputs
from hf_specx.sampling.per_request import RequestStopping

from .ranks import synced_by_default
from .request_results import RequestResults
from .requests import CancelCriteria, Completion, PreparedRequest, Request, RequestPreparer, as_request


MAX_UNUSED_COLUMNS = 4096  # columns of pads before all prompts, kept after a longer prompt has ended


class RequestQueue:
    """Requests, taken from an iterable as they are needed: when a batch begins, and after each round for free places.

    Args:
        models: the target, and the draft if it is a model.
        requests: the iterable.
        options: arguments of `generate` for all requests.
        max_batch_tokens: how many slots a cache may have, rows times their length; None is any number.
        logprobs, streams: as in `RequestResults`.

    Attributes:
        results: what became of the requests that have ended, or were refused.
        batch_requests: the requests with which the batch began, `max_rows` at most; `stopping` is of its rows.
        is_over: whether the iterable has ended, or failed; a None that it yields says that there is nothing yet.
        iterable_error: an error of the iterable; it is raised once what was taken before is complete.
    """

    stopping: RequestStopping

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        requests: Any,
        options: dict[str, Any],
        max_batch_tokens: int | None = None,
        logprobs: bool = False,
        streams: bool = False,
    ):
        message = (
            "a model is spread over processes (FSDP or ZeRO-3), which would read prompts at different times; load a "
            "copy on each process, or call generate for batches."
        )
        require(not synced_by_default(*models), message)
        self.iterator, self.preparer = iter(requests), RequestPreparer(models[0], options)
        self.max_batch_tokens, self.results = max_batch_tokens, RequestResults(logprobs, streams)
        self.num_requests = 0
        self.max_rows = 1
        self.is_over = False
        self.batch_requests: list[PreparedRequest] = []
        self.next: PreparedRequest | None = None
        self.put_back: list[PreparedRequest] = []  # taken for a batch that was not decoded
        self.all_run_alone = False
        self.iterable_error: Exception | None = None

    def check_options(self) -> None:
        """Raise ValueError if the options of the call serve no request, not even one of a single token."""
        self._check_room(self.preparer.prepare_request(0, Request([0], seed=0)))

    def begin_batch(self, rows: int) -> bool:
        """Take as many requests as may share a batch of at most so many rows; False if there is none now."""
        self.max_rows = rows
        requests: list[PreparedRequest] = []
        while len(requests) < rows:
            request = self._peek()
            if request is None or not self._fits([*requests, request]):
                break
            if requests and request.runs_alone:
                break
            requests.append(self._take())
            if request.runs_alone:
                break
        self.batch_requests = requests
        if requests:
            limit = max(request.limit for request in requests)
            self.stopping = RequestStopping(requests[0].stopping.eos_token_ids, limit)
        return bool(requests)

    def run_each_alone(self) -> None:
        """Let the requests of the batch that has begun wait again, and decode each request alone."""
        next_ones = [] if self.next is None else [self.next]
        self.put_back, self.next = [*self.batch_requests, *next_ones, *self.put_back], None
        self.all_run_alone = True

    def batch_inputs(self) -> PreparedInputs:
        """What `generate` prepares for the batch: rows with pads, or one request that runs alone, as any call."""
        first = self.batch_requests[0]
        if first.runs_alone:
            prompt = self.preparer.prepare_alone(first)
        else:
            prompts = [request.prompt_ids for request in self.batch_requests]
            prompt = self.preparer.prepare_batch(prompts, self.stopping.max_new_tokens)
        config = prompt.generation_config
        prompt = replace(prompt, seeds=[request.seed for request in self.batch_requests] if config.do_sample else None)
        if first.runs_alone:
            config.return_dict_in_generate = True
            config.output_scores = config.output_logits = self.results.logprobs
            config.output_attentions = config.output_hidden_states = False
            # it copies the logits of the model, to which a processor may write
            copying = [TemperatureLogitsWarper(1.0)] if self.results.logprobs else []
            processors = LogitsProcessorList([*copying, *first.processors])
            criteria = StoppingCriteriaList(first.stopping.all)
            if first.request.cancelled is not None:
                criteria.append(CancelCriteria(first.request.cancelled))
            prompt = replace(prompt, criteria=criteria, processors=processors)
        return prompt

    def next_requests(self, batch: Batch, ended: list[int]) -> dict[int, PreparedRequest]:
        """The next requests, taken for the places of rows that have ended and for those that are free, by row."""
        requests: dict[int, PreparedRequest] = {}
        present = [batch.row_states[row].request for row in batch.rows if row not in ended]
        free = [row for row in range(self.max_rows) if row not in batch.rows]
        for row in [*ended, *free]:
            request = self._peek()
            if request is None or request.runs_alone:
                break
            together = [*present, *requests.values(), request]
            widest = max(len(each.input_ids) for each in together)
            # if a prompt was much longer than those that are left, forwards would go on reading that width
            too_wide = batch.width - widest > max(MAX_UNUSED_COLUMNS, widest)
            if too_wide or not self._fits(together, max(len(batch.row_states), row + 1), batch.width):
                break
            requests[row] = self._take()
        return requests

    def is_request_error(self, error: Exception) -> bool:
        """Whether the own processors of one request alone made an error, as where they exclude every token."""
        by_processors = isinstance(error, ValueError) or "probability tensor contains" in str(error)  # of multinomial
        return by_processors and self.batch_requests[0].has_own_processors

    def _peek(self) -> PreparedRequest | None:
        """The next request that can be served, which stays the next one; None if there is none now."""
        while self.next is None or self.next.is_cancelled():
            if self.next is not None:  # while it waited
                self.results.completed.append(Completion(self.next.index, [], "cancelled"))
                self.next = None
            if self.put_back:
                self.next = replace(self.put_back.pop(0), runs_alone=True)
                continue
            request = None if self.is_over else self._next_of_iterator()
            if request is None:
                return None
            index, self.num_requests = self.num_requests, self.num_requests + 1
            self.next = self._prepare(index, request)
        return self.next

    def _next_of_iterator(self) -> Any:
        """What the user's iterator yields next; None if it has nothing yet, has ended, or fails."""
        try:
            return next(self.iterator)
        except StopIteration:
            self.is_over = True
        except Exception as error:
            self.iterable_error, self.is_over = error, True
        return None

    def _prepare(self, index: int, prompt: Any) -> PreparedRequest | None:
        """A prompt or `Request` as it is decoded; None if it was cancelled or is refused, and is complete by that."""
        request = as_request(prompt)
        if request.is_cancelled():
            self.results.completed.append(Completion(index, [], "cancelled"))
            return None
        if index == 0:  # the type of the first is that of all
            self.preparer.check_kind(request)
        try:
            prepared = self.preparer.prepare_request(index, request)
            self._check_room(prepared)
        except ValueError as error:
            self.results.refuse(index, error)
            return None
        return replace(prepared, runs_alone=prepared.runs_alone or self.all_run_alone)

    def _check_room(self, request: PreparedRequest) -> None:
        """Raise ValueError if a request does not even fit by itself."""
        require(
            self._fits([request]),
            f"the prompt has {len(request.prompt_ids)} tokens and may get {request.limit} new ones, more than there "
            f"is room for: max_batch_tokens={self.max_batch_tokens} (by default, what half of the free memory holds); "
            "raise it, lower max_new_tokens, or shorten the prompt.",
        )

    def _take(self) -> PreparedRequest:
        """Take the request that `_peek` has returned."""
        request, self.next = self.next, None
        assert request is not None
        return request

    def _fits(self, requests: Sequence[PreparedRequest], rows: int = 0, width: int = 0) -> bool:
        """Whether a batch of `rows` or more rows with prompts of `width` or more columns has place for requests."""
        width = max(width, *(request.width for request in requests))
        longest = width + max(request.limit for request in requests)
        return self.max_batch_tokens is None or max(rows, len(requests)) * longest <= self.max_batch_tokens


def in_order(completions: Iterator[Completion]) -> Iterator[Completion]:
    """Completions in the order in which their requests were given."""
    early: dict[int, Completion] = {}
    number = 0
    for completion in completions:
        early[completion.index] = completion
        while number in early:
            yield early.pop(number)
            number += 1
