"""What all commands print: tables, progress, and errors in one line; nothing that takes time is imported for it."""

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from hf_specx.common.errors import OptionError, brief, is_out_of_memory


SAME_NAME = """
    temperature top_p top_k max_new_tokens num_draft_tokens verification samples prompt_tokens repeats phases
    texts_per_phase min_p repetition_penalty
""".split()  # noqa: SIM905
FLAGS = {name: f"--{name.replace('_', '-')}" for name in SAME_NAME}  # of options in Python
WRONG, BROKEN, PIPE_CLOSED = 2, 3, 141  # exit codes; the last is 128 and the number of the signal
# of `specx check` and `specx tune`
VERDICTS = {
    "passed": "green",
    "failed": "red",
    "not tested": "yellow",
    "ok": "green",
    "note": "yellow",
    "error": "red",
}
INDENT = max(map(len, VERDICTS)) + 2
BAR_AFTER, NEXT_LINE_AFTER = 3.0, 10.0  # seconds: before a bar appears; between lines, where there is no terminal
SPEEDUP_COLUMNS = {  # of all tables of speed, with what is in them
    "speed-up": "how many times as fast as plain generate, as measured",
    "limit": "the speed-up if both took nothing but their forwards; plain steps take longer, so measured may be more",
    "Theorem 3.8": "the limit if the target took as long for all candidates as for one token",
}


class Output(Console):
    """A rich console for the output of commands; where the reader has closed the pipe it raises BrokenPipeError."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def text(self, text: object, style: str = "") -> None:
        """Print a text as it is: no markup, and wrapped by the terminal alone."""
        self.print(text if isinstance(text, Text) else Text(str(text), style), soft_wrap=True)

    def verdict(self, verdict: str, what: str, note: str) -> None:
        """Print a verdict and on what it is, with a note below it."""
        self.text(Text.assemble((f"{verdict:{INDENT}}", VERDICTS[verdict]), what))
        if note:
            self.print(Padding(Text(note, "dim"), (0, 0, 0, INDENT), expand=False))

    def figures(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table of figures, of which none is cut: where a terminal is too narrow, lines are longer."""
        table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
        for heading in headings:
            table.add_column(heading.replace(" ", "\n"), justify="right" if table.columns else "left")
        for row in rows:
            table.add_row(*map(Text, row))
        table.width = self.measure(table, options=self.options.update(max_width=sys.maxsize)).maximum
        self.print(table, crop=False)


def figure(value: Any) -> str:
    """A number, or the median of a `spread`, with two decimals; "-" where it is not known."""
    value = value["median"] if isinstance(value, dict) else value
    return "-" if value is None else f"{value:.2f}"


@contextmanager
def imports() -> Iterator[None]:
    """A context in which torch and what needs it are imported, which takes seconds.

    Ctrl-C ends the process at once meanwhile: half-imported modules answer it with errors of their own.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
        from transformers.utils import logging

        logging.set_verbosity_error()  # its warnings and progress bars would mix with the output
        logging.disable_progress_bar()
    finally:
        signal.signal(signal.SIGINT, handler)


def waiting_for(doing: str) -> AbstractContextManager[object]:
    """A context in which a terminal shows what is being waited for."""
    return Output(stderr=True).status(doing)


def steps(doing: str, total: int | None = None) -> tqdm:
    """A progress bar on stderr, moved by `update`; where that is no terminal, a line now and then.

    Without a total it shows a number in place of a bar. It is drawn by `update` only: a thread that draws would slow
    down what is timed.
    """
    of_total = "" if total is None else " of {total_fmt}"
    text = f"{doing}: {{n_fmt}}{of_total} in {{elapsed}}"
    in_terminal = sys.stderr.isatty()
    bar_format = f"{text}\n"
    if in_terminal:
        bar_format = f"{{bar:20}} {text}" if total else text
    return tqdm(
        total=total,
        leave=not in_terminal,
        delay=BAR_AFTER if in_terminal else NEXT_LINE_AFTER,
        mininterval=0.1 if in_terminal else NEXT_LINE_AFTER,
        bar_format=bar_format,
    )


def error_line(error: object) -> str:
    """The message of an error in one line; an option that it is about is called as it is typed."""
    text = str(error)
    if isinstance(error, OptionError) and error.option in FLAGS:
        text = f"{FLAGS[error.option]} {brief(error.value)} {error.rest}"
    elif isinstance(error, Exception) and is_out_of_memory(error):
        text = "memory is not enough; use smaller batches, fewer new tokens, shorter prompts or another --dtype. "
        text += f"What ran out of it said: {error}"
    return " ".join(text.split())


def say(message: str, style: str = "") -> None:
    """Print a line on stderr, unless its reader has closed it."""
    try:
        Output(stderr=True).text(message, style)
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """Discard the output that is still to be written."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        os.dup2(nowhere, stream.fileno())


def say_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """Print a warning, unless it is about code that will have to change, which who types a command has not written."""
    if not issubclass(category, DeprecationWarning | PendingDeprecationWarning | FutureWarning):
        say(f"warning: {error_line(message)}", "yellow")


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """A context that prints an error which a user can correct as one red line on stderr, and exits with code 2.

    Warnings become lines too, but not those for developers. Any other error is printed with its traceback, and ends
    with code 3, since 1 is for a failed check alone. Where the reader of the output has closed it, the code is 141, as
    of other programs; typer ends Ctrl-C with 130.
    """
    with warnings.catch_warnings():
        warnings.showwarning = say_warning
        try:
            yield
        except BrokenPipeError as error:
            drop_output()
            raise typer.Exit(PIPE_CLOSED) from error
        except typer.Exit:
            raise
        except Exception as error:
            if not isinstance(error, ValueError | OSError) and not is_out_of_memory(error):
                say(traceback.format_exc())
                raise typer.Exit(BROKEN) from error
            say(f"error: {error_line(error)}", "red")
            raise typer.Exit(WRONG) from error


@contextmanager
def going_on_with(file: Path | None) -> Iterator[None]:
    """A context that says after Ctrl-C with which file or folder the same command goes on."""
    try:
        yield
    except KeyboardInterrupt:
        if file is not None:
            say(f"interrupted; the same command goes on with {file}")
        raise
