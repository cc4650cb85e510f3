"""Drafters: one that samples from a draft model, and one for any `CandidateGenerator` of transformers."""

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import compress
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specx.common.batch import Batch
from hf_specx.common.devices import to_device_async
from hf_specx.common.errors import require
from hf_specx.common.round import Draft, Round
from hf_specx.common.wrappers import vocabulary
from hf_specx.models.choose import layouts_of, make_runner
from hf_specx.models.prompts import prepare
from hf_specx.sampling.processors import Processors
from hf_specx.sampling.verifiers import GreedyVerifier, Verifier

from .drafter import DraftContext, Drafter, no_candidates, shared_prefix_length
from .forced import ForcedRun
from .round_timer import RoundTimer
from .several import SeveralDrafts
from .trees import Shape, TreeKind, TreeShapes, shape_below


AnyDraft = PreTrainedModel | CandidateGenerator | Drafter


def make_drafter(draft: "AnyDraft | Sequence[AnyDraft]", target: PreTrainedModel) -> Drafter:
    """A drafter for one call with a target: of a model, of a `CandidateGenerator`, of a drafter, or of several."""
    if isinstance(draft, list | tuple):
        parts = [make_drafter(part, target) for part in draft]
        return parts[0] if len(parts) == 1 else SeveralDrafts(parts)
    if hasattr(draft, "propose"):  # a head is one of these, and a model as well
        return cast(Drafter, draft).bind(target)
    if isinstance(draft, PreTrainedModel):
        return SampledCandidateGenerator(draft)
    return GeneratorDrafter(cast(CandidateGenerator, draft))


class FoundCandidates:
    """The candidates of a round while they are found, position by position.

    Attributes:
        limits: [R], how many candidates of the draft model each row may have.
        steps: the positions for which the draft model took a step; for the others all tokens were forced.
        ranked: at each position [R, n], the candidate first, and next best ones behind it where they may branch.
        host_ranked: the same as lists, if masks ask for candidates on the host.
        probs: at each position q [R, 1, V], if candidates are drawn from it.
        num_drawn: [R], candidates of each row without forced ones.
    """

    def __init__(self, limits: list[int]):
        self.limits = list(limits)
        self.steps: list[int] = []
        self.ranked: list[torch.Tensor] = []
        self.host_ranked: list[list[list[int]]] = []
        self.probs: list[torch.Tensor] = []
        self.num_drawn = [0] * len(limits)

    @property
    def position(self) -> int:
        """The next position."""
        return len(self.ranked)

    @property
    def num_unfed(self) -> int:
        """How many candidates in front of it the draft model took no step for."""
        last_step = self.steps[-1] if self.steps else -1
        return self.position - last_step - 1

    def add(self, ranked: torch.Tensor, drawn_from: torch.Tensor | None, draws: list[bool]) -> None:
        """Add what was found at the next position: `ranked` [R, n], by q [R, V], of rows that draw and of others."""
        self.ranked.append(ranked)
        if drawn_from is not None:
            self.probs.append(drawn_from[:, None])
        self.num_drawn = [number + draw for number, draw in zip(self.num_drawn, draws, strict=True)]


class SampledCandidateGenerator(CandidateGenerator, Drafter):
    """Drafts by sampling from the draft model's own processed distribution, with a cache of its own.

    hf_specx uses it for whole batches, as a `Drafter`. It is also a complete `CandidateGenerator`: transformers' own
    assisted generation uses it, at batch 1, for a model that returns one from `_get_candidate_generator`.

    Args:
        draft_model: the draft; its token ids mean what the target's mean.
        processors: the target's processors, applied to the draft's scores once, as to the target's.
        verifier: draws a candidate from scores.
        vocab_size: of the target; the draft's logits are cut to this size, or filled up with -inf. None leaves them.
        num_draft_tokens: K in `get_candidates`; in a call of hf_specx `propose` is told.
    """

    has_probs = True
    proposes_trees = True
    tree_shapes: TreeShapes | None = None
    tree_kind: TreeKind = "comb"  # "full" where candidates do not depend on those before them
    source = "model"  # of its drafts
    draftable: torch.Tensor | None = None  # [V] bool on the CPU, the tokens that it has; None is all
    round_timer: RoundTimer | None = None
    threshold = 0.0
    allow_forced_tokens = False
    counts_forced = False  # whether forced tokens count towards the number of candidates of a row
    has_prefilled = False  # whether the prompts were read
    num_prompts = 1  # with which the call began

    def __init__(
        self,
        draft_model: PreTrainedModel,
        processors: Processors | None = None,
        verifier: Verifier | None = None,
        vocab_size: int | None = None,
        num_draft_tokens: int = 5,
    ):
        self.model: PreTrainedModel = draft_model
        self.processors = processors or Processors([])
        self.verifier = verifier or GreedyVerifier()
        self.vocab_size = vocab_size
        self.num_draft_tokens = num_draft_tokens
        self.batch: Batch | None = None  # of `get_candidates`
        self.unread_rows = set[int]()  # rows whose prompts came later, and were not read yet

    def start(self, context: DraftContext) -> None:
        """Take up the prompts of all rows; they are read when candidates are wanted first, if ever."""
        self.processors = context.processors
        self.verifier = context.verifier
        self.vocab_size = context.vocab_size
        self.threshold = context.threshold
        self.allow_forced_tokens = context.allow_forced_tokens
        self.tree_shapes = context.tree_shapes
        self.counts_forced = context.independent_rows  # else a row with a seed depends on the steps of others
        self.round_timer = None if context.independent_rows else context.round_timer
        self.num_prompts = len(context.batch.counts)
        self.runner = self._make_runner(context)

    def _make_runner(self, context: DraftContext) -> Any:
        assert context.prompt is not None
        return make_runner(context.layout, context.prompt, vocabulary(self.model), context.compiled)

    def _ready(self, batch: Batch) -> Any:
        """The runner, once it has read the prompts of all decoding rows."""
        runner = self.runner
        if not self.has_prefilled:
            runner.prefill()
            if len(batch.counts) > self.num_prompts:
                runner.add_rows(batch, batch.index.where(batch.index < self.num_prompts, 0))
            elif len(batch.rows) < len(batch.counts):
                runner.gather_rows(batch.index)
            runner.forget_prompts([row for row in range(self.num_prompts) if row not in batch.rows])
            self.has_prefilled = True
        if self.unread_rows:
            new_rows = [row for row in batch.rows if row in self.unread_rows]
            if new_rows:
                runner.admit(batch.view_at([0] * len(batch.counts)), new_rows)
                runner.has_all_prompt_logits = False  # these rows may have emitted tokens by now
            self.unread_rows.clear()
        return runner

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """Draft for every decoding row, writing the candidates after the rows' ends.

        A row whose candidate falls below the threshold keeps it, and drafts no further: whether a candidate is judged
        then depends only on those before it, so every verification stays exact. Forced tokens take no step.

        Where candidates may branch, the next best choices at each position are candidates as well: see `as_tree`.

        Args:
            batch: the text so far.
            lengths: [R], how many candidates each row may have at most, forced ones aside.

        Returns:
            A draft with q, where the verifier draws candidates from it.
        """
        if self.tree_shapes is not None:
            lengths = self.tree_shapes.begin_round(lengths, self.tree_kind)
        found = FoundCandidates(lengths)
        forced_run = None
        if self.allow_forced_tokens and self.processors.mask_size:
            forced_run = ForcedRun(self.processors, batch, self.round_timer, self.draftable)
        while True:
            num_counted = found.position if self.counts_forced else len(found.steps)
            draws = [num_counted < limit for limit in found.limits]  # [R], rows that take a candidate of the model
            if forced_run is not None:
                draws = forced_run.next_position(draws)
            if any(draws):
                scores = self._scores(batch, found.position, found.num_unfed)
                found.steps.append(found.position)
            elif forced_run is not None and forced_run.has_forced_tokens:
                size = len(lengths), self.vocab_size or 0
                scores = torch.zeros(size, dtype=torch.float32, device=batch.ids.device)
            else:
                break
            if forced_run is not None:
                scores = forced_run.restrict(scores)
            ranked, drawn_from = self._choose(batch, scores, found.position, draws, lengths)
            host_tokens = []
            if forced_run is not None and self.tree_shapes is not None:  # all at once, since it asks for the first
                found.host_ranked.append(ranked.tolist())
                host_tokens = [[of_row[0] for of_row in found.host_ranked[-1]]]
            batch.write(ranked[:, :1], found.position, host_tokens)
            found.add(ranked, drawn_from, draws)
            if self.threshold:
                found.limits = self._limits_after(ranked[:, 0], scores, found.limits)
        return self._draft_of(found, forced_run, batch)

    def _draft_of(self, found: "FoundCandidates", forced_run: ForcedRun | None, batch: Batch) -> Draft:
        """The draft of what was found: a chain, or a tree where candidates may branch."""
        if not found.ranked:
            return no_candidates(batch)
        draft = Draft(
            torch.stack([ranked[:, 0] for ranked in found.ranked], 1),
            found.num_drawn,
            torch.cat(found.probs, 1) if found.probs else None,
            self.source,
            host_tokens=batch.host_candidates[: found.position],
        )
        if forced_run is not None:
            source = self.source if found.steps else "forced"
            draft = draft._replace(lengths=forced_run.lengths, source=source, forced=forced_run.forced)
        draft = self._confident_part(draft)
        if self.tree_shapes is None:
            return draft
        return as_tree(draft, found.ranked, self.tree_shapes, self.tree_kind, found.host_ranked)

    def _choose(
        self, batch: Batch, scores: torch.Tensor, position: int, draws: list[bool], depths: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The choices [R, n] at a position, the candidate first, and q, as of `Verifier.draw_candidates`.

        In a chain the candidate is the only one. `draws` [R] says which rows take it from the draft model, and
        `depths` [R] how deep their trees go.
        """
        if self.tree_shapes is None:
            lengths = [position + draw for draw in draws]
            token, drawn_from = self.verifier.draw_candidates(batch, scores, position, lengths)
            return token[:, None], drawn_from
        number = min(self.tree_shapes.num_choices(position, depths, self.tree_kind), scores.shape[-1])
        return self.verifier.top_candidates(batch, scores, position, number)

    def _confident_part(self, draft: Draft) -> Draft:
        """The candidates of each row before the first that the draft itself takes back."""
        return draft

    def _scores(self, batch: Batch, position: int, num_unfed: int) -> torch.Tensor:
        """Processed scores [R, V] at a position of the round, by a step of the draft model.

        For the `num_unfed` positions before this one it took no step.
        """
        logits = self._ready(batch).decode_step(batch, position, num_unfed)
        num_missing = 0 if self.vocab_size is None else self.vocab_size - logits.shape[-1]
        if num_missing:  # cut, if that is negative
            logits = torch.nn.functional.pad(logits, (0, num_missing), value=-torch.inf)
        return self.processors(batch, None, logits, position)[:, 0]

    def _limits_after(self, token: torch.Tensor, scores: torch.Tensor, limits: list[int]) -> list[int]:
        """The limits [R] after candidates [R] by scores [R, V]: 0 for rows whose candidate is below the threshold."""
        # NaN where the processors leave nothing that the draft has
        probabilities = scores.softmax(-1).gather(-1, token[:, None])[:, 0].nan_to_num(0).tolist()
        pairs = zip(probabilities, limits, strict=True)
        return [0 if probability < self.threshold else limit for probability, limit in pairs]

    def add_rows(self, batch: Batch, previous_indices: torch.Tensor) -> None:
        if self.has_prefilled:
            self.runner.add_rows(batch, previous_indices)

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """Take up new prompts. Where they are wider than all before, they are read at once: columns have moved."""
        self.unread_rows.update(rows)
        if self.has_prefilled and batch.width > self.runner.width:
            self._ready(batch)

    def observe(self, round_: Round) -> None:
        """Note how much of the cache is the text by now; the next step rolls back the rest, and feeds what is missing.

        A row whose candidates came from elsewhere was fed others than were judged. One that left the chain of first
        choices was fed what lies on that.
        """
        if self.runner is None or not self.has_prefilled:
            return
        model_free = round_.draft.model_free or [False] * len(round_.rows)
        rows = zip(round_.rows, round_.emitted_before, round_.accepted_in_chain, model_free, strict=True)
        for row, emitted_before, num_first, is_free in rows:
            num_fed = emitted_before if is_free else emitted_before + num_first
            self.runner.limit_computed_tokens(row, min(num_fed, round_.batch.counts[row] - 1))
        if round_.keep_indices is not None:
            self.runner.gather_rows(round_.keep_indices)
            self.runner.forget_prompts([row for row in round_.rows if row not in round_.batch.rows])

    def cost(self, batch: Batch) -> Callable[[int], object] | None:
        return lambda count: self._ready(batch).dummy_run(batch, count)

    def get_candidates(  # type: ignore[override]
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """The candidates of one row [1, L] without pads, as transformers asks for them.

        Returns:
            [1, L + K] ids, and [1, K, V] log-probabilities of what the candidates were drawn from (None if greedy).
        """
        if self.batch is None:
            self.batch = Batch(input_ids, None, pad_token_id=0)
            self.verifier.start()
            inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
            layout = layouts_of(self.model, drafts=True)[0]
            self.runner = make_runner(layout, prepare(self.model, sys.maxsize, inputs), vocabulary(self.model))
        new = input_ids[:, self.batch.width + self.batch.counts[0] :]  # what was kept of the last ones, and one more
        self.batch.emit(new, [new.shape[1]])
        draft = self.propose(self.batch, [self.num_draft_tokens])
        logits = None if draft.probs is None else draft.probs.log()
        return torch.cat([input_ids, draft.tokens], -1), logits  # type: ignore[return-value]

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Does nothing: the text of the next `get_candidates` tells what was kept."""


def as_tree(
    draft: Draft,
    ranked: Sequence[torch.Tensor],
    tree_shapes: TreeShapes,
    kind: TreeKind = "comb",
    host_ranked: Sequence[list[list[int]]] = (),
) -> Draft:
    """A chain of candidates with next best choices beside it, which are the same behind all at one position.

    Args:
        ranked: at each position the draft's choices [R, n], best first; the first are the candidates of the chain.
        kind: of the shapes; in a row with forced tokens it is "comb", since these are right behind the chain, and
            nowhere else for sure.
        host_ranked: `ranked` as lists, if they were read back.
    """
    shapes = []
    for index, length in enumerate(draft.lengths):
        limits = [of_position.shape[1] for of_position in ranked]
        is_forced = [] if draft.forced is None else draft.forced[index]
        for position in compress(range(len(limits)), is_forced):
            limits[position] = 1
        shapes.append(shape_below(tree_shapes.shape("comb" if any(is_forced) else kind, length), tuple(limits)))
    if all(shape.is_chain for shape in shapes):
        return draft
    widest = max(of_position.shape[1] for of_position in ranked)
    places, places_on_device = places_of(tuple(shapes), widest, draft.tokens.device)
    padded = [nn.functional.pad(of_position, (0, widest - of_position.shape[1])) for of_position in ranked]
    tokens = torch.cat(padded, 1).gather(1, places_on_device)
    host_tokens: list[list[int]] = []
    for column in zip(*places, strict=True) if host_ranked else ():
        positions_and_ranks = [divmod(place, widest) for place in column]
        host_tokens.append([host_ranked[at][index][rank] for index, (at, rank) in enumerate(positions_and_ranks)])
    lengths, parents = [len(shape.parents) for shape in shapes], [shape.parents for shape in shapes]
    return draft._replace(tokens=tokens, lengths=lengths, parents=parents, host_tokens=host_tokens)


@lru_cache(256)
def places_of(shapes: tuple[Shape, ...], widest: int, device: torch.device) -> tuple[list[list[int]], torch.Tensor]:
    """Where the candidates of R rows stand among all choices, `widest` at each position: [R, K], and on a device.

    Rows with fewer than K candidates have fillers.
    """
    most = max(len(shape.parents) for shape in shapes)
    places = []
    for shape in shapes:
        of_row = [position * widest + rank for position, rank in zip(shape.positions, shape.ranks, strict=True)]
        places.append([*of_row, *[0] * (most - len(of_row))])
    return places, to_device_async(places, device)


class GeneratorDrafter(Drafter):
    """Any `CandidateGenerator`: it is asked for each row, without pads, and told what was kept of each.

    Its candidates are taken as given, not as draws from a distribution; the logits that it returns are not used.
    """

    def __init__(self, generator: CandidateGenerator):
        self.generator = generator

    def start(self, context: DraftContext) -> None:
        self.vocab_size = context.vocab_size

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """What the generator proposes for each row, cut to its length.

        Raises:
            ValueError: if it proposes ids that the target does not have.
        """
        self.lengths = lengths  # that were asked for
        candidates = []
        for row, length in zip(batch.rows, lengths, strict=True):
            text = batch.row(row)[None]
            continued = self.generator.get_candidates(text)[0] if length else text  # type: ignore[arg-type]
            candidates.append(continued[0, text.shape[1] :][:length])
        tokens = torch.nn.utils.rnn.pad_sequence(candidates, batch_first=True).to(batch.ids)
        num_candidates = list(map(len, candidates))
        self.candidates = [ids[:number] for ids, number in zip(tokens.tolist(), num_candidates, strict=True)]
        name = type(self.generator).__name__
        highest = self.vocab_size - 1
        require(
            all(0 <= number <= highest for ids in self.candidates for number in ids),
            f"{name} proposes ids outside of the target's vocabulary, 0 to {highest}; use a generator for this "
            "target.",
        )
        return Draft(tokens, num_candidates, None, name)

    def observe(self, round_: Round) -> None:
        """Tell the generator of each row what was kept, as transformers does after each of its rounds."""
        of_rows = zip(round_.rows, self.lengths, self.candidates, round_.tokens, round_.num_new_tokens, strict=True)
        for index, (row, length, candidates, tokens, num_new_tokens) in enumerate(of_rows):
            if not length or not tokens:
                continue
            # after a cut at a stop the last token counts as the one that follows what was kept
            emitted = tokens if len(tokens) == num_new_tokens else tokens[:-1]
            num_matches = shared_prefix_length(candidates, emitted)
            scores = round_.scores[index : index + 1, : len(candidates) + 1]
            self.generator.update_candidate_strategy(round_.batch.row(row)[None], scores, num_matches)
