"""Checks of what `check` is asked to do."""

import json
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from hf_specx.common.errors import refusal
from hf_specx.measure.checks import batches_of_no_size, check_out


OWN = ("do_sample", "max_new_tokens", "custom_generate", "seeds", "return_dict_in_generate", "num_return_sequences")
PAGES = (".html", ".htm")


@refusal
def verifications_that_are_unknown(names: Sequence[str], known: Sequence[str]) -> str | None:
    if names and set(names) <= set(known) and len(set(names)) == len(names):
        return None
    return f"verifications={list(names)!r}: give some of {', '.join(known)}, each once."


@refusal
def texts_without_a_round(new_tokens: int, samples: int | None) -> str | None:
    if new_tokens >= 2 and (samples is None or samples >= 2):
        return None
    return f"new_tokens={new_tokens} and samples={samples} leave nothing to compare; give 2 or more of each."


@refusal
def candidates_of_no_number(num_draft_tokens: Any) -> str | None:
    if isinstance(num_draft_tokens, int) and not isinstance(num_draft_tokens, bool) and num_draft_tokens >= 1:
        return None
    return (
        f"num_draft_tokens={num_draft_tokens!r}: give a number of 1 or more; 'auto' goes by the clock, and a check is "
        "the same each time."
    )


@refusal
def sampling_of_no_distribution(temperature: float, top_p: float, top_k: int) -> str | None:
    if 0 < temperature < math.inf and 0 < top_p <= 1 and top_k >= 0:
        return None
    return (
        f"temperature={temperature}, top_p={top_p}, top_k={top_k}: give a temperature above 0, a top-p above 0 and at "
        "most 1, and a top-k of 0 (off) or more; greedy decoding is checked by verifications=('greedy',)."
    )


@refusal
def level_of_no_test(level: float) -> str | None:
    if 0 < level < 1:
        return None
    return f"level={level} is no chance of a false alarm; give a number between 0 and 1, like 0.001."


@refusal
def options_that_are_the_checks_own(options: Collection[str]) -> str | None:
    found = [name for name in options if name in OWN]
    return f"{found[0]}= is set by the check itself; leave it out." if found else None


@refusal
def options_that_are_no_values(options: dict[str, Any]) -> str | None:
    try:
        json.dumps(options)
    except (TypeError, ValueError):
        return f"{', '.join(options)}: give plain values (numbers, texts, lists), since results say what they are."
    return None


def check_settings(given: dict[str, Any], known: Sequence[str]) -> None:
    """Whether anything can be checked in this way."""
    batches_of_no_size(given["batch_sizes"])
    verifications_that_are_unknown(given["verifications"], known)
    texts_without_a_round(given["new_tokens"], given["samples"])
    candidates_of_no_number(given["num_draft_tokens"])
    sampling_of_no_distribution(given["temperature"], given["top_p"], given["top_k"])
    level_of_no_test(given["level"])
    options_that_are_the_checks_own(given["options"])
    options_that_are_no_values(given["options"])


@refusal
def metrics_without_evaluate(lacking: Sequence[str]) -> str | None:
    return f"a check needs {', '.join(lacking)}: pip install 'hf_specx[quality]'." if lacking else None


@refusal
def encoder_decoder_in_a_check(encodes: bool) -> str | None:
    if not encodes:
        return None
    return "the pair is of encoder-decoders, whose distributions a check does not know; compare greedy texts yourself."


@refusal
def prompts_of_no_kind(prompts: Any, tokenizer: object) -> str | None:
    if tokenizer is None:
        return (
            "the pair has no tokenizer to read prompts with; DraftTargetPair(target, draft, tokenizer) gives it one."
        )
    if prompts and not isinstance(prompts, str) and all(isinstance(text, str) for text in prompts):
        return None
    return f"prompts={str(prompts)[:40]!r}: give a list of texts; the pair has {'' if prompts else 'none '}of its own."


def check_subject(lacking: Sequence[str], encodes: bool, prompts: Any, tokenizer: object) -> None:
    """Whether this pair can be checked here, where these packages are lacking, on these prompts."""
    metrics_without_evaluate(lacking)
    encoder_decoder_in_a_check(encodes)
    prompts_of_no_kind(prompts, tokenizer)


@refusal
def report_that_is_no_page(path: Path) -> str | None:
    if path.suffix.lower() in PAGES:
        return None
    return f"the report {path} does not end in .html, which it is; name it so."


@refusal
def report_that_cannot_be_written(path: Path, figures: Path) -> str | None:
    locked = [each for each in (path, figures) if not os.access(each if each.exists() else each.parent, os.W_OK)]
    if not locked:
        return None
    return f"the report cannot be written: {locked[0]} is not yours to write; name another file."


@refusal
def figures_that_are_no_folder(figures: Path) -> str | None:
    if figures.is_dir() or not figures.exists():
        return None
    return f"the figures of the report go into {figures}, which is a file; move it, or name another report."


@refusal
def report_without_plots(missing: Sequence[str]) -> str | None:
    if not missing:
        return None
    return f'a report needs {" and ".join(missing)}: pip install "hf_specx[plots]".'


def check_report(path: Path, figures: Path, missing: Sequence[str]) -> None:
    """Whether a report could be written.

    Args:
        path: of the page.
        figures: the folder of its figures.
        missing: packages that it needs.
    """
    report_that_is_no_page(path)
    check_out(path)
    figures_that_are_no_folder(figures)
    report_that_cannot_be_written(path, figures)
    report_without_plots(missing)
