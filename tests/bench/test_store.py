"""The file of results of `specx bench`: records stay in it, and two processes do not write it at once."""

import json
import os
import subprocess
import sys

import pytest

from hf_specx.bench.store import Store
from hf_specx.hub.locks import HOLDER, check_free


# another process that writes; it imports no torch, so that it is there at once
WRITER = """
import sys
from pathlib import Path
from hf_specx.hub.locks import locked

with locked(Path(sys.argv[1])):
    print("holds it", flush=True)
    sys.stdin.readline()
"""


def record(name: str) -> dict:
    return {"settings": name, "provenance": {}}


def writer(path) -> subprocess.Popen:
    """A process that holds the lock of a file until it reads a line."""
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", WRITER, path], **how)
    assert process.stdout.readline() == "holds it\n"
    return process


def test_of_two_writers_the_second_is_told_who_the_first_is(tmp_path):
    """Before it measures anything; once the first is done it goes on, and all records are in the file."""
    path = tmp_path / "results.json"
    with Store(path, "schema", {}) as store:
        store.add(record("the first"))
        with pytest.raises(ValueError, match=f"process {os.getpid()}"):
            Store(path, "schema", {})
    other = writer(path)
    for refused in (lambda: Store(path, "schema", {}), lambda: check_free(path)):
        with pytest.raises(ValueError, match=f"process {other.pid}"):
            refused()
    other.communicate("\n")
    assert other.returncode == 0
    check_free(path)
    with Store(path, "schema", {}) as store:
        store.add(record("the second"))
    assert [record["settings"] for record in json.loads(path.read_text())["records"]] == ["the first", "the second"]


def test_a_writer_that_was_killed_holds_nothing(tmp_path):
    path = tmp_path / "results.json"
    killed = writer(path)
    killed.kill()
    killed.wait()
    with Store(path, "schema", {}) as store:
        assert json.loads(path.with_name(path.name + HOLDER).read_text())["pid"] == os.getpid()
        assert store.records == []


def test_what_is_free_is_left_as_it_is(tmp_path):
    check_free(tmp_path / "results.json")
    check_free(None)
    assert list(tmp_path.iterdir()) == []
    Store(None, "schema", {}).add(record("in memory"))
    Store(tmp_path / "check.unfinished", "check", {}).add({"part": "of a check", "provenance": {}})
    assert [path.name for path in tmp_path.iterdir()] == ["check.unfinished"]
