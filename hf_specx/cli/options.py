"""Options that several commands share, and their checks."""

import copy
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hf_specx.common.errors import require
from hf_specx.drafting.suffix import SuffixDraft
from hf_specx.hub.cards import check_known_name
from hf_specx.hub.known_pairs import BY_NAME, is_embedded, is_known
from hf_specx.hub.saving import INSIDE, REFERENCE
from hf_specx.measure.checks import check_sampling, looking_for
from hf_specx.measure.drafts import weightless_draft
from hf_specx.pair_files.pair_config import ModelSource
from hf_specx.pairs.pair import DraftTargetPair
from hf_specx.validation.options import check_choices


BOTH = "both"
DTYPES = ("auto", "float32", "bfloat16", "float16")
LARGEST_SEED = 2**32 - 1

PromptFile = Annotated[
    Path | None, typer.Option("--file", "--prompts", help="Prompts, one per line.", exists=True, dir_okay=False)
]
MaxNewTokens = Annotated[int, typer.Option(help="New tokens per row, at most.")]
Temperature = Annotated[float, typer.Option(help="Temperature of sampling.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling; 1 is off.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 is off.")]
Greedy = Annotated[bool, typer.Option("--greedy", help="Argmax instead of sampling.")]
Dtype = Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}; auto is as saved.")]
Revision = Annotated[str | None, typer.Option(help="Commit, branch or tag on the Hub.")]
Token = Annotated[
    str | None, typer.Option(help="For the Hub; else the one of `hf auth login` or HF_TOKEN.", show_default=False)
]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code of models and tokenizers; read it before.")]
HELP_DRAFT = (
    "suffix: no model, but what followed the same tokens before; both: the better of this and the pair's own; "
    "exit:4: the target's first 4 layers; else the pair's own."
)
DraftKind = Annotated[str | None, typer.Option("--draft", help=HELP_DRAFT)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the folder, with all that is in it.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document as the last line of stdout.")]


def read_prompts(prompts: list[str], file: Path | None, others: str, demo: bool = False) -> list[str]:
    """The prompts, from the arguments, a file or standard input; [] for the demo, which has its own.

    Args:
        prompts: the arguments.
        file: one prompt per line.
        others: the ways to give prompts, for the error.
        demo: whether the demo was asked for.

    Raises:
        ValueError: there are no prompts, or they were given in several ways.
    """
    ways = bool(prompts) + demo + (file is not None)
    require(ways <= 1, "prompts were given in more than one way; use arguments, --file or --demo.")
    if prompts or demo:
        return prompts
    text = ""
    if file is not None:
        text = file.read_text(encoding="utf-8")
    elif not sys.stdin.isatty():
        text = sys.stdin.read()
    lines = [line for line in text.splitlines() if line.strip()]
    require(bool(lines), f"no prompts; give them {others}.")
    return lines


def sampling_options(
    greedy: bool, temperature: float, top_p: float, top_k: int, max_new_tokens: int
) -> dict[str, Any]:
    """The arguments of `generate` for sampling and length, also those that are off, since a model may have them on.

    They are checked here, before a model is loaded.

    Raises:
        ValueError: a value is out of range, or contradicts --greedy.
    """
    require(max_new_tokens >= 1, f"--max-new-tokens {max_new_tokens} generates nothing; give 1 or more.")
    if greedy:
        untouched = (temperature, top_p, top_k) == (1, 1, 0)
        require(untouched, "--greedy draws nothing; leave --temperature, --top-p and --top-k out.")
        return {"do_sample": False, "max_new_tokens": max_new_tokens}
    check_sampling(temperature, top_p, top_k)
    drawn = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    return {"do_sample": True, **drawn, "max_new_tokens": max_new_tokens}


def strategy_options(num_draft_tokens: str | None, verification: str | None) -> dict[str, Any]:
    """The options of the strategy that were given, checked before a model is loaded."""
    number: str | int | None = num_draft_tokens
    if isinstance(number, str) and number.removeprefix("-").isdecimal():
        number = int(number)
    check_choices("auto" if number is None else number, verification)
    given = {"num_draft_tokens": number, "verification": verification}
    return {name: value for name, value in given.items() if value is not None}


def check_dtype(dtype: str) -> None:
    """Raise a ValueError if --dtype is not in `DTYPES`."""
    require(dtype in DTYPES, f"--dtype {dtype} is unknown; choose one of {', '.join(DTYPES)}.")


def default_device_map() -> str | None:
    """`"auto"` if there is an accelerator, else None."""
    return "auto" if torch.cuda.is_available() else None


def hub_options(revision: str | None, token: str | None, trust_remote_code: bool = False) -> dict[str, Any]:
    """The arguments of loading from the Hub that were given."""
    given = {"revision": revision, "token": token, "trust_remote_code": trust_remote_code or None}
    return {name: value for name, value in given.items() if value is not None}


def load_given_pair(name: str, dtype: str, **options: Any) -> DraftTargetPair:
    """Load a pair, on the accelerator if there is one.

    Args:
        name: id, folder, or "embedded".
        dtype: one of `DTYPES`.
        **options: for `DraftTargetPair.from_pretrained`.

    Raises:
        ValueError: there is no such pair, or its files are wrong.
    """
    check_dtype(dtype)
    check_name(name)
    if is_known(name) and not is_embedded(name):
        ids = f"{BY_NAME[name].target} {BY_NAME[name].draft}"
        raise ValueError(f"{name!r} is not published as a pair; make one with specx tune {ids} --out FOLDER.")
    placed = {"device_map": device_map} if (device_map := default_device_map()) else {}
    with looking_for(name):
        return DraftTargetPair.from_pretrained(name, dtype=dtype, **placed, **options)


def with_draft(pair: DraftTargetPair, draft: str | None) -> DraftTargetPair:
    """The pair with what --draft asks for in place of its draft; the pair itself where nothing is asked for.

    What was measured with its own draft, and recommended for it, does not hold then.
    """
    if draft is None:
        return pair
    weightless = weightless_draft(draft)
    known = weightless is not None or draft == BOTH
    require(known, f"--draft {draft} is unknown; choose one of suffix, both, exit:4 or the like, or leave it out.")
    config = copy.deepcopy(pair.config)
    config.forget()
    if weightless is not None:
        config.set_draft(weightless)
        return DraftTargetPair(pair.target, weightless, pair.tokenizer, config)
    made = DraftTargetPair(pair.target, [SuffixDraft(), *pair.models[1:]], pair.tokenizer, config)
    made.draft_tokenizer = made.strategy.draft_tokenizer = pair.draft_tokenizer
    return made


def check_name(name: str) -> None:
    """Raise a ValueError if there cannot be a pair of this name: ids on the Hub have an owner."""
    if "/" not in name and not Path(name).is_dir():
        check_known_name(name)


def saved_as(source: ModelSource, inside: bool) -> str:
    """Whether to save a model inside the pair or by reference."""
    return INSIDE if inside or source.name is None else REFERENCE


def typed() -> str:
    """The command as it was typed, without a token for the Hub, since it is saved with measurements."""
    words, hidden = ["specx"], False
    for word in sys.argv[1:]:
        if not hidden and word.partition("=")[0] != "--token":
            words.append(word)
        hidden = word == "--token"
    return shlex.join(words)
