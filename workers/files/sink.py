"""Fetches one model's files from a node that serves them, by several connections over every rail.

A program: `python -m workers.files.sink` reads one line of JSON from stdin, {"manifest", "environ", "ways", "key", "connections"}, where
a way is [own address, other address, port]; prints {"done_bytes", "total_bytes", "fetched_bytes"} each PROGRESS_S, at the end {"ended":
true} with "removed" and "left" where there are any (see stale_files), or {"error"}; and ends when stdin does. The chunks that it has
verified by then stay for the next try.
"""

from __future__ import annotations

import base64
import collections
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from sparkd.errors import RankError
from workers.files.chunks import Buffer, range_of
from workers.files.manifest import File, ModelFolder, ModelManifest, lacking, place_of, refuse_without_room
from workers.files.partial_file import PartialFile
from workers.files.source import REFUSAL, TIMEOUT_S
from workers.files.stale_files import clear
from workers.host.line_writer import ordered

ATTEMPTS = 4
PAUSE_S = 0.5
PROGRESS_S = 0.3
CONFIG = "config.json"
_DIGEST = re.compile(r"sha-256=:([A-Za-z0-9+/]{43}=):")

Way = tuple[str, str, int]
Task = tuple[PartialFile, int]  # a file and the number of its chunk


class TransferSink:
    """`fetch` blocks until all is there. Counters may be read from another thread."""

    def __init__(self, manifest: ModelManifest, place: ModelFolder, ways: Sequence[Way], key: str, connections: int) -> None:
        self._manifest, self._place = manifest, place
        self._ways, self._key = ways, key
        self._connections = connections
        self._tasks: collections.deque[Task] = collections.deque()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._last: list[PartialFile] = []
        self._parts: list[PartialFile] = []
        self.fetched_bytes = 0
        self.removed: list[str] = []
        self.left: list[str] = []

    @property
    def done_bytes(self) -> int:
        return sum(part.done_bytes for part in self._parts)

    def fetch(self) -> None:
        """Raises RankError, with the node's own reason where it gave one, and OSError of this node's disk."""
        # Two names of one content are fetched once.
        files = {self._place.of(file): file for file in self._manifest.files}
        self._parts = [PartialFile(file, path) for path, file in files.items()]
        try:
            for part in self._parts:
                self._begin(part)
            threads = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(self._connections)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if self._error is not None:
                raise self._error
            buffer = Buffer()
            for part in self._last:
                part.finish(buffer)
            buffer.close()
            self._publish()
        finally:
            for part in self._parts:
                part.close()

    def _begin(self, part: PartialFile) -> None:
        self._tasks.extend((part, index) for index in part.begin())
        if not part.file.size:
            # An empty file has no chunk that could be its last.
            self._last.append(part)

    def _work(self, number: int) -> None:
        buffer, link = Buffer(), _Link(self._ways, number, self._key, lambda: self._error is not None)
        try:
            while (task := self._next()) is not None:
                self._do(*task, buffer, link)
        except Exception as error:  # noqa: BLE001 - `fetch` raises it; the others end too
            self._error = self._error or error
        finally:
            link.close()
            buffer.close()

    def _next(self) -> Task | None:
        with self._lock:
            return self._tasks.popleft() if self._tasks and self._error is None else None

    def _do(self, part: PartialFile, index: int, buffer: Buffer, link: _Link) -> None:
        if not part.is_as_before(index, buffer):
            self._fetch(part, index, buffer, link)
        if not part.done(index):
            return
        # Without it no engine takes the folder for a model that is all there.
        if part.to.name == CONFIG:
            self._last.append(part)
        else:
            part.finish(buffer)

    def _fetch(self, part: PartialFile, index: int, buffer: Buffer, link: _Link) -> None:
        for _ in range(ATTEMPTS):
            if part.keep(index, buffer, link.ask(part.file, index, buffer)):
                with self._lock:
                    self.fetched_bytes += range_of(part.file.size, index)[1]
                return
        cure = "check the cable, its plugs and the memory"
        raise RankError(f"{part.file.name} arrived damaged {ATTEMPTS} times in a row over the network: {cure}.")

    def _publish(self) -> None:
        """The cache's links, and at the very end the name of the revision: until then the hub's library does not find it. In a plain folder
        what an earlier copy put there and the source has no more goes."""
        place, commit = self._place, self._manifest.commit
        if place.blobs is None or commit is None:
            self.removed, self.left = clear(self._manifest, place.files)
            return
        for file in (file for file in self._manifest.files if file.blob):
            link = place.files / file.name
            link.parent.mkdir(parents=True, exist_ok=True)
            target = os.path.relpath(place.blobs / str(file.blob), link.parent)
            fresh = link.with_name(f".{link.name}.{os.getpid()}")
            with suppress(FileNotFoundError):
                fresh.unlink()
            fresh.symlink_to(target)
            fresh.replace(link)
        revision = self._manifest.revision or "main"
        if revision != commit:
            ref = place.top / "refs" / revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            fresh = ref.with_name(f".{ref.name}.{os.getpid()}")
            fresh.write_text(commit, encoding="ascii")
            fresh.replace(ref)


class _Link:
    """One connection to the other node, made when it is needed, by the next way where one does not answer."""

    def __init__(self, ways: Sequence[Way], number: int, key: str, is_over: Callable[[], bool]) -> None:
        self._ways, self._turn = ways, number
        self._is_over = is_over
        self._headers = {"Authorization": f"Bearer {key}"}
        self._link: HTTPConnection | None = None

    def ask(self, file: File, index: int, buffer: Buffer) -> str:
        """Fetch a chunk into `buffer`; its SHA-256 by the other end, hex. Raises RankError."""
        offset, size = range_of(file.size, index)
        reason = "another connection has failed"
        for attempt in range(ATTEMPTS):
            own, other, port = self._ways[self._turn % len(self._ways)]
            try:
                link = self._connected(own, other, port)
                wanted = {"Range": f"bytes={offset}-{offset + size - 1}"}
                link.request("GET", "/" + quote(file.name, safe=""), headers=self._headers | wanted)
                # An answer that is not closed keeps its connection from the next one.
                with link.getresponse() as response:
                    return _taken(response, buffer, size)
            except (HTTPException, OSError) as error:
                reason = f"{other}:{port} from {own}: {getattr(error, 'strerror', None) or error}"
            self.close()
            self._turn += 1
            if self._is_over():
                break
            time.sleep(PAUSE_S * attempt)
        raise RankError(f"The node that has it cannot be reached ({reason}). Run the same again to go on: the verified part stays.")

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _connected(self, own: str, other: str, port: int) -> HTTPConnection:
        if self._link is None:
            self._link = HTTPConnection(other, port, TIMEOUT_S, source_address=(own, 0))
        return self._link


def _taken(response: HTTPResponse, buffer: Buffer, size: int) -> str:
    """The digest that an answer has of its bytes, hex. Raises RankError with the other end's reason where it refuses, HTTPException."""
    if response.status == 401:
        raise HTTPException("the other end has another key")
    if response.status != 206:
        raise RankError(f"The node that has it says: {unquote(response.headers.get(REFUSAL, f'HTTP {response.status}'))[:4096]}.")
    digest = _DIGEST.fullmatch(response.headers.get("Content-Digest", ""))
    if digest is None:
        raise HTTPException("the answer has no digest")
    got = 0
    while got < size:
        more = response.readinto(buffer.view[got:size])
        if not more:
            raise HTTPException("it closed the connection")
        got += more
    return base64.b64decode(digest[1]).hex()


def run(order: Mapping[str, Any], tell: Callable[[Mapping[str, Any]], None]) -> None:
    """Tells progress and the end; never raises for what the operator can mend."""
    manifest = ModelManifest.from_dict(order["manifest"])
    try:
        refuse_without_room(manifest.model, lacking(manifest, order["environ"]))
        ways = [(str(own), str(other), int(port)) for own, other, port in order["ways"]]
        sink = TransferSink(manifest, place_of(manifest, order["environ"]), ways, str(order["key"]), int(order["connections"]))
        ended = threading.Event()

        def report() -> None:
            while not ended.wait(PROGRESS_S):
                tell({"done_bytes": sink.done_bytes, "total_bytes": manifest.size, "fetched_bytes": sink.fetched_bytes})

        threading.Thread(target=report, name="staging progress", daemon=True).start()
        try:
            sink.fetch()
        finally:
            ended.set()
        over = {"done_bytes": manifest.size, "total_bytes": manifest.size, "fetched_bytes": sink.fetched_bytes}
        beside = {"removed": sink.removed, "left": sink.left}
        tell(over | {"ended": True} | {what: names for what, names in beside.items() if names})
    except RankError as error:
        tell({"error": error.message})
    except OSError as error:
        where = error.filename or Path(manifest.root)
        tell({"error": f"{where} cannot be written: {error.strerror or error}. Check its owner, its mode and the disk."})


def main() -> None:
    run(*ordered("staging end"))


if __name__ == "__main__":
    main()
