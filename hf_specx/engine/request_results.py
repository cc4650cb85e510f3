"""What became of requests: their tokens, why they ended, and log-probabilities."""

from collections.abc import Sequence
from typing import Any

import torch

from hf_specx.common.round import Round

from .requests import Completion, Piece, PreparedRequest


KEPT_ROUNDS = 256  # of each row, in the report of a queue that may have no end


class RequestResults:
    """Completes requests, as a listener of the rounds of their batches.

    Args:
        logprobs: whether completions have log-probabilities.
        streams: whether `pop` gives new tokens as well, round by round.

    Attributes:
        completed: since the last `pop`.
        new_tokens: by request, since the last `pop`, if it `streams`.
    """

    def __init__(self, logprobs: bool = False, streams: bool = False):
        self.logprobs, self.streams = logprobs, streams
        self.completed: list[Completion] = []
        self.new_tokens: dict[int, list[int]] = {}

    def observe(self, round_: Round) -> None:
        """Complete the requests of rows that ended in a round."""
        row_states = round_.batch.row_states
        for index, row in enumerate(round_.rows if self.logprobs else ()):
            row_states[row].logprobs += _logprobs(round_, index, row)
        for row, tokens in zip(round_.rows, round_.tokens, strict=True) if self.streams else ():
            self.new_tokens.setdefault(row_states[row].request.index, []).extend(tokens)
        for row in round_.ended:
            row_state = row_states[row]
            if row_state.dead_end is None:
                self.complete(
                    row_state.request, list(row_state.emitted_ids), round_.batch.row(row)[None], row_state.logprobs
                )
            else:
                _, error = row_state.dead_end
                row_state.dead_end = None
                self.refuse(row_state.request.index, error)

    def complete(
        self,
        request: PreparedRequest,
        tokens: list[int],
        input_ids: torch.Tensor,
        logprobs: Sequence[tuple[float, float]] = (),
    ) -> None:
        """Complete a request that has ended, with new tokens that are the end of input_ids [1, L]."""
        processed = [of_processed for of_processed, _ in logprobs] if self.logprobs else None
        raw = [of_model for _, of_model in logprobs] if self.logprobs else None
        reason = "length" if request.stopping.ended_by_limit(input_ids, tokens) else "stop"
        if reason == "stop" and request.is_cancelled() and not request.stopping.stops(input_ids, tokens):
            reason = "cancelled"
        self.completed.append(Completion(request.index, tokens, reason, processed, raw))

    def complete_alone(self, request: PreparedRequest, output: Any) -> None:
        """Complete a request that has run alone, by the output of its call."""
        output.speculation_report.max_history = KEPT_ROUNDS
        new = output.sequences[:, len(request.input_ids) :]
        logprobs: list[tuple[float, float]] = []
        if self.logprobs:
            tokens = new.mT  # [n, 1]
            logprobs = _of_tokens(tokens, torch.cat(output.scores), torch.cat(output.logits))
        tokens_of_row = new[0].tolist()
        if self.streams:
            self.new_tokens[request.index] = tokens_of_row
        self.complete(request, tokens_of_row, output.sequences, logprobs)

    def refuse(self, index: int, error: Exception) -> None:
        """Complete a request as one that cannot be served; the others go on."""
        self.completed.append(Completion(index, None, "refused", error=str(error)))

    def pop(self) -> list[Any]:
        """The completions since the last time; pieces, if it `streams`."""
        done, self.completed = self.completed, []
        if not self.streams:
            return done
        new_tokens, self.new_tokens = self.new_tokens, {}
        last = [Piece(each.index, new_tokens.pop(each.index, []), each) for each in done]
        return [*(Piece(index, tokens) for index, tokens in new_tokens.items() if tokens), *last]


def _logprobs(round_: Round, index: int, row: int) -> list[tuple[float, float]]:
    """Log-probabilities of the tokens that a row emitted in a round: after all processors, and of the model."""
    number, first = round_.emitted[index], round_.batch.width + round_.emitted_before[index]
    tokens = round_.batch.ids[row, first : first + number, None]
    return _of_tokens(tokens, round_.scores[index, :number], round_.forward.logits[index, :number])


def _of_tokens(tokens: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor) -> list[tuple[float, float]]:
    """The log-probabilities of tokens [n, 1] by scores and by logits [n, V]."""
    pairs = []
    for values in (scores, logits):
        chosen = values.float().log_softmax(-1).gather(-1, tokens.to(values.device))
        pairs.append(chosen[:, 0].tolist())
    return list(zip(*pairs, strict=True))
