"""The cells of a check: what the metrics say of the texts of each way to generate."""

import math
import sys
from functools import cache, partial
from typing import Any

import numpy
import torch
from transformers import GenerationConfig

from hf_specx.bench.trace import trace
from hf_specx.metrics import path

from .draft_quality import judged, law_of, overrated
from .equality import Noise, explain, impossible, tolerance
from .power import CONFIDENCE, least_replaced
from .texts import Subject


TESTS_OF_TEXTS = 4  # statistics of `two_samples`, and as many of `text_quality`
LOOKS = (0.05, 0.002)  # levels of permutation tests that come before the one of a check
SPARE = 4  # times as many exchanges as a p-value needs to get below its level


@cache
def metric(name: str) -> Any:
    """One of this package's, by its name."""
    import evaluate

    return evaluate.load(path(name), keep_in_memory=True)


def judge_acceptance(ours: dict[str, Any]) -> dict[str, Any]:
    """What the draft of a speculative way was worth: by `acceptance`, `count_rounds`, "alpha" and "layout"."""
    found = metric("acceptance").compute(predictions=ours["accepted"], references=ours["drafted"])
    kept = {name: found[name] for name in ("acceptance_rate", "tokens_per_round", "rounds")}
    return kept | count_rounds(ours) | {name: ours[name] for name in ("alpha", "layout")}


def count_rounds(ours: dict[str, Any]) -> dict[str, list[int]]:
    """Counts over the rounds of all rows.

    Returns:
        "accepted_lengths": rounds with n = 0 to γ accepted candidates; "judged_per_position": candidates at position 1
        to γ whose predecessors were all accepted; "accepted_per_position": those of them that were accepted.
    """
    by_row = zip(ours["accepted"], ours["drafted"], strict=True)
    rounds = [each for row in by_row for each in zip(*row, strict=True)]
    longest = max((drafted for _, drafted in rounds), default=0)
    judged = [min(accepted + 1, drafted) for accepted, drafted in rounds]
    return {
        "accepted_lengths": [sum(accepted == n for accepted, _ in rounds) for n in range(longest + 1)],
        "judged_per_position": [sum(number > position for number in judged) for position in range(longest)],
        "accepted_per_position": [sum(accepted > position for accepted, _ in rounds) for position in range(longest)],
    }


def judge_equality(
    subject: Subject, way: str, batch: int, plain: dict[str, Any], ours: dict[str, Any]
) -> dict[str, Any]:
    """`sequence_equality` of both texts, with what is made of the first difference of each row.

    Returns:
        "exact_match", "rows"; "tokens", those up to each row's first difference or its end; "tolerance", by which a
        logit may be off there at most, and count as rounding; "differences", of `explain`.
    """
    texts = ours["texts"], plain["texts"]
    found = metric("sequence_equality").compute(predictions=texts[0], references=texts[1])
    options = subject.settings.generation(sampled=way != "greedy")
    prompts, differences = [subject.ids[index] for index in subject.prompt_indices(way, batch)], []
    for row, position in enumerate(found["first_difference"]):
        if position < 0:
            continue
        noise = None
        if way != "greedy":
            noise = Noise(subject.settings.run_seed(way, batch, row // batch), batch, row % batch)
        both = plain["texts"][row], ours["texts"][row]
        differences.append(explain(subject.target, options, prompts[row], *both, row, position, noise)._asdict())
    equal = zip(plain["texts"], found["first_difference"], strict=True)
    return {
        "exact_match": found["exact_match"],
        "rows": len(texts[0]),
        "tokens": sum(len(text) if position < 0 else position + 1 for text, position in equal),
        "tolerance": tolerance(subject.target, prompts, plain["texts"]),
        "differences": differences,
    }


def judge_distribution(subject: Subject, way: str, batch: int, ours: dict[str, Any]) -> dict[str, Any]:
    """`sampled_law` of the texts at one batch size; "impossible" tokens do not count where rounding explains them."""
    prompts = [subject.ids[index] for index in subject.prompt_indices(way, batch)]
    options = subject.settings.generation(sampled=True)
    found = metric("sampled_law").compute(
        predictions=ours["texts"],
        references=prompts,
        model=subject.target,
        generation_config=GenerationConfig(**options),
        level=subject.settings.share,
    )
    if not found["impossible"]:
        return found
    wrong = impossible(subject.target, options, prompts, ours["texts"])
    least = min((statistic["p_value"] for statistic in found["statistics"].values()), default=1.0)
    chance = 0.0 if wrong else min(1.0, least * max(1, found["comparisons"]))
    known = {"impossible": wrong, "on_the_edge": found["impossible"] - wrong}
    return found | known | {"p_value": chance, "passed": chance >= found["level"]}


def judge_draft(subject: Subject, way: str, batch: int, ours: dict[str, Any]) -> dict[str, Any] | None:
    """`overrated` of the texts at one batch size, by the p-values of `sampled_law`; None where no law is known."""
    law = law_of(subject.pair)
    if law is None:
        return None
    prompts = [subject.ids[index] for index in subject.prompt_indices(way, batch)]
    options = subject.settings.generation(sampled=True)
    sums = overrated(subject.target, law, options, prompts, ours["texts"])
    tests = sys.modules[type(metric("sampled_law")).__module__]
    return judged(sums, subject.settings.share, tests.p_value, tests.least_excess)


def too_few(rows: int, share: float) -> bool:
    """Whether so many pairs of texts have too few exchanges for a test at this level, as `two_samples` says."""
    return TESTS_OF_TEXTS * 2.0 ** (2 - rows) >= share


def judge_texts(subject: Subject, plain: list[list[int]], ours: list[list[int]]) -> dict[str, Any] | None:
    """`two_samples` of all texts of a verification and plain ones; None where they are too few for the level."""
    settings = subject.settings
    if too_few(len(ours), settings.share):
        return None
    compare = partial(metric("two_samples").compute, references=plain, seed=settings.seed)
    looks = [{"level": level, "permutations": exchanges(level)} for level in (*LOOKS, settings.share)]
    looks = [look for look in looks if look["level"] >= settings.share]
    # few exchanges can only let pass what the whole test might have rejected
    for look in looks:
        found = compare(predictions=ours, **look)
        if found["passed"]:
            break
    other = max(map(max, ours + plain)) + 1

    def replaced(number: int) -> dict[str, float]:
        rows = [[token + other for token in row] if index < number else row for index, row in enumerate(ours)]
        unchanged = {"statistic": 0.0, "expected": 0.0, "deviation": 0.0, "skewness": 0.0}
        return compare(predictions=rows, **looks[0])["statistics"].get("tokens", unchanged)

    share = settings.share / TESTS_OF_TEXTS
    known = {"level": settings.share, "rows": len(ours), "least_replaced": least_replaced(len(ours), share, replaced)}
    return found | known


def exchanges(level: float) -> int:
    """How many a permutation test of texts needs at a level."""
    return math.ceil(SPARE * TESTS_OF_TEXTS / level)


def judge_quality(
    subject: Subject, indices: list[int], plain: list[list[int]], ours: list[list[int]]
) -> dict[str, Any] | None:
    """`text_quality` of all texts of a verification, compared with plain ones of the same prompts, given by index.

    Its intervals are those of 95 %. "within" says whether 0 is in the interval of the level that each measure has,
    which is "widened" from them as Student's t says; a bootstrap itself cannot tell so small a level. None where the
    texts are too few for the level: a few differences may be equal by chance.
    """
    settings = subject.settings
    if too_few(len(ours), settings.share):
        return None
    texts = [subject.decoded(each) for each in (ours, plain)]
    judge = {"model": subject.target, "prompts": [subject.prompts[index] for index in indices]}
    # decoding drops end tokens, so a text may have none left; its pair then has no perplexity
    pairs = sum(bool(left.strip() and right.strip()) for left, right in zip(*texts, strict=True))
    found = metric("text_quality").compute(
        predictions=texts[0],
        references=texts[1],
        tokenizer=subject.tokenizer,
        level=1 - CONFIDENCE,
        seed=settings.seed,
        **({} if too_few(pairs, settings.share) else judge),
    )
    # as emitted: a text that was decoded and read again may have more tokens than were asked for
    module = sys.modules[type(metric("text_quality")).__module__]
    lengths = [numpy.array([len(text) for text in each], dtype=numpy.float64) for each in (ours, plain)]
    found["length"] = module.compared(*lengths, 1 - CONFIDENCE, settings.seed)
    for name, measured in found.items():
        wider = stretch(settings.share / len(found), pairs if name == "perplexity" else len(ours))
        low, high = (measured["difference"] + wider * (end - measured["difference"]) for end in measured["interval"])
        measured |= {"widened": [low, high], "within": bool(low <= 0 <= high)}
    return found


def stretch(level: float, rows: int) -> float:
    """By how much an interval of `CONFIDENCE` from so many rows has to be widened for another level."""
    from scipy import stats

    return float(stats.t.isf(level / 2, rows - 1) / stats.norm.isf((1 - CONFIDENCE) / 2))


def trace_one(subject: Subject) -> dict[str, Any]:
    """`trace` of one text of the first prompt, by token verification if that is checked."""
    chosen = subject.settings.verifications
    way = "token" if "token" in chosen else chosen[-1]
    options = subject.settings.generation(sampled=way != "greedy")
    torch.manual_seed(subject.settings.run_seed("trace", 1, 0))
    return trace(subject.target, subject.strategy(way), subject.encoded([0]), options, subject.tokenizer)
