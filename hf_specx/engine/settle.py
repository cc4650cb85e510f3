"""Verify and append: which candidates stay, and what the text, the outputs and the stream get of them.

Usually all positions of a round are judged at once. Where a processor or a criterion must see each emitted token once,
in order, as stock shows it, the positions are walked one by one, all rows together, until some row rejects.
"""

import itertools
from dataclasses import dataclass, field
from operator import itemgetter

import torch

from hf_specx.common.batch import Sequences
from hf_specx.drafting.candidates import Drafter
from hf_specx.drafting.draft_length import Outcome
from hf_specx.layouts.decoder import Decoder
from hf_specx.sampling.processors import Processors
from hf_specx.sampling.rules import Draft, Rule
from hf_specx.sampling.stopping import Stopping

from .outputs import Outputs
from .report import SpeculationReport
from .streaming import Stream


NOTHING = Outcome(0, True, [], [])


@dataclass
class Run:
    """What one call of `generate` works with; the prompts are read.

    Attributes:
        lockstep: whether all rows must advance alike.
        in_order: whether positions are judged one by one; all rows then stay to the end.
        fixed: whether each round drafts the same number, though the text may end before its last candidates.
        outcome: what came of the last round.
        dead_ends: row -> emitted tokens behind which it has none to go on with, and the error to raise.
    """

    target: Decoder
    drafter: Drafter
    rule: Rule
    processors: Processors
    stopping: Stopping
    sequences: Sequences
    report: SpeculationReport
    outputs: Outputs
    stream: Stream
    lockstep: bool = False
    in_order: bool = False
    fixed: bool = False
    outcome: Outcome = NOTHING
    dead_ends: dict[int, tuple[int, Exception]] = field(default_factory=dict)


def settle_at_once(run: Run, draft: Draft, logits: torch.Tensor) -> bool:
    """Judge a draft, emit accepted candidates and the token after them, up to a stop.

    Args:
        draft: K candidates for each of the R decoding rows.
        logits: [R, K + 1, V], the target's.

    Returns:
        Whether all rows are finished; the others have left the batch.
    """
    sequences, stopping, rows = run.sequences, run.stopping, run.sequences.rows
    scores = run.processors(sequences, logits)
    (accepted, next_token, survival), overlap, undefined = run.rule.judge(sequences, draft, scores)
    tokens = torch.nn.functional.pad(draft.tokens, (0, 1))
    tokens = tokens.scatter(1, accepted[:, None], next_token[:, None])  # [R, K + 1]
    num_new = accepted + 1
    if run.lockstep:
        num_new = num_new.min().expand_as(num_new)
    kept, ended = stopping.cut(sequences, tokens, num_new)
    decided = torch.stack([accepted, num_new, kept, ended.to(kept.dtype)], 1)
    numbers, (chances, shares, lawless) = _listed(decided, survival, overlap, undefined)
    accepted_list, gained, kept_list, ended_list = numbers
    firsts = [sequences.counts[row] for row in rows]
    run.outcome = _outcome(run, draft, accepted_list, chances, firsts)
    sequences.append(tokens, kept, kept_list)
    leaving = stopping.update(sequences, kept_list, ended_list)
    emitted = [max(0, sequences.counts[row] - first) for row, first in zip(rows, firsts, strict=True)]
    run.dead_ends = _dead_ends(run, rows, firsts, emitted, _first(lawless)) | run.dead_ends
    if run.dead_ends:
        _stop_at_dead_ends(run)
    shared = sum(sum(row[: number + 1]) for row, number in zip(shares, accepted_list, strict=True))
    run.report.observe(rows, draft.tokens.shape[1], accepted_list, emitted, shared, gained, survival=chances)
    run.outputs.take(run.target, rows, firsts, emitted, logits, scores)
    run.stream.put(sequences, stopping)
    return _leave(run, leaving)


def settle_in_order(run: Run, draft: Draft, logits: torch.Tensor) -> bool:
    """The same position by position: each emitted token is shown once, in order, to every processor and criterion.

    All B rows take part to the end, those that are finished with pads, since stock shows them as well. The round ends
    where a row emits another token than the one that the target was fed, or stops.
    """
    sequences, rows, drafted = run.sequences, run.sequences.rows, draft.tokens.shape[1]
    first, over = sequences.counts[0], _over(sequences)
    early = run.processors(sequences, logits)  # by those before the first that has to wait
    known, alike, finished, length = (~over).nonzero()[:, 0], True, False, 0
    accepted, judged, emitted = (torch.zeros_like(sequences.index) for _ in range(3))
    overlap = torch.zeros((), device=logits.device)
    while alike and not finished and length <= drafted:
        prefix = sequences.prefix(first + length)
        with run.rule.alone():
            scores = run.processors.in_order(prefix, early[:, length])  # type: ignore[arg-type]
        (kept, token, _), shared, undefined = run.rule.judge(sequences, *_one(draft, scores, length))
        here, live = [first + length] * len(rows), (~over).long().tolist()
        for _, error in _dead_ends(run, rows, here, live, _first(undefined.tolist())).values():
            raise error
        if length < drafted:
            token = torch.where(kept > 0, draft.tokens[:, length], token)
        token = sequences.padded(token)
        sequences.append(token[:, None], torch.ones_like(token), [1] * len(rows))
        run.outputs.take(run.target, rows, here, live, logits[:, length : length + 1], scores[:, None], length)
        emitted += ~over
        if length < drafted:
            same = token == draft.tokens[:, length]
            accepted, judged = accepted + (same & ~over), judged + ~over
            overlap = overlap + (shared[:, 0] * ~over).sum()
            alike = bool(same.all())
        length += 1
        with run.rule.alone():
            finished = run.stopping.update_in_order(sequences, run.outputs.shown_in_order(scores))
        run.stream.put(sequences, run.stopping)
        before, over = over, _over(sequences)
        alike = alike and bool((before == over).all())
    counters = [x[known].tolist() for x in (accepted, emitted, judged)]
    gained = [length] * len(known)
    seen = max(counters[2], default=0)  # rows are judged up to where the first of them rejects
    chances = [[float(i < number) for i in range(seen)] for number in counters[0]]
    run.outcome = _outcome(run, draft, counters[0], chances, [first] * len(known))
    run.report.observe(known.tolist(), drafted, counters[0], counters[1], overlap, gained, counters[2], chances)
    return _leave(run, rows if finished else [])


def _listed(decided: torch.Tensor, *figures: torch.Tensor) -> tuple[list[list[int]], list[list[list[float]]]]:
    """Integers [R, n] column by column and figures [R, ...] row by row, by the round's one synchronisation."""
    table = torch.cat([decided, *figures], 1).tolist()
    ends = list(itertools.accumulate(part.shape[1] for part in (decided, *figures)))
    numbers = [list(map(int, column)) for column in zip(*(row[: ends[0]] for row in table), strict=True)]
    return numbers, [[row[i:j] for row in table] for i, j in itertools.pairwise(ends)]


def _outcome(run: Run, draft: Draft, accepted: list[int], survival: list[list[float]], firsts: list[int]) -> Outcome:
    """What the next number of candidates goes by, of rows that had emitted `firsts` tokens before."""
    drafted = draft.tokens.shape[1]
    left = [max(1, run.stopping.max_new_tokens - count) for count in firsts]
    return Outcome(drafted, all(number == drafted for number in accepted), survival, left)


def _one(draft: Draft, scores: torch.Tensor, position: int) -> tuple[Draft, torch.Tensor]:
    """The candidate at a position, if there is one, as a draft of its own, and scores [R, V] for it and behind it."""
    probs = None if draft.probs is None else draft.probs[:, position : position + 1]
    one = Draft(draft.tokens[:, position : position + 1], probs)
    return one, scores[:, None].expand(-1, 1 + one.tokens.shape[1], -1)


def _over(sequences: Sequences) -> torch.Tensor:
    over = sequences.over
    return torch.zeros_like(sequences.index, dtype=torch.bool) if over is None else over


def _first(lawless: list[list[float]]) -> list[int]:
    """The first position of each row that has no law, of flags [R][P]; P where there is none."""
    return [flags.index(True) if True in flags else len(flags) for flags in lawless]


def _dead_ends(
    run: Run, rows: list[int], firsts: list[int], emitted: list[int], lawless: list[int]
) -> dict[int, tuple[int, Exception]]:
    """Rows that emit tokens where stock has none to choose: how many they had emitted there, and the error to raise.

    Args:
        firsts: tokens that each of the rows had emitted before.
        emitted: tokens that each of them emits now.
        lawless: the first of its positions without a law.
    """
    found: dict[int, tuple[int, Exception]] = {}
    barred = run.processors.barred
    for row, first, number, position in zip(rows, firsts, emitted, lawless, strict=True):
        ends = [(count, barred[row, count]) for count in range(first, first + number) if (row, count) in barred]
        if position < number:
            why = "the target's logits are not finite, or the logits processors exclude every token"
            error = RuntimeError(f"row {row} has no next token after {first + position} new ones: {why}")
            ends.append((first + position, error))
        if ends:
            found[row] = min(ends, key=itemgetter(0))
    return found


def _stop_at_dead_ends(run: Run) -> None:
    """Raise an error once it is sure that the text gets there: without an end token a row may run ahead of it."""
    settled = run.stopping.settled(run.sequences)
    for row, (count, error) in run.dead_ends.items():
        if count < settled[row]:
            raise error


def _leave(run: Run, leaving: list[int]) -> bool:
    """Take rows out of the batch; the last ones to finish stay where they are."""
    rows = run.sequences.rows
    finished = len(leaving) == len(rows)
    if finished:
        run.target.leave(rows, run.sequences.index[:0])
    else:
        stay = run.sequences.retire(leaving)
        for follower in (run.target, run.drafter, run.processors):
            follower.leave(rows, stay)
    return finished
