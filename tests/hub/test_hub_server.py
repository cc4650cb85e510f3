"""The fake Hub is one to huggingface_hub: what goes up comes down, at its commit, to those who may have it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hub_client import Client, Failed
from hub_server import OWNER, Hub


LARGE = bytes(range(256)) * 256
FILES = {"README.md": b"---\nlicense: mit\n---\n", "model.safetensors": LARGE, "draft/config.json": b"[]"}
Clients = Callable[..., Client]


def upload(files: dict[str, bytes], token: str | bool = OWNER, **options: object) -> str:
    from huggingface_hub import HfApi

    for path, content in files.items():
        file = Path("sent", path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    api = HfApi(token=token)
    api.create_repo("org/pair", exist_ok=True)
    return api.upload_folder(repo_id="org/pair", folder_path="sent", **options).oid


def download(**options: object) -> dict[str, bytes]:
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download("org/pair", **options))
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_goes_up_comes_down_at_its_commit(hub: Hub, client: Clients):
    first = client("first")(upload, FILES)
    assert hub.files("org/pair") == FILES
    changed = {"draft/config.json": b"{}"}
    second = client("second")(upload, changed, delete_patterns=["README.md"])
    later = {path: content for path, content in (FILES | changed).items() if path != "README.md"}
    down = client("down")
    assert (down(download), down(download, revision=first), down(download, revision=second)) == (later, FILES, later)


def test_only_the_owner_writes(hub: Hub, client: Clients):
    hub.put("org/pair", FILES)
    with pytest.raises(Failed, match="401"):
        client()(upload, {"config.json": b"no"}, False)
    assert hub.files("org/pair") == FILES


@pytest.mark.parametrize("token", [None, "hf_stranger"])
def test_what_is_private_looks_missing(hub: Hub, client: Clients, token: str | None):
    hub.put("org/pair", FILES)
    hub.repositories["org/pair"].private = True
    with pytest.raises(Failed, match="RepositoryNotFoundError"):
        client()(download, token=token)
    assert client("owner")(download, token=OWNER) == FILES


def fetch(path: str, revision: str) -> None:
    from huggingface_hub import hf_hub_download

    hf_hub_download("org/pair", path, revision=revision)


@pytest.mark.parametrize(
    ("path", "revision", "error"),
    [("other.json", "main", "RemoteEntryNotFoundError"), ("README.md", "other", "RevisionNotFoundError")],
)
def test_what_is_not_there(hub: Hub, client: Clients, path: str, revision: str, error: str):
    hub.put("org/pair", FILES)
    with pytest.raises(Failed, match=error):
        client()(fetch, path, revision)
