"""A hub on this machine: what huggingface_hub asks of one to make a repository, commit to it and fetch from it."""

import base64
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Files = dict[str, bytes]


class Hub:
    """Repositories with their commits, newest last. Files above 1000 bytes go through git-lfs, as tensors do on the
    real one. `answers`: functions that take over requests whose path matches, to misbehave."""

    def __init__(self) -> None:
        self.repos: dict[str, list[Files]] = {}
        self.objects: dict[str, bytes] = {}
        self.answers: list[tuple[str, Callable[[Any], None]]] = []
        self.requests: list[str] = []
        self.private: set[str] = set()
        self.url = ""

    def sha(self, repo: str, number: int = -1) -> str:
        """Name of a commit."""
        commits = self.repos[repo]
        return hashlib.sha1(f"{repo} {range(len(commits))[number]}".encode()).hexdigest()

    def files(self, repo: str, revision: str) -> Files | None:
        """Files at `main` or at a commit."""
        commits = self.repos.get(repo, [])
        names = {self.sha(repo, i): files for i, files in enumerate(commits)} | {"main": commits[-1] if commits else {}}
        return names.get(revision)


@contextmanager
def running() -> Iterator[Hub]:
    """A hub that answers at `hub.url`, on the loopback interface."""
    hub = Hub()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients that are killed are meant
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _handle(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        self.body = self.rfile.read(int(self.headers.get("content-length", 0)))
        for pattern, answer in self.hub.answers:
            if re.search(pattern, path):
                return answer(self)
        for pattern, name in _ROUTES:
            if found := re.fullmatch(pattern, f"{self.command} {path}"):
                return getattr(self, name)(*found.groups())
        self.reply(404, {"error": f"no such page: {self.path}"})

    do_GET = do_POST = do_PUT = do_HEAD = _handle

    def reply(self, code: int, data: Any, **headers: str) -> None:
        text = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(code)
        self.send_header("content-length", str(len(text)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def create(self) -> None:
        wanted = json.loads(self.body)
        repo = "/".join(filter(None, (wanted.get("organization"), wanted["name"])))
        if repo in self.hub.repos:
            return self.reply(409, {"error": "exists", "url": f"{self.hub.url}/{repo}"})
        self.hub.repos[repo] = [{".gitattributes": b"*.safetensors filter=lfs"}]
        if wanted.get("private") or wanted.get("visibility") == "private":
            self.hub.private.add(repo)
        self.reply(200, {"url": f"{self.hub.url}/{repo}", "name": repo})

    def yaml(self) -> None:
        self.reply(200, {"errors": [], "warnings": []})

    def info(self, repo: str) -> None:
        files = self.hub.files(repo, "main")
        if files is None:
            return self.reply(404, {"error": "Repository not found"}, x_error_code="RepoNotFound")
        self.reply(200, {"id": repo, "sha": self.hub.sha(repo), "siblings": [{"rfilename": name} for name in files]})

    def tree(self, repo: str) -> None:
        files = self.hub.files(repo, "main") or {}
        self.reply(200, [{"type": "file", "path": n, "size": len(d), "oid": _oid(d)} for n, d in files.items()])

    def preupload(self, repo: str) -> None:
        files = json.loads(self.body)["files"]
        modes = [
            {"path": f["path"], "uploadMode": "lfs" if f["size"] > 1000 else "regular", "shouldIgnore": False}
            for f in files
        ]
        self.reply(200, {"files": modes})

    def batch(self, repo: str) -> None:
        objects = [
            {"oid": o["oid"], "size": o["size"], "actions": {"upload": {"href": f"{self.hub.url}/lfs/{o['oid']}"}}}
            for o in json.loads(self.body)["objects"]
        ]
        self.reply(200, {"transfer": "basic", "objects": objects}, content_type="application/vnd.git-lfs+json")

    def store(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self.reply(400, {"error": "hash"})
        self.hub.objects[oid] = self.body
        self.reply(200, {})

    def commit(self, repo: str) -> None:
        files = dict(self.hub.repos[repo][-1])
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        self.hub.repos[repo].append(files)
        sha = self.hub.sha(repo)
        self.reply(200, {"commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "commitOid": sha, "success": True})

    def resolve(self, repo: str, revision: str, name: str) -> None:
        if repo not in self.hub.repos:
            return self.reply(404, {"error": "Repository not found"}, x_error_code="RepoNotFound")
        files = self.hub.files(repo, revision)
        if files is None:
            return self.reply(404, {"error": "Revision not found"}, x_error_code="RevisionNotFound")
        if name not in files:
            return self.reply(404, {"error": "Entry not found"}, x_error_code="EntryNotFound")
        sha = self.hub.sha(repo) if revision == "main" else revision
        self.reply(200, files[name], x_repo_commit=sha)


_REPO = r"([\w.-]+/[\w.-]+)"
_ROUTES = [
    (r"POST /api/repos/create", "create"),
    (r"POST /api/validate-yaml", "yaml"),
    (rf"GET /api/models/{_REPO}(?:/revision/main)?", "info"),
    (rf"GET /api/models/{_REPO}/tree/main", "tree"),
    (rf"POST /api/models/{_REPO}/preupload/main", "preupload"),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", "batch"),
    (r"PUT /lfs/(\w+)", "store"),
    (rf"POST /api/models/{_REPO}/commit/main", "commit"),
    (rf"GET /{_REPO}/resolve/([\w.-]+)/(.+)", "resolve"),
]


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


# Ways to misbehave


def silent(seconds: float) -> Callable[[Any], None]:
    """Takes the request and says nothing for so long."""
    return lambda request: time.sleep(seconds)


def dripping(chunks: int, seconds: float) -> Callable[[Any], None]:
    """A byte, a pause, a byte, ..."""

    def answer(request: Any) -> None:
        request.send_response(200)
        request.send_header("content-length", "1000000")
        request.end_headers()
        try:
            for _ in range(chunks):
                request.wfile.write(b"{")
                request.wfile.flush()
                time.sleep(seconds)
        except OSError:  # the client has had enough
            pass

    return answer


def endless(request: Any) -> None:
    """Says no length, and sends until the client has had enough."""
    request.send_response(200)
    request.end_headers()
    request.close_connection = True
    try:
        for _ in range(1 << 12):
            request.wfile.write(bytes(1 << 16))
    except OSError:
        pass


def cut(data: bytes, at: int) -> Callable[[Any], None]:
    """Promises all of `data` and breaks off."""

    def answer(request: Any) -> None:
        request.send_response(200)
        request.send_header("content-length", str(len(data)))
        request.end_headers()
        request.wfile.write(data[:at])
        request.close_connection = True

    return answer
