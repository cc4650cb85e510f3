"""Options that several commands share, each declared once, in groups with their checks.

Names are those of Python: of `generate`, `from_pretrained`, and of this package.
"""

import inspect
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specx.bench.checks import check_processing, check_sampling
from hf_specx.common.chats import check_template_options
from hf_specx.common.drafts import HELP_DRAFT, read_draft, split_revision
from hf_specx.common.errors import require
from hf_specx.hub.folders import without_folders
from hf_specx.hub.known_pairs import EMBEDDED, check_without_owner

from .console import errors_in_one_line


QUANTIZED = ("4bit",)
HELP_QUANTIZE = (
    "4bit: load the target with weights of 4 bits, by bitsandbytes or else torchao; the draft stays as it is."
)
DTYPES = ("auto", "float32", "bfloat16", "float16")
SAMPLING_OPTIONS = ("temperature", "top_p", "top_k")  # what greedy decoding has none of
LARGEST_SEED = 2**32 - 1

PERHAPS_AT = "perhaps with @ and a commit, branch or tag"
HELP_PAIR = f"A pair, or with --draft a target: id ({PERHAPS_AT}) or folder; else the pair in the package."
HELP_TARGET = f"Id ({PERHAPS_AT}) or folder of the target; {EMBEDDED} is the target in the package."
HELP_PROMPTS = (
    "File with a prompt in each line; blank lines are left out. In a .jsonl file a line is a text in quotes, or an "
    "object with prompt, text or messages."
)
HELP_PENALTY = "Penalty for tokens that are in the text already; 1 is off."
HELP_MIN_P = "Leave out tokens with less than this share of the likeliest one's probability; 0 is off."
HELP_DATASET = (
    "Dataset whose rows are the prompts: id on the Hub, perhaps with : and a configuration, or folder. It is read by "
    "the package datasets."
)
HELP_SPLIT = "Split of the dataset, such as test or test[:100]; else train."
HELP_COLUMN = "Column of the dataset with texts or messages; else prompt, text or messages, whichever it has."
HELP_CHAT = "Put prompts into the target's chat template; a text counts as a message of the user."
HELP_DTYPE = f"Precision of all models: {', '.join(DTYPES)}; auto is as they were saved."
HELP_DEVICE_MAP = "cpu, cuda, cuda:1 or auto; else an accelerator if there is one."
HELP_TEMPLATE = "What the template reads besides messages, in JSON: '{\"enable_thinking\": false}'."
Batches = Annotated[
    list[int] | None, typer.Option("--batch-size", help="Rows of a batch, once for each size; else 1 and 8.")
]
Seed = Annotated[int, typer.Option(help="Seed of all random numbers.", min=0, max=LARGEST_SEED)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the folder of another pair, with all in it.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, and nothing else.")]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that models and tokenizers bring; read it first.")
]


@dataclass(frozen=True)
class PromptOptions:
    """The options --prompts, --chat and --chat-template-kwargs."""

    file: Annotated[Path | None, typer.Option("--prompts", help=HELP_PROMPTS, exists=True, dir_okay=False)] = None
    dataset: Annotated[str | None, typer.Option(help=HELP_DATASET)] = None
    split: Annotated[str | None, typer.Option(help=HELP_SPLIT)] = None
    column: Annotated[str | None, typer.Option(help=HELP_COLUMN)] = None
    chat: Annotated[bool, typer.Option("--chat", help=HELP_CHAT)] = False
    chat_template_kwargs: Annotated[str | None, typer.Option(metavar="JSON", help=HELP_TEMPLATE)] = None

    def __post_init__(self) -> None:
        require(
            self.file is None or self.dataset is None,
            f"--prompts {self.file} and --dataset {self.dataset} both give prompts; leave one of them out.",
        )
        for name in ("split", "column"):
            value = getattr(self, name)
            require(
                self.dataset is not None or value is None,
                f"--{name} {value} is for --dataset, which was not given; give it, or leave --{name} out.",
            )
        typed = self.chat_template_kwargs
        require(
            typed is None or self.chat,
            f"--chat-template-kwargs {typed} is for messages; add --chat, or leave it out.",
        )
        check_template_options(self.template_options, f"--chat-template-kwargs {typed}")

    @property
    def template_options(self) -> dict[str, Any]:
        """What the chat template reads besides the messages, by name."""
        if self.chat_template_kwargs is None:
            return {}
        try:
            options: dict[str, Any] = json.loads(self.chat_template_kwargs)
        except ValueError as error:
            raise ValueError(
                f"--chat-template-kwargs {self.chat_template_kwargs} is no JSON ({error}); write it like "
                """--chat-template-kwargs '{"enable_thinking": false}'."""
            ) from error
        return options

    @property
    def is_named(self) -> bool:
        """Whether a file or a dataset is named."""
        return self.file is not None or self.dataset is not None


@dataclass(frozen=True)
class LoadingOptions:
    """The options by which models are loaded; `device_map` None is an accelerator if there is one."""

    dtype: Annotated[str, typer.Option(help=HELP_DTYPE)] = "auto"
    device_map: Annotated[str | None, typer.Option(help=HELP_DEVICE_MAP)] = None
    quantize: Annotated[str | None, typer.Option(help=HELP_QUANTIZE)] = None
    trust_remote_code: Trust = False

    def __post_init__(self) -> None:
        require(
            self.quantize in (None, *QUANTIZED),
            f"--quantize {self.quantize} is unknown; choose one of {', '.join(QUANTIZED)}.",
        )
        packages = [name for name in ("bitsandbytes", "torchao") if find_spec(name) is not None]
        require(
            self.quantize is None or bool(packages),
            f"--quantize {self.quantize} needs bitsandbytes or torchao, and neither is installed; pip install "
            "bitsandbytes.",
        )
        require(self.dtype in DTYPES, f"--dtype {self.dtype} is unknown; choose one of {', '.join(DTYPES)}.")


@dataclass(frozen=True)
class PairOptions:
    """The models that a command names: a pair, perhaps with another draft, or a target and a draft.

    Raises ValueError if there can be no models of these names.
    """

    pair: Annotated[str | None, typer.Argument(metavar="[PAIR|TARGET]", help=HELP_PAIR)] = None
    draft: Annotated[str | None, typer.Option(help=HELP_DRAFT)] = None

    def __post_init__(self) -> None:
        require(
            self.pair is not None or self.draft is None,
            f"--draft {self.draft} needs a target; name one, as in specx bench TARGET --draft {self.draft} or specx "
            f"generate PROMPT --target TARGET --draft {self.draft} (embedded is that in the package).",
        )
        if self.draft is None:
            check_name(self.first)
        else:
            read_draft(self.draft)

    @property
    def first(self) -> str:
        """The name of the pair or the target."""
        return EMBEDDED if self.pair is None else self.pair

    @property
    def name(self) -> str:
        """The name of the models in results and messages."""
        return self.first if self.draft is None else f"{self.first} with {self.draft}"


@dataclass(frozen=True)
class PairByOption(PairOptions):
    """`PairOptions` for a command whose arguments are something else: the pair is an option."""

    pair: Annotated[str | None, typer.Option("--target", "--pair", metavar="NAME", help=HELP_PAIR)] = None


@dataclass(frozen=True)
class ProcessorOptions:
    """What changes the target's distribution besides how it is drawn from; None comes from its generation config."""

    min_p: Annotated[float | None, typer.Option(help=HELP_MIN_P)] = None
    repetition_penalty: Annotated[float | None, typer.Option(help=HELP_PENALTY)] = None

    def __post_init__(self) -> None:
        check_processing(self.min_p, self.repetition_penalty)

    @property
    def options(self) -> dict[str, Any]:
        """Those that were typed, as arguments of `generate`."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def beside(self, sampling: "DecodingOptions") -> dict[str, Any]:
        """All arguments of `generate` that were typed; a min-p says that tokens are drawn, as a temperature does."""
        options = sampling.options | self.options
        if self.min_p is None:
            return options
        require(sampling.do_sample is not False, "--no-do-sample draws nothing; leave --min-p out.")
        return {"do_sample": True} | options


@dataclass(frozen=True)
class SamplingOptions:
    """The options by which tokens are sampled, and how many; None is as the target's generation config says."""

    max_new_tokens: Annotated[int | None, typer.Option(help="New tokens of a row, at most.", min=1)] = None
    temperature: Annotated[float | None, typer.Option(help="Temperature of sampling.")] = None
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling; 1 is off.")] = None
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 is off.")] = None

    def __post_init__(self) -> None:
        values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} | self.options
        check_sampling(values["temperature"], values["top_p"], values["top_k"])

    @property
    def options(self) -> dict[str, Any]:
        """The options that were typed, as arguments of `generate`."""
        values = {name: getattr(self, name) for name in (*SAMPLING_OPTIONS, "max_new_tokens")}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class DecodingOptions(SamplingOptions):
    """`SamplingOptions` with --do-sample; a temperature, top-p or top-k that was typed implies it."""

    do_sample: Annotated[
        bool | None, typer.Option("--do-sample/--no-do-sample", help="Sample, or decode greedily.")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.do_sample is not False or not self.options.keys() & set(SAMPLING_OPTIONS),
            "--no-do-sample draws nothing; leave --temperature, --top-p and --top-k out.",
        )

    @property
    def options(self) -> dict[str, Any]:
        """The options that were typed, as arguments of `generate`, with do_sample where the others imply it."""
        options = super().options
        if self.do_sample is not None:
            return {"do_sample": self.do_sample} | options
        if options.keys() & set(SAMPLING_OPTIONS):
            return {"do_sample": True} | options
        return options


def command(body: Callable[..., None]) -> Callable[..., None]:
    """A typer command made of a function: a parameter whose type is a group of options becomes these options.

    Errors that a user can correct end it as `errors_in_one_line` says.
    """
    parameters = inspect.signature(body).parameters.values()
    groups: dict[str, Any] = {
        parameter.name: parameter.annotation for parameter in parameters if is_dataclass(parameter.annotation)
    }
    options: list[inspect.Parameter] = []
    for parameter in parameters:
        if parameter.name in groups:
            options += inspect.signature(groups[parameter.name]).parameters.values()
        else:
            options.append(parameter)
    options = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]

    @wraps(body)
    def call(**values: Any) -> None:
        with errors_in_one_line():
            for name, group in groups.items():
                values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
            body(**values)

    call.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    call.__annotations__ = {option.name: option.annotation for option in options}
    return call


def check_name(name: str) -> None:
    """Raise a ValueError if there cannot be a pair of this name."""
    name, _ = split_revision(name)
    if "/" not in name and not Path(name).is_dir():
        check_without_owner(name)


def typed() -> str:
    """The command as it was typed, without folders of this machine, since it is saved and published."""
    return without_folders(shlex.join(["specx", *sys.argv[1:]]))
