"""Serves one model's files to the nodes that have the key, on the addresses it is given. Never writes a file, never serves another.

A program: `python -m workers.transfer.source` reads one line of JSON from stdin, {"manifest", "binds", "key"}, prints {"ports": {address:
port}}, and ends when stdin does, or when nobody was connected for IDLE_S: a daemon that was killed ends nothing.
"""

from __future__ import annotations

import hashlib
import json
import select
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from workers.transfer.chunks import CHUNK_BYTES, Buffer, ChunkFile
from workers.transfer.manifest import File, ModelManifest
from workers.transfer.protocol import DATA, TIMEOUT_S, TransferRequest, WireError, answer, greet_as_server, next_request, refuse

MOST_CONNECTIONS = 64
IDLE_S = 300.0
LOOK_S = 5.0


class TransferSource:
    """Every connection has a thread and a buffer of one chunk."""

    def __init__(self, manifest: ModelManifest, key: bytes) -> None:
        self._root = Path(manifest.root)
        self._files = {file.name: file for file in manifest.files}
        self._key = key
        self._room = threading.Semaphore(MOST_CONNECTIONS)
        self._lock = threading.Lock()
        self._links, self._left_s = 0, time.monotonic()

    def idle_s(self) -> float:
        """For how long nobody was connected."""
        with self._lock:
            return 0.0 if self._links else time.monotonic() - self._left_s

    def listen(self, address: str) -> int:
        """The port on which it serves there from now on. Raises OSError."""
        listening = socket.create_server((address, 0), backlog=MOST_CONNECTIONS)
        threading.Thread(target=self._accept, args=(listening,), name="staging source", daemon=True).start()
        return int(listening.getsockname()[1])

    def _accept(self, listening: socket.socket) -> None:
        while True:
            link, _ = listening.accept()
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(link,), name="staging link", daemon=True).start()
            else:
                link.close()

    def _serve(self, link: socket.socket) -> None:
        buffer, held = Buffer(), _Held()
        self._note(1)
        try:
            with link, suppress(WireError, OSError):
                link.settimeout(TIMEOUT_S)
                greet_as_server(link, self._key)
                # A peer that has the key may take its time: a disk at the other end may be slower than the cable.
                link.settimeout(None)
                link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                while (request := next_request(link)) is not None:
                    self._answer(link, request, buffer, held)
        finally:
            held.close()
            buffer.close()
            self._note(-1)
            self._room.release()

    def _note(self, change: int) -> None:
        with self._lock:
            self._links += change
            self._left_s = time.monotonic()

    def _answer(self, link: socket.socket, request: TransferRequest, buffer: Buffer, held: _Held) -> None:
        file = self._files.get(request.name)
        if file is None or request.size > CHUNK_BYTES or request.offset % CHUNK_BYTES or request.offset + request.size > file.size:
            refuse(link, f"{request.name[:200]} has no such bytes")
            return
        try:
            data = held.of(self._root / file.name, file).read(buffer, request.offset, request.size)
        except OSError as error:
            refuse(link, f"{file.name} cannot be read: {error.strerror or error}")
            return
        if len(data) != request.size:
            refuse(link, f"{file.name} has changed while it was copied")
            return
        answer(link, data if request.what == DATA else b"", hashlib.sha256(data).digest())


class _Held:
    """The file that was asked for last, open."""

    def __init__(self) -> None:
        self._name, self._file = "", None  # type: str, ChunkFile | None

    def of(self, path: Path, file: File) -> ChunkFile:
        if self._file is None or self._name != file.name:
            status = path.stat()
            if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
                raise OSError(0, "it has changed since the copy began")
            self.close()
            self._name, self._file = file.name, ChunkFile(path)
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def main() -> None:
    order = json.loads(sys.stdin.readline())
    source = TransferSource(ModelManifest.from_dict(order["manifest"]), bytes.fromhex(order["key"]))
    try:
        told: dict[str, Any] = {"ports": {address: source.listen(address) for address in order["binds"]}}
    except OSError as error:
        told = {"error": f"{', '.join(order['binds'])} cannot be listened on: {error.strerror or error}."}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    while source.idle_s() < IDLE_S and not select.select([sys.stdin], [], [], LOOK_S)[0]:
        pass


if __name__ == "__main__":
    main()
