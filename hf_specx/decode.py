"""The loop: draft, one target forward, verify, append until a stop, roll back, count."""

import torch
from transformers.generation.streamers import BaseStreamer

from .candidates import Drafter
from .decoders import Decoder
from .processors import Processors
from .report import SpeculationReport
from .rules import Draft, Judgement, Rule
from .sequences import Sequences
from .stopping import Stopping


def decode(
    target: Decoder,
    drafter: Drafter,
    rule: Rule,
    processors: Processors,
    stopping: Stopping,
    sequences: Sequences,
    num_draft_tokens: int,
    report: SpeculationReport,
    streamer: BaseStreamer | None = None,
    lockstep: bool = False,
) -> torch.Tensor:
    """Generate until every row has stopped.

    The rollback is in `sequences.append`: both models are fed by the ends of the rows, and make their caches agree
    with them.

    Args:
        target, drafter: with the prompts read.
        lockstep: whether all rows must advance alike.

    Returns:
        [B, L + N] int64, as stock `generate` returns it.
    """
    timed = report.timed
    propose, forward, judge, emit = timed(_draft), timed(_target), timed(_verify), timed(_append)
    draft, logits = Draft(sequences.index.new_empty(len(sequences.rows), 0), None), target.after_prompt
    while True:
        rows = sequences.rows
        judgement = judge(rule, processors, sequences, draft, logits)
        stay = emit(sequences, draft, judgement, stopping, report, streamer, lockstep)
        target.leave(rows, stay)
        if not sequences.rows:
            break
        drafter.leave(rows, stay)
        draft = propose(drafter, sequences, stopping, num_draft_tokens)
        logits = forward(target, sequences, draft)
    rule.finish(stopping.columns)
    return sequences.output(stopping.columns)


def _draft(drafter: Drafter, sequences: Sequences, stopping: Stopping, num_draft_tokens: int) -> Draft:
    """Candidates [R, K] for every decoding row, no more than can be emitted."""
    room = stopping.max_new_tokens - min(sequences.counts[row] for row in sequences.rows)
    wanted = min(num_draft_tokens, room - 1)
    if wanted < 1:
        return Draft(sequences.index.new_empty(len(sequences.rows), 0), None)
    return drafter.propose(sequences, wanted)


def _target(target: Decoder, sequences: Sequences, draft: Draft) -> torch.Tensor:
    """Logits [R, K + 1, V] after the last emitted token and after each candidate."""
    num_candidates = draft.tokens.shape[1]
    return target(sequences, 1 + num_candidates, num_candidates, 1 + num_candidates)


def _verify(rule: Rule, processors: Processors, sequences: Sequences, draft: Draft, logits: torch.Tensor) -> Judgement:
    """Which candidates stay, by the processed scores."""
    return rule.judge(sequences, draft, processors(sequences, logits))


def _append(
    sequences: Sequences,
    draft: Draft,
    judgement: Judgement,
    stopping: Stopping,
    report: SpeculationReport,
    streamer: BaseStreamer | None,
    lockstep: bool,
) -> torch.Tensor | None:
    """Emit accepted candidates and the token after them, up to a stop; returns the places of the rows that stay."""
    (accepted, next_token), overlap, undefined = judgement
    rows, drafted = sequences.rows, draft.tokens.shape[1]
    tokens = torch.nn.functional.pad(draft.tokens, (0, 1))
    tokens = tokens.scatter(1, accepted[:, None], next_token[:, None])  # [R, K + 1]
    num_new = accepted + 1
    kept, ended = stopping.cut(sequences, tokens, num_new.min().expand_as(num_new) if lockstep else num_new)
    judged = torch.arange(drafted, device=overlap.device) <= accepted[:, None]
    decided = torch.stack([accepted, kept, ended.to(kept.dtype), undefined.to(kept.dtype)])
    accepted_list, kept_list, ended_list, undefined_list = decided.tolist()  # the round's one synchronisation
    if any(undefined_list):
        raise RuntimeError(
            f"row {rows[undefined_list.index(1)]} has no next token: the target's logits are not finite, or the "
            "logits processors exclude every token"
        )
    before = [sequences.counts[row] for row in rows]
    sequences.append(tokens, kept, kept_list)
    leaving = stopping.update(sequences, kept_list, ended_list)
    emitted = [max(0, sequences.counts[row] - count) for row, count in zip(rows, before, strict=True)]
    report.observe(rows, drafted, accepted_list, emitted, (overlap * judged).sum())
    if streamer is not None:
        streamer.put(sequences.row(0)[-emitted[0] :].cpu())
    return sequences.retire(leaving)
