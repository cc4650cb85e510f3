"""How one text came about: each round's candidates with p and q, what was kept of them, and the token after them."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.round import Round
from hf_specx.engine.strategy import SpeculativeDecoding
from hf_specx.sampling.rules import distribution


class Recorder:
    """Listens to the rounds of a call for one row.

    Attributes:
        rounds: as `trace` gives them.
    """

    def __init__(self) -> None:
        self.rounds: list[dict[str, Any]] = []

    def observe(self, done: Round) -> None:
        """Take in one round of one row."""
        accepted, emitted, row = done.accepted[0], done.emitted[0], done.rows[0]
        first = done.batch.width + done.before[0]
        tokens, new = done.draft.tokens[0].tolist(), done.batch.ids[row, first : first + emitted].tolist()
        p = distribution(done.scores[0])[0]  # [P, V]
        q = None if done.draft.probs is None else done.draft.probs[0]
        candidates = [
            {
                "token": token,
                "p": float(p[position, token]),
                "q": None if q is None else float(q[position, token]),
                "overlap": done.overlap[0][position] if position < len(done.overlap[0]) else 0.0,
                "accepted": position < accepted,
            }
            for position, token in enumerate(tokens[: min(done.draft.lengths[0], len(p))])
        ]
        for candidate in candidates:
            # a greedy candidate is no draw: it is kept if it is the target's own choice
            sure = candidate["overlap"] if candidate["q"] is None else min(1.0, candidate["p"] / candidate["q"])
            candidate["acceptance"] = sure
        all_kept = accepted == done.draft.lengths[0]
        follower = "bonus" if all_kept else "recovered"
        emits = [
            {
                "token": token,
                "p": float(p[position, token]),
                "q": None if q is None or position >= len(tokens) else float(q[position, token]),
                "origin": "accepted" if position < accepted else follower,
            }
            for position, token in enumerate(new)
        ]
        self.rounds.append({"candidates": candidates, "rejected": None if all_kept else accepted, "tokens": emits})


def trace(
    target: PreTrainedModel,
    strategy: SpeculativeDecoding,
    inputs: dict[str, torch.Tensor],
    options: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> dict[str, Any]:
    """Generate one text, and say how.

    Args:
        target: whose `generate` is called.
        strategy: ours.
        inputs: input_ids and attention_mask [1, L].
        options: what `generate` takes besides.
        tokenizer: to show tokens as text.

    Returns:
        Plain values: "verification", "prompt" (ids) and "rounds". Each round has "candidates" and "tokens". A
        candidate has its "token", "p" and "q" (None where it is no draw), "overlap" (the sum of min(p, q)
        over the vocabulary), "accepted", and "acceptance": min(1, p / q), by which token verification keeps it, given
        those before it; block verification keeps it at least as often, and coupled verification where the two models
        agree. "rejected" is the position of the first that was not kept, or None. "tokens" are those that entered the
        text, each with its "token", "p", "q" (None also after the last candidate, where the draft was not asked) and
        "origin": "accepted", "recovered" or "bonus".
    """
    recorder, listened = Recorder(), copy.copy(strategy)
    listened.listeners = (*strategy.listeners, recorder)
    target.generate(**inputs, **options, custom_generate=listened)  # type: ignore[operator]
    strategy.report = report = listened.report
    assert report is not None
    prompt = inputs["input_ids"][0].tolist()
    if tokenizer is not None:
        add_texts(tokenizer, prompt, recorder.rounds)
    return {"verification": report.verification, "prompt": prompt, "rounds": recorder.rounds}


def add_texts(tokenizer: PreTrainedTokenizerBase, prompt: list[int], rounds: list[dict[str, Any]]) -> None:
    """Give each candidate and token the "text" that it adds to what is before it."""
    before = prompt[-1:]
    for each in rounds:
        for entries in (each["candidates"], each["tokens"]):
            left = before
            for entry in entries:
                entry["text"] = added(tokenizer, left, entry["token"])
                left = [entry["token"]]
        before = left


def added(tokenizer: PreTrainedTokenizerBase, before: list[int], token: int) -> str:
    """The text of a token after another one, since some tokenizers strip the space at the start of a text."""
    texts = [tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (before, [*before, token], [token])]
    first, both, alone = map(str, texts)
    return both.removeprefix(first) if both.startswith(first) and both != first else alone  # else part of a character
