"""How far `complete` is, on stderr: a bar in a terminal, elsewhere a line now and then."""

import os
import sys

from tqdm import tqdm

from hf_specx.common.round import Round


DELAY = 3  # seconds, before a progress bar appears
LINE_EVERY = 30  # seconds, where there is no terminal


class Progress(tqdm):
    """A bar of prompts, and of tokens as a listener of a strategy; of several processes the first one shows it.

    Args:
        total: prompts; None if that is not known.
        done: prompts that were done before.
    """

    def __init__(self, total: int | None, done: int = 0):
        self.emitted = self.drafted = self.accepted = 0
        in_terminal = sys.stderr.isatty()
        shown = "{n_fmt} prompts in {elapsed}{postfix}"
        if total is not None:
            shown = "{n_fmt} of {total_fmt} prompts in {elapsed}, {remaining} left{postfix}"
        super().__init__(
            total=total,
            initial=done,
            delay=DELAY if in_terminal else LINE_EVERY,
            mininterval=0.1 if in_terminal else LINE_EVERY,
            bar_format=f"{{bar:20}} {shown}" if total and in_terminal else f"{shown}\n",
            disable=os.environ.get("RANK", "0") != "0",
        )

    def observe(self, done: Round) -> None:
        """Count what a round has done."""
        self.emitted += sum(done.emitted)
        self.drafted += sum(done.draft.lengths)
        self.accepted += sum(done.accepted)

    def reach(self, done: int) -> None:
        """So many prompts are done by now, by all processes."""
        if self.disable:
            return
        seconds = max(self.format_dict["elapsed"], 1e-9)
        accepted = f", {self.accepted / self.drafted:.0%} of candidates accepted" if self.drafted else ""
        self.set_postfix_str(f"{self.emitted / seconds:.0f} tokens/s{accepted}", refresh=False)
        self.update(done - self.n)
