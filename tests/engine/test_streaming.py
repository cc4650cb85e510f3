"""Streams: one row gets what stock gives it, many rows are tagged, and nothing is handed over that is cut later."""

from typing import Any

import pytest
import torch
from all_pairs import all_pairs, each_value
from collectors import Collector, RowCollector
from criteria import Counting, RowSumIs
from plain import coupled
from tiny import prompts, tiny
from transformers import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_specx import BatchStreamer


GREEDY = {"do_sample": False, "max_new_tokens": 24}
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 24}
TIMEOUT = 60


def test_a_tokenizer_that_fails_does_not_keep_the_reader_waiting():
    class Broken:
        def decode(self, ids, **kwargs):
            raise RuntimeError("no text")

    streamer = BatchStreamer(Broken(), timeout=TIMEOUT)
    with pytest.raises(RuntimeError, match="no text"):
        streamer.put_row(0, torch.tensor([1]))
    with pytest.raises(RuntimeError, match="no text"):
        streamer.end()
    assert list(streamer) == []


def run(collector: BaseStreamer, rows: int, noise: float, stream_by: str, **call: Any) -> tuple[Any, Any]:
    """Our text and report."""
    target = tiny()
    strategy = coupled(target, noise, streamer=collector, stream_by=stream_by)
    torch.manual_seed(3)
    return target.generate(**prompts(rows), **call, custom_generate=strategy), strategy.report


@pytest.mark.parametrize(
    ("noise", "settings", "eos_token_id", "criteria"),
    all_pairs([0.0, 0.05], [GREEDY, SAMPLED], [None, 5], [[], [RowSumIs()]]),
)
def test_one_row_gets_what_stock_gives(noise: float, settings: dict, eos_token_id: int | None, criteria: list):
    call = settings | {"eos_token_id": eos_token_id, "stopping_criteria": StoppingCriteriaList(criteria)}
    target, stock, ours, runs = tiny(), Collector(), Collector(), Collector()
    torch.manual_seed(3)
    expected = target.generate(**prompts(1), **call, streamer=stock)
    output, _ = run(ours, 1, noise, "token", **call)
    assert torch.equal(output, expected)
    assert [value.tolist() for value in ours.puts] == [value.tolist() for value in stock.puts]
    assert ours.ends == stock.ends == 1
    _, report = run(runs, 1, noise, "run", **call)
    assert runs.tokens == expected[0].tolist()
    assert [len(value) for value in runs.puts[1:]] == [record.emitted for record in report.history[0]]
    assert runs.ends == 1


PLAIN = GREEDY | {"logits_processor": LogitsProcessorList([Counting()])}


@pytest.mark.parametrize(
    ("settings", "stream_by"),
    each_value(
        [
            GREEDY,
            SAMPLED | {"num_return_sequences": 2},
            GREEDY | {"eos_token_id": 5},
            PLAIN,
            PLAIN | {"eos_token_id": 5},
        ],
        ["token", "run"],
    ),
)
def test_rows_get_their_texts(settings: dict, stream_by: str):
    collector = RowCollector()
    rows = settings.get("num_return_sequences", 1) * 4
    output, report = run(collector, 4, 0.05, stream_by, **settings)
    mask = prompts(4)["attention_mask"].repeat_interleave(rows // 4, 0).bool()
    for row in range(rows):
        prompt, *parts = collector.rows[row]
        assert prompt == output[row, :11][mask[row]].tolist()
        text = [token for part in parts for token in part]
        assert text == output[row, 11 : 11 + report.emitted_per_row[row]].tolist()
        one_by_one = stream_by == "token" or "logits_processor" in settings
        assert {len(part) for part in parts} == {1} if one_by_one else len(parts) < len(text)
    assert collector.ends == 1
    assert collector.ended.keys() == (set(range(rows)) if "eos_token_id" in settings else set())


def test_a_row_that_ends_is_let_go_at_once():
    """Its last words do not wait for the other rows."""
    collector = RowCollector()
    _, report = run(collector, 4, 0.05, "token", **GREEDY, eos_token_id=5)
    lengths = report.emitted_per_row
    first, last = lengths.index(min(lengths)), lengths.index(max(lengths))
    assert collector.ended[first] < collector.ended[last]


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_nothing_is_streamed_that_is_cut_later(noise: float):
    """Without an end token rows that a criterion has stopped go on until the last row stops, and may run ahead."""
    collector = RowCollector()
    criteria = StoppingCriteriaList([RowSumIs()])
    output, _ = run(collector, 4, noise, "run", **GREEDY | {"max_new_tokens": 60}, stopping_criteria=criteria)
    assert output.shape[1] < 11 + 60
    for row, (_, *parts) in collector.rows.items():
        assert [token for part in parts for token in part] == output[row, 11:].tolist()
