"""Prompts over processes: two real ones, as a launcher starts them, get what one gets, in order."""

import atexit
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from completing import SAMPLED, TEXTS, load
from transformers import LogitsProcessor

from hf_specx import DraftTargetPair
from hf_specx.common.devices import in_group
from hf_specx.pairs.results_file import CompletedText, NumberedText


GREEDY = {"do_sample": False, "max_new_tokens": 12}
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "greedy, uneven": (TEXTS, GREEDY | {"batch_size": 2}),
    "block, uneven": (TEXTS, SAMPLED | {"batch_size": 2}),
    "coupled, uneven": (TEXTS, SAMPLED | {"batch_size": 1, "verification": "coupled"}),
    "block, one prompt": (TEXTS[:1], SAMPLED),
    "greedy, none": ([], GREEDY),
}


class Failing(LogitsProcessor):
    """Fails in the process that reads the longest prompt."""

    stateless = True

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 6:
            raise ArithmeticError("out of numbers")
        return scores


def run(folder: Path) -> dict[str, Any]:
    """The outcome of every case, to a list and to a file, and of one in which one process fails."""
    pair, outcomes, indices = load(folder), {}, []

    def noted(prompt: NumberedText, *done: Any) -> CompletedText:
        indices.append(prompt.index)
        return CompletedText(prompt, *done)

    for name, (texts, options) in CASES.items():
        indices.clear()
        with mock.patch("hf_specx.pairs.complete.CompletedText", noted):
            outcomes[name] = {"texts": pair.complete(texts, **options), "indices": list(indices)}
        out = folder / f"{name} by {os.environ.get('WORLD_SIZE', 1)}.jsonl"
        pair.complete(texts[:2], **options, out=out)  # more prompts may follow, at once
        outcomes[name]["file"] = pair.complete(texts, **options, out=out).read_text()
    try:
        pair.complete(TEXTS[1:3], max_new_tokens=4, batch_size=1, logits_processor=[Failing()])
    except Exception as error:
        outcomes["failing"] = f"{type(error).__name__}: {error}"
    return outcomes


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return run(folder)


@pytest.fixture(scope="module")
def together(folder: Path) -> list[dict[str, Any]]:
    """What each of two processes got."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    running = [
        subprocess.Popen([sys.executable, __file__, str(folder)], env=environment | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]
    assert [process.wait(300) for process in running] == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_get_what_one_gets(alone: dict[str, Any], together: list[dict[str, Any]], name: str):
    """Each prompt is completed by one of them, and the group has ended, or the processes might abort."""
    for outcomes in together:
        assert outcomes[name]["texts"] == alone[name]["texts"]
        assert outcomes[name]["file"] == alone[name]["file"]
        assert not outcomes["in group"]
    assert [json.loads(line)["text"] for line in alone[name]["file"].splitlines()] == alone[name]["texts"]
    first, second = (outcomes[name]["indices"] for outcomes in together)
    assert sorted(first + second) == list(range(len(CASES[name][0])))


def test_an_error_in_one_process_is_raised_in_both(alone: dict[str, Any], together: list[dict[str, Any]]):
    error = "ArithmeticError: out of numbers"
    assert alone["failing"] == error
    failing = [outcomes["failing"] for outcomes in together]
    assert failing in (
        [error, f"RuntimeError: process 0 failed with {error}"],
        [f"RuntimeError: process 1 failed with {error}", error],
    )


def test_texts_are_those_of_stock(pair: DraftTargetPair, alone: dict[str, Any]):
    """In the order of the prompts, each under its own seed, and up to its end."""
    for name, settings in (("greedy, uneven", GREEDY), ("coupled, uneven", SAMPLED)):
        plain = {option: value for option, value in settings.items() if option != "seed"}
        for place, text in enumerate(TEXTS):
            inputs = pair.tokenizer([text], return_tensors="pt")
            torch.manual_seed(SAMPLED["seed"] + place)
            output = pair.target.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **plain)
            new = output[0, inputs["input_ids"].shape[1] :]
            assert alone[name]["texts"][place] == pair.tokenizer.decode(new, skip_special_tokens=True)


def test_text_does_not_depend_on_batch_mates(pair: DraftTargetPair, alone: dict[str, Any]):
    expected, later = alone["block, uneven"]["texts"], SAMPLED | {"seed": 6}
    for batch_size in (1, 5):
        assert pair.complete(TEXTS, **SAMPLED, batch_size=batch_size) == expected
    assert pair.complete(TEXTS, **later)[:4] != expected[:4]
    assert pair.complete(TEXTS[1:], **later) == expected[1:]


if __name__ == "__main__":
    place = Path(sys.argv[1])
    outcomes = {}

    def write() -> None:
        (place / f"{os.environ['RANK']}.json").write_text(json.dumps(outcomes | {"in group": in_group()}))

    atexit.register(write)  # before what the package registers, so that it is called after
    outcomes |= run(place)
