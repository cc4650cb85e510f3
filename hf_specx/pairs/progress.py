"""How far `complete` is, on stderr: a bar in a terminal, elsewhere a line now and then."""

import os
import sys
import time

from tqdm import tqdm

from hf_specx.common.round import Round


DELAY = 3  # seconds, before a progress bar appears
LINE_EVERY = 30  # seconds, where there is no terminal
TOTAL = "{n_fmt} of {total_fmt} prompts in {elapsed}, {remaining} left{postfix}"
NO_TOTAL = "{n_fmt} prompts in {elapsed}{postfix}"


class Meter:
    """Counts tokens, as a listener of a strategy."""

    def __init__(self) -> None:
        self.emitted = self.drafted = self.accepted = 0

    def observe(self, done: Round) -> None:
        self.emitted += sum(done.emitted)
        self.drafted += sum(done.draft.lengths)
        self.accepted += sum(done.accepted)

    def said(self, seconds: float) -> str:
        """Tokens in a second, and the share of candidates that were accepted."""
        accepted = f", {self.accepted / self.drafted:.0%} of candidates accepted" if self.drafted else ""
        return f"{self.emitted / max(seconds, 1e-9):.0f} tokens/s{accepted}"


class Progress:
    """What is shown, as a context; of several processes that a launcher started, the first one shows it.

    Args:
        total: prompts; None if that is not known.
        done: prompts that were done before.
        meter: of this process.
    """

    def __init__(self, total: int | None, done: int, meter: Meter):
        self.total, self.before, self.meter, self.started = total, done, meter, time.monotonic()
        shown = os.environ.get("RANK", "0") == "0"
        in_terminal = shown and sys.stderr.isatty()
        self.format = NO_TOTAL if total is None else TOTAL
        bar = f"{{bar:20}} {self.format}" if total else self.format
        self.bar = tqdm(total=total, initial=done, delay=DELAY, disable=not in_terminal, bar_format=bar)
        self.next_line = self.started + LINE_EVERY if shown and not in_terminal else float("inf")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def update(self, done: int) -> None:
        """So many prompts are done by now, by all processes."""
        now = time.monotonic()
        if not self.bar.disable:
            self.bar.set_postfix_str(self.meter.said(now - self.started), refresh=False)
            self.bar.update(done - self.bar.n)
        if now >= self.next_line:
            self.next_line = now + LINE_EVERY
            print(self.line(done, now - self.started), file=sys.stderr, flush=True)

    def line(self, done: int, seconds: float) -> str:
        """What is shown where there is no terminal, after so many seconds."""
        said = {"initial": self.before, "postfix": self.meter.said(seconds), "bar_format": self.format}
        return str(tqdm.format_meter(done, self.total, seconds, **said))
