"""Batches of a Ray dataset: columns and seeds here, and in a slow test two workers of a local Ray."""

from pathlib import Path

import pytest
from completing import MANY, SAMPLED, load, save

from hf_specx import DraftTargetPair
from hf_specx.pairs.ray_data import CompleteBatches


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a saved pair."""
    folder = tmp_path_factory.mktemp("saved")
    load(save(tmp_path_factory.mktemp("pair"))).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    return DraftTargetPair.from_pretrained(folder).complete(MANY, **SAMPLED)


def test_a_row_with_an_index_has_its_text(folder: Path, expected: list[str]):
    complete = CompleteBatches(folder, prompts="asked", texts="answer", indices="id", **SAMPLED)
    order = [7, 3, 30, 3]
    batch = {"asked": [MANY[index] for index in order], "id": order, "other": list("abcd")}
    assert complete(batch) == batch | {"answer": [expected[index] for index in order]}


def test_without_indices_texts_go_by_prompts(folder: Path):
    complete = CompleteBatches(folder, **SAMPLED)
    (alone,) = complete({"prompt": ["for line in 1"]})["text"]
    assert complete({"prompt": ["x", "", "for line in 1", "x"]})["text"][1:3] == [None, alone]
    other = CompleteBatches(folder, **SAMPLED | {"seed": 6})
    assert other({"prompt": ["for line in 1"]})["text"] != [alone]


def test_misuse(folder: Path):
    with pytest.raises(ValueError, match="batch_size=0"):
        CompleteBatches(folder, batch_size=0)
    with pytest.raises(ValueError, match="no column 'prompt' among text, id; name"):
        CompleteBatches(folder)({"text": ["a"], "id": [0]})


@pytest.mark.slow
def test_two_workers(folder: Path, expected: list[str]):
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=3, include_dashboard=False, logging_level="ERROR")  # one for what reads
    try:
        items = [{"prompt": text, "id": index} for index, text in enumerate(MANY)]
        options = {"pair": str(folder), "indices": "id", **SAMPLED}
        done = ray.data.from_items(items, override_num_blocks=5).map_batches(
            CompleteBatches, fn_constructor_kwargs=options, batch_size=8, concurrency=2
        )
        texts = {row["id"]: row["text"] for row in done.iter_rows()}
    finally:
        ray.shutdown()
    assert [texts[index] for index in range(len(MANY))] == expected
