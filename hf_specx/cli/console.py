"""What commands print: text coloured by the origin of its tokens, progress, and errors in one line."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_specx.engine.history import RoundRecord
from hf_specx.strategy import SpeculativeDecoding


OPTIONS = {  # argument to option
    "overwrite=True": "--overwrite",
    "trust_remote_code=True": "--trust-remote-code",
    "temperature=": "--temperature ",
    "top_p=": "--top-p ",
    "top_k=": "--top-k ",
    "do_sample=False": "--greedy",
    "batch_size=": "--batch-size ",
    "lora=": "--lora ",
}
# Figure 1 of Leviathan et al. 2022: accepted in green, corrections in blue; rejected candidates are not shown
STYLES = {"accepted": "green", "recovered": "bright_blue", "bonus": "magenta", "forced": "yellow"}


class TokenDecoder:
    """Decodes token by token; a token that ends inside a character waits for the one that completes it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: list[int]):
        self.tokenizer = tokenizer
        # some tokenizers strip a space at the start of a text, so the last tokens of the prompt come first
        self.ids = prompt[-8:]
        self.shown_from, self.shown_to = 0, len(self.ids)

    def push(self, token: int) -> str:
        """The text that this token adds, with that of tokens that waited; "" if it has to wait."""
        self.ids.append(token)
        added = self.rest()
        if not added or added.endswith("\ufffd"):
            return ""
        self.shown_from, self.shown_to = self.shown_to, len(self.ids)
        return added

    def rest(self) -> str:
        """The text of tokens that still wait; an unfinished character is shown as the replacement character."""
        return self._decode(self.ids[self.shown_from :])[
            len(self._decode(self.ids[self.shown_from : self.shown_to])) :
        ]

    def _decode(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


class OriginStreamer(BaseStreamer):
    """Prints what each round has emitted; that round is the last one in the report."""

    def __init__(self, strategy: SpeculativeDecoding, tokenizer: PreTrainedTokenizerBase, console: Console):
        self.strategy, self.tokenizer, self.console = strategy, tokenizer, console
        self.decoder: TokenDecoder | None = None

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt [1, L] in the first call, then the tokens [n] of a round."""
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
    """The origin of each token that a row emitted in a round: a key of `STYLES`."""
    accepted = min(record.accepted, record.emitted)
    follower = "bonus" if record.accepted == record.drafted else "recovered"
    kept = ["forced" if position in record.forced else "accepted" for position in range(accepted)]
    return kept + [follower] * (record.emitted - accepted)


def coloured(tokens: list[int], history: Iterable[RoundRecord], decoder: TokenDecoder, last: bool = True) -> Text:
    """The text of tokens, each in the style of its origin.

    Args:
        tokens: emitted by one row.
        history: the rounds that emitted them.
        decoder: has read the text before them.
        last: whether the text ends here, True unless given.
    """
    text = Text()
    origins = itertools.chain.from_iterable(map(round_origins, history))
    for token, origin in zip(tokens, origins, strict=False):  # a stop string may cut a row within its last round
        text.append(decoder.push(token), STYLES[origin])
    return text.append(decoder.rest()) if last else text


def legend() -> Text:
    """One line that explains the styles."""
    accepted, recovered, bonus, forced = STYLES.items()
    drafted = Text.assemble(accepted, ": drafted; ", forced, ": the only token allowed; ")
    return Text.assemble(drafted, recovered, ": the target's, after a rejection; ", bonus, ": the target's, else")


def figure(value: Any) -> str:
    """A number, or the median of a `spread`, with two decimals; "-" where it is not known."""
    value = value["median"] if isinstance(value, dict) else value
    return "-" if value is None else f"{value:.2f}"


@contextmanager
def progress(text: str, steps: int) -> Iterator[Callable[[], object]]:
    """A progress bar on stderr, if that is a terminal; yields a function to be called after each step.

    It is drawn between steps only, since a thread that draws would slow down what is timed.
    """
    console = Console(stderr=True)
    with Progress(console=console, transient=True, auto_refresh=False, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=steps)
        bar.refresh()
        yield lambda: bar.update(task, advance=1, refresh=True)


def error_line(error: object) -> str:
    """The message of an error, with options of commands where it names arguments of functions."""
    text = " ".join(str(error).split())
    for argument, option in OPTIONS.items():
        text = text.replace(argument, option)
    return text


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """For errors that a user can correct: print one red line on stderr, and exit with code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        Console(stderr=True).print(Text(f"error: {error_line(error)}", "red"), soft_wrap=True)
        raise typer.Exit(2) from error
