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

    def observe(self, round_: Round) -> None:
        """Record one round of one row."""
        accepted = round_.accepted[0]
        first = round_.batch.width + round_.emitted_before[0]
        emitted = round_.batch.ids[round_.rows[0], first : first + round_.emitted[0]].tolist()
        p = distribution(round_.scores[0])[0]  # [P, V]
        q = draft_distributions(round_)
        overlaps = round_.overlap[0]
        candidates = []
        for position, candidate in enumerate(self._entries(shown_candidates(round_, emitted), p, q)):
            overlap = overlaps[position] if position < len(overlaps) else 0.0
            # a greedy candidate is no draw: it is kept if it is the target's own choice
            acceptance = overlap if candidate["q"] is None else min(1.0, candidate["p"] / candidate["q"])
            candidate |= {"overlap": overlap, "accepted": position < accepted, "acceptance": acceptance}
            if round_.tree is not None:
                candidate["rank"] = round_.accepted_ranks[0][position] if position < accepted else 0
            candidates.append(candidate)
        follower = "bonus" if round_.is_bonus[0] else "recovered"
        tokens = [
            entry | {"origin": "accepted" if position < accepted else follower}
            for position, entry in enumerate(self._entries(emitted, p, q))
        ]
        self.last_token = emitted[-1:] or self.last_token
        rejected = None if round_.is_bonus[0] else accepted
        self.rounds.append({"candidates": candidates, "rejected": rejected, "tokens": tokens})

    def _entries(self, tokens: list[int], p: torch.Tensor, q: torch.Tensor | None) -> list[dict[str, Any]]:
        """Each token that follows the text so far with its text and its chances by p [P, V] and q [up to P, V]."""
        entries = []
        before = self.last_token
        for position, token in enumerate(tokens[: len(p)]):
            draft_chance = None
            if q is not None and position < len(q):
                draft_chance = float(q[position, token])
            text = text_added(self.tokenizer, before, token)
            entries.append({"token": token, "text": text, "p": float(p[position, token]), "q": draft_chance})
            before = [token]
        return entries


def shown_candidates(round_: Round, emitted: list[int]) -> list[int]:
    """The candidates of a round of one row, also those behind a rejected one. Of a tree those on the accepted branch,
    and the first choice behind it if that was judged and rejected."""
    chain: list[int] = round_.draft.tokens[0, : round_.draft.lengths[0]].tolist()
    accepted = round_.accepted[0]
    if round_.tree is None:
        return chain
    stayed_on_chain = round_.accepted_in_chain[0] == accepted
    return emitted[:accepted] + (chain[accepted : accepted + 1] if stayed_on_chain else [])


def draft_distributions(round_: Round) -> torch.Tensor | None:
    """The distributions q [up to D, V] at the positions of a round of one row; of a tree as far as its chain of first
    choices was followed. None of a draft without any."""
    if round_.draft.probs is None:
        return None
    q = round_.draft.probs[0]
    return q if round_.tree is None else q[: round_.accepted_in_chain[0] + 1]


def trace(
    target: PreTrainedModel,
    strategy: SpeculativeDecoding,
    inputs: dict[str, torch.Tensor],
    options: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Generate one text for `inputs`, input_ids and attention_mask [1, L]; returns a record of its rounds.

    Returns:
        Values of JSON: "verification", "prompt" (ids) and "rounds". Each round has "candidates" and "tokens", each of
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
