"""Options that several commands share, and their checks: how models are named, and how tokens are drawn."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specx.bench.checks import check_sampling
from hf_specx.bench.ways import SUFFIX, exit_layer_of
from hf_specx.common.errors import require
from hf_specx.engine.check_options import check_choices
from hf_specx.hub.folders import without_folders
from hf_specx.hub.known_pairs import EMBEDDED, check_known_name

from .prompts import Messages as Messages
from .prompts import read_prompts as read_prompts


DRAFTS = (SUFFIX, "both")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LARGEST_SEED = 2**32 - 1

HELP_FILE = "Prompts, one per line; of a .jsonl file texts, or objects with prompt, text or messages."
PromptFile = Annotated[Path | None, typer.Option("--file", "--prompts", help=HELP_FILE, exists=True, dir_okay=False)]
MaxNewTokens = Annotated[int, typer.Option(help="New tokens per row, at most.")]
Temperature = Annotated[float, typer.Option(help="Temperature of sampling.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling; 1 is off.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 is off.")]
Greedy = Annotated[bool, typer.Option("--greedy", help="Argmax instead of sampling.")]
Dtype = Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}; auto is as saved.")]
Revision = Annotated[str | None, typer.Option(help="Commit, branch or tag on the Hub.")]
Token = Annotated[str | None, typer.Option(help="For the Hub; else the one of `hf auth login` or HF_TOKEN.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code of models and tokenizers; read it before.")]
HELP_KINDS = (
    "suffix: no model, but what followed the same tokens before",
    "exit:4: the target's first 4 layers",
    "both: the better of suffix and the pair's own",
)
HELP_NAMED = f"Id or folder of a draft for the target; or {'; '.join(HELP_KINDS)}; else the pair's own."
DraftName = Annotated[str | None, typer.Option("--draft", help=HELP_NAMED)]
TargetName = Annotated[str | None, typer.Option("--target", help="Id or folder of a target, in place of a pair.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, auto; else accelerators if there are any.")]
PairName = Annotated[str | None, typer.Argument(help="Id or folder of a pair; else the one in the package.")]
Chat = Annotated[bool, typer.Option("--chat", help="Each prompt is a message: put it into the chat template.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the folder of another pair, with all in it.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, and nothing else.")]


@dataclass(frozen=True)
class Named:
    """The models that a command names.

    Attributes:
        pair: id or folder of a pair; None for a target with a draft, or for the pair in the package.
        target, draft: ids or folders in place of a pair, or of its draft; a draft may also be a kind, see `is_kind`.
        dtype: one of `DTYPES`.
        device: as torch names it, or "auto"; None is "auto" where there is an accelerator.
        hub: see `hub_options`.

    Raises:
        ValueError: for names that cannot be, or that contradict each other.
    """

    pair: str | None = None
    target: str | None = None
    draft: str | None = None
    dtype: str = "auto"
    device: str | None = None
    hub: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        both = f"the pair {self.pair!r} and --target {self.target}"
        require(self.pair is None or self.target is None, f"{both} are two targets; leave one of them out.")
        told = f"--target {self.target} has no draft; name one with --draft, or take --draft suffix, which needs none."
        require(self.target is None or self.draft is not None, told)
        told = "--draft both needs the draft model of a pair, and --target names none; name a model, or take suffix."
        require(self.target is None or self.draft != DRAFTS[1], told)
        if self.target is None:
            check_name(self.shown_pair)
        for role, name in (("target", self.target), ("draft", self.draft)):
            if name is not None and not (role == "draft" and is_kind(name)):
                check_model_name(f"--{role}", name)

    @property
    def shown_pair(self) -> str:
        """The pair's name."""
        return self.pair or EMBEDDED

    @property
    def name(self) -> str:
        """What results and messages call the models."""
        first = self.target or self.shown_pair
        return first if self.draft is None else f"{first} with {self.draft}"


def check_model_name(option: str, name: str) -> None:
    """Raise a ValueError if no model can have this name; what looks like a path is one."""
    if not Path(name).is_dir():
        path = name.startswith((".", "/", "~")) or name.count("/") > 1
        require(not path, f"{option} {name}: there is no such folder.")


def check_name(name: str) -> None:
    """Raise a ValueError if there cannot be a pair of this name."""
    if "/" not in name and not Path(name).is_dir():
        check_known_name(name)


def is_kind(draft: str | None) -> bool:
    """Whether --draft names a kind of draft that needs no model: one of `DRAFTS`, or "exit:4" and the like."""
    return draft in DRAFTS or (draft is not None and exit_layer_of(draft) is not None)


def check_saved_kind(draft: str | None) -> None:
    """Raise a ValueError if --draft is no kind of draft that a pair is saved with."""
    known = draft is None or (is_kind(draft) and draft != DRAFTS[1])
    require(known, f"--draft {draft} is no kind of draft to save; choose {SUFFIX}, exit:4 or the like.")


def check_dtype(dtype: str) -> None:
    """Raise a ValueError if --dtype is not in `DTYPES`."""
    require(dtype in DTYPES, f"--dtype {dtype} is unknown; choose one of {', '.join(DTYPES)}.")


def sampling_options(
    greedy: bool, temperature: float, top_p: float, top_k: int, max_new_tokens: int
) -> dict[str, Any]:
    """The arguments of `generate` for sampling and length, also those that are off, since a model may have them on.

    Raises:
        ValueError: a value is out of range, or contradicts --greedy.
    """
    require(max_new_tokens >= 1, f"--max-new-tokens {max_new_tokens} generates nothing; give 1 or more.")
    if greedy:
        untouched = (temperature, top_p, top_k) == (1, 1, 0)
        require(untouched, "--greedy does not sample; leave --temperature, --top-p and --top-k out.")
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
    return _given(num_draft_tokens=number, verification=verification)


def hub_options(revision: str | None, token: str | None, trust_remote_code: bool = False) -> dict[str, Any]:
    """The arguments of loading from the Hub that were given."""
    return _given(revision=revision, token=token, trust_remote_code=trust_remote_code or None)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def typed() -> str:
    """The command as it was typed, but for a token for the Hub and this machine's folders: it is saved, and published.

    See `without_folders`.
    """
    words, hidden = ["specx"], False
    for word in sys.argv[1:]:
        if not hidden and word.partition("=")[0] != "--token":
            words.append(word)
        hidden = word == "--token"
    return without_folders(shlex.join(words))
