"""Batches of a Ray dataset: columns and seeds here, and in a slow test two workers of a local Ray."""

from pathlib import Path

import pytest
from completing import MANY, SAMPLED

from hf_specx import DraftTargetPair
from hf_specx.pairs.ray_data import CompleteBatches


@pytest.fixture(scope="module")
def saved(pair: DraftTargetPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    pair.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(pair: DraftTargetPair) -> list[str]:
    return pair.complete(MANY, **SAMPLED)


def test_a_row_with_an_index_has_its_text(saved: Path, expected: list[str]):
    complete = CompleteBatches(saved, prompts="asked", texts="answer", indices="id", **SAMPLED)
    order = [7, 3, 30, 3]
    batch = {"asked": [MANY[index] for index in order], "id": order, "other": list("abcd")}
    assert complete(batch) == batch | {"answer": [expected[index] for index in order]}


def test_without_indices_texts_go_by_prompts(saved: Path):
    complete = CompleteBatches(saved, **SAMPLED)
    (alone,) = complete({"prompt": ["for line in 1"]})["text"]
    assert complete({"prompt": ["x", "", "for line in 1", None]})["text"][1:] == [None, alone, None]
    other = CompleteBatches(saved, **SAMPLED | {"seed": 6})
    assert other({"prompt": ["for line in 1"]})["text"] != [alone]


def test_misuse(saved: Path):
    with pytest.raises(ValueError, match="'prompt'"):
        CompleteBatches(saved)({"text": ["a"], "id": [0]})
    for column, values in {"prompt": ["a", 3], "id": [0, -1]}.items():
        with pytest.raises(ValueError, match=f"'{column}' has {values[1]}"):
            CompleteBatches(saved, indices="id")({"prompt": ["a", "b"], "id": [0, 1]} | {column: values})


@pytest.mark.slow
def test_two_workers(saved: Path, expected: list[str]):
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=3, include_dashboard=False, logging_level="ERROR")  # one for what reads
    try:
        items = [{"prompt": text, "id": index} for index, text in enumerate(MANY)]
        options = {"pair": str(saved), "indices": "id", **SAMPLED}
        done = ray.data.from_items(items, override_num_blocks=5).map_batches(
            CompleteBatches, fn_constructor_kwargs=options, batch_size=8, concurrency=2
        )
        texts = {row["id"]: row["text"] for row in done.iter_rows()}
    finally:
        ray.shutdown()
    assert [texts[index] for index in range(len(MANY))] == expected
