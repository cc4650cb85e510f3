"""Scripts: what they leave alone, and what they compare."""

import importlib
from pathlib import Path

import pytest

from hf_specx.bench.timed_methods import TimedMethod
from hf_specx.hub.flatten import PACKAGE


@pytest.fixture
def script(monkeypatch):
    """Imports one by its name."""
    monkeypatch.syspath_prepend(str(PACKAGE.parent / "scripts"))
    return importlib.import_module


def test_training_replaces_nothing_but_a_pair(script, tmp_path: Path):
    """It is refused before anything is trained."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is there already"):
        script("train_pair").main(work=tmp_path / "work", out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_table_compares_like_with_like(script, monkeypatch, tmp_path: Path):
    """Assisted generation and ours have one draft, compiled ways stand beside compiled plain text; each is named."""
    table, calls, call = script("speed_table"), [], TimedMethod.__call__

    def noted(own, inputs, options):
        calls.append((own.name, own.draft))
        compiled = own.name.endswith("-compiled")  # which takes minutes
        own.method, own.compiled = own.method._replace(compiled=False), False
        if compiled and own.strategy is not None:
            own.strategy.compile = False
        return call(own, inputs, options)

    monkeypatch.setattr(TimedMethod, "__call__", noted)
    kinds = (table.SAMPLED, table.COMPILED, table.COPY)
    monkeypatch.setattr(table, "CASES", [table.Case(kind, "float32", rows) for kind in kinds for rows in (1, 2)])
    run = table.measure(1, 4)
    drafts = {name: {id(draft) for other, draft in calls if other == name} for name, _ in calls}
    assert drafts["assisted"] < drafts["block-auto"] == drafts["block-5-compiled"]
    ways = {row["label"].partition(", float32")[0]: set() for row in run["rows"]}
    for row in run["rows"]:
        kind = row["label"].removesuffix(", float32")
        ways[kind].add(row["draft"])
        alone = row["batch"] == 1 and (kind, row["draft"]) in {(table.SAMPLED, table.MODEL), (table.COPY, table.TEXT)}
        assert (row["assisted"] is not None) == alone
    drafted = {table.MODEL, table.HEAD}
    assert ways == {table.SAMPLED: drafted, table.COMPILED: drafted, table.COPY: {table.TEXT}}
    assert [name for name, _ in calls].count("plain-compiled") == 2 * 2
    lines = table.table([run]).splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == 2 + len(run["rows"])
    assert "| sampled code, float32 | a draft model | 2 |" in table.table([run])
    assert "| refused | " in table.table([run])
