"""The command line `specx`: reads prompts, shows text by origin, reports and speeds. It decodes nothing itself."""

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .bench import Comparison, compare, emitted_per_row, encode, provenance
from .checks import check_choices
from .pairs import DraftTargetPair
from .report import RoundRecord
from .strategy import SpeculativeDecoding


try:
    import typer
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text
except ImportError as error:
    raise SystemExit("specx needs typer and rich: pip install 'hf_specx[cli]'") from error


# Figure 1 of Leviathan et al. 2022: accepted in green, corrections in blue; rejected candidates are not in the text
STYLES = {"accepted": "green", "recovered": "bright_blue", "bonus": "magenta"}
DTYPES = ("auto", "float32", "bfloat16")
DEMO_BATCHES = (1, 8)
MAX_SEED = 2**32 - 1

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_show_locals=False)


def main() -> None:
    """The entry point."""
    app()


@app.callback()
def specx() -> None:
    """Speculative sampling for Hugging Face transformers: the same distribution, faster."""
    logging.set_verbosity_error()  # its warnings and bars would fall between the lines of the text
    logging.disable_progress_bar()


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts, one batch.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option(help="Prompts, one a line.", exists=True, dir_okay=False)] = None,
    demo: Annotated[bool, typer.Option("--demo", help="The pair's own prompts, at batch 1 and 8.")] = False,
    pair: Annotated[str, typer.Option(help="Id or folder of a draft-target pair.")] = "embedded",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens a row, at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="Temperature of sampling.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="The k likeliest tokens; 0 is off.")] = 0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Argmax instead of sampling.")] = False,
    verification: Annotated[str | None, typer.Option(help="token, block or coupled; else the pair's.")] = None,
    num_draft_tokens: Annotated[str | None, typer.Option(help="A number or auto; else the pair's.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of all random numbers; else a new one.", min=0, max=MAX_SEED)
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)} (as saved).")] = "auto",
    repeats: Annotated[int, typer.Option(help="Timed runs of plain and of ours, an odd number.")] = 5,
    no_compare: Annotated[bool, typer.Option("--no-compare", help="No timing against plain generate.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document as the last line of stdout.")] = False,
) -> None:
    """Generate with a draft, show where each token came from, and time it against plain generate.

    Prompts come from the arguments, --file, --demo, or else standard input.
    """
    with errors_in_one_line():
        given = read_prompts(prompts or [], file, demo)
        if repeats < 1 or repeats % 2 == 0:
            raise ValueError(f"--repeats {repeats} has no middle run; give an odd number of 1 or more.")
        options = sampling_options(greedy, temperature, top_p, top_k) | {"max_new_tokens": max_new_tokens}
        loaded = load_pair(pair, dtype, **strategy_options(num_draft_tokens, verification))
        seed = torch.seed() % MAX_SEED if seed is None else seed
        session = Session(loaded, options, 0 if no_compare else repeats, seed)
        session.console.print(legend(), soft_wrap=True)
        runs = [session.run(batch) for batch in (demo_batches(loaded.prompts, pair) if demo else [given])]
    if as_json:
        source = {"pair": pair, "seed": seed, "options": options, **provenance(loaded.target)}
        typer.echo(json.dumps(source | {"runs": runs}))


@dataclass
class Session:
    """What every batch of a command shares; `repeats` is 0 where nothing is timed."""

    pair: DraftTargetPair
    options: dict[str, Any]
    repeats: int
    seed: int

    def __post_init__(self) -> None:
        self.console = Console()

    def run(self, prompts: list[str]) -> dict[str, Any]:
        """Generate for a batch, show all there is to show, and return the same as plain values."""
        target, tokenizer, strategy = self.pair.target, self.pair.tokenizer, self.pair.strategy
        assert tokenizer is not None
        inputs = encode(tokenizer, target, prompts, self.options["max_new_tokens"])
        input_ids = inputs["input_ids"]
        if len(prompts) == 1:
            self.console.print(Text(f"\n{prompts[0]}", "dim"), end="", soft_wrap=True)
            strategy.streamer, strategy.stream_by = OriginStreamer(strategy, tokenizer, self.console), "run"
        torch.manual_seed(self.seed)
        output = target.generate(**inputs, **self.options, custom_generate=strategy)  # type: ignore[operator]
        report, strategy.streamer, strategy.stream_by = strategy.report, None, "token"
        assert report is not None
        counts = emitted_per_row(output, input_ids.shape[1], target.generation_config.eos_token_id)
        new = [row[:n] for row, n in zip(output[:, input_ids.shape[1] :].tolist(), counts, strict=True)]
        if len(prompts) > 1:
            for row, (prompt, tokens) in enumerate(zip(prompts, new, strict=True)):
                body = coloured(tokens, report.history[row], TokenDecoder(tokenizer, input_ids[row].tolist()))
                self.console.print(Text.assemble((f"\n{row + 1}. {prompt}", "dim"), body), soft_wrap=True)
        self.console.print(Text(f"\n{report}"), soft_wrap=True)
        comparison = self.compare(inputs) if self.repeats else None
        return {
            "batch": len(prompts),
            "prompts": prompts,
            "texts": tokenizer.batch_decode(new, skip_special_tokens=True),
            "report": report.to_dict(),
            "comparison": None if comparison is None else comparison.to_dict(),
        }

    def compare(self, inputs: dict[str, torch.Tensor]) -> Comparison:
        """Time plain and ours in turns, and show it."""
        steps = 2 * (self.repeats + 1)
        console = Console(stderr=True)
        # refreshed between the runs only: a thread that draws would take its time from what is timed
        with Progress(
            console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
        ) as progress:
            task = progress.add_task("plain and speculative in turns", total=steps)
            progress.refresh()

            def advance() -> None:
                progress.update(task, advance=1, refresh=True)

            comparison = compare(
                self.pair.target, self.pair.strategy, inputs, self.options, self.repeats, self.seed, advance
            )
        self.console.print(Text(f"\n{comparison}"), soft_wrap=True)
        return comparison


class TokenDecoder:
    """Text token by token; bytes of an unfinished character wait for the token that completes it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: list[int]):
        self.tokenizer = tokenizer
        # some tokenizers strip a space at the start of a text, so the first token needs some before it
        self.ids = prompt[-8:]
        self.shown_from, self.shown_to = 0, len(self.ids)

    def push(self, token: int) -> str:
        """What this token adds to the text, with all that waited for it."""
        self.ids.append(token)
        added = self.rest()
        if not added or added.endswith("\ufffd"):
            return ""
        self.shown_from, self.shown_to = self.shown_to, len(self.ids)
        return added

    def rest(self) -> str:
        """What waits still; a character that stays unfinished is shown as the replacement character."""
        return self._decode(self.ids[self.shown_from :])[
            len(self._decode(self.ids[self.shown_from : self.shown_to])) :
        ]

    def _decode(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


class OriginStreamer(BaseStreamer):
    """Prints each run of tokens as it is emitted; the round that emitted it is the last one in the report."""

    def __init__(self, strategy: SpeculativeDecoding, tokenizer: PreTrainedTokenizerBase, console: Console):
        self.strategy, self.tokenizer, self.console = strategy, tokenizer, console
        self.decoder: TokenDecoder | None = None

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt [1, L] at first, then the tokens [n] of a round."""
        if self.decoder is None:
            self.decoder = TokenDecoder(self.tokenizer, value.flatten().tolist())
            return
        assert self.strategy.report is not None
        record = self.strategy.report.history[0][-1]
        self.console.print(coloured(value.tolist(), [record], self.decoder, last=False), end="", soft_wrap=True)

    def end(self) -> None:
        rest = "" if self.decoder is None else self.decoder.rest()
        self.console.print(Text(rest), soft_wrap=True)


def round_origins(record: RoundRecord) -> list[str]:
    """Where each of the tokens that a row emitted in a round came from."""
    accepted = min(record.accepted, record.emitted)
    follower = "bonus" if record.accepted == record.drafted else "recovered"
    return ["accepted"] * accepted + [follower] * (record.emitted - accepted)


def coloured(tokens: list[int], history: Iterable[RoundRecord], decoder: TokenDecoder, last: bool = True) -> Text:
    """The text of tokens, each in the style of its origin; `last` where nothing follows."""
    text = Text()
    origins = itertools.chain.from_iterable(map(round_origins, history))
    for token, origin in zip(tokens, origins, strict=False):  # a stop string may cut a row inside its last round
        text.append(decoder.push(token), STYLES[origin])
    return text.append(decoder.rest()) if last else text


def legend() -> Text:
    """What the styles mean."""
    accepted, recovered, bonus = STYLES.items()
    return Text.assemble(
        accepted, ": drafted; ", recovered, ": the target's, after a rejection; ", bonus, ": the target's, else"
    )


def read_prompts(prompts: list[str], file: Path | None, demo: bool) -> list[str]:
    """The prompts of the caller's one source; none for the demo, which has its own."""
    if (bool(prompts) + demo + (file is not None)) > 1:
        raise ValueError("prompts were given in more than one way; use arguments, --file or --demo.")
    if prompts or demo:
        return prompts
    text = ""
    if file is not None:
        text = file.read_text(encoding="utf-8")
    elif not sys.stdin.isatty():
        text = sys.stdin.read()
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError("no prompts; give them as arguments, with --file, on standard input, or use --demo.")
    return lines


def demo_batches(prompts: list[str], pair: str) -> list[list[str]]:
    """The pair's own prompts at each of `DEMO_BATCHES`, repeated where there are not enough."""
    if not prompts:
        raise ValueError(f"--demo: the pair {pair!r} has no prompts of its own; give some as arguments.")
    return [list(itertools.islice(itertools.cycle(prompts), size)) for size in DEMO_BATCHES]


def sampling_options(greedy: bool, temperature: float, top_p: float, top_k: int) -> dict[str, Any]:
    """What `generate` is told about drawing tokens; "off" is told too, since a model's own settings may differ."""
    if not greedy:
        return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    if temperature != 1 or top_p != 1 or top_k != 0:
        raise ValueError("--greedy draws nothing; leave --temperature, --top-p and --top-k out.")
    return {"do_sample": False}


def strategy_options(num_draft_tokens: str | None, verification: str | None) -> dict[str, Any]:
    """The strategy's options among what was given; checked here, since loading a pair may take minutes."""
    number: str | int | None = num_draft_tokens
    if isinstance(number, str) and number.removeprefix("-").isdecimal():
        number = int(number)
    check_choices("auto" if number is None else number, verification)
    given = {"num_draft_tokens": number, "verification": verification}
    return {name: value for name, value in given.items() if value is not None}


def load_pair(name: str, dtype: str, **options: Any) -> DraftTargetPair:
    """The pair, on the accelerator if there is one, and its strategy with `options` instead of its own."""
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype} is unknown; choose one of {', '.join(DTYPES)}.")
    placed = {"device_map": "auto"} if torch.cuda.is_available() else {}
    pair = DraftTargetPair.from_pretrained(name, dtype=dtype, **placed)
    if pair.tokenizer is None:
        raise ValueError(f"the pair {name!r} has no tokenizer, so it cannot read text.")
    for option, value in options.items():
        setattr(pair.strategy, option, value)
    return pair


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End with code 2 and one red line on stderr for what a user can mend."""
    try:
        yield
    except (ValueError, OSError) as error:
        Console(stderr=True).print(Text(f"error: {' '.join(str(error).split())}", "red"), soft_wrap=True)
        raise typer.Exit(2) from error
