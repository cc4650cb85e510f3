"""Files of pairs and models: what is asked for, what tells weights from others, and folders without a request."""

import shutil
import socket
from fnmatch import fnmatch
from pathlib import Path
from unittest import mock

import huggingface_hub.constants
import pytest
import torch
from repositories import INDEX, edit
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from hf_specx import DraftTargetPair
from hf_specx.hub import fetch
from hf_specx.hub.fetch import SMALL_FILES, fingerprint, get_model, get_pair


COMMIT = "c" * 40


@pytest.fixture
def downloads(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """A Hub with one repository, org/pair, whose files go into a cache as they are asked for; with what was asked."""
    asked: list[dict] = []
    root = tmp_path / "cache" / "models--org--pair" / "snapshots" / COMMIT

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str], **options) -> str:
        asked.append({"name": name, "patterns": allow_patterns} | options)
        for path in folder.rglob("*"):
            inside = path.relative_to(folder).as_posix()
            wanted = any(fnmatch(inside, x) for x in allow_patterns)
            if path.is_file() and wanted and not any(fnmatch(inside, x) for x in ignore_patterns):
                (root / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, root / inside)
        return str(root)

    monkeypatch.setattr(fetch, "snapshot_download", download)
    return asked


def here(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_what_is_asked_of_the_hub(folder: Path, downloads: list):
    """First the small files, then the weights that they name; nothing of the draft for the target, and no code."""
    for name in ("custom_generate/generate.py", "own.py", "pytorch_model.bin", "other.safetensors", "draft/own.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    files, config = get_pair("org/pair", "v1", token="t", cache_dir="c")
    assert downloads == [
        {"name": "org/pair", "patterns": list(SMALL_FILES), "revision": "v1", "token": "t", "cache_dir": "c"}
    ]
    settings, of_model = {"specx_config.json", "tokenizer.json", "tokenizer_config.json"}, "model.safetensors"
    small = settings | {"config.json", "generation_config.json"}
    assert here(files.root) == small
    assert files.revision == COMMIT
    get_model(files, config.target, False, True)
    assert here(files.root) == small | {of_model}
    get_model(files, config.draft, False, True)
    assert here(files.root / "draft") == small - settings | {of_model}
    assert all(asked["revision"] == COMMIT for asked in downloads[1:])


def test_no_request_for_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Though it may go online."""
    refuse = mock.Mock(side_effect=OSError("no network"))
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(OSError, match="."):
        get_pair("org/pair", None)
    assert refuse.called
    refuse.reset_mock()
    DraftTargetPair.from_pretrained(folder)
    assert not refuse.called


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_value_in_the_middle_of_a_tensor_is_enough(tmp_path: Path, dtype: torch.dtype):
    """Of any size, and in any file; it is one of those that are read."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / INDEX).write_text('{"metadata": {}, "weight_map": {"x": "1.safetensors", "weight": "2.safetensors"}}')
    save_file({"x": torch.zeros(1)}, tmp_path / "1.safetensors")
    for size in (1, 2, 500, 60_001):
        weight, fingerprints = torch.zeros(size, dtype=dtype), []
        for value in (0, 1, 0):
            weight[size // 2] = value
            save_file({"before": torch.zeros(3), "weight": weight}, tmp_path / "2.safetensors")
            fingerprints.append(fingerprint(tmp_path))
        assert fingerprints[0] == fingerprints[2] != fingerprints[1]


def test_a_fingerprint_is_of_what_is_computed(folder: Path, tmp_path: Path):
    """So that settings count as weights do, but not who has saved them, and where."""
    before = fingerprint(folder)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "again")
    assert fingerprint(tmp_path / "again") == before != fingerprint(folder / "draft")
    for name, value in {"transformers_version": "9.9", "_name_or_path": "org/target"}.items():
        edit("config.json", **{name: value})(folder)
        assert fingerprint(folder) == before
    edit("config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e5})(folder)
    assert fingerprint(folder) != before
