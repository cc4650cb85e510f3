"""How many candidates each row drafts, as the user says in transformers' own words; "auto" is in `auto.py`.

These words are a number, its schedule and a threshold, which transformers reads from the draft's own file alone.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import GenerationConfig

from hf_specx.common.batch import Batch
from hf_specx.common.round import Round
from hf_specx.sampling.processors import Processors


UNSET = {  # what `generate` fills in before it calls a strategy, whether or not the user gave these values
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}


class DraftSettings(NamedTuple):
    """What was asked for: candidates of a round, None for "auto"; transformers' schedule; and its threshold.

    After a candidate that the draft gave less than the threshold a row drafts no further; 0 is off. It stays as given,
    where transformers adapts it by scikit-learn's ROC curve.
    """

    num_draft_tokens: int | None = None
    schedule: str = "constant"
    threshold: float = 0.0


def explicit_draft_settings(*sources: Mapping[str, Any] | GenerationConfig | None) -> dict[str, Any]:
    """Those of transformers' three arguments that a user has set, each from the first source that has it.

    The sources are the call's keyword arguments, and configs that were not filled up with defaults yet.
    """
    arguments: dict[str, Any] = {}
    for source in reversed(sources):
        values = vars(source) if isinstance(source, GenerationConfig) else source or {}
        arguments |= {name: values[name] for name in UNSET if values.get(name) is not None}
    return arguments


def choose_draft_settings(
    num_draft_tokens: int | str, explicit: Mapping[str, Any] | None, config: GenerationConfig, draft_model: Any
) -> DraftSettings:
    """What is used: the strategy's own number, else what the call says, else the draft's own file, else "auto".

    Args:
        num_draft_tokens: of the strategy; if it is a number, no schedule counts, and the draft's file is not read.
        explicit: the `explicit_draft_settings` of the call; None if only `config` is known.
        config: of the call, where `generate` has filled in defaults; values other than these count as set by the user.
        draft_model: its `generation_config` is the draft's own file.
    """
    if explicit is None:
        values = {name: getattr(config, name, None) for name in UNSET}
        explicit = {name: value for name, value in values.items() if value != UNSET[name]}
    of_draft = getattr(draft_model, "generation_config", None) if num_draft_tokens == "auto" else None
    defaults = dict(zip(UNSET, DraftSettings(), strict=True))
    number, schedule, threshold = (defaults | explicit_draft_settings(explicit, of_draft)).values()
    if not isinstance(num_draft_tokens, str):
        number, schedule = num_draft_tokens, "constant"
    elif schedule in ("heuristic", "heuristic_transient"):
        number = None
    return DraftSettings(number, schedule, threshold)


class DraftLengthSchedule:
    """How many candidates each row drafts in the next round: the same number for all rows and rounds.

    Args:
        num_draft_tokens: that number.
        round_timer: a `RoundTimer`, which is told when rounds end; None where no times are kept.
        equal_lengths: whether all rows and ranks must draft equally many. Else a row that is nearly done drafts no
            more than it can emit together with the token that follows.
        processors: their `max_rollback_of` a row limits its candidates.
        agree: returns the first rank's number on each rank, which asks it in each round; None where all ranks have the
            same by themselves.
    """

    def __init__(
        self,
        num_draft_tokens: int,
        round_timer: Any = None,
        equal_lengths: bool = False,
        processors: Processors | None = None,
        agree: Callable[[int], int] | None = None,
    ):
        self.num_draft_tokens = num_draft_tokens
        self.round_timer = round_timer
        self.equal_lengths = equal_lengths
        self.processors = processors or Processors([])
        self.agree = agree

    def __call__(self, batch: Batch) -> list[int]:
        """Candidates for each of the R decoding rows."""
        if self.agree is not None:
            self.num_draft_tokens = self.agree(min(self.num_draft_tokens, self.processors.max_rollback))
        return [self._row_length(batch, row) for row in batch.rows]

    def _row_length(self, batch: Batch, row: int) -> int:
        """Candidates of a row: as many as it should have, where it has room for them."""
        row_state = batch.row_states[row]
        # as in a batch of one, whose first round has no candidates; others have some as soon as they have a place
        if not batch.counts[row] and (row_state.independent_lengths or not row_state.is_refill):
            return 0
        wanted = self.wanted_length(batch, row)
        if self.equal_lengths:
            return min(wanted, self.processors.max_rollback)
        return min(wanted, self.processors.max_rollback_of(row), max(0, batch.remaining_tokens(row) - 1))

    def wanted_length(self, batch: Batch, row: int) -> int:
        """How many candidates a row should have; it may have room for fewer."""
        return self.num_draft_tokens

    def observe(self, round_: Round) -> None:
        """Time a round in which every candidate took a step of the draft, or none did."""
        if self.round_timer is None or not any(round_.emitted_before):
            return  # the first step, with the prompts, took another time
        draft = round_.draft
        if round_.num_candidates != draft.lengths:
            self.round_timer.observe_tree(len(round_.rows), draft.steps, max(round_.num_candidates))
        elif draft.model_free is None and draft.steps == max(draft.lengths):
            self.round_timer.observe(len(round_.rows), draft.steps)
        else:
            self.round_timer.skip()

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """New prompts have the places of these rows."""
        if self.round_timer is not None:
            self.round_timer.skip()

    def end(self) -> None:
        """End the call: later ones go by what its rounds took."""
        if self.round_timer is not None:
            self.round_timer.end()
