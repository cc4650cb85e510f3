"""What all commands print: tables, progress, and errors in one line; nothing that takes time is imported for it."""

import itertools
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


OPTIONS = "overwrite trust_remote_code temperature top_p top_k batch_size lora max_new_tokens".split()  # noqa: SIM905
WRONG, PIPE_CLOSED = 2, 141  # exit codes; the second is 128 and the number of the signal
SECONDS = 10.0  # between lines of progress


class Output(Console):
    """What commands print on; a reader that has closed the pipe raises, instead of ending with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def text(self, text: object, style: str = "") -> None:
        """Print a text as it is: no markup, and wrapped by the terminal alone."""
        self.print(text if isinstance(text, Text) else Text(str(text), style), soft_wrap=True)

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
        """Print a table of sentences, which are wrapped."""
        table = Table(show_edge=False)
        for heading in headings:
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        self.print(table)

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
def progress(doing: str, total: int = 0) -> Iterator[Callable[[str, int, int], None]]:
    """Progress on stderr until the work ends: a bar on a terminal, else a line every ten seconds.

    The function that it gives is told what is being done, how much is, and of how much: 0 for news, which are printed
    at once. The bar is drawn in its calls alone, since a thread that draws would slow down what is timed.
    """
    console, ended, started = Output(stderr=True), threading.Event(), time.monotonic()
    bar = Progress(console=console, transient=True, auto_refresh=False, disable=not console.is_terminal)
    task = bar.add_task(doing, total=total or None)

    def tell(doing: str, done: int, total: int) -> None:
        with suppress(OSError):  # nobody reads it
            if total:
                bar.update(task, description=doing, completed=done, total=total, refresh=True)
            else:
                console.text(doing)

    def lines() -> None:
        while not ended.wait(SECONDS):
            now = bar.tasks[0]
            counted = f": {now.completed:.0f} of {now.total:.0f}" if now.total else ""
            with suppress(OSError):
                console.text(f"{now.description}{counted}, {time.monotonic() - started:.0f} s")

    thread = threading.Thread(target=lines, daemon=True)
    if not console.is_terminal:
        thread.start()
    try:
        with bar:
            bar.refresh()
            yield tell
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()


@contextmanager
def steps(doing: str, total: int) -> Iterator[Callable[[], None]]:
    """As `progress`, for work that only says when a step is done."""
    done = itertools.count(1)
    with progress(doing, total) as tell:
        yield lambda: tell(doing, next(done), total)


def error_line(error: object) -> str:
    """The message of an error, with options of commands where it names arguments of functions."""
    text = " ".join(str(error).split()).replace("do_sample=False", "--greedy")
    for name in OPTIONS:
        option = f"--{name.replace('_', '-')}"
        text = text.replace(f"{name}=True", option).replace(f"{name}=", f"{option} ")
    return text.replace("max_new_tokens", "--max-new-tokens")


def say(message: str, style: str = "") -> None:
    """One line on stderr, if anybody reads it."""
    try:
        Output(stderr=True).text(message, style)
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """What is left to write goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        os.dup2(nowhere, stream.fileno())


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """For errors that a user can correct: print one red line on stderr, and exit with code 2.

    A reader of the output that has closed it ends with code 141, as in other programs; typer ends Ctrl-C with 130.
    """
    try:
        yield
    except BrokenPipeError as error:
        drop_output()
        raise typer.Exit(PIPE_CLOSED) from error
    except (ValueError, OSError) as error:
        say(f"error: {error_line(error)}", "red")
        raise typer.Exit(WRONG) from error


@contextmanager
def going_on_with(file: Path | None) -> Iterator[None]:
    """Say after Ctrl-C that the same command goes on with this file or folder, if there is one."""
    try:
        yield
    except KeyboardInterrupt:
        if file is not None:
            say(f"interrupted; the same command goes on with {file}")
        raise
