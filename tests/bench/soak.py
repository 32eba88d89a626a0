"""`python -m tests.bench.soak`: clients that abort, thousands of event subscribers, and parsers under random bytes, against a whole daemon.

The daemon has Ray and the stub engine. Its longest silence is that of /livez, asked every 50 ms over a connection of its own; its memory
is the anonymous pages of smaps_rollup before and after, behind a round that does not count. --parsers-s has hypothesis put random
bytes and pieces into what reads them in the gateway: a body, its outline, a form, a metrics page. Exits 1 where a bar is
missed: no crash, no silence above 0.25 s, at most 4 MiB more than before.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import resource
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkd.errors import SparkdError
from sparkd.gateway.body import model_of_form, model_of_json
from sparkd.gateway.outline import outline
from sparkd.scrape import fault_of, merge
from tests.bench.slope import _daemon, _kib
from tests.daemon_process import DaemonProcess
from tests.gateway.fakes import post, request

SILENCE_BAR_S, MEMORY_BAR_KIB = 0.25, 4096
BODY = b'{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true}'
CHAT = post("/v1/chat/completions", BODY)
EVENTS = request("GET", "/admin/v1/events?limit=1", "Accept: text/event-stream")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aborts", type=int, default=20_000)
    parser.add_argument("--subscribers", type=int, default=2_000)
    parser.add_argument("--parsers-s", type=float, default=600.0)
    asked = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="sk") as folder:
        made = _daemon(Path(folder))
        try:
            missed = _against(made, asked.aborts, asked.subscribers)
        finally:
            made.gone()
    return 1 if missed + _parsers(asked.parsers_s) else 0


def _against(made: DaemonProcess, aborts: int, subscribers: int) -> int:
    if made.process is None:
        raise RuntimeError("the daemon does not run")
    pid, missed = made.process.pid, 0
    rounds: list[tuple[str, int, Callable[[int], None]]] = [
        ("aborted requests", aborts, lambda count: _abort(made.port, count)),
        ("event subscribers", subscribers, lambda count: _subscribe(made.port, count)),
    ]
    print(f"{'':20} {'count':>7} {'seconds':>8} {'longest silence':>16} {'memory':>10}")
    for name, count, act in rounds:
        act(count)  # pools and caches grow to what the round that counts needs
        time.sleep(1.0)
        before_kib, begun_s = _kib(pid), time.monotonic()
        with Watch(made.port) as watch:
            act(count)
            time.sleep(0.5)
        took_s = time.monotonic() - begun_s
        time.sleep(1.0)
        more_kib = _kib(pid) - before_kib
        ok = watch.longest_s <= SILENCE_BAR_S and more_kib <= MEMORY_BAR_KIB and not watch.failed and made.process.poll() is None
        missed += not ok
        told = f"{name:20} {count:>7,} {took_s:>8.1f} {watch.longest_s:>14.3f} s {more_kib:>+6.0f} KiB"
        print(f"{told} {'ok' if ok else 'MISSED'}", flush=True)
    return missed


def _abort(port: int, count: int) -> None:
    """Six kinds in turn: closed and reset, before an answer, after a part of the request, and within the answer."""
    for number in range(count):
        kind = number % 6
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(CHAT[: len(CHAT) // 2] if kind in (2, 3) else CHAT)
            if kind in (4, 5):
                client.recv(64)
            if kind % 2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its close is a reset


def _subscribe(port: int, count: int) -> None:
    """All are there at one time."""
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            held.append(socket.create_connection(("127.0.0.1", port), timeout=10))
            held[-1].sendall(EVENTS)
        for client in held:
            client.settimeout(30)
            if b" 200 " not in client.recv(64):
                raise RuntimeError("a subscriber was refused")
    finally:
        for client in held:
            client.close()


class Watch:
    """The longest time that /livez took while it is open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.longest_s = 0.0
        self.failed = False

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        client = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        while not self._end.wait(0.05):
            asked_s = time.monotonic()
            client.request("GET", "/livez")
            answer = client.getresponse()
            answer.read()
            self.failed = self.failed or answer.status != 200
            self.longest_s = max(self.longest_s, time.monotonic() - asked_s)
        client.close()


def _parsers(seconds: float) -> int:
    """How many parsers raised what they must not: anything but a SparkdError."""
    failed = 0
    for name, parse in PARSERS.items():
        deadline_s, tried = time.monotonic() + seconds / len(PARSERS), 0
        error = None
        while time.monotonic() < deadline_s and error is None:
            examples, error = _try(parse)
            tried += examples
        failed += error is not None
        print(f"{name:20} {tried:>7,} inputs {'ok' if error is None else f'MISSED {error!r}'}", flush=True)
    return failed


PIECES = st.sampled_from(
    [*'{}[]:,"\\ \n\r0e-.', "model", '"model":"m"', '"stream":true', "\\u00", "--x\r\n", 'name="model"', "vllm:x", "# TYPE ", "1" * 99]
)
TEXTS = st.lists(PIECES | st.text(max_size=3), max_size=60).map(lambda pieces: "".join(pieces).encode("utf-8", "replace"))


def _try(parse: Callable[[bytes], object]) -> tuple[int, Exception | None]:
    tried = 0

    @settings(max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(TEXTS | st.binary(max_size=400))
    def run(data: bytes) -> None:
        nonlocal tried
        tried += 1
        try:
            parse(data)
        except SparkdError:
            return

    try:
        run()
    except Exception as error:  # noqa: BLE001 - what is looked for
        return tried, error
    return tried, None


def _page(data: bytes) -> None:
    page = data.decode("utf-8", "replace")
    fault_of(page)
    merge({("m", "n"): page})


PARSERS: dict[str, Callable[[bytes], object]] = {
    "body": model_of_json,
    "outline": lambda data: asyncio.run(outline(b'{"model":"m","x":"' + b"y" * (1 << 19) + b'",' + data)),
    "form": lambda data: model_of_form(b"--x\r\n" + data, "multipart/form-data; boundary=x"),
    "metrics page": _page,
}

if __name__ == "__main__":
    sys.exit(main())
