"""Options that several commands share, in groups, and their checks: which models, from where, how tokens are drawn."""

import inspect
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from hf_specx.bench.checks import check_sampling
from hf_specx.bench.ways import SUFFIX, exit_layer_of
from hf_specx.common.errors import require
from hf_specx.hub.folders import without_folders
from hf_specx.hub.known_pairs import EMBEDDED, check_known_name

from .console import errors_in_one_line


DRAFTS = (SUFFIX, "both")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LARGEST_SEED = 2**32 - 1

HELP_FILE = "Prompts, one per line; of a .jsonl file texts, or objects with prompt, text or messages."
PromptFile = Annotated[Path | None, typer.Option("--file", "--prompts", help=HELP_FILE, exists=True, dir_okay=False)]
Chat = Annotated[bool, typer.Option("--chat", help="Each prompt is a message: put it into the chat template.")]
Batches = Annotated[list[int] | None, typer.Option(help="Rows, once for each size; else 1 and 8.")]
Seed = Annotated[int, typer.Option(help="Of all random numbers.", min=0, max=LARGEST_SEED)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the folder of another pair, with all in it.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, and nothing else.")]
HELP_DEVICE = "cpu, cuda, cuda:1, auto; else accelerators if there are any."
HELP_KINDS = (
    "suffix: no model, but what followed the same tokens before",
    "exit:4: the target's first 4 layers",
    "both: the better of suffix and the pair's own",
)
HELP_NAMED = f"Id or folder of a draft for the target; or {'; '.join(HELP_KINDS)}; else the pair's own."


@dataclass(frozen=True)
class Source:
    """Which version of a repository on the Hub is read, and by whose right."""

    revision: Annotated[str | None, typer.Option(help="Commit, branch or tag on the Hub.")] = None
    token: Annotated[str | None, typer.Option(help="For the Hub; else the one of `hf auth login` or HF_TOKEN.")] = None

    @property
    def hub(self) -> dict[str, Any]:
        """The arguments of loading from the Hub that were given."""
        given = {name: getattr(self, name, None) for name in ("revision", "token", "trust_remote_code")}
        return {name: value for name, value in given.items() if value not in (None, False)}


@dataclass(frozen=True)
class TrustedSource(Source):
    """The same, and whether code of it is run."""

    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code of models and tokenizers; read it before.")
    ] = False


@dataclass(frozen=True)
class Loading(TrustedSource):
    """How models are loaded; the device as torch names it, "auto", or None for an accelerator if there is one."""

    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}; auto is as saved.")] = "auto"
    device: Annotated[str | None, typer.Option(help=HELP_DEVICE)] = None

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, f"--dtype {self.dtype} is unknown; choose one of {', '.join(DTYPES)}.")


@dataclass(frozen=True)
class Named(Loading):
    """The models that a command names: a pair, else a target with a draft, else the pair in the package.

    Raises:
        ValueError: for names that cannot be, or that contradict each other.
    """

    pair: Annotated[str | None, typer.Argument(help="Id or folder of a pair; else the one in the package.")] = None
    target: Annotated[str | None, typer.Option(help="Id or folder of a target, in place of a pair.")] = None
    draft: Annotated[str | None, typer.Option(help=HELP_NAMED)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        both = f"the pair {self.pair!r} and --target {self.target}"
        require(self.pair is None or self.target is None, f"{both} are two targets; leave one of them out.")
        told = f"--target {self.target} has no draft; name one with --draft, or take --draft suffix, which needs none."
        require(self.target is None or self.draft is not None, told)
        told = "--draft both needs the draft model of a pair, and --target names none; name a model, or take suffix."
        require(self.target is None or self.draft != DRAFTS[1], told)
        if self.target is None:
            check_name(self.shown_pair)
        is_kind(self.draft)  # "exit:" needs a number

    @property
    def shown_pair(self) -> str:
        return self.pair or EMBEDDED

    @property
    def name(self) -> str:
        """What results and messages call the models."""
        first = self.target or self.shown_pair
        return first if self.draft is None else f"{first} with {self.draft}"


@dataclass(frozen=True)
class NamedByOptions(Named):
    """The same for a command whose arguments are something else."""

    pair: Annotated[str | None, typer.Option(help="Id or folder of a pair; else the one in the package.")] = None


@dataclass(frozen=True)
class Warping:
    """How the distribution is changed before tokens are drawn from it."""

    temperature: Annotated[float, typer.Option(help="Temperature of sampling.")] = 1.0
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1 is off.")] = 1.0
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 is off.")] = 0


@dataclass(frozen=True)
class Sampling(Warping):
    """How text is generated.

    Raises:
        ValueError: a value is out of range, or contradicts --greedy.
    """

    greedy: Annotated[bool, typer.Option("--greedy", help="Argmax instead of sampling.")] = False
    max_new_tokens: Annotated[int, typer.Option(help="New tokens per row, at most.", min=1)] = 128

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_p, self.top_k)
        untouched = (self.temperature, self.top_p, self.top_k) == (1, 1, 0)
        told = "--greedy does not sample; leave --temperature, --top-p and --top-k out."
        require(untouched or not self.greedy, told)

    @property
    def call(self) -> dict[str, Any]:
        """The arguments of `generate`, also those that are off, since a model may have them on."""
        if self.greedy:
            return {"do_sample": False, "max_new_tokens": self.max_new_tokens}
        drawn = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {"do_sample": True, **drawn, "max_new_tokens": self.max_new_tokens}


def command(body: Callable[..., None]) -> Callable[..., None]:
    """A command for typer: in place of a parameter whose type is a group of options it has these options.

    Errors that a user can correct end it as `errors_in_one_line` says.
    """
    parameters = inspect.signature(body).parameters.values()
    groups: dict[str, Any] = {each.name: each.annotation for each in parameters if is_dataclass(each.annotation)}
    shown: list[inspect.Parameter] = []
    for each in parameters:
        shown += options_of(groups[each.name]) if each.name in groups else [each.replace(kind=each.KEYWORD_ONLY)]

    @wraps(body)
    def run(**given: Any) -> None:
        with errors_in_one_line():
            for name, group in groups.items():
                given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
            body(**given)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in shown}
    return run


def options_of(group: Any) -> list[inspect.Parameter]:
    """The options of a group: its own first, then those of the groups that it extends."""
    hints = get_type_hints(group, include_extras=True)
    names = dict.fromkeys(name for each in group.__mro__ for name in inspect.get_annotations(each))
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(x, kind, default=getattr(group, x), annotation=hints[x]) for x in names]


def check_name(name: str) -> None:
    """Raise a ValueError if there cannot be a pair of this name."""
    if "/" not in name and not Path(name).is_dir():
        check_known_name(name)


def is_kind(draft: str | None) -> bool:
    """Whether --draft names a kind of draft that needs no model: one of `DRAFTS`, or "exit:4" and the like."""
    return draft in DRAFTS or (draft is not None and exit_layer_of(draft) is not None)


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
