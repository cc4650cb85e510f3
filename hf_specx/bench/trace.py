"""How one text came about: each round's candidates with p and q, what was kept of them, and the token after them."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.round import Round
from hf_specx.engine.strategy import SpeculativeDecoding
from hf_specx.sampling.verifiers import distribution


class Recorder:
    """Listens to the rounds of a call for one row, after a token; `rounds` are as `trace` gives them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, last: list[int]):
        self.tokenizer, self.last = tokenizer, last
        self.rounds: list[dict[str, Any]] = []

    def observe(self, done: Round) -> None:
        """Take in one round of one row."""
        accepted, drafted, first = done.accepted[0], done.draft.lengths[0], done.batch.width + done.before[0]
        proposed = done.draft.tokens[0].tolist()
        emitted = done.batch.ids[done.rows[0], first : first + done.emitted[0]].tolist()
        p = distribution(done.scores[0])[0]  # [P, V]
        q = None if done.draft.probs is None else done.draft.probs[0]

        def entry(position: int, run: list[int]) -> dict[str, Any]:
            token, before = run[position], run[position - 1 : position] or self.last
            known = None if q is None or position >= len(proposed) else float(q[position, token])
            text = text_added(self.tokenizer, before, token)
            return {"token": token, "text": text, "p": float(p[position, token]), "q": known}

        candidates = []
        for position in range(min(drafted, len(p))):
            known = entry(position, proposed)
            overlap = done.overlap[0][position] if position < len(done.overlap[0]) else 0.0
            # a greedy candidate is no draw: it is kept if it is the target's own choice
            acceptance = overlap if known["q"] is None else min(1.0, known["p"] / known["q"])
            kept = {"overlap": overlap, "accepted": position < accepted, "acceptance": acceptance}
            candidates.append(known | kept)
        follower = "bonus" if accepted == drafted else "recovered"
        tokens = [
            entry(position, emitted) | {"origin": "accepted" if position < accepted else follower}
            for position in range(len(emitted))
        ]
        self.last = emitted[-1:] or self.last
        rejected = None if accepted == drafted else accepted
        self.rounds.append({"candidates": candidates, "rejected": rejected, "tokens": tokens})


def trace(
    target: PreTrainedModel,
    strategy: SpeculativeDecoding,
    inputs: dict[str, torch.Tensor],
    options: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Generate one text for `inputs`, input_ids and attention_mask [1, L], and say how.

    Returns:
        Plain values: "verification", "prompt" (ids) and "rounds". Each round has "candidates" and "tokens", each of
        these with its "token", "text", "p" and "q" (None where it is no draw, or the draft was not asked). A candidate
        also has "overlap" (the sum of min(p, q) over the vocabulary), "accepted", and "acceptance": min(1, p / q), by
        which token verification keeps it, given those before it; block verification keeps it at least as often, and
        coupled verification where the two models agree. "rejected" is the position of the first that was not kept, or
        None. "tokens" entered the text; their "origin" is "accepted", "recovered" or "bonus".
    """
    prompt = inputs["input_ids"][0].tolist()
    recorder, listened = Recorder(tokenizer, prompt[-1:]), copy.copy(strategy)
    listened.listeners = (*strategy.listeners, recorder)
    target.generate(**inputs, **options, custom_generate=listened)  # type: ignore[operator]
    strategy.report = report = listened.report
    assert report is not None
    return {"verification": report.verification, "prompt": prompt, "rounds": recorder.rounds}


def text_added(tokenizer: PreTrainedTokenizerBase, before: list[int], token: int) -> str:
    """The text of a token after another one, since some tokenizers strip the space at the start of a text."""
    texts = [tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (before, [*before, token], [token])]
    first, both, alone = map(str, texts)
    return both.removeprefix(first) if both.startswith(first) and both != first else alone  # else part of a character
