"""What all commands print: figures, progress, and errors in one line; nothing that takes time is imported for it."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
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
}
WRONG, INTERRUPTED, PIPE_CLOSED = 2, 130, 141  # exit codes; the last two are 128 and the number of the signal
SECONDS = 10.0  # between lines of progress where there is no terminal


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
def progress(text: str, steps: int) -> Iterator[Callable[[], object]]:
    """Progress on stderr: a bar on a terminal, else a line about every ten seconds.

    It is drawn between steps only, since a thread that draws would slow down what is timed.

    Args:
        text: what is being done.
        steps: how many there are.

    Returns:
        A context with a function to be called after each step.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressLines(text, steps).advance
        return
    with Progress(console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(text, total=steps)
        bar.refresh()
        yield lambda: bar.update(task, advance=1, refresh=True)


class ProgressLines:
    """Progress as plain lines, now and then.

    Args:
        text: what is being done.
        steps: how many there are.
    """

    def __init__(self, text: str, steps: int):
        self.text, self.steps, self.done = text, steps, 0
        self.started = self.shown = time.monotonic()

    def advance(self) -> None:
        """One step more."""
        self.done += 1
        if time.monotonic() - self.shown >= SECONDS:
            self.show()

    def show(self) -> None:
        """Print how far it is."""
        self.shown = time.monotonic()
        print(f"{self.text}: {self.done} of {self.steps}, {self.shown - self.started:.0f} s", file=sys.stderr)


def error_line(error: object) -> str:
    """The message of an error, with options of commands where it names arguments of functions."""
    text = " ".join(str(error).split())
    for argument, option in OPTIONS.items():
        text = text.replace(argument, option)
    return text


def say_error(message: str) -> None:
    """One red line on stderr."""
    Console(stderr=True).print(Text(f"error: {message}", "red"), soft_wrap=True)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """For errors that a user can correct: print one red line on stderr, and exit with code 2.

    Ctrl-C ends with code 130, and a reader of the output that has closed it with 141, as in other programs.
    """
    try:
        yield
    except BrokenPipeError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to write goes nowhere
        raise typer.Exit(PIPE_CLOSED) from error
    except (ValueError, OSError) as error:
        say_error(error_line(error))
        raise typer.Exit(WRONG) from error
    except KeyboardInterrupt as error:
        Console(stderr=True).print("interrupted")
        raise typer.Exit(INTERRUPTED) from error
