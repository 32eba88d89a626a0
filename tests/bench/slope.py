"""`python -m tests.bench.slope`: whether the daemon grows with what it serves. Never asserts; it exits 1 where the bar is missed.

A real daemon with the stub engine serves short answers over kept connections, streams, now and then a refusal, and clients that send a
whole request and close at once. All are spread evenly over --steps steps; behind each, once no request is at work, the memory is read
(anonymous pages of /proc/PID/smaps_rollup). Before the first reading that counts, --warm steps come over twice as many connections:
caches and what is kept of the last minutes fill, and pools grow beyond what the rest can need at once, so that what is left is growth. The
heap's own steps become rarer for some 40 steps. How many come before is settled beforehand: who waited for a flat stretch would choose it.

The slope is a least-squares line through all readings after it, with what it may be off by in 95 of 100 runs (trend.py). The bar is 1 KiB
for each 1000 of what was done: MISSED where the slope is surely above it, ok where it surely is not, else `unsure`: run it for longer.
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
from typing import NamedTuple

from tests.bench.arguments import Parser, amount, count, new
from tests.bench.load import Job
from tests.bench.trend import Verdict, trend
from tests.support.daemon_process import ROOT, DaemonProcess
from tests.support.waiting import until

BAR_KIB = 1.0
CHUNKS, STREAMS_AT_ONCE, WARMER = 20, 100, 2
STEP_LIMIT_S = 600.0


class Reading(NamedTuple):
    """How many were done so far, and the KiB that the daemon holds."""

    requests: int
    streams: int
    leavers: int
    kib: float

    @property
    def done(self) -> int:
        return self.requests + self.streams + self.leavers


def main() -> int:
    parser = Parser("tests.bench.slope", __doc__, requests=200, streams=20, leavers=100, steps=10, warm=1)
    parser.add_argument("--requests", type=count, default=300_000)
    parser.add_argument("--streams", type=count, default=10_000)
    parser.add_argument("--leavers", type=count, default=60_000, help="clients that send a whole request and close at once")
    parser.add_argument("--steps", type=count, default=60, help="readings that count")
    parser.add_argument("--warm", type=count, default=60, help="further steps of the same size, before")
    parser.add_argument("--connections", type=count, default=16)
    parser.add_argument("--limit-s", type=amount, default=3600)
    parser.add_argument("--json", type=new, help="write the readings there")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ss") as folder:
        made = stub_daemon(Path(folder))
        try:
            readings = _measure(made, asked)
        finally:
            made.gone()
    if asked.json:
        asked.json.write_text(json.dumps([reading._asdict() for reading in readings]))
    verdict = _judge(readings[asked.warm :])
    return 1 if verdict is Verdict.MISSED and not asked.smallest else 0


def stub_daemon(folder: Path, kind: type[DaemonProcess] = DaemonProcess, environ: dict[str, str] | None = None) -> DaemonProcess:
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


def _measure(made: DaemonProcess, asked: argparse.Namespace) -> list[Reading]:
    """One before everything, and one behind each step."""
    if made.process is None:
        raise RuntimeError("the daemon does not run")
    pid, failed = made.process.pid, 0
    readings = [Reading(0, 0, 0, anonymous_kib(pid))]
    deadline_s = time.monotonic() + asked.limit_s
    load = subprocess.Popen([sys.executable, "-m", "tests.bench.load"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        for step in range(1, asked.warm + asked.steps + 1):
            if time.monotonic() > deadline_s:
                print(f"{asked.limit_s:g} s are over before {asked.warm + asked.steps} steps were done", flush=True)
                break
            times = WARMER if step <= asked.warm else 1
            requests, streams, leavers = (number * step // asked.steps for number in (asked.requests, asked.streams, asked.leavers))
            last = readings[-1]
            failed += _ask(load, made.port, requests - last.requests, times * asked.connections)
            failed += _stream(load, made.port, streams - last.streams, times * STREAMS_AT_ONCE)
            # What is refused, and who leaves early, must not stay either.
            made.chat("nobody", "x")
            _leave(made.port, leavers - last.leavers)
            until(lambda: made.metric("sparkd_in_flight", '"m"') == 0, "no request is at work", limit_s=STEP_LIMIT_S)
            readings.append(Reading(requests, streams, leavers, anonymous_kib(pid)))
            if step % 10 == 0:
                done = f"{requests:>8,} requests {streams:>7,} streams {leavers:>7,} leavers"
                print(f"{done} {readings[-1].kib / 1024:>8.1f} MiB, {failed} lost", flush=True)
    finally:
        if load.stdin:
            load.stdin.close()
        load.wait(30)
    last = readings[-1]
    print(f"{last.requests:,} requests, {last.streams:,} streams, {last.leavers:,} leavers, {failed} lost", flush=True)
    return readings


def _ask(load: subprocess.Popen[str], port: int, answers: int, connections: int) -> int:
    """How many of the requests had no answer."""
    if not answers:
        return 0
    done = _run(load, Job("short", "127.0.0.1", port, "m", connections, answers=answers, limit_s=STEP_LIMIT_S))
    return answers - int(done["answered"])


def _stream(load: subprocess.Popen[str], port: int, streams: int, at_once: int) -> int:
    """How many of the streams were not whole."""
    failed = 0
    for first in range(0, streams, at_once):
        count = min(at_once, streams - first)
        done = _run(load, Job("streams", "127.0.0.1", port, "m", count, chunks=CHUNKS, interval_s=0.005, spread_s=0.2))
        failed += count - int(done["whole"])
    return failed


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


def anonymous_kib(pid: int) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return float(re.search(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)[1])  # type: ignore[index]


def _judge(readings: Sequence[Reading]) -> Verdict:
    line = trend([(reading.done, reading.kib) for reading in readings])
    verdict = line.verdict(BAR_KIB)
    first, last = readings[0].kib / 1024, readings[-1].kib / 1024
    slope = f"{line.slope:+.2f} +- {line.around:.2f} KiB for each 1000 of them (bar {BAR_KIB:g})"
    print(f"{verdict:6} {slope}, from {first:.1f} to {last:.1f} MiB over {line.readings} readings")
    return verdict


if __name__ == "__main__":
    sys.exit(main())
