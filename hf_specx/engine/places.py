"""The requests of one batch, and who has the place of a row that ends."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from hf_specx.common.batch import Batch
from hf_specx.common.padding import padded_rows
from hf_specx.common.round import Round
from hf_specx.drafting.drafter import Drafter
from hf_specx.layouts.prompts import UNLIMITED, Prompt
from hf_specx.sampling.per_request import RequestProcessors, RequestStopping
from hf_specx.sampling.processors import Processor, can_look_ahead
from hf_specx.validation.many import why_whole

from .plan import Plan
from .requests import Completion, Entry, Waiting, prepared


LEFT_OVER = 4096  # columns before all prompts that are left over from a longer one, at most


@dataclass
class Places:
    """The requests of one batch, and those that wait for a place.

    Attributes:
        entries: the request of each of the B rows.
        waiting: what follows.
        logprobs: whether completions have them.
        coming: the requests for the rows that ended in this round.
        completed: what is done, and was not handed on yet.
        ended: rows that ended in this round, and whether they did so at their limits.
        refills: whether prompts can be read in the places of rows that ended.
    """

    entries: list[Entry]
    waiting: Waiting
    logprobs: bool = False
    coming: dict[int, Entry] = field(default_factory=dict)
    completed: list[Completion] = field(default_factory=list)
    ended: dict[int, bool] = field(default_factory=dict)
    refills: bool = True

    def __post_init__(self) -> None:
        self.chances: list[list[tuple[float, float]]] = [[] for _ in self.entries]
        self.stopping = PlacesStopping(self)

    @property
    def seeds(self) -> list[int]:
        """Of the rows."""
        return [entry.seed for entry in self.entries]

    def processors(self, look_ahead: bool = False) -> RequestProcessors:
        """Those of the rows; `look_ahead` leaves out those that keep state, for a draft."""
        own = [_ahead(entry.processors) if look_ahead else entry.processors for entry in self.entries]
        alike = [entry.alike for entry in self.entries]
        return RequestProcessors(own, self.stopping.eos_token_id, self.stopping.limits, alike)

    def prompt(self) -> tuple[Prompt, torch.Tensor | None]:
        """The prompts of all rows, as `generate` prepares them with pads; and what an encoder reads, if any."""
        encodes = self.waiting.model.config.is_encoder_decoder
        padded = padded_rows([entry.given for entry in self.entries], "right" if encodes else "left")
        ids, mask = padded["input_ids"], padded["attention_mask"]
        options = self.waiting.options | {"max_new_tokens": self.stopping.max_new_tokens, "stop_strings": None}
        prompt, *_ = prepared(self.waiting.model, ids, mask, options)
        prompt.max_new_tokens, prompt.limits = UNLIMITED, self.stopping.limits
        prompt.generation_config.return_dict_in_generate = False  # completions have no other outputs
        return prompt, ids if encodes else None

    def settle(self, plan: Plan, prompt: Prompt, drafter: Drafter) -> Plan:
        """Whether rows are filled again; if not, no prompts come in their places, and the plan says why."""
        models = [prompt.model] if drafter.model is None else [prompt.model, drafter.model]
        why = why_whole(models, plan.layout, plan.draft_layout)
        if why is None:
            return plan
        self.refills, prompt.max_new_tokens = False, self.stopping.max_new_tokens
        return plan._replace(reason=f"{plan.reason}; whole batches, since {why}")

    def replace(self, batch: Batch) -> dict[int, Entry]:
        """Put the prompts that are coming into the text; returns them by row."""
        coming, self.coming = self.coming, {}
        widest = max((len(entry.input_ids) for entry in coming.values()), default=0)
        if widest > batch.width:
            batch.widen(widest - batch.width)
        for row, entry in coming.items():
            self.entries[row] = entry
            batch.replace(row, entry.input_ids)
            self.stopping.admit(row, entry.stopping)
        return coming

    def refill(self, batch: Batch, row: int) -> bool:
        """Whether a request waits that can have the place of a row; it is then about to come.

        If a prompt was much longer than those that are left, it cannot: forwards would go on reading that width.
        """
        entry = self.waiting.peek() if self.refills else None
        if entry is None or entry.alone:
            return False
        live = [entry, *(self.coming.get(number, self.entries[number]) for number in batch.rows if number != row)]
        widest = max(len(one.input_ids) for one in live)
        if batch.width - widest > max(LEFT_OVER, widest):
            return False
        if not self.waiting.fits(live, len(self.entries), batch.width):
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
        self.completed.append(Completion(self.entries[row].index, tokens, reason, *given))
        self.chances[row] = []

    def handed_on(self) -> Iterator[Completion]:
        """What is done since the last time."""
        done, self.completed = self.completed, []
        yield from done
        yield from self.waiting.hand_on()


class PlacesStopping(RequestStopping):
    """Closes requests whose rows have ended; a row leaves the batch only if no other request can have its place."""

    def __init__(self, places: Places):
        super().__init__([entry.stopping for entry in places.entries])
        self.places = places

    def update(self, batch: Batch, new: list[int], ended: list[bool]) -> list[int]:
        leaving = super().update(batch, new, ended)
        self.places.ended = {row: self.by_limit_in(batch, row) for row in leaving}
        return [row for row in leaving if not self.places.refill(batch, row)]


def _ahead(processors: Sequence[Processor]) -> list[Processor]:
    return [processor for processor in processors if can_look_ahead(processor)]


def _chances(done: Round, index: int, row: int) -> list[tuple[float, float]]:
    """Log-probabilities of the tokens that a row has emitted in a round: after all processors, and of the model."""
    number, end = done.emitted[index], done.batch.width + done.before[index]
    tokens = done.batch.ids[row, end : end + number, None]
    kinds = (done.scores[index, :number], done.forward.logits[index, :number])
    found = [logits.float().log_softmax(-1).gather(-1, tokens)[:, 0].tolist() for logits in kinds]
    return list(zip(*found, strict=True))
