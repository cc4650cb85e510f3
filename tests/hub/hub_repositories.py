"""Repositories as the Hub keeps them, in memory: files, commits, branches and tags."""

import hashlib
import json
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from typing import Any


class Refused(Exception):
    """An answer that is an error, with the headers that huggingface_hub tells errors by."""

    def __init__(self, status: int, code: str | None, message: str, **headers: str):
        self.status, self.message = status, message
        self.headers = {"X-Error-Message": message, **headers} | ({"X-Error-Code": code} if code else {})


@dataclass(frozen=True)
class Blob:
    """A file's content; a large one is kept outside git, which has a pointer to it."""

    content: bytes
    large: bool = False

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def oid(self) -> str:
        """As git counts it."""
        kept = f"oid sha256:{self.sha256}\nsize {len(self.content)}\n".encode() if self.large else self.content
        return hashlib.sha1(b"blob %d\0" % len(kept) + kept).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.oid

    def facts(self) -> dict[str, Any]:
        """As file lists have them."""
        large = {"lfs": {"oid": self.sha256, "size": len(self.content), "pointerSize": 134}} if self.large else {}
        return {"oid": self.oid, "size": len(self.content)} | large


@dataclass(frozen=True)
class Commit:
    title: str
    parent: str | None
    files: dict[str, Blob]
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"))

    @cached_property
    def oid(self) -> str:
        listed = [self.title, self.parent, self.date, [(path, blob.oid) for path, blob in sorted(self.files.items())]]
        return hashlib.sha1(json.dumps(listed).encode()).hexdigest()


class Repository:
    """Commits by their hash, and names for some of them."""

    def __init__(self, name: str, private: bool):
        first = Commit("initial commit", None, {".gitattributes": Blob(b"*.safetensors filter=lfs\n")})
        self.name, self.private, self.commits = name, private, {first.oid: first}
        self.branches, self.tags = {"main": first.oid}, {}

    def at(self, revision: str) -> Commit:
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        if oid not in self.commits:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self.commits[oid]

    def file(self, revision: str, path: str) -> tuple[Commit, Blob]:
        commit = self.at(revision)
        if path not in commit.files:
            raise Refused(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": commit.oid})
        return commit, commit.files[path]

    def commit(self, branch: str, title: str, files: dict[str, Blob]) -> Commit:
        if branch not in self.branches:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {branch}")
        commit = Commit(title, self.branches[branch], files)
        self.commits[commit.oid], self.branches[branch] = commit, commit.oid
        return commit
