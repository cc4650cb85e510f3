"""What a call hands out besides its text: scores and logits, and streams."""

from collections.abc import Iterable, Sequence
from queue import Queue
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, TextStreamer
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.generation.streamers import BaseStreamer

from hf_specx.common.batch import Batch
from hf_specx.common.round import Round
from hf_specx.models.slots import CACHE

from .call import Call


class Outputs:
    """Scores and logits of a call, one entry for each emitted column, as in `generate`.

    Up to the end of a row its values are those of `generate`. After it `generate` has values of the pads that it
    feeds to the row; here are zeros of the same shape.
    """

    def __init__(self, config: GenerationConfig, rows: int):
        self.rows, names = rows, ("scores", "logits")
        self.entries: dict[str, list[torch.Tensor]] = {x: [] for x in names if getattr(config, f"output_{x}")}

    def observe(self, round_: Round) -> None:
        """Keep what belongs to the tokens that a round emitted."""
        for name, entries in self.entries.items():
            values = round_.scores if name == "scores" else round_.forward.logits
            for index, (row, before, number) in enumerate(
                zip(round_.rows, round_.emitted_before, round_.emitted, strict=True)
            ):
                while len(entries) < before + number:
                    entries.append(values.new_zeros(self.rows, values.shape[2], dtype=torch.float32))
                for n in range(number):
                    entries[before + n][row] = values[index, n]

    def finish(
        self, sequences: torch.Tensor, columns: int, past: Cache | None, is_encoder_decoder: bool, report: Any
    ) -> GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
        """The output of `generate` for sequences [B, L + columns]; rows may have emitted more.

        The report is its attribute, not an item, since Whisper splits every item by row.
        """
        kind: Any = GenerateEncoderDecoderOutput if is_encoder_decoder else GenerateDecoderOnlyOutput
        fields = {name: tuple(entries[:columns]) for name, entries in self.entries.items()}
        output = kind(sequences=sequences, **{CACHE: past}, **fields)
        output.speculation_report = report
        return output


class Stream:
    """Hands the text of one call to a streamer, never a token that may be taken back: `stopping` knows that.

    A streamer with `put_row` and `end_row`, as `BatchStreamer`, is told each part's row. Any other serves one row,
    and gets what `generate` gives it. By "token" it gets one at a time, by "run" all that a round has emitted.
    """

    def __init__(self, call: Call):
        self.stopping, self.stream_by = call.stopping, call.strategy.stream_by
        self.prompt_streamed = call.prompt_streamed
        self.streamer = streamer = call.strategy.streamer
        self.tags_rows = hasattr(streamer, "put_row")
        self.put = streamer.put_row if self.tags_rows else lambda row, tokens: streamer.put(tokens)

    def prompt(self, batch: Batch) -> None:
        """Hand over the prompts: [1, L] with its pads, as `generate` does, or each row [l] without pads."""
        for row in () if self.prompt_streamed else range(len(batch.counts)):
            self.put(row, batch.row(row).cpu() if self.tags_rows else batch.prefix(0).cpu())

    def observe(self, round_: Round) -> None:
        """Hand over what will surely be in the text."""
        new = []
        for row_state, end in zip(round_.batch.row_states, self.stopping.num_final_tokens(round_.batch), strict=True):
            new.append(row_state.emitted_ids[row_state.num_streamed : end])
            row_state.num_streamed = end
        # where no row is padded, texts end with the call
        self.put_tokens(new, round_.ended if self.stopping.has_eos_stopping_criteria else ())

    def put_tokens(self, new: Sequence[Sequence[int]], ended: Iterable[int]) -> None:
        """Hand over the new tokens of each of the B rows, and end the rows in `ended`."""
        for row, tokens in enumerate(new):
            step = 1 if self.stream_by == "token" else max(1, len(tokens))
            for first in range(0, len(tokens), step):
                self.put(row, torch.tensor(tokens[first : first + step], device="cpu"))
        for row in ended if self.tags_rows else ():
            self.streamer.end_row(row)


class BatchStreamer(BaseStreamer):
    """The texts of many rows at once, each part with its row, for a reader in another thread.

    Rows are those of the output. The words of a row come as from `TextStreamer`: as soon as they are whole, and the
    rest when the row ends.

    Args:
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
