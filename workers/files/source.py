"""Serves one model's files to the nodes that have the key, on the addresses it is given.

A program: `python -m workers.files.source` reads one line of JSON from stdin, {"manifest", "binds", "key"}, prints {"ports": {address:
port}}, and ends when stdin does, or when no node was connected for IDLE_S: a daemon that was killed cannot end it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import select
import socket
import sys
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import quote, unquote

from workers.files.chunks import CHUNK_BYTES, Buffer
from workers.files.direct_file import DirectFile
from workers.files.manifest import ModelManifest

MOST_CONNECTIONS = 64
IDLE_S = 300.0
LOOK_S = 5.0
TIMEOUT_S = 60.0
REFUSAL = "X-Refusal"
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")


class TransferSource:
    """Every connection has a thread and, once it has shown the key, a buffer of one chunk."""

    def __init__(self, manifest: ModelManifest, key: str) -> None:
        self.root = Path(manifest.root)
        self.files = {file.name: file for file in manifest.files}
        self.authorization = f"Bearer {key}".encode()
        self.room = threading.Semaphore(MOST_CONNECTIONS)
        self._lock = threading.Lock()
        self._links, self._left_s = 0, time.monotonic()

    def idle_s(self) -> float:
        """Seconds without a connection."""
        with self._lock:
            return 0.0 if self._links else time.monotonic() - self._left_s

    def listen(self, address: str) -> int:
        """The port on which it serves there from now on. Raises OSError."""
        server = _Server(address, self)
        threading.Thread(target=server.serve_forever, name="staging source", daemon=True).start()
        return server.server_port

    def note(self, change: int) -> None:
        """One connection more, or one less."""
        with self._lock:
            self._links += change
            self._left_s = time.monotonic()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, address: str, source: TransferSource) -> None:
        self.source = source
        super().__init__((address, 0), _Answers)

    def server_bind(self) -> None:
        # http.server's own asks the name server for this node's name.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.source.room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self.source.note(1)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.source.note(-1)
            self.source.room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # The other end asks again after a connection that broke.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Answers(BaseHTTPRequestHandler):
    """GET of a file's bytes (RFC 9110, "Range Requests") with their Content-Digest (RFC 9530)."""

    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT_S
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self._buffer: Buffer | None = None

    def finish(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
        super().finish()

    def do_GET(self) -> None:
        source = self.server.source
        if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), source.authorization):
            self.close_connection = True
            self._refuse(401, "it was shown another key")
            return
        # A peer that has the key may take its time: a disk at the other end may be slower than the cable.
        self.connection.settimeout(None)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        name, wanted = unquote(self.path[1:]), _RANGE.fullmatch(self.headers.get("Range", ""))
        file = source.files.get(name)
        offset, end = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, 0)
        if file is None or offset % CHUNK_BYTES or not offset < end <= min(offset + CHUNK_BYTES, file.size):
            self._refuse(416, f"{name[:200]} has no such bytes")
            return
        self._buffer = self._buffer or Buffer()
        path = source.root / file.name
        try:
            status = path.stat()
            with closing(DirectFile(path)) as opened:
                data = self._buffer.read(opened, offset, end - offset)
        except OSError as error:
            self._refuse(409, f"{file.name} cannot be read: {error.strerror or error}")
            return
        if len(data) != end - offset or (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
            self._refuse(409, f"{file.name} has changed while it was copied")
            return
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {offset}-{end - 1}/{file.size}")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Digest", f"sha-256=:{base64.b64encode(hashlib.sha256(data).digest()).decode()}:")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _refuse(self, status: int, reason: str) -> None:
        self.send_response(status)
        self.send_header(REFUSAL, quote(reason))
        self.send_header("Content-Length", "0")
        self.end_headers()


def main() -> None:
    order = json.loads(sys.stdin.readline())
    source = TransferSource(ModelManifest.from_dict(order["manifest"]), str(order["key"]))
    try:
        answer: dict[str, Any] = {"ports": {address: source.listen(address) for address in order["binds"]}}
    except OSError as error:
        answer = {"error": f"{', '.join(order['binds'])} cannot be listened on: {error.strerror or error}."}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    while source.idle_s() < IDLE_S and not select.select([sys.stdin], [], [], LOOK_S)[0]:
        pass


if __name__ == "__main__":
    main()
