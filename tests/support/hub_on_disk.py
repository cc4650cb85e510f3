"""What `publish` uploads, as the cache of the Hub's client would have it: pairs then load by their id, offline."""

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from huggingface_hub.errors import RevisionNotFoundError

from hf_specx.hub import publish, publish_code


class HubOnDisk:
    """Repositories below `home`, which is the `HF_HOME` of whoever loads them; each commit is a folder."""

    def __init__(self, home: Path):
        self.home, self.commits, self.private = home, 0, set[str]()

    def branch(self, repo_id: str, name: str | None) -> Path:
        """The file that says which commit a branch is at."""
        return self.home / "hub" / f"models--{repo_id.replace('/', '--')}" / "refs" / (name or "main")

    def files(self, repo_id: str, revision: str | None = None) -> dict[str, bytes]:
        """The content of each file of a branch."""
        branch = self.branch(repo_id, revision)
        if not branch.exists():
            raise RevisionNotFoundError(f"no {revision}", response=mock.MagicMock())
        root = self.branch(repo_id, None).parents[1] / "snapshots" / branch.read_text()
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    def put(self, repo_id: str, files: dict[str, bytes], revision: str | None = None) -> str:
        """Commit these files, and no others; returns the commit."""
        self.commits += 1
        commit, branch = f"{self.commits:040x}", self.branch(repo_id, revision)
        snapshots = self.branch(repo_id, None).parents[1] / "snapshots"
        for file, content in {snapshots / commit / path: content for path, content in files.items()}.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        branch.parent.mkdir(parents=True, exist_ok=True)
        branch.write_text(commit)
        return commit

    @property
    def cache(self) -> Path:
        return self.home / "hub"

    def create_repo(self, repo_id: str, private: bool | None, **_: Any) -> None:
        if not self.branch(repo_id, None).exists():
            self.put(repo_id, {".gitattributes": b""})
            self.private |= {repo_id} if private else set()

    def repo_info(self, repo_id: str) -> SimpleNamespace:
        return SimpleNamespace(private=repo_id in self.private)

    def hf_hub_download(self, repo_id: str, filename: str, revision: str | None = None) -> str:
        commit = self.branch(repo_id, revision).read_text()
        return str(self.branch(repo_id, None).parents[1] / "snapshots" / commit / filename)

    def create_branch(self, repo_id: str, branch: str, **_: Any) -> None:
        if not self.branch(repo_id, branch).exists():
            self.put(repo_id, self.files(repo_id), branch)

    def upload_folder(self, folder_path: Path, repo_id: str, revision: str | None, **options: Any) -> SimpleNamespace:
        start = f"{options['path_in_repo']}/" if "path_in_repo" in options else ""
        stale = [f"{start}{pattern}" for pattern in options["delete_patterns"]]
        there = self.files(repo_id, revision).items()
        remaining = {path: content for path, content in there if not any(fnmatch(path, pattern) for pattern in stale)}
        new = [path for path in folder_path.rglob("*") if path.is_file()]
        sent = {f"{start}{path.relative_to(folder_path).as_posix()}": path.read_bytes() for path in new}
        return SimpleNamespace(oid=self.put(repo_id, remaining | sent, revision))

    @contextmanager
    def published_to(self) -> Iterator[mock.Mock]:
        """Let `publish` upload here, by the methods of `HfApi`, with arguments that these have; yields that class."""
        with mock.patch.object(publish, "HfApi", autospec=True) as api, mock.patch.object(publish_code, "HfApi", api):
            api.return_value.list_repo_files.side_effect = self.files
            for name in ("create_repo", "repo_info", "hf_hub_download", "create_branch", "upload_folder"):
                getattr(api.return_value, name).side_effect = getattr(self, name)
            yield api
