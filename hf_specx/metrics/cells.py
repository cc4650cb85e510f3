"""The cells of a check: what the metrics say of the texts of each way to generate."""

from functools import cache
from typing import Any

from transformers import GenerationConfig

from hf_specx.metrics import path

from .equality import Noise, explain
from .settings import UNITS, is_greedy
from .texts import Subject


CONFIDENCE = 0.95  # of intervals
MEASURES = 4  # of quality


@cache
def metric(name: str) -> Any:
    """One of this package's, by its name."""
    import evaluate

    return evaluate.load(path(name), keep_in_memory=True)


def judge_equality(
    subject: Subject, way: str, batch: int, plain: list[list[int]], ours: list[list[int]]
) -> dict[str, Any]:
    """`sequence_equality` of both texts, with what is made of the first difference of each row.

    Returns:
        "exact_match", "rows"; "tokens", those up to each row's first difference or its end; "differences", of
        `explain`.
    """
    found = metric("sequence_equality").compute(predictions=ours, references=plain)
    prompts, differences, tokens = subject.prompt_indices(way, batch), [], 0
    for row, (texts, position) in enumerate(
        zip(zip(plain, ours, strict=True), found["first_difference"], strict=True)
    ):
        tokens += len(texts[0]) if position < 0 else position + 1
        if position >= 0:
            seed = subject.settings.run_seed(way, batch, row // batch)
            noise = None if is_greedy(way) else Noise(seed, batch, row % batch)
            options, prompt = subject.settings.generation(way), subject.ids[prompts[row]]
            differences.append(explain(subject.target, options, prompt, *texts, row, position, noise)._asdict())
    return {"exact_match": found["exact_match"], "rows": len(ours), "tokens": tokens, "differences": differences}


def judge_distribution(subject: Subject, way: str, batch: int, ours: list[list[int]]) -> dict[str, Any]:
    """`sampled_law` of the texts at one batch size, with the draft where it has a distribution."""
    found: dict[str, Any] = metric("sampled_law").compute(
        predictions=ours,
        references=[subject.ids[index] for index in subject.prompt_indices(way, batch)],
        model=subject.target,
        generation_config=GenerationConfig(**subject.settings.generation(way)),
        draft=subject.draft,
        rounding=UNITS,
        level=subject.settings.share,
    )
    return found


def too_few(pairs: int, share: float) -> bool:
    """Whether all differences of so many pairs of texts may have one sign by chance, at a level that is shared."""
    return MEASURES * 2.0 ** (1 - pairs) >= share


def judge_quality(
    subject: Subject, indices: list[int], plain: list[list[int]], ours: list[list[int]]
) -> dict[str, Any] | None:
    """`text_quality` of all texts of a verification, compared with plain ones of the same prompts, given by index.

    Lengths are those of the tokens that were emitted, since text that is read again may have more of them. None where
    there are too few texts.
    """
    share = subject.settings.share
    if too_few(len(ours), share):
        return None
    texts = [subject.decoded(each) for each in (ours, plain)]
    judge = {"model": subject.target, "prompts": [subject.prompts[index] for index in indices]}
    # decoding drops end tokens, so a text may have none left; its pair then has no perplexity
    pairs = sum(bool(left.strip() and right.strip()) for left, right in zip(*texts, strict=True))
    found: dict[str, Any] = metric("text_quality").compute(
        predictions=texts[0],
        references=texts[1],
        tokenizer=subject.tokenizer,
        lengths=[[len(text) for text in each] for each in (ours, plain)],
        level=1 - CONFIDENCE,
        seed=subject.settings.seed,
        **({} if too_few(pairs, share) else judge),
    )
    return found
