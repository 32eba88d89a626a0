"""`python -m tests.bench.soak`: a whole daemon under clients that abort and subscribers of events.

    aborts        --aborts clients in turn, which close or reset before, within and behind the request
    subscribers   --subscribers of events at one time, each of which reads up to 1,000 rows of a history of --events

The daemon has Ray and the stub engine. Its longest silence is that of /livez, asked every 50 ms over a connection of its own, beside which
stands how late the watch itself was woken, the machine's doing; its memory is the anonymous pages of smaps_rollup before and after, behind
a round that does not count. The subscribers come in three rounds, whose median growth is judged: a leak grows with each. Exits 1 where a
bar is missed: no crash, no traceback, no silence above 0.25 s, at most 4 MiB more than before. --only names parts by a regular expression.
"""

from __future__ import annotations

import argparse
import http.client
import re
import resource
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Self

import httpx

from sparkd.state.store import Store
from tests.bench.arguments import Parser, count, pattern
from tests.sparkd.gateway.fakes import post, request
from tests.stub import stub_engine
from tests.support.daemon_process import DaemonProcess, daemon

SILENCE_BAR_S, MEMORY_BAR_KIB = 0.25, 4096
LIVEZ_S = 0.05
PARTS = ("aborts", "subscribers")
# With 2,000 subscribers the first round in a daemon takes 134 MiB, and the second or the third 5 to 7 more, once: as much as it holds where
# all of them wait for the rest of their rows at one moment. Each of the others took at most 0.6.
SUBSCRIBER_ROUNDS = 3
BODY = b'{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true}'
CHAT = post("/v1/chat/completions", BODY)
MOST_ROWS = 1000
EVENTS = request("GET", f"/admin/v1/events?limit={MOST_ROWS}", "Accept: text/event-stream")


@dataclass(frozen=True, slots=True)
class Round:
    """One part, done to a daemon: `act` returns how many. The first time does not count, the others are measured."""

    name: str
    act: Callable[[], int]
    times: int = 1


class Watch:
    """The longest time that /livez took while it is open. failed: it had another answer than 200, or none.

    late_s: by how much the watch itself was woken too late, at most. On a machine that has too few CPUs for what runs, it is as long.
    """

    def __init__(self, port: int) -> None:
        self.longest_s = self.late_s = 0.0
        self.failed = False
        self._client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        slept_s = time.monotonic()
        while not self._ended.wait(LIVEZ_S):
            asked_s = time.monotonic()
            self.late_s = max(self.late_s, asked_s - slept_s - LIVEZ_S)
            try:
                self._client.request("GET", "/livez")
                answer = self._client.getresponse()
                answer.read()
                self.failed = self.failed or answer.status != 200
            except (OSError, http.client.HTTPException):
                self.failed = True
                self._client.close()  # the next request opens it again
            slept_s = time.monotonic()
            self.longest_s = max(self.longest_s, slept_s - asked_s)


def main() -> int:
    parser = Parser("tests.bench.soak", __doc__, aborts=60, subscribers=20, events=200)
    parser.add_argument("--aborts", type=count, default=20_000)
    parser.add_argument("--subscribers", type=count, default=2_000)
    parser.add_argument("--events", type=count, default=10_000, help="before the daemon starts; it keeps the last 5,000 and some")
    parser.add_argument("--only", type=pattern, default="")
    asked = parser.parse_args()
    chosen = parser.chosen(PARTS, asked.only)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"{'':18} {'count':>9} {'seconds':>8} {'longest silence':>16} {'watch late':>12} {'memory':>11}")
    return 1 if _one_daemon(asked, chosen) else 0


def settings(folder: Path) -> dict[str, Any]:
    (folder / "model").mkdir()
    model = {"model": str(folder / "model"), "memory_gib": 1, "preload": True}
    return {"engine": stub_engine() | {"stop_timeout_s": 2}, "models": {"m": model}, "log_level": "info"}


def anonymous_kib(pid: int) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return float(re.search(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)[1])  # type: ignore[index]


def _one_daemon(asked: argparse.Namespace, chosen: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="sk") as folder:
        _fill(Path(folder) / "state" / "state.db", asked.events)
        with daemon(Path(folder), settings(Path(folder))) as made:
            made.wait_for("m", "READY")
            rounds = [one for one in _rounds(made, asked) if one.name in chosen]
            return sum(_missed(made, one, judged=not asked.smallest) for one in rounds)


def _rounds(made: DaemonProcess, asked: argparse.Namespace) -> list[Round]:
    return [
        Round("aborts", partial(_abort, made.port, asked.aborts)),
        Round("subscribers", partial(_subscribe, made.port, asked.subscribers), SUBSCRIBER_ROUNDS),
    ]


def _missed(made: DaemonProcess, one: Round, *, judged: bool) -> bool:
    """Does it and prints its row. judged: whether the figures count, too; a traceback or a crash always does."""
    if made.process is None:
        raise RuntimeError("the daemon does not run")
    if judged:
        one.act()  # pools and caches grow to what the round that counts needs
        time.sleep(1.0)
    sizes_kib, begun_s, count = [anonymous_kib(made.process.pid)], time.monotonic(), 0
    with Watch(made.port) as watch:
        for _ in range(one.times if judged else 1):
            count += one.act()
            time.sleep(1.5 if judged else 0.5)
            if made.process.poll() is not None:
                print(f"{one.name:18} {count:>9,} MISSED the daemon ended with {made.process.returncode}: {made.tail()}", flush=True)
                return True
            sizes_kib.append(anonymous_kib(made.process.pid))
    took_s = time.monotonic() - begun_s
    more_kib = growth(sizes_kib)
    faults = ["/livez did not answer 200"] * watch.failed
    faults += ["a traceback in the daemon's log"] * ("Traceback (most recent call last)" in made.output.read_text(errors="replace"))
    missed = bool(faults) or (judged and (watch.longest_s > SILENCE_BAR_S or more_kib > MEMORY_BAR_KIB))
    row = f"{one.name:18} {count:>9,} {took_s:>8.1f} {watch.longest_s:>14.3f} s {watch.late_s:>10.3f} s {more_kib:>+7.0f} KiB"
    print("\n    ".join([f"{row} {'MISSED' if missed else 'ok'}", *faults]), flush=True)
    return missed


def growth(sizes: Sequence[float]) -> float:
    """By how much a size grows in a round, as the median, of the sizes before the first and behind each."""
    return median(after - before for before, after in pairwise(sizes))


def _abort(port: int, count: int) -> int:
    """Six kinds in turn: closed and reset, before an answer, after a part of the request, and within the answer."""
    for number in range(count):
        kind = number % 6
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(CHAT[: len(CHAT) // 2] if kind in (2, 3) else CHAT)
            if kind in (4, 5):
                client.recv(64)
            if kind % 2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its close is a reset
    return count


def _fill(path: Path, count: int) -> None:
    """A history as long as that of a daemon that has run for weeks."""
    store = Store(path)
    for number in range(count):
        store.history.add_event(float(number), "state", "m", "LOADING -> READY", {"old": "LOADING", "new": "READY", "reason": None})
    store.close()


def _subscribe(port: int, count: int) -> int:
    """All are there at one time, and each reads to the event that was the last when they came."""
    newest = httpx.get(f"http://127.0.0.1:{port}/admin/v1/events?limit=1").json()["events"][-1]["seq"]
    last = f"id: {newest}\n".encode()
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            held.append(socket.create_connection(("127.0.0.1", port), timeout=10))
            held[-1].sendall(EVENTS)
        for client in held:
            client.settimeout(30)
            head = client.recv(64)
            if b" 200 " not in head:
                raise RuntimeError("a subscriber was refused")
            tail = head
            while last not in tail:
                piece = client.recv(1 << 18)
                if not piece:
                    raise RuntimeError("the stream of a subscriber ended")
                tail = tail[-len(last) :] + piece
    finally:
        for client in held:
            client.close()
    return count


if __name__ == "__main__":
    sys.exit(main())
