"""What `publish` uploads, as the cache of the Hub's client would have it: pairs then load by their id, offline."""

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from huggingface_hub.errors import RevisionNotFoundError

from hf_specx.hub import publish


class HubOnDisk:
    """Repositories below `home`, which is the `HF_HOME` of whoever loads them; each commit is a folder."""

    def __init__(self, home: Path):
        self.home, self.commits = home, 0

    def place(self, repo_id: str) -> Path:
        return self.home / "hub" / f"models--{repo_id.replace('/', '--')}"

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """The content of each file of a branch."""
        name = self.place(repo_id) / "refs" / revision
        if not name.exists():
            raise RevisionNotFoundError(f"no {revision}", response=mock.MagicMock())
        root = self.place(repo_id) / "snapshots" / name.read_text()
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    def put(self, repo_id: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Commit these files, and no others; returns the commit."""
        self.commits += 1
        commit = f"{self.commits:040x}"
        for path, content in files.items():
            file = self.place(repo_id) / "snapshots" / commit / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        name = self.place(repo_id) / "refs" / branch
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_text(commit)
        return commit

    def create_repo(self, repo_id: str, private: bool | None = None, exist_ok: bool = False) -> None:
        if not self.place(repo_id).exists():
            self.put(repo_id, {".gitattributes": b""})

    def create_branch(self, repo_id: str, branch: str, exist_ok: bool = False) -> None:
        if not (self.place(repo_id) / "refs" / branch).exists():
            self.put(repo_id, self.files(repo_id), branch)

    def list_repo_files(self, repo_id: str, revision: str | None = None) -> list[str]:
        return list(self.files(repo_id, revision or "main"))

    def upload_folder(
        self,
        folder_path: Path,
        repo_id: str,
        path_in_repo: str = "",
        revision: str | None = None,
        delete_patterns: list[str] | None = None,
        commit_message: str = "",
    ) -> SimpleNamespace:
        start = f"{path_in_repo}/" if path_in_repo else ""
        stale = [f"{start}{pattern}" for pattern in delete_patterns or []]
        there = self.files(repo_id, revision or "main").items()
        kept = {path: content for path, content in there if not any(fnmatch(path, pattern) for pattern in stale)}
        new = [path for path in folder_path.rglob("*") if path.is_file()]
        sent = {f"{start}{path.relative_to(folder_path).as_posix()}": path.read_bytes() for path in new}
        return SimpleNamespace(oid=self.put(repo_id, kept | sent, revision or "main"))

    @contextmanager
    def published_to(self) -> Iterator[mock.Mock]:
        """Let `publish` upload here, by the methods of `HfApi`, with arguments that these have; yields that class."""
        with mock.patch.object(publish, "HfApi", autospec=True) as api:
            for name in ("create_repo", "create_branch", "list_repo_files", "upload_folder"):
                getattr(api.return_value, name).side_effect = getattr(self, name)
            yield api
