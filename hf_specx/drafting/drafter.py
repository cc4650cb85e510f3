"""Who proposes candidates: the one interface of all drafts, and what a call gives to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.batch import Batch
from hf_specx.common.drafts import FIXED_DRAFT_TOKENS
from hf_specx.common.errors import brief, is_int, require
from hf_specx.common.round import Draft, Round
from hf_specx.models.prompts import HiddenStateTap, PreparedInputs
from hf_specx.models.runner import ModelRunner
from hf_specx.sampling.processors import Processors
from hf_specx.sampling.verifiers import RejectionVerifier, Verifier

from .forward_times import ForwardSize, size_of
from .round_timer import RoundTimer
from .trees import TreeShapes


class TokenizerMatch(NamedTuple):
    """How the tokens of a draft with another tokenizer become the target's: how ("tokens": common ones), and why.

    `overlap` is the part of the target's tokens that the draft has as well, `coverage` of those of a sample text.
    """

    match: str
    reason: str
    overlap: float
    coverage: float


@dataclass
class DraftContext:
    """What a drafter is told about a call, once the target has read the prompts.

    Attributes:
        batch: the target's prompts.
        target: has read them, with its cache.
        vocab_size: of the target; candidates are ids below it.
        verifier: draws candidates from scores.
        processors: of the call, for the draft's logits; those that keep state are left out.
        threshold: after a candidate that the draft gave less than this probability a row drafts no further; 0 is off.
        prompt: prepared for the drafter's own model; None if it has none. `layout` is that of this model, and
            `compiled` whether its forwards after the prompt are compiled.
        allow_forced_tokens: whether forced tokens may add to the candidates; not where ranks or compiled forwards need
            the same number of candidates for all rows.
        round_timer: how long rounds take; it is known before anything is proposed.
        num_draft_tokens: candidates of a round that the user asked for; None is "auto".
        alpha: acceptance in earlier calls with this verification; None where none was seen.
        tree_shapes: the shapes of trees, where candidates may branch; None where each follows the one before.
    """

    batch: Batch
    target: ModelRunner
    vocab_size: int
    verifier: Verifier
    processors: Processors
    threshold: float = 0.0
    prompt: PreparedInputs | None = None
    layout: str = "ragged"
    compiled: bool = False
    allow_forced_tokens: bool = False
    round_timer: RoundTimer = field(default_factory=lambda: RoundTimer(None))
    num_draft_tokens: int | None = None
    alpha: float | None = None
    tree_shapes: TreeShapes | None = None

    @property
    def independent_rows(self) -> bool:
        """Whether what a row proposes must not depend on other rows: with seeds, where it changes what is drawn."""
        return isinstance(self.verifier, RejectionVerifier) and self.verifier.seeded


class Drafter(Protocol):
    """Proposes candidates for all rows of a batch; a class that inherits from this needs `propose` alone.

    A call drives it in this order: `bind`, `check`, `start`, under "auto" `cost` and perhaps `size`, then in each
    round `propose` and `observe`; in a queue `admit` follows where new prompts came, after `add_rows` where they have
    places that were free. What `bind` returns serves one call at a time, and holds all that belongs to it.

    Attributes:
        model: the draft model, if there is one; it is checked against the target before anything is read.
        runner: a `ModelRunner` of that model once a call has begun, or what acts as one.
        has_probs: whether drafts have q, the distribution that candidates were drawn from; without it the default
            verification is "coupled".
        proposes_trees: whether drafts may have `parents`, where a call takes trees; it is then coupled, or greedy.
        needs_hidden: whether it reads `Round.forward.hidden`; `hidden_state_taps`: where in the target, by default
            after its final norm; `all_prompt_hidden`: whether it reads those of all tokens of a prompt, or the last.
        max_candidates: the most candidates of a round that it finds; None for any number.
        drafts_blocks: whether one step finds all candidates of a round; "auto" then chooses how many are judged, or
            none.
        has_other_tokenizer: whether its model has another tokenizer than the target; `tokenizer_match` says how
            their tokens are matched.
        parts: the drafters that a `SeveralDrafts` chooses from; empty for any other.
    """

    model: PreTrainedModel | None = None
    runner: Any = None
    has_probs: bool = False
    proposes_trees: bool = False
    needs_hidden: bool = False
    all_prompt_hidden: bool = True
    hidden_state_taps: Sequence[HiddenStateTap] = ()
    max_candidates: int | None = None
    drafts_blocks: bool = False
    has_other_tokenizer: bool = False
    tokenizer_match: TokenizerMatch | None = None
    parts: Sequence["Drafter"] = ()

    def bind(self, target: PreTrainedModel) -> "Drafter":
        """The drafter of one call with a target, by default this itself.

        Raises:
            ValueError: if it cannot serve the target.
        """
        return self

    def check(self, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Raise ValueError if this cannot serve a call with a target of V tokens; called before anything is read.

        The tokenizer is the target's; None where it is not known.
        """
        return

    def start(self, context: DraftContext) -> None:
        """Begin a call; prompts need not be read before candidates are wanted."""
        return

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """Candidates for the R decoding rows.

        Args:
            batch: the text so far; `batch.row(row)` for each of `batch.rows`.
            lengths: [R], how many each row may have at most; all 0 if none are wanted.
        """
        raise TypeError(f"{type(self).__name__} has no `propose`; what its `bind` returns must have one.")

    def add_rows(self, batch: Batch, previous_indices: torch.Tensor) -> None:
        """In a queue rows that left earlier, or new ones, decode from now on; `admit` follows with their prompts.

        `previous_indices` [R'] are the row indices of all decoding rows up to now, 0 for those that had none.
        """
        return

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """New prompts have the places of these rows: `batch.row(row)`."""
        return

    def observe(self, round_: Round) -> None:
        """Learn what was kept of the draft in a round, and which rows go on."""
        return

    def misread_reason(self, batch: Batch) -> str:
        """Why the draft's files look as if they were misread, and what to do, at the end of a call; else empty."""
        return ""

    def cost(self, batch: Batch) -> Callable[[int], object] | None:
        """A function that runs one step of the draft, for one more candidate of each row, and waits for it.

        Its argument is how many tokens of a row the step is fed, which is always 1. Of a drafter that `drafts_blocks`
        it runs the step for all candidates.

        It is timed. With None "auto" is `max_candidates`, or 5 without one; `lambda _: None` says that candidates cost
        nothing.
        """
        return None

    @property
    def finds_own_number(self) -> bool:
        """Whether `num_draft_tokens="auto"` is always `max_candidates`, of which it proposes as many as seem right.

        Else "auto" chooses a number up to that. By default those with a most do, unless they `drafts_blocks`.
        """
        return self.max_candidates is not None and not self.drafts_blocks

    @property
    def candidates_per_step(self) -> int:
        """How many candidates one step finds; `FIXED_DRAFT_TOKENS` where a block may have any length."""
        if not self.drafts_blocks:
            return 1
        return self.max_candidates or FIXED_DRAFT_TOKENS

    def size(self) -> ForwardSize | None:
        """The size of what `cost` runs, by which its time is assumed before it is timed; None if only timing tells."""
        return None if self.model is None else size_of(self.model)


def no_candidates(batch: Batch) -> Draft:
    """A draft without candidates."""
    return Draft(batch.index.new_empty(len(batch.rows), 0), [0] * len(batch.rows))


def shared_prefix_length(text: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common before the first that differs."""
    length = 0
    for token, other_token in zip(text, other, strict=False):
        if token != other_token:
            break
        length += 1
    return length


def check_number(name: str, value: Any, what: str = "one") -> None:
    """Raise ValueError if a value is not an int of 1 or more."""
    require(is_int(value) and value >= 1, f"{name}={brief(value)} is not an int of 1 or more; give {what}.")
