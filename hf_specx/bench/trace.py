"""A record of how one text was generated: the candidates of each round with p and q, and which were accepted."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.round import Round
from hf_specx.engine.strategy import SpeculativeDecoding
from hf_specx.sampling.verifiers import distribution


class Recorder:
    """A listener that records the rounds of a call for one row; `rounds` are those that `trace` returns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, last_token: list[int]):
        self.tokenizer, self.last_token = tokenizer, last_token
        self.rounds: list[dict[str, Any]] = []

    def observe(self, done: Round) -> None:
        """Record one round of one row."""
        accepted, drafted = done.accepted[0], done.draft.lengths[0]
        first = done.batch.width + done.emitted_before[0]
        emitted = done.batch.ids[done.rows[0], first : first + done.emitted[0]].tolist()
        ranks, num_first = done.accepted_ranks[0], done.accepted_in_chain[0]
        chain = done.draft.tokens[0].tolist()
        proposed, number = chain, drafted
        if done.tree is not None:  # the branch that was taken, and the first choice that was judged behind it
            proposed = emitted[:accepted] + (chain[accepted : accepted + 1] if num_first == accepted else [])
            number = len(proposed)
        p = distribution(done.scores[0])[0]  # [P, V]
        q = None if done.draft.probs is None else done.draft.probs[0]

        def entry(position: int, tokens: list[int]) -> dict[str, Any]:
            token, before = tokens[position], tokens[position - 1 : position] or self.last_token
            draft_chance = None
            if q is not None and position < len(q) and (done.tree is None or position <= num_first):
                draft_chance = float(q[position, token])
            text = text_added(self.tokenizer, before, token)
            return {"token": token, "text": text, "p": float(p[position, token]), "q": draft_chance}

        candidates = []
        for position in range(min(number, len(p))):
            candidate = entry(position, proposed)
            overlap = done.overlap[0][position] if position < len(done.overlap[0]) else 0.0
            # a greedy candidate is no draw: it is kept if it is the target's own choice
            acceptance = overlap if candidate["q"] is None else min(1.0, candidate["p"] / candidate["q"])
            candidates.append(
                candidate | {"overlap": overlap, "accepted": position < accepted, "acceptance": acceptance}
            )
            if done.tree is not None:
                candidates[-1]["rank"] = ranks[position] if position < accepted else 0
        follower = "bonus" if done.is_bonus[0] else "recovered"
        tokens = [
            entry(position, emitted) | {"origin": "accepted" if position < accepted else follower}
            for position in range(len(emitted))
        ]
        self.last_token = emitted[-1:] or self.last_token
        rejected = None if done.is_bonus[0] else accepted
        self.rounds.append({"candidates": candidates, "rejected": rejected, "tokens": tokens})


def trace(
    target: PreTrainedModel,
    strategy: SpeculativeDecoding,
    inputs: dict[str, torch.Tensor],
    options: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Generate one text for `inputs`, input_ids and attention_mask [1, L]; returns a record of its rounds.

    Returns:
        Plain values: "verification", "prompt" (ids) and "rounds". Each round has "candidates" and "tokens", each of
        these with its "token", "text", "p" and "q" (None where it is no draw, or the draft was not asked). A candidate
        also has "overlap" (the sum of min(p, q) over the vocabulary), "accepted", and "acceptance": min(1, p / q), by
        which token verification keeps it, given those before it; block verification keeps it at least as often, and
        coupled verification where the two models agree. "rejected" is the position of the first that was not kept, or
        None. "tokens" entered the text; their "origin" is "accepted", "recovered" or "bonus".
        Of a tree, candidates are those on the branch that was taken, each with its "rank" among its siblings, and the
        first choice behind them if that was rejected.
    """
    prompt = inputs["input_ids"][0].tolist()
    recorder = Recorder(tokenizer, prompt[-1:])
    listened = copy.copy(strategy)
    listened.listeners = (*strategy.listeners, recorder)
    target.generate(**inputs, **options, custom_generate=listened)  # type: ignore[operator]
    strategy.report = report = listened.report
    assert report is not None
    return {"verification": report.verification, "prompt": prompt, "rounds": recorder.rounds}


def text_added(tokenizer: PreTrainedTokenizerBase, before: list[int], token: int) -> str:
    """The text that a token adds after another one; some tokenizers strip a space at the start of a text."""

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    text_before, text = decode(before), decode([*before, token])
    if text.startswith(text_before) and text != text_before:
        return text.removeprefix(text_before)
    return decode([token])  # else part of a character
