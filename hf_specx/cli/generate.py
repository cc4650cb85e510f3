"""`specx generate`: text coloured by origin, a report, and the speed compared with plain `generate`."""

import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer

from hf_specx.common.errors import require
from hf_specx.hub.folders import check_writable
from hf_specx.pairs.results_file import check_results_path

from . import options
from .console import errors_in_one_line, imports
from .prompts import check_messages, given_prompts


TIMED_TURNS = 5
BATCH_SIZE = 8  # of --out
WAYS = "as arguments, with --file, on standard input, or use --demo"
DEMO_TEMPERATURE = 0.5  # at which small models write text that can be read
HELLO = "Speculative sampling with the pair {}: about two minutes on two cores. Loading ..."
HELP_TIMED_TURNS = f"Timed runs of each of them, odd; else {TIMED_TURNS}."
HELP_SEED = "Of all random numbers; else a new one, with --demo and --out 0. With --out prompt i has this one + i."
HELP_SCHEMA = "File with a JSON schema that each text follows; needs xgrammar."
HELP_BATCH_SIZE = f"Rows of a batch with --out; else {BATCH_SIZE}."
HELP_OUT = (
    "Complete prompts, any number, to this file of JSON lines. The same command goes on where it was interrupted; "
    "several at a time share the prompts."
)


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts, one batch.", show_default=False)] = None,
    file: options.PromptFile = None,
    chat: options.Chat = False,
    demo: Annotated[bool, typer.Option("--demo", help="The pair's own prompts, at batch 1 and 8.")] = False,
    pair: Annotated[str | None, typer.Option(help="Id or folder of a pair; else the one in the package.")] = None,
    target: options.TargetName = None,
    draft: options.DraftName = None,
    revision: options.Revision = None,
    token: options.Token = None,
    trust_remote_code: options.Trust = False,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    greedy: options.Greedy = False,
    verification: Annotated[str | None, typer.Option(help="token, block or coupled; else the pair's.")] = None,
    num_draft_tokens: Annotated[str | None, typer.Option(help="A number or auto; else the pair's.")] = None,
    seed: Annotated[int | None, typer.Option(help=HELP_SEED, min=0, max=options.LARGEST_SEED)] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    compare: Annotated[bool, typer.Option("--compare", help="Time it against plain generate, in turns.")] = False,
    repeats: Annotated[int | None, typer.Option(help=HELP_TIMED_TURNS)] = None,
    json_schema: Annotated[Path | None, typer.Option(help=HELP_SCHEMA, exists=True, dir_okay=False)] = None,
    out: Annotated[Path | None, typer.Option(help=HELP_OUT)] = None,
    batch_size: Annotated[int | None, typer.Option(help=HELP_BATCH_SIZE, min=1)] = None,
    as_json: options.AsJson = False,
) -> None:
    """Generate with a draft, show where each token came from, and report what the draft was worth; or fill a file.

    Prompts come from the arguments, --file, --demo, or else standard input. Models: a pair, or --target and --draft.
    """
    with errors_in_one_line(kept=out):
        timed = checked_turns(repeats, compare or demo, out, batch_size)
        temperature = DEMO_TEMPERATURE if demo and not greedy and temperature == 1 else temperature
        call = options.sampling_options(greedy, temperature, top_p, top_k, max_new_tokens)
        chosen = options.strategy_options(num_draft_tokens, verification)
        hub = options.hub_options(revision, token, trust_remote_code)
        named = options.Named(pair, target, draft, dtype, device, hub)
        check_json_schema(json_schema)
        check_messages(given := given_prompts(prompts or [], file, WAYS, demo), chat)
        if demo and not as_json:
            typer.echo(HELLO.format(named.name))
        with imports():
            from .session import open_session
        seed = 0 if seed is None and (demo or out) else seed
        session = open_session(named, chosen, json_schema, seed, options=call, repeats=timed, quiet=as_json)
        found = session.demonstrate() if demo else session.answer(given, chat, out, batch_size or BATCH_SIZE)
        if as_json:
            typer.echo(json.dumps(found))


def check_json_schema(file: Path | None) -> None:
    """Raise a ValueError, before models are loaded, if xgrammar is not installed, or a file of it is no JSON."""
    if file is None:
        return
    found = importlib.util.find_spec("xgrammar") is not None
    require(found, "--json-schema needs xgrammar, which is not installed; pip install xgrammar.")
    try:
        json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"--json-schema {file} is no JSON ({error}); give a file with a JSON schema.") from error


def checked_turns(repeats: int | None, timed: bool, out: Path | None, batch_size: int | None) -> int:
    """Timed runs of each contender, 0 if nothing is timed.

    Raises:
        ValueError: their number has no middle run, --out can be no such file, or two options exclude each other.
    """
    require(batch_size is None or out is not None, "--batch-size is for --out; without it all prompts are one batch.")
    require(out is None or not timed, "--out shows and times nothing; leave --demo and --compare out.")
    if out is not None:
        check_results_path(out)
        check_writable(out.absolute().parent, out)
    if repeats is None:
        return TIMED_TURNS if timed else 0
    require(timed, "--repeats is for --compare, which times both ways to generate; add it, or leave --repeats out.")
    odd = repeats >= 1 and repeats % 2 == 1
    require(odd, f"--repeats {repeats} has no middle run; give an odd number of 1 or more.")
    return repeats
