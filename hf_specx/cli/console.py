"""What all commands print: figures, progress, and errors in one line; nothing that takes time is imported for it."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text


OPTIONS = {  # argument to option
    "overwrite=True": "--overwrite",
    "trust_remote_code=True": "--trust-remote-code",
    "temperature=": "--temperature ",
    "top_p=": "--top-p ",
    "top_k=": "--top-k ",
    "do_sample=False": "--greedy",
    "batch_size=": "--batch-size ",
    "lora=": "--lora ",
    "max_new_tokens": "--max-new-tokens",
}
WRONG, INTERRUPTED, PIPE_CLOSED = 2, 130, 141  # exit codes; the last two are 128 and the number of the signal
SECONDS = 10.0  # between lines of progress


class Output(Console):
    """What commands print on; a reader that has closed the pipe raises, instead of ending with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def figure(value: Any) -> str:
    """A number, or the median of a `spread`, with two decimals; "-" where it is not known."""
    value = value["median"] if isinstance(value, dict) else value
    return "-" if value is None else f"{value:.2f}"


def print_figures(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], with_head: bool = True
) -> None:
    """Print a table of short texts, of which none is cut: where a terminal is too narrow for them, lines are longer.

    Args:
        console: where.
        headings: of the columns; they may wrap between words.
        rows: as many texts each. The first column is on the left, the others on the right.
        with_head: whether the headings are shown.
    """
    widths = [max(map(len, (*heading.split(), *column))) for heading, *column in zip(headings, *rows, strict=True)]
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False, show_header=with_head)
    for heading, width in zip(headings, widths, strict=True):
        table.add_column(heading, justify="right" if table.columns else "left", width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    table.width = sum(widths) + len(widths) - 1
    console.print(table, crop=False)


@contextmanager
def imports() -> Iterator[None]:
    """Import torch and what needs it, which takes seconds.

    Ctrl-C ends the process at once meanwhile: half-imported modules answer it with errors of their own.
    """
    ours = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_DFL) if ours else None
    try:
        yield
        from transformers.utils import logging

        logging.set_verbosity_error()  # its warnings and progress bars would mix with the output
        logging.disable_progress_bar()
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


@contextmanager
def progress(text: str, steps: int) -> Iterator[Callable[[], object]]:
    """Progress on stderr: a bar on a terminal, else a line about every ten seconds.

    The bar is drawn between steps only, since a thread that draws would slow down what is timed.

    Args:
        text: what is being done.
        steps: how many there are.

    Returns:
        A context with a function to be called after each step.
    """
    console = Output(stderr=True)
    if not console.is_terminal:
        done: list[None] = []
        with lines_now_and_then(lambda: f"{text}: {len(done)} of {steps}"):
            yield lambda: done.append(None)
        return
    with Progress(console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(text, total=steps)
        bar.refresh()
        yield lambda: bar.update(task, advance=1, refresh=True)


@contextmanager
def lines_now_and_then(line: Callable[[], str]) -> Iterator[None]:
    """Every ten seconds, until the work ends, print a line on stderr, and how long it has taken so far.

    Args:
        line: says what is being done.
    """
    started, ended = time.monotonic(), threading.Event()

    def say() -> None:
        while not ended.wait(SECONDS):
            with suppress(OSError):  # nobody reads it
                print(f"{line()}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def error_line(error: object) -> str:
    """The message of an error, with options of commands where it names arguments of functions."""
    text = " ".join(str(error).split())
    for argument, option in OPTIONS.items():
        text = text.replace(argument, option)
    return text


def say(message: str, style: str = "") -> None:
    """One line on stderr, if anybody reads it."""
    try:
        Output(stderr=True).print(Text(message, style), soft_wrap=True)
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """What is left to write goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        os.dup2(nowhere, stream.fileno())


@contextmanager
def errors_in_one_line(kept: Path | None = None) -> Iterator[None]:
    """For errors that a user can correct: print one red line on stderr, and exit with code 2.

    Ctrl-C ends with code 130, and a reader of the output that has closed it with 141, as in other programs.

    Args:
        kept: what an interrupted command goes on with when it is typed again, if it can.
    """
    try:
        yield
    except BrokenPipeError as error:
        drop_output()
        raise typer.Exit(PIPE_CLOSED) from error
    except (ValueError, OSError) as error:
        say(f"error: {error_line(error)}", "red")
        raise typer.Exit(WRONG) from error
    except KeyboardInterrupt as error:
        say("interrupted" if kept is None else f"interrupted; the same command goes on with {kept}")
        raise typer.Exit(INTERRUPTED) from error
