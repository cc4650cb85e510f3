"""The loop: draft, one target forward, verify, append until a stop, roll back, count."""

import torch
from transformers.generation.streamers import BaseStreamer

from .candidates import Drafter
from .layouts import RaggedDecoder
from .processors import Processors
from .report import SpeculationReport
from .rules import Draft, Judgement, Rule
from .sequences import Sequences
from .stopping import Stopping


def decode(
    target: RaggedDecoder,
    drafter: Drafter,
    rule: Rule,
    processors: Processors,
    stopping: Stopping,
    sequences: Sequences,
    num_draft_tokens: int,
    report: SpeculationReport,
    streamer: BaseStreamer | None = None,
) -> torch.Tensor:
    """Generate until every row has stopped.

    The rollback is in `sequences.append`: both models are fed by the lengths of the rows, and what their caches hold
    beyond is hidden and overwritten.

    Returns:
        [B, L + N] int64, as stock `generate` returns it.
    """
    timed = report.timed
    propose, forward, judge, emit = timed(_draft), timed(_target), timed(_verify), timed(_append)
    while sequences.rows:
        draft = propose(drafter, sequences, stopping, num_draft_tokens)
        logits = forward(target, sequences, draft)
        judgement = judge(rule, processors, sequences, draft, logits)
        stay = emit(sequences, draft, judgement, stopping, report, streamer)
        target.select(stay)
        drafter.select(stay)
    rule.finish(stopping.columns)
    return sequences.output(stopping.columns)


def _draft(drafter: Drafter, sequences: Sequences, stopping: Stopping, num_draft_tokens: int) -> Draft:
    """Candidates [R, K] for every decoding row; none before the prompt was read, nor more than can be emitted."""
    room = stopping.max_new_tokens - min(sequences.counts[row] for row in sequences.rows)
    wanted = min(num_draft_tokens, room - 1) if any(sequences.counts) else 0
    if wanted < 1:
        return Draft(sequences.index.new_empty(len(sequences.rows), 0), None)
    return drafter.propose(sequences, wanted)


def _target(target: RaggedDecoder, sequences: Sequences, draft: Draft) -> torch.Tensor:
    """Logits [R, K + 1, V] after the last emitted token and after each candidate; at first, after the prompt."""
    num_candidates = draft.tokens.shape[1]
    pending = 1 if any(sequences.counts) else sequences.width
    return target(sequences, pending + num_candidates, num_candidates, num_candidates + 1)


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
) -> torch.Tensor | None:
    """Emit accepted candidates and the token after them, up to a stop; returns the places of the rows that stay."""
    (accepted, next_token), overlap, undefined = judgement
    rows, drafted = sequences.rows, draft.tokens.shape[1]
    tokens = torch.nn.functional.pad(draft.tokens, (0, 1))
    tokens = tokens.scatter(1, accepted[:, None], next_token[:, None])  # [R, K + 1]
    kept, ended = stopping.cut(sequences, tokens, accepted + 1)
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
