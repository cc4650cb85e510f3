"""`specx generate`: text coloured by origin, a report, and the speed compared with plain `generate`; or a file."""

import importlib.util
import json
import os
import secrets
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specx.common.errors import require
from hf_specx.engine.check_options import check_choices, check_tree
from hf_specx.hub.known_pairs import EMBEDDED
from hf_specx.hub.locks import check_free
from hf_specx.pairs.results_file import check_results_path

from .console import WRONG, going_on_with, imports, say
from .options import (
    LARGEST_SEED,
    AsJson,
    DecodingOptions,
    LoadingOptions,
    PairByOption,
    ProcessorOptions,
    PromptOptions,
    command,
)
from .prompts import Prompts, apply_chat_option, read_prompts


TIMED_TURNS = 5  # of the demo
BATCH_SIZE = 8  # of --out
WAYS_TO_GIVE_PROMPTS = "as arguments, with --prompts FILE or --dataset NAME, on standard input, or use --demo"
DEMO_TEMPERATURE = 0.5  # at which small models write text that can be read
HELLO = "Speculative sampling with the pair {}: about two minutes on two cores. Loading ..."
LONGEST_PATH = 4096
HELP_STOP = "A text at which a row ends, once for each; \\n in it is a line break."
HELP_COMPILE = "Compile the forwards: the first text of each size takes seconds longer."
HELP_REPEATS = "Time it against plain generate, in so many turns."
HELP_SEED = "Seed of all random numbers. By default 0 with --demo or --out, else a new one in each run. With --out, "
HELP_SEED += "prompt i has the seed SEED + i."
HELP_TREE = "Let several candidates follow one token: at most so many a row and round, auto or no; else as the pair "
HELP_TREE += "recommends."
HELP_VERIFICATION = "How candidates are judged: token, block or coupled; else as the pair recommends."
HELP_NUMBER = "Candidates a round: a number or auto; else as the pair recommends."
HELP_SCHEMA = "File with a JSON schema that each text follows; needs xgrammar."
HELP_THINKING = "Tokens after <think>, at most; then </think> is forced. A JSON schema begins after it."
HELP_BATCH_SIZE = f"Rows of a batch with --out; else {BATCH_SIZE}."
HELP_OUT = (
    "File that texts are written to, one JSON object a line. The same command goes on where it was interrupted; "
    "processes of torchrun or accelerate launch share the prompts."
)


@command
def generate(
    source: PromptOptions,
    sampling: DecodingOptions,
    processing: ProcessorOptions,
    named: PairByOption,
    loading: LoadingOptions,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts, decoded as one batch.", show_default=False)
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="The pair's own prompts, at batch 1 and 8.")] = False,
    verification: Annotated[str | None, typer.Option(help=HELP_VERIFICATION)] = None,
    num_draft_tokens: Annotated[str | None, typer.Option(help=HELP_NUMBER)] = None,
    tree: Annotated[str | None, typer.Option(help=HELP_TREE)] = None,
    stop: Annotated[list[str] | None, typer.Option(help=HELP_STOP, show_default=False)] = None,
    compile: Annotated[bool, typer.Option("--compile", help=HELP_COMPILE)] = False,
    seed: Annotated[int | None, typer.Option(help=HELP_SEED, min=0, max=LARGEST_SEED)] = None,
    repeats: Annotated[int | None, typer.Option(help=HELP_REPEATS, min=1)] = None,
    thinking_budget: Annotated[int | None, typer.Option(help=HELP_THINKING, min=0)] = None,
    json_schema: Annotated[Path | None, typer.Option(help=HELP_SCHEMA, exists=True, dir_okay=False)] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help=HELP_OUT)] = None,
    batch_size: Annotated[int | None, typer.Option(help=HELP_BATCH_SIZE, min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Generate with a draft, show where each token came from, and report what the draft gained; or write to a file.

    Prompts come from the arguments, --prompts, --dataset, --demo, or else standard input. Texts go to standard output,
    all else to standard error. Options that are left out come from the target's generation config.
    """
    check_out_alone(out, batch_size, demo or repeats is not None)
    strategy = strategy_options(num_draft_tokens, verification, tree) | ({"compile": True} if compile else {})
    if json_schema is not None:
        check_json_schema(json_schema)
    num_sources = bool(prompts) + demo + source.is_named
    require(num_sources <= 1, "prompts were given in more than one way; use arguments, --prompts or --demo.")
    for prompt in prompts or ():
        check_no_model(prompt)
    chosen: Prompts = [apply_chat_option(prompt, source.chat) for prompt in prompts or ()]
    if not chosen and not demo:
        chosen = read_prompts(source, WAYS_TO_GIVE_PROMPTS)
    options, turns = processing.beside(sampling), repeats or (TIMED_TURNS if demo else 0)
    if stop:
        options["stop_strings"] = [text.replace("\\n", "\n").replace("\\t", "\t") for text in stop]
    if demo:
        say(HELLO.format(named.name))
        if options.get("do_sample", True):
            options = {"do_sample": True, "temperature": DEMO_TEMPERATURE, "top_k": 0} | options
    with going_on_with(out):
        with imports():
            from .loading import load_named
            from .session import Session, processors_of, show_demo, write_texts
            from .setting_sources import naming_files
        pair = load_named(named, loading, source.chat)
        if seed is None:
            seed = 0 if demo or out else secrets.randbelow(LARGEST_SEED)
        processors = processors_of(pair, thinking_budget, json_schema)
        with naming_files(pair, options | strategy):
            session = Session(pair, named.name, strategy, options, processors, source.template_options, seed, as_json)
            if demo:
                results = {"runs": show_demo(session, turns)}
            elif out is not None:
                results = write_texts(session, chosen, out, batch_size or BATCH_SIZE)
            else:
                results = {"runs": [session.answer(chosen, turns)]}
    if as_json:
        typer.echo(json.dumps(session.facts | results))
    if results.get("refused"):
        raise typer.Exit(WRONG)


def check_no_model(prompt: str) -> None:
    """Raise a ValueError for what is no prompt, but a pair or the folder of one, or of anything else."""
    is_folder = prompt != "" and len(prompt) < LONGEST_PATH and "\0" not in prompt and Path(prompt).is_dir()
    require(
        not is_folder and prompt != EMBEDDED,
        f"{prompt!r} is {'a folder' if is_folder else 'a pair'}, and stands where a prompt belongs; did you mean "
        f"--pair {shlex.quote(prompt)}? (A prompt of these words: on standard input.)",
    )


def strategy_options(
    num_draft_tokens: str | None, verification: str | None, tree: str | None = None
) -> dict[str, Any]:
    """The options of `SpeculativeDecoding` that were typed."""
    number, nodes = typed_number(num_draft_tokens), False if tree == "no" else typed_number(tree)
    check_choices("auto" if number is None else number, verification)
    check_tree(False if nodes is None else nodes)
    options = {"num_draft_tokens": number, "verification": verification, "tree": nodes}
    return {option: value for option, value in options.items() if value is not None}


def typed_number(value: str | None) -> Any:
    """An int where one was typed, else the value."""
    return int(value) if value is not None and value.removeprefix("-").isdecimal() else value


def check_json_schema(file: Path) -> None:
    """Raise a ValueError, before models are loaded, if xgrammar is not installed, or a file of it is no JSON."""
    is_installed = importlib.util.find_spec("xgrammar") is not None
    require(is_installed, "--json-schema needs xgrammar, which is not installed; pip install xgrammar.")
    try:
        json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"--json-schema {file} is no JSON ({error}); give a file with a JSON schema.") from error


def check_out_alone(out: Path | None, batch_size: int | None, timed: bool) -> None:
    """Raise ValueError for options that exclude each other, and for a file that is in use or is no file of results."""
    require(batch_size is None or out is not None, "--batch-size is for --out; without it all prompts are one batch.")
    require(out is None or not timed, "--out shows and times nothing; leave --demo and --repeats out.")
    if out is not None:
        check_results_path(out)
        if os.environ.get("RANK", "0") == "0":  # else the first process of the launch may have it already
            check_free(out.resolve())
