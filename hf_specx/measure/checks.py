"""Checks of what is asked of the bench and of `tune`, of files of results, and of names that commands are given."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hf_specx.common.errors import refusal


FILE_VERSION = 1  # of the files of results and of checks


@refusal
def draft_of_no_layers(layers: int, draft_layers: int) -> str | None:
    if 0 < draft_layers < layers:
        return None
    return (
        f"draft_layers={draft_layers} is not between 0 and the {layers} layers of the target; give fewer, 1 or more."
    )


@refusal
def heads_that_do_not_divide(hidden: int, heads: int, kv_heads: int) -> str | None:
    if hidden % (2 * heads) == 0 and heads % kv_heads == 0:
        return None
    return (
        f"{heads} heads and {kv_heads} key-value heads do not divide a width of {hidden}; the heads must be a "
        "multiple of the key-value heads, and each must be of an even width."
    )


def check_recipe(layers: int, draft_layers: int, hidden: int, heads: int, kv_heads: int) -> None:
    """Whether a grafted pair can be made of these numbers."""
    draft_of_no_layers(layers, draft_layers)
    heads_that_do_not_divide(hidden, heads, kv_heads)


@refusal
def contender_of_no_kind(name: str, kind: str, numbers: list[str], compiled: bool) -> str | None:
    counted = len(numbers) == 1 and (numbers[0].isdecimal() and int(numbers[0]) > 0)
    automatic = numbers == ["auto"]
    known = {
        "plain": not numbers,
        "stock": (counted or not numbers) and not compiled,
        **dict.fromkeys(("token", "block", "coupled"), counted or automatic),
    }
    if known.get(kind, False):
        return None
    return (
        f"contender {name!r} is unknown; give plain, plain-compiled, stock, stock-5, or ours: token, block or coupled "
        "with a number or auto, like block-auto, and -compiled after it, like block-5-compiled."
    )


@refusal
def pair_without_prompts(name: str, tokenizer: object, prompts: Sequence[object]) -> str | None:
    if tokenizer is not None and prompts:
        return None
    lacks = (
        "prompts of its own; give some with --file" if tokenizer is not None else "tokenizer, so it cannot read any"
    )
    return f"the pair {name!r} has no {lacks}."


@refusal
def encoder_decoder_in_turns(name: str, encodes: bool) -> str | None:
    if not encodes:
        return None
    return (
        f"the pair {name!r} is of encoder-decoders, which the bench does not know; specx generate --demo times them."
    )


@refusal
def no_room_for_prompts(name: str, prompt_tokens: int, new_tokens: int, limit: int) -> str | None:
    if prompt_tokens + new_tokens <= limit:
        return None
    return (
        f"{prompt_tokens} prompt tokens and {new_tokens} new ones are more than the {limit} positions of {name!r}; "
        "give fewer."
    )


@refusal
def grafted_pair_of_no_recipe(name: str, prefix: str, known: list[str]) -> str | None:
    if not name.startswith(prefix) or name.removeprefix(prefix) in known:
        return None
    return f"the grafted pair {name!r} is unknown; choose one of {', '.join(prefix + each for each in known)}."


@refusal
def file_of_another_kind(path: Path, kind: str, version: int) -> str | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {kind: version, "cells": []}
        if found[kind] == version and isinstance(found["cells"], list):
            return None
    except (ValueError, KeyError, TypeError):
        pass
    lacks = {
        "schema": "has no results of this version of the bench",
        "check": "is no interrupted check of this version",
    }
    return f"{path} is there already and {lacks[kind]}; name another file."


@refusal
def name_of_a_folder(path: Path) -> str | None:
    return f"{path} is a folder; name a file in it." if path.is_dir() else None


@refusal
def file_in_no_folder(path: Path) -> str | None:
    folder = path.resolve().parent
    return None if folder.is_dir() else f"{path}: there is no folder {folder}; make it, or name another file."


def check_out(path: Path | None) -> None:
    """Whether a file could be written at a path."""
    if path is not None:
        name_of_a_folder(path)
        file_in_no_folder(path)


def check_store(path: Path | None, kind: str, version: int = FILE_VERSION) -> None:
    """Whether a `Store` of a kind could be written at a path, or go on with what is there."""
    check_out(path)
    if path is not None:
        file_of_another_kind(path, kind, version)


@refusal
def plots_without_matplotlib(found: bool) -> str | None:
    return None if found else "figures need matplotlib: pip install 'matplotlib>=3.8', or leave --plots out."


@refusal
def options_with_a_grid(grids: list[str], given: list[str]) -> str | None:
    if not grids or not given:
        return None
    return f"{grids[0]} has its own pairs and sizes; leave {', '.join(given)} out, or choose with --only."


@refusal
def two_grids(grids: list[str]) -> str | None:
    return None if len(grids) < 2 else f"{' and '.join(grids)} are two grids; choose one."


@refusal
def grid_without_accelerator(grids: list[str], accelerated: bool) -> str | None:
    if "--full" not in grids or accelerated:
        return None
    return "--full has models of 1B and 7B parameters and there is no GPU here; use --grid."


@refusal
def experiments_that_are_unknown(grids: list[str], only: list[str], known: list[str]) -> str | None:
    if not only:
        return None
    if not grids:
        return "--only chooses experiments of a grid; use it with --grid or --full."
    unknown = [name for name in only if name not in known]
    return f"--only {unknown[0]} is unknown; choose among {', '.join(known)}." if unknown else None


@refusal
def sizes_of_nothing(prompt_tokens: int, new_tokens: int) -> str | None:
    if prompt_tokens >= 1 and new_tokens >= 2:
        return None
    return (
        f"--prompt-tokens {prompt_tokens} and --new-tokens {new_tokens} leave no round to time; give 1 or more, and 2 "
        "or more."
    )


@refusal
def warpers_out_of_range(temperature: float, top_p: float) -> str | None:
    if 0 <= temperature < float("inf") and 0 < top_p <= 1:
        return None
    return (
        f"--temperature {temperature} and --top-p {top_p}: give a temperature of 0 (greedy) or above, and a "
        "top-p above 0 and at most 1."
    )


def check_grid(grids: list[str], given: list[str], only: list[str], known: list[str], accelerated: bool) -> None:
    """Whether it is clear which cells are meant, and whether this machine can run them."""
    two_grids(grids)
    options_with_a_grid(grids, given)
    experiments_that_are_unknown(grids, only, known)
    grid_without_accelerator(grids, accelerated)


def check_cell(prompt_tokens: int, new_tokens: int, temperature: float, top_p: float) -> None:
    """Whether there is anything to time."""
    sizes_of_nothing(prompt_tokens, new_tokens)
    warpers_out_of_range(temperature, top_p)


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
