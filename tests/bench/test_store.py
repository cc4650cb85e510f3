"""The file of results of `specx bench`: records stay in it, and two processes do not write it at once."""

import json
import os
import subprocess
import sys

import pytest

from hf_specx.bench.store import Store
from hf_specx.hub.locks import HOLDER, check_free


WRITER = """
import sys
from pathlib import Path
from hf_specx.bench.store import Store

with Store(Path(sys.argv[1]), "schema", {}) as store:
    print("holds it", flush=True)
    sys.stdin.readline()
    for number in range(5):
        store.add({"settings": f"of the first {number}", "provenance": {}})
"""


def record(name: str) -> dict:
    return {"settings": name, "provenance": {}}


def test_of_two_writers_the_second_is_told_who_the_first_is(tmp_path):
    """Before it measures anything; and once that is done it goes on, with all records of both in the file."""
    path = tmp_path / "results.json"
    with Store(path, "schema", {}) as store:
        store.add(record("of an earlier run"))
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    first = subprocess.Popen([sys.executable, "-c", WRITER, path], **how)
    assert first.stdout.readline() == "holds it\n"
    for refused in (lambda: Store(path, "schema", {}), lambda: check_free(path)):
        with pytest.raises(ValueError, match=f"process {first.pid}"):
            refused()
    first.communicate("\n")
    assert first.returncode == 0
    check_free(path)
    with Store(path, "schema", {}) as store:
        store.add(record("of the second"))
    names = [record["settings"] for record in json.loads(path.read_text())["records"]]
    assert names == ["of an earlier run", *(f"of the first {number}" for number in range(5)), "of the second"]


def test_a_writer_that_was_killed_holds_nothing(tmp_path):
    path = tmp_path / "results.json"
    first = subprocess.Popen([sys.executable, "-c", WRITER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout.readline() == b"holds it\n"
    first.kill()
    first.wait()
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
