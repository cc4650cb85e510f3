"""The loop for processors and criteria that keep state: each emitted token is shown to them once, in order.

`generate` shows them one column of all rows at a time. So all rows stay in the batch to the end, finished ones with
pads, and the candidates of a round are judged position by position.
"""

from typing import Any

import torch
from transformers import GenerationConfig

from hf_specx.common.round import Draft, Round
from hf_specx.layouts.forward_outputs import Forward
from hf_specx.sampling.rewindable import in_use

from .decode import decode
from .run import Run


def decode_call(run: Run, in_order: bool) -> torch.Tensor:
    """Generate in the one loop or the other; users' own processors are left where plain `generate` leaves them."""
    with in_use(run.processors.at_once, run.batch):
        return decode_in_order(run) if in_order else decode(run)


def decode_in_order(run: Run) -> torch.Tensor:
    """As `decode`, with the positions of a round judged one by one."""
    run.admit()
    while run.active():
        draft = run.batch.take(run.drafter.propose(run.batch, run.schedule(run.batch)))
        run.lap("draft")
        forward = run.target(run.batch, draft)
        run.lap("target")
        run.publish(*judge_in_order(run, draft, forward))
        run.lap("verify")
    return run.finish()


def judge_in_order(run: Run, draft: Draft, forward: Forward) -> tuple[Round, Forward, torch.Tensor]:
    """Judge and emit position by position, until a row emits another token than the target was fed, or stops.

    Returns:
        The round of all B rows, the forward, and scores [B, n, V] of the n positions that were judged. In it a row
        that was finished before has no candidates and gains nothing.
    """
    batch, most, first = run.batch, draft.tokens.shape[1], run.batch.counts[0]
    # by the processors before the first that goes in order; at all positions, since a row may emit what fills it up
    early = run.processors(batch, None, forward.logits)
    over, live = _over(run), ~_over(run)
    shown: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []  # of each candidate [B, 2]: whether the row emits it, and its overlap
    alike, finished = True, False
    while alike and not finished and len(shown) <= most:
        length, one = len(shown), draft.at(len(shown))
        with run.rule.alone():
            own = early[:, length].clone()  # for processors that write to it; outputs have the logits of the forward
            scores = run.processors.in_order(batch.prefix(first + length), own)  # type: ignore[arg-type]
        judgement = run.rule.judge(batch, one, scores[:, None].expand(-1, 1 + one.tokens.shape[1], -1))
        run.dead_ends.refuse(batch, judgement.undefined[:, 0].tolist(), over.tolist())
        token = judgement.next_token
        if length < most:
            token = batch.padded(torch.where(judgement.accepted > 0, draft.tokens[:, length], token))
            same = token == draft.tokens[:, length]
            kept.append(torch.stack([same.float(), judgement.overlap[:, 0]], 1))
            alike = bool(same.all())
        batch.emit(batch.padded(token)[:, None], [1] * len(batch.rows))
        shown.append(scores)
        with run.rule.alone():
            finished = run.stopping.update_in_order(batch, run.outputs.shown_in_order(scores))
        before, over = over, _over(run)
        alike = alike and bool((before == over).all())
    figures = torch.stack(kept, 1).tolist() if kept else [[]] * len(batch.rows)
    return _round(run, draft, live.tolist(), figures, len(shown), finished), forward, torch.stack(shown, 1)


def _round(
    run: Run, draft: Draft, live: list[bool], kept: list[list[list[float]]], gained: int, finished: bool
) -> Round:
    """The record of a round in which all rows were judged up to the first rejection in any of them.

    Args:
        draft: what was judged.
        live: [B], whether each row was not finished before.
        kept: [B, n, 2], for each position whether the row emitted its candidate, and the overlap.
        gained: tokens by which each row went on.
        finished: whether all rows have stopped by now.
    """
    lengths = [length if is_live else 0 for length, is_live in zip(draft.lengths, live, strict=True)]
    judged = [min(length, len(row)) for length, row in zip(lengths, kept, strict=True)]
    accepted = [int(sum(same for same, _ in row[:number])) for row, number in zip(kept, judged, strict=True)]
    emitted = [gained if is_live else 0 for is_live in live]
    texts = run.batch.last(gained).tolist()
    return Round(
        batch=run.batch,
        rows=run.batch.rows,
        draft=draft._replace(lengths=lengths),
        before=[run.batch.counts[0] - gained] * len(live),
        emitted=emitted,
        tokens=[text[:number] for text, number in zip(texts, emitted, strict=True)],
        accepted=accepted,
        judged=judged,
        gained=emitted,
        survival=[[float(i < count) for i in range(number)] for count, number in zip(accepted, judged, strict=True)],
        overlap=[[overlap for _, overlap in row[:number]] for row, number in zip(kept, judged, strict=True)],
        undefined=[gained] * len(live),  # an undefined position was refused at once
        finished=finished,
    )


def _over(run: Run) -> torch.Tensor:
    over = run.batch.over
    return torch.zeros_like(run.batch.index, dtype=torch.bool) if over is None else over


def wants_layers(config: GenerationConfig) -> bool:
    """Whether a call wants what layers give to each token alone, which rounds of several tokens do not have."""
    return bool(config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states))


def own_sampler(model: Any, input_ids: torch.Tensor, *prepared: Any) -> Any:
    """What transformers' own sampler gives in the place of a strategy.

    Args:
        model, input_ids: of the call.
        prepared: by `generate`: processors, criteria, config, and last the inputs of the model.
    """
    *given, kwargs = prepared
    return model._sample(input_ids, *given, **kwargs)
