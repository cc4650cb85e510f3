"""How one text came about: each round's candidates with p and q, what was kept of them, and the token after them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.batch import Sequences
from hf_specx.common.patching import Overriding, beneath, patch_function
from hf_specx.engine.prefill import prefill
from hf_specx.engine.report import SpeculationReport
from hf_specx.sampling.rules import Draft, Judgement, Rule, law
from hf_specx.strategy import SpeculativeDecoding


class Recorder:
    """Notes what a call's rule judges, for one row; the rule and the call are as they would be without it.

    Attributes:
        judged: {"candidates": [...], "accepted": number, "next": id, "p" and "q" of that id} for each judgement; q is
            None where the draft has no law there.
    """

    def __init__(self) -> None:
        self.judged: list[dict[str, Any]] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note the calls of this thread."""
        place = prefill.__globals__  # where it looks for what makes a rule
        usual = beneath(place["_rule"])[-1]

        def make(*args: Any) -> Rule:
            return self.attach(usual(*args))

        with Overriding({patch_function(place, "_rule"): make}):
            yield

    def attach(self, rule: Rule) -> Rule:
        """The same rule, whose judgements are noted."""
        judge = rule.judge

        def noted(sequences: Sequences, draft: Draft, scores: torch.Tensor) -> Judgement:
            found = judge(sequences, draft, scores)
            self.note(draft, scores, found)
            return found

        vars(rule)["judge"] = noted
        return rule

    def note(self, draft: Draft, scores: torch.Tensor, found: Judgement) -> None:
        """Take in one judgement on K candidates of one row, by the target's scores [1, K + 1, V]."""
        tokens, accepted = draft.tokens[0], int(found.verdict.accepted[0])
        at, follower = tokens[:, None], int(found.verdict.next_token[0])
        probs = law(scores[:1])[0][0]  # [K + 1, V]
        p = probs[:-1].gather(-1, at)[:, 0].tolist()
        q = [None] * len(p) if draft.probs is None else draft.probs[0].gather(-1, at)[:, 0].tolist()
        overlap = found.overlap[0].tolist()
        candidates = [
            {
                "token": token,
                "p": p[place],
                "q": q[place],
                # a greedy candidate is no draw: it is kept if it is the target's own choice
                "acceptance": overlap[place] if q[place] is None else min(1.0, p[place] / q[place]),
                "overlap": overlap[place],
                "accepted": place < accepted,
            }
            for place, token in enumerate(tokens.tolist())
        ]
        last = {
            "next": follower,
            "p": float(probs[accepted, follower]),
            "q": None if draft.probs is None or accepted == len(p) else float(draft.probs[0, accepted, follower]),
        }
        self.judged.append({"candidates": candidates, "accepted": accepted} | last)


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
        candidate has its "token", "p" and "q" (None where it is no draw from a law), "overlap" (the sum of min(p, q)
        over the vocabulary), "accepted", and "acceptance": min(1, p / q), by which token verification keeps it, given
        those before it; block verification keeps it at least as often, and coupled verification where the two models
        agree. "rejected" is the place of the first that was not kept, or None. "tokens" are those that entered the
        text, each with its "token", "p", "q" (None also behind the last candidate, where the draft was not asked) and
        "origin": "accepted", "recovered" or "bonus".
    """
    recorder = Recorder()
    with recorder.listening():
        output = target.generate(**inputs, **options, custom_generate=strategy)  # type: ignore[operator]
    report, width = strategy.report, inputs["input_ids"].shape[1]
    assert report is not None
    emitted = output[0, width : width + report.emitted_per_row[0]].tolist()
    rounds = list(_rounds(recorder.judged, report, emitted))
    prompt = inputs["input_ids"][0].tolist()
    if tokenizer is not None:
        add_texts(tokenizer, prompt, rounds)
    return {"verification": report.verification, "prompt": prompt, "rounds": rounds}


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
    """The text of a token behind another one, since some tokenizers strip the space at the start of a text."""
    texts = [tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (before, [*before, token], [token])]
    first, both, alone = map(str, texts)
    return both.removeprefix(first) if both.startswith(first) and both != first else alone  # else part of a character


def _rounds(judged: list[dict[str, Any]], report: SpeculationReport, emitted: list[int]) -> Iterator[dict[str, Any]]:
    """Rounds with the tokens that they brought, which a stop may have cut."""
    one_by_one = len(judged) != len(report.history[0])  # each judgement then emits the one token that was looked at
    place = 0
    for each in judged:
        candidates, kept = each["candidates"], each["accepted"]
        all_kept = kept == len(candidates)
        tokens = [
            {name: candidate[name] for name in ("token", "p", "q")} | {"origin": "accepted"}
            for candidate in candidates[:kept]
        ]
        if not (one_by_one and kept):
            origin = "bonus" if all_kept else "recovered"
            tokens.append({"token": each["next"], "p": each["p"], "q": each["q"], "origin": origin})
        tokens = tokens[: len(emitted) - place]
        assert [token["token"] for token in tokens] == emitted[place : place + len(tokens)]
        place += len(tokens)
        yield {"candidates": candidates, "rejected": None if all_kept else kept, "tokens": tokens}
