"""How far `complete` is, on stderr: a bar in a terminal, elsewhere a line now and then."""

import os
import sys
from typing import Any

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
        of, left = ("", "") if total is None else (" of {total_fmt}", ", {remaining} left")
        shown = f"{{n_fmt}}{of} prompts in {{elapsed}}{left}{{postfix}}"
        how: dict[str, Any] = {"delay": LINE_EVERY, "mininterval": LINE_EVERY, "bar_format": f"{shown}\n"}
        if sys.stderr.isatty():
            how = {"delay": DELAY, "bar_format": f"{{bar:20}} {shown}" if total else shown}
        super().__init__(total=total, initial=done, disable=os.environ.get("RANK", "0") != "0", **how)

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
