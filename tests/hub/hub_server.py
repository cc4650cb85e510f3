"""A Hub on loopback: a real HTTP server that speaks its protocol, counts what it is asked, and fails when told to."""

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from hub_answers import LARGE_FILE, Answer, Request, answer_to
from hub_repositories import Blob, Refused, Repository


PATIENCE = 60  # seconds that a stalled download is held at most


class Seen(NamedTuple):
    """A request as tests count it."""

    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class Fault:
    """What goes wrong with the content of one file, `times` times, after `after` bytes.

    "cut": the connection ends; "stall": nothing more comes until `release` is set, and `reached` tells that it is so;
    "short": the answer says that this is all there is.
    """

    kind: str
    after: int
    times: int = 1
    reached: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


class Hub:
    """Repositories, and the two hosts that serve them: the Hub itself and the storage of large files.

    Attributes:
        endpoint: for `HF_ENDPOINT`.
        repositories: by id, like "org/pair"; tokens are `hub_answers.OWNER` (of "org") and `STRANGER`.
        objects: contents of large files by SHA-256.
        requests: all seen, in order, those to the storage included.
        faults: by the file's path in its repository.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.hosts = [ThreadingHTTPServer(("127.0.0.1", 0), handler(self, storage)) for storage in (False, True)]
        self.endpoint, self.storage = (f"http://127.0.0.1:{host.server_port}" for host in self.hosts)
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[Seen] = []
        self.faults: dict[str, Fault] = {}

    def environment(self, home: Path | str) -> dict[str, str]:
        """What a process needs to take this for the Hub, with `home` for its cache."""
        ours = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        ours["TRANSFORMERS_VERBOSITY"] = "error"
        ours |= {
            f"HF_HUB_{name}_TIMEOUT": str(PATIENCE) for name in ("ETAG", "DOWNLOAD")
        }  # 10 are few on a busy machine
        ours |= {f"HF_HUB_DISABLE_{name}": "1" for name in ("XET", "TELEMETRY", "PROGRESS_BARS", "UPDATE_CHECK")}
        left = ("PATH", "LANG", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "SYSTEMROOT")
        return {name: os.environ[name] for name in left if name in os.environ} | ours

    def put(self, name: str, files: dict[str, bytes], *, private: bool = False) -> str:
        """Commit files without a request, the repository anew if need be. Returns the commit's hash."""
        repository = self.repositories.setdefault(name, Repository(name, private))
        blobs = {path: Blob(content, bool(LARGE_FILE.fullmatch(path))) for path, content in files.items()}
        self.objects |= {blob.sha256: blob.content for blob in blobs.values() if blob.large}
        return repository.commit("main", "put", repository.at("main").files | blobs).oid

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """What is in a repository, without what the Hub itself put there."""
        files = self.repositories[name].at(revision).files
        return {path: blob.content for path, blob in files.items() if path != ".gitattributes"}

    def fail(self, path: str, kind: str, after: int, times: int = 1) -> Fault:
        """Let the next downloads of a file fail; see `Fault`."""
        self.faults[path] = Fault(kind, after, times)
        return self.faults[path]

    def take_fault(self, path: str | None) -> Fault | None:
        with self.lock:
            fault = self.faults.get(path or "")
            if fault is None or fault.times == 0:
                return None
            fault.times -= 1
            return fault

    def stored(self, request: Request) -> Answer:
        """What the storage answers: addresses are signed, so that a token is none of its business."""
        if request.token or "signature" not in request.query:
            raise Refused(400, None, "Only one auth mechanism allowed")
        verb, oid, *path = request.path.strip("/").split("/", 2)
        if (request.method, verb) == ("PUT", "upload") and hashlib.sha256(request.body).hexdigest() == oid:
            self.objects[oid] = request.body
            return Answer()
        if request.method == "GET" and verb == "files" and oid in self.objects:
            return Answer(self.objects[oid], headers={"ETag": f'"{oid}"'}, file=unquote(path[0]))
        raise Refused(403, None, "Access denied")


@contextmanager
def running() -> Iterator[Hub]:
    """A Hub that answers."""
    hub = Hub()
    for host in hub.hosts:
        threading.Thread(target=host.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        for fault in hub.faults.values():
            fault.release.set()
        for host in hub.hosts:
            host.shutdown()
            host.server_close()


def handler(hub: Hub, storage: bool) -> type[BaseHTTPRequestHandler]:
    """HTTP for one of the two hosts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            scheme, _, token = self.headers.get("Authorization", "").partition(" ")
            asked = Request(
                self.command, url.path, parse_qs(url.query), body, token if scheme else None, self.headers.get("Range")
            )
            hub.requests.append(Seen(asked.method, unquote(asked.path), asked.range, asked.token))
            try:
                with hub.lock:
                    answer = hub.stored(asked) if storage else answer_to(hub, asked)
            except Refused as error:
                answer = Answer(f'{{"error": "{error.message}"}}'.encode(), error.status, error.headers)
            self.reply(asked, answer)

        do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

        def reply(self, asked: Request, answer: Answer) -> None:
            content, headers = answer.content, {"Content-Length": str(len(answer.content))} | answer.headers
            if answer.file is not None and asked.range is not None:
                first = int(asked.range.removeprefix("bytes=").split("-")[0])
                headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
                content, answer.status = content[first:], 206
                headers["Content-Length"] = str(len(content))
            fault = hub.take_fault(answer.file) if asked.method == "GET" else None
            if fault is not None and fault.kind == "short":
                content = content[: fault.after]
                headers["Content-Length"] = str(len(content))
            self.send_response(answer.status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if asked.method != "HEAD":
                self.send(content, fault)

        def send(self, content: bytes, fault: Fault | None) -> None:
            if fault is None or fault.kind == "short":
                self.wfile.write(content)
                return
            self.wfile.write(content[: fault.after])
            self.close_connection = True
            fault.reached.set()
            if fault.kind == "stall" and fault.release.wait(PATIENCE):
                with suppress(OSError):  # whoever asked may be gone
                    self.wfile.write(content[fault.after :])

        def log_message(self, *args: object) -> None:
            pass

    return Handler
