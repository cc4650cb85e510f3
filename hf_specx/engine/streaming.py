"""Text while it is generated: what a streamer gets, of one row or of many."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer
from transformers.generation.streamers import BaseStreamer

from hf_specx.common.batch import Batch
from hf_specx.common.round import Round
from hf_specx.sampling.stopping import Stopping


class Stream:
    """Hands the text of one call to a streamer, never a token that may be taken back.

    A streamer with `put_row` and `end_row`, as `BatchStreamer`, is told each part's row. Any other serves one row,
    and gets what `generate` gives it.

    Args:
        streamer: None if there is none.
        by: "token" hands over one token at a time, as `generate` does; "run" all that a round has emitted.
        stopping: says how many tokens of each row will surely be in the text.
    """

    def __init__(self, streamer: BaseStreamer | None, by: str, stopping: Stopping):
        self.stopping = stopping
        self.streamer: Any = streamer
        self.by, self.tags_rows = by, hasattr(streamer, "put_row")
        self.given: list[int] = []  # emitted tokens of each row that were handed over
        self.ended: set[int] = set()

    def prompt(self, batch: Batch) -> None:
        """Hand over the prompts: [1, L] with its pads, as `generate` does, or each row [l] without pads."""
        if self.streamer is None:
            return
        self.given = [0] * len(batch.counts)
        if not self.tags_rows:
            self.streamer.put(batch.prefix(0).cpu())
            return
        for row in range(len(self.given)):
            self.streamer.put_row(row, batch.row(row).cpu())

    def observe(self, done: Round) -> None:
        """Hand over what was emitted since the last time."""
        if self.streamer is None:
            return
        batch, stopping = done.batch, self.stopping
        settled = stopping.settled(batch)
        columns = [(batch.width + a, batch.width + b) for a, b in zip(self.given, settled, strict=True)]
        over = stopping.stopped_at.keys() if stopping.pads_finished_rows else set()
        self.hand_on([batch.ids[row, first:end] for row, (first, end) in enumerate(columns)], over - self.ended)
        self.given = settled
        self.ended |= over

    def hand_on(self, new: list[torch.Tensor], ended: Iterable[int]) -> None:
        """Hand over the new tokens [n] of each of the B rows, and end the rows in `ended`."""
        runs = torch.cat(new).cpu().split([len(tokens) for tokens in new])
        for row, run in enumerate(runs):
            for tokens in run.split(1 if self.by == "token" else max(1, len(run))):
                if len(tokens) and self.tags_rows:
                    self.streamer.put_row(row, tokens)
                elif len(tokens):
                    self.streamer.put(tokens)
        if self.tags_rows:
            for row in ended:
                self.streamer.end_row(row)


@contextmanager
def ended(streamer: BaseStreamer | None) -> Iterator[None]:
    """End a streamer at the end of this context, also after an error."""
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


class BatchStreamer(BaseStreamer):
    """The texts of many rows at once, each part with its row, for a reader in another thread.

    Rows are those of the output, after `num_return_sequences`. The words of a row come as from `TextStreamer`: as soon
    as they are whole, and the rest when the row ends.

    Args:
        tokenizer: decodes the tokens.
        skip_prompt: whether to leave out the prompts; else each row begins with its own, without pads.
        timeout: seconds that the reader waits for a part before `queue.Empty` is raised; None is for ever.
        **decode_kwargs: for `tokenizer.decode`, as `skip_special_tokens`.

    Example:
        >>> streamer = BatchStreamer(tokenizer, skip_prompt=True)
        >>> strategy = SpeculativeDecoding(draft_model, streamer=streamer)
        >>> Thread(target=model.generate, kwargs={**inputs, "custom_generate": strategy}).start()
        >>> texts = [""] * len(inputs["input_ids"])
        >>> for row, text in streamer:
        ...     texts[row] += text
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        skip_prompt: bool = False,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ):
        self.tokenizer, self.skip_prompt, self.timeout = tokenizer, skip_prompt, timeout
        self.decode_kwargs = decode_kwargs
        self.queue: Queue[tuple[int, str] | None] = Queue()
        self.rows: dict[int, TextStreamer] = {}

    def put(self, value: torch.Tensor) -> None:
        """Take the prompts [B, L], and after them one token of each row [B], as `generate` hands them over."""
        for row, tokens in enumerate(value):
            self.put_row(row, tokens.reshape(-1))

    def put_row(self, row: int, tokens: torch.Tensor) -> None:
        """Take the prompt [l] of a row, without pads and perhaps empty, and after it the row's next tokens [n]."""
        if row not in self.rows:
            self.rows[row] = _RowStreamer(self, row)
        self.rows[row].put(tokens)

    def end_row(self, row: int) -> None:
        """Pass on the rest of a row's text: no tokens of it follow."""
        self.rows.pop(row).end()

    def end(self) -> None:
        """Pass on the rest of all rows: nothing follows. The streamer can then serve another call."""
        try:
            for row in list(self.rows):
                self.end_row(row)
        finally:
            self.queue.put(None)

    def on_finalized_text(self, row: int, text: str, stream_end: bool = False) -> None:
        """Queue a part of a row's text, its last one if `stream_end`; override this to do something else with it."""
        if text:
            self.queue.put((row, text))

    def __iter__(self) -> "BatchStreamer":
        return self

    def __next__(self) -> tuple[int, str]:
        part = self.queue.get(timeout=self.timeout)
        if part is None:
            raise StopIteration
        return part


class _RowStreamer(TextStreamer):
    """One row of a `BatchStreamer`."""

    def __init__(self, batch: BatchStreamer, row: int):
        super().__init__(batch.tokenizer, batch.skip_prompt, **batch.decode_kwargs)
        self.batch, self.row = batch, row

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.batch.on_finalized_text(self.row, text, stream_end)
