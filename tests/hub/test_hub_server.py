"""The Hub that other tests use is one to huggingface_hub: what goes up comes down, and faults are as real ones."""

import os
import signal
import urllib.request
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
from hub_answers import OWNER, STRANGER
from hub_client import Client, Failed
from hub_server import Hub


pytest_plugins = ["hub_fixtures"]

LARGE = bytes(range(256)) * 256
CHUNK = 10 * 2**20
CARD = b"---\nlicense: mit\n---\n"
FILES = {"README.md": CARD, "config.json": b"{}", "model.safetensors": LARGE, "draft/config.json": b"[]"}
Clients = Callable[..., Client]


def upload(folder: str, repo: str, token: str | bool = OWNER, private: bool | None = None, **options: object) -> str:
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    api.create_repo(repo, exist_ok=True, private=private)
    return api.upload_folder(repo_id=repo, folder_path=folder, **options).oid


def download(repo: str, **options: object) -> dict[str, bytes]:
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(repo, **options))
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {path: content for path, content in files.items() if path != ".gitattributes"}


def download_of(repo: str, options: dict[str, object]) -> dict[str, bytes]:
    return download(repo, **options)


def fetch(repo: str, path: str) -> int:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo, path)).stat().st_size


def name_things(repo: str, oid: str) -> tuple[str, list[str], list[str]]:
    """Who we are, what branches and tags there are after one more of each, and the files of the branch."""
    from huggingface_hub import HfApi

    api = HfApi(token=OWNER)
    api.create_branch(repo, branch="old", revision=oid)
    api.create_tag(repo, tag="v1", revision=oid)
    refs = api.list_repo_refs(repo)
    return api.whoami()["name"], sorted(ref.name for ref in refs.branches + refs.tags), api.list_repo_files(repo)


def a_tiny_model():
    from tiny import tiny

    return tiny()


def push_model(repo: str) -> None:
    a_tiny_model().push_to_hub(repo, token=OWNER)


def is_that_model(repo: str) -> bool:
    import torch
    from transformers import AutoModelForCausalLM

    got, sent = AutoModelForCausalLM.from_pretrained(repo).state_dict(), a_tiny_model().state_dict()
    return got.keys() == sent.keys() and all(torch.equal(got[name], sent[name]) for name in sent)


def write(folder: Path, files: dict[str, bytes]) -> str:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return str(folder)


def asked(hub: Hub, method: str, path: str) -> list[str | None]:
    """The ranges of the requests for a file."""
    return [seen.range for seen in hub.requests if seen.method == method and seen.path.endswith(f"/{path}")]


def test_what_goes_up_comes_down(hub: Hub, client: Clients, tmp_path: Path):
    """To anyone: the repository is public. Large files go to and come from the storage, where no token is shown."""
    oid = client("up")(upload, write(tmp_path / "sent", FILES), "org/pair")
    assert hub.files("org/pair") == FILES
    assert [seen.token for seen in hub.requests if seen.method == "PUT"] == [None]
    hub.requests.clear()
    assert client("down")(download, "org/pair") == FILES
    seen = [(seen.method, seen.path) for seen in hub.requests]
    assert ("HEAD", f"/org/pair/resolve/{oid}/model.safetensors") in seen
    assert ("GET", f"/api/resolve-cache/models/org/pair/{oid}/config.json") in seen
    assert [path.split("/")[-1] for method, path in seen if path.startswith("/files")] == ["model.safetensors"]


def test_a_revision_pins_what_was_there(hub: Hub, client: Clients, tmp_path: Path):
    """A later commit changes one file and sends nothing that is there already; without a change there is none."""
    up, down, repo = client("up"), client("down"), "org/pair"
    first = up(upload, write(tmp_path / "first", FILES), repo)
    hub.requests.clear()
    later = {"README.md": CARD, "config.json": b"{1}", "model.safetensors": LARGE}
    second = up(upload, write(tmp_path / "later", later), repo)
    assert up(upload, str(tmp_path / "later"), repo) == second != first
    assert hub.files(repo) == FILES | later
    assert not [seen for seen in hub.requests if seen.method == "PUT"]
    assert up(name_things, repo, first) == ("owner", ["main", "old", "v1"], [".gitattributes", *sorted(FILES)])
    for revision in (first, "old", "v1"):
        assert down(download_of, repo, {"revision": revision}) == FILES
    assert down(download, repo) == FILES | later


def test_deletions(hub: Hub, client: Clients, tmp_path: Path):
    up = client("up")
    up(upload, write(tmp_path / "first", FILES), "org/pair")
    up(replace_by, write(tmp_path / "later", {"README.md": CARD}), "org/pair")
    assert hub.files("org/pair") == {"README.md": CARD}


def replace_by(folder: str, repo: str) -> None:
    upload(folder, repo, delete_patterns="*")


@pytest.mark.parametrize(("token", "message"), [(None, "401"), (STRANGER, "404"), ("hf_nobody", "Invalid cred")])
def test_a_private_repository_is_for_its_owners(hub: Hub, client: Clients, token: str | None, message: str):
    hub.put("org/pair", FILES, private=True)
    down = client()
    with pytest.raises(Failed, match=message) as refused:
        down(download_of, "org/pair", {"token": token})
    assert str(refused.value).startswith("RepositoryNotFoundError") == (token != "hf_nobody")
    assert down.cached == {}
    assert down(download_of, "org/pair", {"token": OWNER}) == FILES


def test_only_owners_write(hub: Hub, client: Clients, tmp_path: Path):
    hub.put("org/pair", FILES)
    folder, up = write(tmp_path / "sent", {"config.json": b"no"}), client()
    for token, message in ((STRANGER, "403 Forbidden"), (False, "401")):
        with pytest.raises(Failed, match=message):
            up(upload, folder, "org/pair", token)
    assert hub.files("org/pair") == FILES


def test_a_private_upload_is_private(hub: Hub, client: Clients, tmp_path: Path):
    client()(upload, write(tmp_path / "sent", FILES), "org/pair", OWNER, True)
    assert hub.repositories["org/pair"].private


def test_what_is_not_there(hub: Hub, client: Clients):
    hub.put("org/pair", FILES)
    down = client()
    for function, args, error in [
        (fetch, ("org/pair", "other.json"), "RemoteEntryNotFoundError"),
        (download_of, ("org/pair", {"revision": "other"}), "RevisionNotFoundError"),
        (download, ("org/other",), "RepositoryNotFoundError"),
    ]:
        with pytest.raises(Failed, match=error):
            down(function, *args)


@pytest.mark.parametrize(
    ("path", "size", "again"), [("model.safetensors", CHUNK + 2000, f"bytes={CHUNK}-"), ("README.md", 2000, None)]
)
def test_a_cut_download_is_tried_again(hub: Hub, client: Clients, path: str, size: int, again: str | None):
    """From where it ended, by chunks of what huggingface_hub writes."""
    content = (b"---\n" + LARGE * (size // len(LARGE) + 1))[:size]
    hub.put("org/pair", FILES | {path: content})
    hub.fail(path, "cut", after=size - 1000)
    assert client()(download, "org/pair")[path] == content
    assert asked(hub, "GET", path) == [None, again]


@pytest.mark.parametrize("path", ["model.safetensors", "README.md"])
def test_a_range_is_that_part(hub: Hub, path: str):
    hub.put("org/pair", FILES)
    asked = urllib.request.Request(f"{hub.endpoint}/org/pair/resolve/main/{path}", headers={"Range": "bytes=3-"})
    with urllib.request.urlopen(asked) as answer:
        assert (answer.status, answer.read()) == (206, FILES[path][3:])


def test_a_short_download_is_no_file(hub: Hub, client: Clients):
    hub.put("org/pair", FILES)
    hub.fail("model.safetensors", "short", after=1000)
    down = client()
    with pytest.raises(Failed, match="Consistency check failed"):
        down(fetch, "org/pair", "model.safetensors")
    assert down.cached == {}
    assert down(fetch, "org/pair", "model.safetensors") == len(LARGE)


def test_after_a_kill_a_second_download_is_clean(hub: Hub, client: Clients):
    hub.put("org/pair", FILES)
    stalled = hub.fail("model.safetensors", "stall", after=1000)
    killed = client("same")
    process, running = killed(os.getpid), killed.start(download, "org/pair")
    assert stalled.reached.wait(30)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(BrokenProcessPool):
        running.result()
    assert len(LARGE) not in killed.cached.values()
    assert client("same")(download, "org/pair") == FILES
    assert asked(hub, "GET", "model.safetensors") == [None, None]


def test_transformers_loads_what_it_pushed(hub: Hub, client: Clients):
    client("up")(push_model, "org/model")
    assert "model.safetensors" in hub.files("org/model")
    assert client("down")(is_that_model, "org/model")
