"""Drafters: one that samples from a draft model, and one for any `CandidateGenerator` of transformers."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specx.common.batch import Batch
from hf_specx.common.errors import require
from hf_specx.common.round import Draft, Round
from hf_specx.common.wrappers import vocabulary
from hf_specx.models.choose import layouts_of, make_runner
from hf_specx.models.prompts import prepare
from hf_specx.sampling.processors import Processors
from hf_specx.sampling.verifiers import GreedyVerifier, Verifier

from .auto import RoundTimer
from .drafter import DraftContext, Drafter, no_candidates, shared_prefix_length
from .forced import ForcedRun
from .several import SeveralDrafts


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
    source = "model"  # of its drafts
    draftable: torch.Tensor | None = None  # [V] bool on the CPU, the tokens that it has; None is all
    round_timer: RoundTimer | None = None
    threshold = 0.0
    forces = False
    counts_forced = False  # whether forced tokens count towards the number of candidates of a row
    has_read = False  # whether the prompts were read
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
        self.waiting = set[int]()  # rows whose prompts came later, and were not read yet

    def start(self, context: DraftContext) -> None:
        """Take up the prompts of all rows; they are read when candidates are wanted first, if ever."""
        self.processors = context.processors
        self.verifier = context.verifier
        self.vocab_size = context.vocab_size
        self.threshold = context.threshold
        self.forces = context.forces
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
        if not self.has_read:
            runner.prefill()
            if len(batch.counts) > self.num_prompts:
                runner.seat_rows(batch, batch.index.where(batch.index < self.num_prompts, 0))
            elif len(batch.rows) < len(batch.counts):
                runner.drop_rows(batch.index)
            self.has_read = True
        if self.waiting:
            new_rows = [row for row in batch.rows if row in self.waiting]
            if new_rows:
                runner.admit(batch.view_at([0] * len(batch.counts)), new_rows)
                runner.has_all_prompt_logits = False  # these rows may have emitted tokens by now
            self.waiting.clear()
        return runner

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """Draft for every decoding row, writing the candidates after the rows' ends.

        A row whose candidate falls below the threshold keeps it, and drafts no further: whether a candidate is judged
        then depends only on those before it, so every verification stays exact. Forced tokens take no step.
        """
        limits = list(lengths)
        num_drafted = [0] * len(lengths)
        steps = 0
        forced_run = None
        if self.forces and self.processors.mask_size:
            forced_run = ForcedRun(self.processors, batch, self.round_timer, self.draftable)
        tokens: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        fed = -1  # the candidates before the last forward of this round
        while True:
            ahead = len(tokens)
            counted = ahead if self.counts_forced else steps
            draws = [counted < limit for limit in limits]
            if forced_run is not None:
                draws = forced_run.next(ahead, draws)
            if any(draws):
                logits = self._ready(batch).decode_step(batch, ahead, ahead - fed - 1)
                surplus = 0 if self.vocab_size is None else self.vocab_size - logits.shape[-1]
                if surplus:
                    logits = torch.nn.functional.pad(logits, (0, surplus), value=-torch.inf)
                scores, fed = self.processors(batch, None, logits, ahead)[:, 0], ahead
            elif forced_run is not None and forced_run.forces:
                size = len(lengths), self.vocab_size or 0
                scores = torch.zeros(size, dtype=torch.float32, device=batch.ids.device)
            else:
                break
            if forced_run is not None:
                scores = forced_run.only(scores)
            token, drawn_from = self.verifier.choose(batch, scores, ahead, [ahead + draw for draw in draws])
            batch.write(token[:, None], ahead)
            tokens.append(token)
            if drawn_from is not None:
                probs.append(drawn_from[:, None])
            steps += any(draws)
            num_drafted = [number + draw for number, draw in zip(num_drafted, draws, strict=True)]
            if self.threshold:
                # NaN where the processors leave nothing that the draft has
                chances = scores.softmax(-1).gather(-1, token[:, None])[:, 0].nan_to_num(0).tolist()
                pairs = zip(chances, limits, strict=True)
                limits = [0 if chance < self.threshold else most for chance, most in pairs]
        if not tokens:
            return no_candidates(batch)
        q = torch.cat(probs, 1) if probs else None
        draft = Draft(torch.stack(tokens, 1), num_drafted, q, self.source, known=batch.read_candidates[: len(tokens)])
        if forced_run is None:
            return draft
        source = self.source if steps else "forced"
        return draft._replace(lengths=forced_run.lengths, source=source, forced=forced_run.forced)

    def seat_rows(self, batch: Batch, before: torch.Tensor) -> None:
        if self.has_read:
            self.runner.seat_rows(batch, before)

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """Take up new prompts. Where they are wider than all before, they are read at once: columns have moved."""
        self.waiting.update(rows)
        if self.has_read and batch.width > self.runner.width:
            self._ready(batch)

    def observe(self, done: Round) -> None:
        """Note how much of the cache is the text by now; the next step rolls back the rest, and feeds what is missing.

        A row whose candidates came from elsewhere was fed others than were judged.
        """
        if self.runner is None or not self.has_read:
            return
        free = done.draft.free or [False] * len(done.rows)
        for row, before, is_free in zip(done.rows, done.before, free, strict=True):
            self.runner.crop(row, before if is_free else done.batch.counts[row] - 1)
        if done.stay is not None:
            self.runner.drop_rows(done.stay)

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

    def observe(self, done: Round) -> None:
        """Tell the generator of each row what was kept, as transformers does after each of its rounds."""
        of_rows = zip(done.rows, self.lengths, self.candidates, done.tokens, done.gained, strict=True)
        for index, (row, length, candidates, tokens, gained) in enumerate(of_rows):
            if not length or not tokens:
                continue
            # after a cut at a stop the last token counts as the one that follows what was kept
            emitted = tokens if len(tokens) == gained else tokens[:-1]
            num_matches = shared_prefix_length(candidates, emitted)
            scores = done.scores[index : index + 1, : len(candidates) + 1]
            self.generator.update_candidate_strategy(done.batch.row(row)[None], scores, num_matches)
