"""Streamers and a tokenizer that show a test what was streamed."""

import torch
from transformers.generation.streamers import BaseStreamer

from hf_specx import BatchStreamer


class Collector(BaseStreamer):
    """Keeps what it gets."""

    def __init__(self):
        self.puts: list[torch.Tensor] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ends
        self.puts.append(value)

    def end(self) -> None:
        self.ends += 1

    @property
    def tokens(self) -> list[int]:
        return torch.cat([value.flatten() for value in self.puts]).tolist()


class RowCollector(BatchStreamer):
    """Keeps what it gets of each row, and after how many parts of other rows a row has ended."""

    def __init__(self):
        self.rows: dict[int, list[list[int]]] = {}
        self.ended: dict[int, int] = {}
        self.ends = 0

    def put_row(self, row: int, tokens: torch.Tensor) -> None:
        assert not self.ends
        assert row not in self.ended
        self.rows.setdefault(row, []).append(tokens.tolist())

    def end_row(self, row: int) -> None:
        assert row not in self.ended
        self.ended[row] = sum(map(len, self.rows.values()))

    def end(self) -> None:
        self.ends += 1
