"""Settings that come from a file: an error or warning about one names the file, and what to do there."""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers.utils import GENERATION_CONFIG_NAME

from hf_specx.common.drafts import PAIR_CONFIG_NAME
from hf_specx.pairs.pair import DraftTargetPair

from .console import FLAGS, error_line


OF_PAIR = ("num_draft_tokens", "verification", "layout", "tree")  # what the config of a pair recommends


@contextmanager
def naming_files(pair: DraftTargetPair, typed: Mapping[str, Any]) -> Iterator[None]:
    """Add to errors that a user can correct, and to warnings, which file a setting comes from that was not typed."""
    show = warnings.showwarning

    def show_with_origin(message: Any, *args: Any, **kwargs: Any) -> None:
        origin = origin_of(error_line(message), pair, typed)
        show(f"{message} {origin}" if origin else message, *args, **kwargs)

    warnings.showwarning = show_with_origin
    try:
        yield
    except ValueError as error:
        line = error_line(error)
        origin = origin_of(line, pair, typed)
        if not origin:
            raise
        raise ValueError(f"{line} {origin}") from error
    finally:
        warnings.showwarning = show


def origin_of(line: str, pair: DraftTargetPair, typed: Mapping[str, Any]) -> str:
    """A sentence on the file from which a setting in a message comes; empty if there is none, or it was typed."""
    settings: dict[str, tuple[Any, str]] = {}
    for name, value in pair.target.generation_config.to_diff_dict().items():
        settings[name] = value, f"{GENERATION_CONFIG_NAME} of {pair.target.name_or_path}"
    for name in OF_PAIR:
        settings[name] = getattr(pair.config, name), f"{PAIR_CONFIG_NAME} of the pair"
    for name, (value, file) in settings.items():
        flag = FLAGS.get(name)
        as_shown = rf"(?<![\w-])({name}`? ?\(?=|{flag} ){re.escape(repr(value))}(?![\w.])"
        if value is not None and name not in typed and re.search(as_shown, line):
            remedy = "change it there" if flag is None else f"change it there, or give {flag}"
            return f"(It was not typed: {name} comes from {file}; {remedy}.)"
    return ""
