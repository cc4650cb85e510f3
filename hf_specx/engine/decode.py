"""The loop: draft, one target forward, verify and append until a stop."""

import torch

from hf_specx.drafting.schedule import Schedule
from hf_specx.sampling.rules import Draft

from .ranks import Peers
from .settle import Run, settle_at_once, settle_in_order


def decode(run: Run, schedule: Schedule, peers: Peers) -> torch.Tensor:
    """Generate until every row has stopped.

    The rollback is in `Sequences.append`: both models are fed by the ends of the rows, and make their caches agree
    with them.

    Args:
        run: models, text and rules of this call, with the prompts read.
        schedule: how many candidates to draft in a round.
        peers: other processes that hold parts of the models, if there are any.

    Returns:
        [B, L + N] int64, as stock `generate` returns it.
    """
    timed, settle = run.report.timed, settle_in_order if run.in_order else settle_at_once
    draft, target, verify = timed("draft", _draft), timed("target", _target), timed("verify", settle)
    finished = verify(run, _nothing(run), run.target.after_prompt)
    while not peers.all_finished(finished):
        if finished:
            peers.idle(run.target, run.drafter, run.processors, run.sequences, schedule.wanted)
            continue
        candidates = draft(run, schedule)
        logits = target(run, candidates)
        finished = verify(run, candidates, logits)
        schedule.update(run.outcome, len(run.sequences.rows))
    run.rule.finish(run.stopping.columns)
    return run.sequences.output(run.stopping.columns)


def _nothing(run: Run) -> Draft:
    return Draft(run.sequences.index.new_empty(len(run.sequences.rows), 0), None)


def _draft(run: Run, schedule: Schedule) -> Draft:
    """Candidates [R, K] for every decoding row; unless K is fixed, no more than can be emitted."""
    wanted = schedule.wanted
    if not run.fixed:
        shortest = min(run.sequences.counts[row] for row in run.sequences.rows)
        wanted = min(wanted, run.stopping.max_new_tokens - shortest - 1)
    if not schedule.wanted:
        _rest(run)
    return run.drafter.propose(run.sequences, wanted, schedule.threshold) if wanted > 0 else _nothing(run)


def _rest(run: Run) -> None:
    """Make the draft take its rejected candidates back, in one step, while it is still known which they are.

    From then on it holds a prefix of each row's text. When it is asked again, one forward feeds it what is missing.
    """
    decoder = getattr(run.drafter, "decoder", None)
    if decoder is not None and any(decoder.held[row] >= run.sequences.counts[row] for row in run.sequences.rows):
        decoder.step(run.sequences, 0)


def _target(run: Run, draft: Draft) -> torch.Tensor:
    """Logits [R, K + 1, V] after the last emitted token and after each candidate."""
    num_candidates = draft.tokens.shape[1]
    return run.target(run.sequences, 1 + num_candidates, num_candidates, 1 + num_candidates)
