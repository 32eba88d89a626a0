"""`python -m tests.bench.slope`: whether the daemon grows with what it serves. Never asserts; it exits 1 where the bar is missed.

A real daemon with the stub engine serves short answers over kept connections, streams, now and then a refusal, and clients that send a
whole request and close at once; its memory (anonymous
pages of /proc/PID/smaps_rollup) is read in between. Before the first reading that counts, --warm requests come over twice as
many connections: caches and what is kept of the last minutes fill, and pools grow beyond what the rest can need at once, so that what is
left is growth. The slope is a least-squares line through all readings after it: below 1 KiB for each 1000 requests.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.arguments import Parser, amount, count, new
from tests.bench.load import Job
from tests.daemon_process import ROOT, DaemonProcess

BAR_KIB = 1.0
CHUNKS, STREAMS_AT_ONCE, WARMER = 20, 100, 2
SHORT_S, SMALLEST_SHORT_S = 5.0, 0.5


def main() -> int:
    parser = Parser("tests.bench.slope", __doc__, requests=200, streams=20, leavers=100, warm=100)
    parser.add_argument("--requests", type=count, default=300_000)
    parser.add_argument("--streams", type=count, default=10_000)
    parser.add_argument("--leavers", type=count, default=60_000, help="clients that send a whole request and close at once")
    parser.add_argument("--warm", type=count, default=100_000, help="requests before those that count, with streams in proportion")
    parser.add_argument("--connections", type=count, default=16)
    parser.add_argument("--limit-s", type=amount, default=3600)
    parser.add_argument("--json", type=new, help="write the readings there")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ss") as folder:
        made = _daemon(Path(folder))
        try:
            points = _measure(made, asked)
        finally:
            made.gone()
    if asked.json:
        asked.json.write_text(json.dumps(points))
    met = _judge([point for point in points if point[0] >= asked.warm])
    return 0 if met or asked.smallest else 1


def _daemon(folder: Path, kind: type[DaemonProcess] = DaemonProcess, environ: dict[str, str] | None = None) -> DaemonProcess:
    (folder / "model").mkdir()
    model = {"model": str(folder / "model"), "memory_gib": 1, "preload": True}
    settings = {"engine": {"entrypoint": "workers.stub", "stop_timeout_s": 2}, "models": {"m": model}, "log_level": "info"}
    made = kind(folder, settings, environ)
    made.start()
    try:
        made.settled()
        made.wait_for("m", "READY", 120)
    except AssertionError:
        made.gone()
        raise
    return made


def _measure(made: DaemonProcess, asked: argparse.Namespace) -> list[tuple[int, int, float]]:
    """(requests, streams and clients that left, KiB) so far, at each reading."""
    if made.process is None:
        raise RuntimeError("the daemon does not run")
    pid, requests, streams, leavers, failed = made.process.pid, 0, 0, 0, 0
    points = [(0, 0, _kib(pid))]
    all_requests = asked.warm + asked.requests
    all_streams, all_leavers = (count * all_requests // asked.requests for count in (asked.streams, asked.leavers))
    deadline_s = time.monotonic() + asked.limit_s
    load = subprocess.Popen([sys.executable, "-m", "tests.bench.load"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        while (requests < all_requests or streams < all_streams) and time.monotonic() < deadline_s:
            times = WARMER if requests < asked.warm else 1
            if requests < all_requests:
                seconds = SMALLEST_SHORT_S if asked.smallest else SHORT_S
                done = _run(load, Job("short", "127.0.0.1", made.port, "m", times * asked.connections, seconds=seconds))
                requests, failed = requests + int(done["answered"]), failed + int(done["failed"])
            # In proportion, so that both end together.
            while streams < all_streams * min(1.0, requests / all_requests):
                count = times * STREAMS_AT_ONCE
                done = _run(load, Job("streams", "127.0.0.1", made.port, "m", count, chunks=CHUNKS, interval_s=0.005, spread_s=0.2))
                streams, failed = streams + count, failed + count - int(done["whole"])
            # What is refused, and who leaves early, must not stay either.
            made.chat("nobody", "x")
            count = int(all_leavers * min(1.0, requests / all_requests)) - leavers
            _leave(made.port, count)
            leavers += count
            points.append((requests, streams + leavers, _kib(pid)))
            if len(points) % 10 == 0:
                told = f"{requests:>8,} requests {streams:>7,} streams {leavers:>7,} leavers"
                print(f"{told} {points[-1][2] / 1024:>8.1f} MiB, {failed} lost", flush=True)
    finally:
        if load.stdin:
            load.stdin.close()
        load.wait(30)
    print(f"{requests:,} requests, {streams:,} streams, {leavers:,} leavers, {failed} lost", flush=True)
    return points


def _run(load: subprocess.Popen[str], job: Job) -> dict[str, float]:
    if load.stdin is None or load.stdout is None:
        raise RuntimeError("the load generator has no pipes")
    load.stdin.write(json.dumps({name: getattr(job, name) for name in Job.__slots__}) + "\n")
    load.stdin.flush()
    return dict(json.loads(load.stdout.readline()))


def _leave(port: int, count: int) -> None:
    """Clients that send a whole request and close at once: the engine's connection opens while its request is being cancelled."""
    request = Job("short", "127.0.0.1", port, "m", 1).request({"model": "m", "messages": [{"role": "user", "content": "x"}]})
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(request)


def _kib(pid: int) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return float(re.search(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)[1])  # type: ignore[index]


def _judge(points: Sequence[tuple[int, int, float]]) -> bool:
    slope = _slope([(requests + others, kib) for requests, others, kib in points])
    ok = slope < BAR_KIB
    first, last = points[0][2] / 1024, points[-1][2] / 1024
    told = f"{slope:+.2f} KiB for each 1000 requests (bar {BAR_KIB:g}), from {first:.1f} to {last:.1f} MiB over {len(points)} readings"
    print(f"{'ok    ' if ok else 'MISSED'} {told}")
    return ok


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Of a least-squares line, KiB per 1000."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    across = sum((x - mean_x) ** 2 for x, _ in points)
    return 1000 * sum((x - mean_x) * (y - mean_y) for x, y in points) / across if across else 0.0


if __name__ == "__main__":
    sys.exit(main())
