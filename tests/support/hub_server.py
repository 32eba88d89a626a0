"""A hub on this machine for one repository: its listing, the redirects to where the bytes lie, ranges. Never knows what reads from it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.waiting import HUNG_S

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL_BYTES = 16 << 20
SIGNATURE = "X-Amz-Signature=0badc0de"


@dataclass(slots=True)
class Asked:
    """One request. server: hub or store; sent: bytes of the body that were written before the client left."""

    server: str
    path: str
    range: str | None
    token: str | None
    sent: int = 0


@dataclass(slots=True)
class Repository:
    """What the hub has, and how it behaves. ranges: the store knows them; listed: sizes in the listing that are not the files' own.

    refusals: status and X-Error-Code of an answer, by what the path ends with, as often as it stands there; cut: bytes after which an
    answer of the store ends; total: what the store says that a file's size is; held: what the store waits for before it answers for a file,
    or the hub for a path that ends so, if it begins with a slash. heads: by branch, where that is at another commit than COMMIT.
    """

    folder: Path
    hub_id: str = "owner/name"
    ranges: bool = True
    listed: dict[str, int | None] = field(default_factory=dict)
    refusals: dict[str, list[tuple[int, dict[str, str]]]] = field(default_factory=dict)
    cut: dict[str, list[int]] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)
    held: dict[str, threading.Event] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    listing: Any = None
    asked: list[Asked] = field(default_factory=list)
    hub: str = ""
    store: str = ""

    @property
    def sent(self) -> int:
        return sum(asked.sent for asked in self.asked)

    def ranges_of(self, name: str) -> list[str | None]:
        return [asked.range for asked in self.asked if asked.server == "store" and asked.path == f"/{name}"]

    def answers(self, revision: str = "main") -> dict[str, Any]:
        files = sorted(file for file in self.folder.rglob("*") if file.is_file())
        names = [str(file.relative_to(self.folder)) for file in files]
        sizes = [self.listed.get(name, file.stat().st_size) for name, file in zip(names, files, strict=True)]
        siblings = [{"rfilename": name} | ({} if size is None else {"size": size}) for name, size in zip(names, sizes, strict=True)]
        return {"id": self.hub_id, "sha": self.heads.get(revision, COMMIT), "siblings": siblings, "tags": ["safetensors"]}


@contextmanager
def serving(repository: Repository) -> Iterator[Repository]:
    """The hub's own address and that of the store, to which it leads for weights, are in the repository then."""
    servers = [_Server(repository, name) for name in ("hub", "store")]
    repository.hub, repository.store = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield repository
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, repository: Repository, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repository, self.name = repository, name

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves in the middle is what some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    _asked: Asked

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        repository, path = self.server.repository, unquote(urlsplit(self.path).path)
        self._asked = Asked(self.server.name, path, self.headers.get("Range"), self.headers.get("Authorization"))
        repository.asked.append(self._asked)
        for end, answers in repository.held.items():
            if end.startswith("/") and path.endswith(end):
                answers.wait(HUNG_S)
        for end, refusals in repository.refusals.items():
            if path.endswith(end) and refusals:
                status, headers = refusals.pop(0)
                return self._answer(status, b'{"error": "no"}', headers)
        if self.server.name == "store":
            return self._store(path.removeprefix("/"))
        if path.startswith(f"/api/models/{repository.hub_id}/revision/"):
            answer = repository.listing if repository.listing is not None else repository.answers(path.rpartition("/")[2])
            return self._answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})
        if path == f"/api/models/{repository.hub_id}/tree/{COMMIT}":
            siblings = repository.answers()["siblings"]
            tree = [{"type": "file", "path": file["rfilename"], "oid": "", "size": file.get("size", 0)} for file in siblings]
            return self._answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        if path.startswith("/api/models/"):
            return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        before = f"/{repository.hub_id}/resolve/{COMMIT}/"
        file = repository.folder / path.removeprefix(before)
        if not path.startswith(before) or not file.is_file():
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        if file.suffix == ".safetensors":
            size = file.stat().st_size
            # The large ones are sparse, and nobody downloads them.
            digest = hashlib.sha256(file.read_bytes()).hexdigest() if size <= SMALL_BYTES else "0"
            there = {"X-Repo-Commit": COMMIT, "X-Linked-Size": str(size), "X-Linked-ETag": f'"{digest}"'}
            return self._answer(302, b"", {"Location": f"{repository.store}/{file.name}?{SIGNATURE}", **there})
        digest = hashlib.sha1(file.read_bytes()).hexdigest()
        return self._answer(200, file.read_bytes(), {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"'})

    def _store(self, name: str) -> None:
        repository = self.server.repository
        if name in repository.held:
            repository.held[name].wait(HUNG_S)
        size = (repository.folder / name).stat().st_size
        total = repository.total.get(name, size)
        if not repository.ranges or self._asked.range is None:
            return self._answer(200, (repository.folder / name).read_bytes(), {}, total, self._cut(name))
        first, last = (int(word or size - 1) for word in self._asked.range.removeprefix("bytes=").split("-"))
        if first >= size:
            return self._answer(416, b"", {"Content-Range": f"bytes */{total}"})
        with (repository.folder / name).open("rb") as file:
            file.seek(first)
            part = file.read(last + 1 - first)
        told = {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{total}", "Accept-Ranges": "bytes"}
        return self._answer(206, part, told, len(part), self._cut(name))

    def _cut(self, name: str) -> int | None:
        cuts = self.server.repository.cut.get(name)
        return cuts.pop(0) if cuts else None

    def _answer(self, status: int, body: bytes, headers: dict[str, str], length: int | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body) if length is None else length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        body = body[:cut]
        for start in range(0, len(body), 1 << 16):
            self._asked.sent += self.wfile.write(body[start : start + (1 << 16)])
        if cut is not None or (length is not None and length > len(body)):
            self.close_connection = True
