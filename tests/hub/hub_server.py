"""A fake Hub: an HTTP server on loopback that keeps repositories in memory, notes requests, and fails when told to.

It answers the requests by which huggingface_hub and transformers push and load models, and no others.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit


OWNER = "hf_owner"  # the token that may write everything and read what is private
LARGE_FILE = re.compile(r".*\.(safetensors|bin|png)")


class Refused(Exception):
    """An answer that is an error; huggingface_hub tells errors by status and code."""

    def __init__(self, status: int, code: str | None, message: str):
        self.status = status
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})


class Repository:
    """The files of each commit by its hash, and branches, which are names for some commits."""

    numbers = count(1)

    def __init__(self, private: bool):
        self.private = private
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.commit("main", {})

    def at(self, revision: str) -> str:
        """The hash of a commit or branch."""
        found = self.branches.get(revision, revision)
        if found not in self.commits:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    def files(self, revision: str) -> dict[str, bytes]:
        return self.commits[self.at(revision)]

    def file(self, revision: str, path: str) -> bytes:
        if path not in self.files(revision):
            raise Refused(404, "EntryNotFound", "Entry not found")
        return self.files(revision)[path]

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        made = f"{next(self.numbers):040x}"
        self.commits[made], self.branches[branch] = files, made
        return made


class Request(NamedTuple):
    method: str
    path: str
    body: bytes
    token: str | None


@dataclass
class Fault:
    """What goes wrong with the content of one file, once, after `after` bytes.

    "cut": the connection ends; "stall": nothing more comes, which `reached` tells; "short": the answer says that this
    is all there is.
    """

    kind: str
    after: int
    reached: threading.Event = field(default_factory=threading.Event)


class Hub:
    """What is on the Hub, and what tests see of it.

    Attributes:
        repositories: by id, like "org/pair".
        uploads: contents of large files, which are sent before the commit that names them, by SHA-256.
        requests: all there were, in order.
        faults: that are still to come, by the file's path in its repository.
    """

    def __init__(self) -> None:
        self.lock, self.endpoint = threading.RLock(), ""
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.repositories: dict[str, Repository] = {}
        self.uploads: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.faults: dict[str, Fault] = {}

    def put(self, name: str, files: dict[str, bytes]) -> str:
        """Commit files without a request, the repository anew if need be. Returns the commit's hash."""
        repository = self.repositories.setdefault(name, Repository(private=False))
        return repository.commit("main", repository.files("main") | files)

    def files(self, name: str) -> dict[str, bytes]:
        return self.repositories[name].files("main")

    def fail(self, path: str, kind: str, after: int) -> Fault:
        """Let the next download of a file fail; see `Fault`."""
        self.faults[path] = Fault(kind, after)
        return self.faults[path]


@dataclass
class Answer:
    """What is sent back; `file` is the path in the repository where the content is a file's, which may go wrong."""

    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 200
    file: str = ""


def as_json(value: Any, status: int = 200) -> Answer:
    return Answer(json.dumps(value).encode(), {"Content-Type": "application/json; charset=utf-8"}, status)


PARTS = {"repo": "[^/]+/[^/]+", "revision": "[^/]+", "path": ".+", "oid": "[0-9a-f]{64}"}
ROUTES: list[tuple[str, re.Pattern[str], Callable[..., Answer]]] = []


def route(methods: str, form: str) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Answer these methods at paths of this form by the function below; its arguments are the parts in braces."""
    pattern = re.compile(re.sub(r"{(\w+)}", lambda part: f"(?P<{part[1]}>{PARTS[part[1]]})", form))

    def register(answer: Callable[..., Answer]) -> Callable[..., Answer]:
        ROUTES.append((methods, pattern, answer))
        return answer

    return register


def answer_to(hub: Hub, request: Request) -> Answer:
    """Raises `Refused` if the answer is an error."""
    for methods, pattern, answer in ROUTES:
        if request.method in methods.split() and (match := pattern.fullmatch(request.path)):
            parts: dict[str, Any] = {name: unquote(part) for name, part in match.groupdict().items() if part}
            if "repo" in parts:
                parts["repo"] = permitted(hub, request, parts["repo"])
            return answer(hub, request, **parts)
    raise Refused(404, None, f"no such path: {request.method} {request.path}")


def permitted(hub: Hub, request: Request, name: str) -> Repository:
    """The repository, if whoever asks may do so; a private one looks missing to those who may not."""
    repository = hub.repositories.get(name)
    if repository is None or (repository.private and request.token != OWNER):
        raise Refused(404 if request.token else 401, "RepoNotFound", "Repository not found")
    if request.method == "POST" and request.token != OWNER:
        raise Refused(401, None, "You don't have the rights to write here")
    return repository


@route("POST", "/api/validate-yaml")
def validate_card(hub: Hub, request: Request) -> Answer:
    return as_json({"errors": [], "warnings": []})


@route("POST", "/api/repos/create")
def create(hub: Hub, request: Request) -> Answer:
    if request.token != OWNER:
        raise Refused(401, None, "Invalid username or password.")
    wanted = json.loads(request.body)
    name = f"{wanted['organization']}/{wanted['name']}"
    status = 409 if name in hub.repositories else 200
    hub.repositories.setdefault(name, Repository(wanted.get("visibility") == "private"))
    return as_json({"url": f"{hub.endpoint}/{name}", "id": name, "name": name}, status)


@route("POST", "/api/models/{repo}/branch/{revision}")
def create_branch(hub: Hub, request: Request, repo: Repository, revision: str) -> Answer:
    repo.branches[revision] = repo.at("main")
    return as_json({})


@route("GET", "/api/models/{repo}(/revision/{revision})?")
def info(hub: Hub, request: Request, repo: Repository, revision: str = "main") -> Answer:
    siblings = [{"rfilename": path} for path in repo.files(revision)]
    return as_json({"id": "", "sha": repo.at(revision), "private": repo.private, "tags": [], "siblings": siblings})


@route("GET", "/api/models/{repo}/tree/{revision}")
def tree(hub: Hub, request: Request, repo: Repository, revision: str) -> Answer:
    files = repo.files(revision).items()
    return as_json([{"type": "file", "path": path, "oid": "", "size": len(content)} for path, content in files])


@route("POST", "/api/models/{repo}/preupload/{revision}")
def preupload(hub: Hub, request: Request, repo: Repository, revision: str) -> Answer:
    """Which files are large."""
    listed = []
    for path in (file["path"] for file in json.loads(request.body)["files"]):
        mode = "lfs" if LARGE_FILE.fullmatch(path) else "regular"
        listed.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None})
    return as_json({"files": listed})


@route("POST", "/{repo}[.]git/info/lfs/objects/batch")
def upload_places(hub: Hub, request: Request, repo: Repository) -> Answer:
    listed = json.loads(request.body)["objects"]
    for wanted in listed:
        wanted["actions"] = {"upload": {"href": f"{hub.endpoint}/uploads/{wanted['oid']}"}}
    return as_json({"transfer": "basic", "objects": listed})


@route("PUT", "/uploads/{oid}")
def upload(hub: Hub, request: Request, oid: str) -> Answer:
    hub.uploads[oid] = request.body
    return Answer()


@route("POST", "/api/models/{repo}/commit/{revision}")
def commit(hub: Hub, request: Request, repo: Repository, revision: str) -> Answer:
    files = dict(repo.files(revision))
    for operation in map(json.loads, request.body.splitlines()):
        key, value = operation["key"], operation["value"]
        if key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            files[value["path"]] = hub.uploads[value["oid"]]
        elif key == "deletedFile":
            del files[value["path"]]
    made = repo.commit(revision, files)
    return as_json({"commitOid": made, "commitUrl": f"{hub.endpoint}/org/pair/commit/{made}"})


@route("GET HEAD", "/{repo}/resolve/{revision}/{path}")
def resolve(hub: Hub, request: Request, repo: Repository, revision: str, path: str) -> Answer:
    content = repo.file(revision, path)
    etag = hashlib.sha256(content).hexdigest()
    return Answer(content, {"X-Repo-Commit": repo.at(revision), "ETag": f'"{etag}"'}, file=path)


class Handler(BaseHTTPRequestHandler):
    """HTTP for the Hub that is `server.hub`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        hub, body = self.server.hub, self.rfile.read(int(self.headers.get("Content-Length", 0)))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        request = Request(self.command, urlsplit(self.path).path, body, token)
        with hub.lock:
            hub.requests.append(request)
            try:
                answer = answer_to(hub, request)
            except Refused as error:
                answer = Answer(b"{}", error.headers, error.status)
            fault = hub.faults.pop(answer.file, None) if self.command == "GET" else None
        if fault is not None and fault.kind == "short":
            answer.content, fault = answer.content[: fault.after], None
        self.reply(answer, fault)

    do_HEAD = do_POST = do_PUT = do_GET

    def reply(self, answer: Answer, fault: Fault | None) -> None:
        self.send_response(answer.status)
        for name, value in ({"Content-Length": str(len(answer.content))} | answer.headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(answer.content[: fault.after] if fault else answer.content)
        if fault:
            self.close_connection = True
            fault.reached.set()
            if fault.kind == "stall":
                self.rfile.read(1)  # nothing, when whoever asked is gone

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def running() -> Iterator[Hub]:
    """A Hub that answers."""
    hub, server = Hub(), ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub, hub.endpoint = hub, f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
