"""Checks of what is asked of `tune`, and of names that commands are given."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hf_specx.common.errors import refusal


@refusal
def drafts_that_are_one(drafts: Sequence[str]) -> str | None:
    if drafts and len(set(drafts)) == len(drafts):
        return None
    return f"drafts={list(drafts)!r}: give at least one, and each once."


@refusal
def revisions_of_other_drafts(drafts: Sequence[str], revisions: Sequence[str | None]) -> str | None:
    if not revisions or len(revisions) == len(drafts):
        return None
    return f"{len(revisions)} revisions were given for {len(drafts)} drafts; give one for each, in their order."


@refusal
def batches_of_no_size(batches: Sequence[int]) -> str | None:
    if batches and all(size >= 1 for size in batches) and len(set(batches)) == len(batches):
        return None
    return f"batches={list(batches)!r} are no different sizes of 1 or more; give some, like 1 and 8."


@refusal
def repeats_without_a_run(repeats: int) -> str | None:
    return None if repeats >= 1 else f"repeats={repeats} times nothing; give 1 or more."


@refusal
def prompts_without_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    return None if tokenizer is not None else f"the target {name!r} has no tokenizer, so it cannot read prompts."


@refusal
def name_that_is_not_found(name: str, error: Exception) -> str | None:
    if Path(name).is_dir():
        return None
    said = " ".join(str(error).split())
    return f"{name!r} cannot be got from the Hub, and there is no folder of that name here: {said}"


@contextmanager
def looking_for(name: str) -> Iterator[None]:
    """Say which name it is that is not found; the Hub's client does not while it is offline."""
    try:
        yield
    except OSError as error:
        name_that_is_not_found(name, error)
        raise


def check_study(batches: Sequence[int], repeats: int) -> None:
    """Whether anything can be measured in this way."""
    batches_of_no_size(batches)
    repeats_without_a_run(repeats)


def check_drafts(drafts: Sequence[str], revisions: Sequence[str | None]) -> None:
    """Whether each draft is named once, before any of them is loaded."""
    drafts_that_are_one(drafts)
    revisions_of_other_drafts(drafts, revisions)


def check_reads(name: str, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Whether a target can read prompts."""
    prompts_without_tokenizer(name, tokenizer)
