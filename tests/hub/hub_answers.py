"""What the Hub answers: the paths by which huggingface_hub and transformers read and write repositories."""

import base64
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote

from hub_repositories import Blob, Refused, Repository


if TYPE_CHECKING:
    from hub_server import Hub

OWNER, STRANGER = "hf_owner", "hf_stranger"  # tokens
NAMESPACES = {OWNER: ["owner", "org"], STRANGER: ["stranger"]}  # the user, then its organisations
LARGE_FILE = re.compile(r".*\.(safetensors|bin|pt|pth|pkl|gz|zip|parquet|msgpack|h5)")
LARGE_SIZE = 10 * 2**20


@dataclass
class Request:
    """What was asked, as far as answers depend on it."""

    method: str
    path: str  # still quoted, without its query
    query: dict[str, list[str]]
    body: bytes
    token: str | None
    range: str | None

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Answer:
    """What is sent back; `file` is the path in the repository where the content is a file's, which may go wrong."""

    content: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    file: str | None = None


def as_json(value: Any) -> Answer:
    return Answer(json.dumps(value).encode(), headers={"Content-Type": "application/json; charset=utf-8"})


ROUTES: list[tuple[str, re.Pattern[str], Callable[..., Answer]]] = []
PARTS = {"repo": "[^/]+/[^/]+", "revision": "[^/]+", "path": ".+", "oid": "[0-9a-f]{64}"}


def route(methods: str, pattern: str) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Answer these methods at paths of this form by the function below; its arguments are the parts in braces."""
    for name, part in PARTS.items():
        pattern = pattern.replace("{" + name + "}", f"(?P<{name}>{part})")

    def register(answer: Callable[..., Answer]) -> Callable[..., Answer]:
        ROUTES.extend((method, re.compile(pattern), answer) for method in methods.split())
        return answer

    return register


def answer_to(hub: "Hub", request: Request) -> Answer:
    """The answer to a request.

    Raises:
        Refused: if it is an error.
    """
    if request.token is not None and request.token not in NAMESPACES:
        raise Refused(401, None, "Invalid credentials in Authorization header")
    for method, pattern, answer in ROUTES:
        if method == request.method and (match := pattern.fullmatch(request.path)):
            parts = {name: unquote(part) for name, part in match.groupdict().items() if part is not None}
            if "repo" in parts:
                parts["repo"] = repository(hub, request, parts["repo"])
            return answer(hub, request, **parts)
    raise Refused(404, None, f"no such path: {request.method} {request.path}")


def repository(hub: "Hub", request: Request, name: str) -> Repository:
    """The repository, if whoever asks may do so; a private one looks missing to those who may not."""
    found = hub.repositories.get(name)
    mine = name.split("/")[0] in NAMESPACES.get(request.token, [])
    if found is None or (found.private and not mine):
        raise Refused(404 if request.token else 401, "RepoNotFound", "Repository not found")
    reads = request.method in ("GET", "HEAD") or "/paths-info/" in request.path
    if not (mine or reads):
        raise Refused(403 if request.token else 401, None, "You don't have the rights to write here")
    return found


@route("GET", "/api/whoami-v2")
def whoami(hub: "Hub", request: Request) -> Answer:
    if request.token is None:
        raise Refused(401, None, "Invalid username or password.")
    user, *organisations = NAMESPACES[request.token]
    return as_json({"type": "user", "name": user, "orgs": [{"type": "org", "name": name} for name in organisations]})


@route("POST", "/api/validate-yaml")
def validate_card(hub: "Hub", request: Request) -> Answer:
    empty = not request.json()["content"].startswith("---\n")
    return as_json({"errors": [], "warnings": [{"message": "empty or missing yaml metadata"}] if empty else []})


@route("POST", "/api/repos/create")
def create(hub: "Hub", request: Request) -> Answer:
    wanted, mine = request.json(), NAMESPACES.get(request.token)
    if mine is None:
        raise Refused(401, None, "Invalid username or password.")
    namespace = wanted["organization"] or mine[0]
    if namespace not in mine:
        raise Refused(403, None, f"You don't have the rights to create a model under {namespace}")
    name = f"{namespace}/{wanted['name']}"
    url = {"url": f"{hub.endpoint}/{name}", "id": name, "name": name}
    if name in hub.repositories:
        exists = as_json({"error": "You already created this model repo", **url})
        exists.status = 409
        return exists
    hub.repositories[name] = Repository(name, private=wanted.get("visibility") == "private")
    return as_json(url)


@route("GET", "/api/models/{repo}(/revision/{revision})?")
def info(hub: "Hub", request: Request, repo: Repository, revision: str = "main") -> Answer:
    commit, siblings = repo.at(revision), []
    for path, blob in sorted(commit.files.items()):
        facts = blob.facts()
        large = {"lfs": {"sha256": blob.sha256} | facts["lfs"]} if blob.large else {}
        blobs = {"blobId": facts["oid"], "size": facts["size"]} | large if "blobs" in request.query else {}
        siblings.append({"rfilename": path} | blobs)
    named = {"id": repo.name, "modelId": repo.name, "author": repo.name.split("/")[0], "sha": commit.oid}
    rest = {"private": repo.private, "gated": False, "disabled": False, "lastModified": commit.date, "tags": []}
    return as_json(named | rest | {"siblings": siblings})


def entries(files: dict[str, Blob]) -> list[dict[str, Any]]:
    return [{"type": "file", "path": path} | blob.facts() for path, blob in sorted(files.items())]


@route("GET", "/api/models/{repo}/tree/{revision}(/{path})?")
def tree(hub: "Hub", request: Request, repo: Repository, revision: str, path: str = "") -> Answer:
    start = f"{path}/" if path else ""
    below = {name: blob for name, blob in repo.at(revision).files.items() if name.startswith(start)}
    if path and not below:
        raise Refused(404, "EntryNotFound", f"{path} does not exist on {revision}")
    if request.query.get("recursive") == ["true"]:
        return as_json(entries(below))
    folders = sorted({start + name[len(start) :].split("/")[0] for name in below if "/" in name[len(start) :]})
    listed = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": folder} for folder in folders]
    return as_json(listed + entries({name: blob for name, blob in below.items() if "/" not in name[len(start) :]}))


@route("POST", "/api/models/{repo}/paths-info/{revision}")
def paths_info(hub: "Hub", request: Request, repo: Repository, revision: str) -> Answer:
    files, paths = repo.at(revision).files, parse_qs(request.body.decode())["paths"]
    return as_json(entries({path: files[path] for path in paths if path in files}))


@route("GET", "/api/models/{repo}/refs")
def refs(hub: "Hub", request: Request, repo: Repository) -> Answer:
    def listed(kind: str, names: dict[str, str]) -> list[dict[str, str]]:
        return [{"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": oid} for n, oid in names.items()]

    return as_json({"branches": listed("heads", repo.branches), "tags": listed("tags", repo.tags), "converts": []})


@route("POST", "/api/models/{repo}/(?P<kind>branch|tag)/{revision}")
def name_commit(hub: "Hub", request: Request, repo: Repository, kind: str, revision: str) -> Answer:
    """A branch's name is in the path and its start in the body; for a tag it is the other way round."""
    wanted = request.json()
    names, new = (repo.branches, revision) if kind == "branch" else (repo.tags, wanted["tag"])
    if new in names:
        raise Refused(409, None, f"{kind} {new} already exists")
    names[new] = repo.at(wanted.get("startingPoint", "main") if kind == "branch" else revision).oid
    return as_json({})


@route("POST", "/api/models/{repo}/preupload/{revision}")
def preupload(hub: "Hub", request: Request, repo: Repository, revision: str) -> Answer:
    """Which files are large, and what is there already."""
    there, listed = repo.at(revision).files, []
    for file in request.json()["files"]:
        large = bool(LARGE_FILE.fullmatch(file["path"])) or file["size"] > LARGE_SIZE
        oid = there[file["path"]].etag if file["path"] in there else None
        mode = "lfs" if large else "regular"
        listed.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return as_json({"files": listed})


@route("POST", "/{repo}[.]git/info/lfs/objects/batch")
def large_batch(hub: "Hub", request: Request, repo: Repository) -> Answer:
    """Where to put large files; those that are there already need nothing."""
    listed = []
    for wanted in request.json()["objects"]:
        oid = wanted["oid"]
        upload = {"href": f"{hub.storage}/upload/{oid}?signature=1"}
        verify = {"href": f"{hub.endpoint}/{repo.name}.git/info/lfs/verify"}
        actions = {} if oid in hub.objects else {"actions": {"upload": upload, "verify": verify}}
        listed.append({"oid": oid, "size": wanted["size"]} | actions)
    return as_json({"transfer": "basic", "objects": listed})


@route("POST", "/{repo}[.]git/info/lfs/verify")
def large_verify(hub: "Hub", request: Request, repo: Repository) -> Answer:
    wanted = request.json()
    if len(hub.objects.get(wanted["oid"], b"")) != wanted["size"]:
        raise Refused(404, None, "Object does not exist or has another size")
    return as_json({})


@route("POST", "/api/models/{repo}/commit/{revision}")
def commit(hub: "Hub", request: Request, repo: Repository, revision: str) -> Answer:
    files, title = dict(repo.at(revision).files), ""
    for line in request.body.splitlines():
        key, value = itemgetter("key", "value")(json.loads(line))
        if key == "header":
            title = value["summary"]
            if value.get("parentCommit", repo.at(revision).oid) != repo.at(revision).oid:
                raise Refused(412, None, "A commit has happened since. Please refresh and try again.")
        elif key == "file":
            files[value["path"]] = Blob(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            if value["oid"] not in hub.objects:
                raise Refused(422, None, "LFS pointer pointed to a file that does not exist")
            files[value["path"]] = Blob(hub.objects[value["oid"]], large=True)
        elif value["path"] not in files and key == "deletedFile":
            raise Refused(404, "EntryNotFound", "A file with this name doesn't exist")
        else:
            below = value["path"] + "/"
            files = {p: b for p, b in files.items() if p != value["path"] and not p.startswith(below)}
    made = repo.commit(revision, title, files)
    return as_json({"commitOid": made.oid, "commitUrl": f"{hub.endpoint}/{repo.name}/commit/{made.oid}"})


@route("GET HEAD", "/{repo}/resolve/{revision}/{path}")
def resolve(hub: "Hub", request: Request, repo: Repository, revision: str, path: str) -> Answer:
    """By a redirect: large files to the storage, on another host, the rest to a place on this one."""
    made, blob = repo.file(revision, path)
    headers = {"X-Repo-Commit": made.oid, "Accept-Ranges": "bytes", "ETag": f'"{blob.etag}"'}
    if blob.large:
        linked = {"X-Linked-ETag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.content))}
        headers |= linked | {"Location": f"{hub.storage}/files/{blob.sha256}/{quote(path)}?signature=1"}
        return Answer(status=302, headers=headers)
    headers["Location"] = f"/api/resolve-cache/models/{repo.name}/{made.oid}/{quote(path)}"
    return Answer(status=307, headers=headers)


@route("GET HEAD", "/api/resolve-cache/models/{repo}/{revision}/{path}")
def small_file(hub: "Hub", request: Request, repo: Repository, revision: str, path: str) -> Answer:
    made, blob = repo.file(revision, path)
    return Answer(blob.content, headers={"X-Repo-Commit": made.oid, "ETag": f'"{blob.etag}"'}, file=path)
