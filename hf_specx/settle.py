"""Verify and append: which candidates stay, and what the text, the outputs and the stream get of them.

Usually all positions of a round are judged at once. Where a processor or a criterion must see each emitted token once,
in order, as stock shows it, the positions are walked one by one, all rows together, until some row rejects.
"""

from dataclasses import dataclass

import torch

from .candidates import Drafter
from .decoders import Decoder
from .outputs import Outputs
from .processors import Processors
from .report import SpeculationReport
from .rules import Draft, Rule
from .sequences import Sequences
from .stopping import Stopping
from .streaming import Stream


@dataclass
class Run:
    """What one call of `generate` works with; the prompts are read.

    Attributes:
        lockstep: whether all rows must advance alike.
        in_order: whether positions are judged one by one; all rows then stay to the end.
        fixed: whether each round drafts the same number, though the text may end before its last candidates.
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
    (accepted, next_token), overlap, undefined = run.rule.judge(sequences, draft, scores)
    tokens = torch.nn.functional.pad(draft.tokens, (0, 1))
    tokens = tokens.scatter(1, accepted[:, None], next_token[:, None])  # [R, K + 1]
    num_new = accepted + 1
    kept, ended = stopping.cut(sequences, tokens, num_new.min().expand_as(num_new) if run.lockstep else num_new)
    decided = torch.stack([accepted, kept, ended.to(kept.dtype), undefined.to(kept.dtype)])
    accepted_list, kept_list, ended_list, undefined_list = decided.tolist()  # the round's one synchronisation
    firsts = [sequences.counts[row] for row in rows]
    _check_allowed(run, rows, firsts, kept_list)
    _check_defined(rows, undefined_list)
    sequences.append(tokens, kept, kept_list)
    leaving = stopping.update(sequences, kept_list, ended_list)
    emitted = [max(0, sequences.counts[row] - first) for row, first in zip(rows, firsts, strict=True)]
    drafted = draft.tokens.shape[1]
    judged = torch.arange(drafted, device=overlap.device) <= accepted[:, None]
    run.report.observe(rows, drafted, accepted_list, emitted, (overlap * judged).sum())
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
        scores = run.processors.in_order(prefix, early[:, length])  # type: ignore[arg-type]
        (kept, token), shared, undefined = run.rule.judge(sequences, *_one(draft, scores, length))
        _check_allowed(run, rows, [first + length] * len(rows), (~over).long().tolist())
        _check_defined(rows, (undefined & ~over).tolist())
        if length < drafted:
            token = torch.where(kept > 0, draft.tokens[:, length], token)
        token = sequences.padded(token)
        sequences.append(token[:, None], torch.ones_like(token), [1] * len(rows))
        here = logits[:, length : length + 1], scores[:, None]
        run.outputs.take(run.target, rows, [first + length] * len(rows), (~over).long().tolist(), *here, length)
        emitted += ~over
        if length < drafted:
            same = token == draft.tokens[:, length]
            accepted, judged, overlap = (
                accepted + (same & ~over),
                judged + ~over,
                overlap + (shared[:, 0] * ~over).sum(),
            )
            alike = bool(same.all())
        length += 1
        finished = run.stopping.update_in_order(sequences, run.outputs.scores_so_far(first + length))
        run.stream.put(sequences, run.stopping)
        before, over = over, _over(sequences)
        alike = alike and bool((before == over).all())
    counters = [x[known].tolist() for x in (accepted, emitted, judged)]
    run.report.observe(known.tolist(), drafted, counters[0], counters[1], overlap, counters[2])
    return _leave(run, rows if finished else [])


def _one(draft: Draft, scores: torch.Tensor, position: int) -> tuple[Draft, torch.Tensor]:
    """The candidate at a position, if there is one, as a draft of its own, and scores [R, V] for it and behind it."""
    probs = None if draft.probs is None else draft.probs[:, position : position + 1]
    one = Draft(draft.tokens[:, position : position + 1], probs)
    return one, scores[:, None].expand(-1, 1 + one.tokens.shape[1], -1)


def _over(sequences: Sequences) -> torch.Tensor:
    over = sequences.over
    return torch.zeros_like(sequences.index, dtype=torch.bool) if over is None else over


def _check_allowed(run: Run, rows: list[int], firsts: list[int], kept: list[int]) -> None:
    for row, first, number in zip(rows, firsts, kept, strict=True):
        for emitted in range(first, first + number) if run.processors.hopeless else ():
            if (row, emitted) in run.processors.hopeless:
                raise ValueError(
                    f"prefix_allowed_tokens_fn allows no token in row {row} after {emitted} new ones, as in stock; "
                    "return at least one, for example the end token."
                )


def _check_defined(rows: list[int], undefined: list[int]) -> None:
    if any(undefined):
        raise RuntimeError(
            f"row {rows[undefined.index(1)]} has no next token: the target's logits are not finite, or the "
            "logits processors exclude every token"
        )


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
