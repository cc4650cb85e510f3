"""The loop: draft, one target forward, verify and append until a stop (Leviathan et al. 2022, Algorithm 1)."""

from collections.abc import Iterator
from contextlib import nullcontext

from hf_specx.common.round import Round
from hf_specx.sampling.rewindable import in_use

from .run import Run


def decode(run: Run) -> Iterator[Round]:
    """Each round of a call, until every row has stopped and nothing waits for its place.

    After a round the target's cache shows exactly each row's prompt and emitted tokens except the last; what was
    rejected is behind them, where attention does not look. The draft's cache shows a prefix of these, and is fed what
    is missing at its next step. Users' own processors are left where plain `generate` leaves them.
    """
    with in_use(run.processors.applied, run.batch) if run.processors.mask_size else nullcontext():
        run.begin()  # prefill
        while run.active():  # here or on another rank
            lengths = run.schedule(run.batch)  # [R], each row its own number of candidates
            draft = run.batch.write_draft(run.drafter.propose(run.batch, lengths))
            run.end_phase("draft")
            forward = run.target(run.batch, draft)
            run.end_phase("target")
            scores = run.processors(run.batch, draft, forward.logits)
            verdict = run.verifier.verify(run.batch, draft, scores)
            round_ = run.batch.append(draft, verdict, run.stopping, forward, scores)
            run.publish(round_)
            requests = run.next_requests(round_)  # of a queue, for places of rows that have ended and free ones
            run.end_round(round_, requests)  # other rows that have ended leave
            run.admit(requests)
            yield round_
        run.finish()
