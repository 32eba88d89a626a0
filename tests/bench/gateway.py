"""What the gateway costs, beside nginx and a direct connection on the same stub, in one run. Never asserts; it prints and exits.

    python -m tests.bench.gateway [--runs 3]

The proxy runs alone on the second core, stub and load generator on the first. Every run measures every target in turn; a figure is the
median of its runs, and "added" is a run's figure less the direct connection's of the same run. Exit status 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tests.bench import targets
from tests.bench.arguments import Parser, count
from tests.bench.load import Job, short_body
from tests.bench.targets import Cores, Target
from tests.support.daemon_process import free_port

_BARS: dict[str, dict[str, float]] = {
    "added_p50_ms_1": {"at_most": 0.4},
    "added_p50_ms_32": {"at_most": 0.2},
    "cpu_ms_per_1000_chunks_32": {"at_most": 45},
    "short_per_s_32": {"at_least": 4000},
    "ttfb_p50_ms_256": {"at_most": 100},
    "whole_streams": {"at_least": 512},
    "rss_kib_per_stream": {"at_most": 150},
    "rss_idle_mib": {"at_most": 60},
}
MODEL = "stub"
_INTERVAL_S = 0.02
_CONCURRENCY = (1, 32, 256)
_MANY = 512
_MANY_INTERVAL_S = 0.2
# Figure, its row's name, digits. A figure that begins with added_ shows the absolute value under "direct".
_ROWS = (
    ("added_p50_ms_1", "chunk latency p50, 1 stream: added ms", 3),
    ("added_p99_ms_1", "chunk latency p99, 1 stream: added ms", 3),
    ("added_p50_ms_32", "chunk latency p50, 32 streams: added ms", 3),
    ("added_p99_ms_32", "chunk latency p99, 32 streams: added ms", 3),
    ("added_p50_ms_256", "chunk latency p50, 256 streams: added ms", 3),
    ("added_p99_ms_256", "chunk latency p99, 256 streams: added ms", 3),
    ("cpu_ms_per_1000_chunks_32", "CPU per 1000 chunks, 32 streams: ms", 1),
    ("cpu_ms_per_1000_chunks_256", "CPU per 1000 chunks, 256 streams: ms", 1),
    ("ttfb_p50_ms_256", "first byte p50, 256 starts at once: ms", 1),
    ("added_short_p50_ms_1", "short answer p50, 1 connection: added ms", 3),
    ("short_per_s_32", "short answers, 32 connections: 1/s", 0),
    ("cpu_ms_per_short", "CPU per short answer, 32 connections: ms", 3),
    ("whole_streams", f"streams of {_MANY} complete and in order", 0),
    ("rss_idle_mib", "RSS idle: MiB", 1),
    ("rss_kib_per_stream", f"RSS per stream, {_MANY} open: KiB", 1),
    ("failed", "streams and answers lost in all runs", 0),
)
_ADDED = re.compile(r"^added_")


@dataclass(frozen=True, slots=True)
class Size:
    """How long everything takes."""

    chunks: int
    short_s: float
    many_s: float


_FULL = Size(chunks=250, short_s=3.0, many_s=15.0)
_SMALLEST = Size(chunks=5, short_s=1.0, many_s=3.0)


class Bench:
    """Holds the generator's pipes and the figures: `figures[name][target]` is one value per run."""

    def __init__(self, generator: subprocess.Popen[str], size: Size, cores: Cores, folder: Path) -> None:
        self.figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._generator = generator
        self._size = size
        self._cores = cores
        self._folder = folder
        self._wrk = shutil.which("wrk")

    def warm(self, target: Target) -> None:
        self._ask(target, kind="streams", count=64, chunks=20)
        self._ask(target, kind="short", count=8, seconds=min(1.0, self._size.short_s))

    def run(self, target: Target) -> None:
        for streams in _CONCURRENCY:
            self._paced(target, streams)
        found = self._ask(target, kind="streams", count=256, chunks=10, interval_s=_INTERVAL_S)
        self._keep(target, "ttfb_p50_ms_256", found["ttfb_p50_ms"])
        self._keep(target, "failed", 256 - found["whole"])
        found = self._ask(target, kind="short", count=1, seconds=self._size.short_s)
        self._keep(target, "added_short_p50_ms_1", found["p50_ms"])
        self._keep(target, "failed", found["failed"])
        self._short(target)

    def many(self, target: Target) -> None:
        """Slow streams, all open at once: are they whole, and what does one cost in memory?"""
        chunks = int(self._size.many_s / _MANY_INTERVAL_S)
        before_kib = targets.rss_kib(target.pid) if target.pid else 0
        self._say(target, kind="streams", count=_MANY, chunks=chunks, interval_s=_MANY_INTERVAL_S, spread_s=2.0, limit_s=60.0)
        time.sleep(2.0 + (self._size.many_s - 2.0) / 2)
        if target.pid:
            self._keep(target, "rss_kib_per_stream", (targets.rss_kib(target.pid) - before_kib) / _MANY)
        self._keep(target, "whole_streams", self._hear()["whole"])

    def _paced(self, target: Target, count: int) -> None:
        before_ms = targets.cpu_ms(target.pid) if target.pid else 0.0
        found = self._ask(target, kind="streams", count=count, chunks=self._size.chunks, interval_s=_INTERVAL_S, spread_s=_INTERVAL_S)
        if target.pid and count > 1 and found["chunks"]:
            spent_ms = targets.cpu_ms(target.pid) - before_ms
            self._keep(target, f"cpu_ms_per_1000_chunks_{count}", spent_ms / found["chunks"] * 1000)
        self._keep(target, f"added_p50_ms_{count}", found["p50_ms"])
        self._keep(target, f"added_p99_ms_{count}", found["p99_ms"])
        self._keep(target, "failed", count - found["whole"])

    def _short(self, target: Target) -> None:
        before_ms = targets.cpu_ms(target.pid) if target.pid else 0.0
        per_s, answered, failed = self._short_by_wrk(target, self._wrk) if self._wrk else self._short_by_own(target)
        self._keep(target, "short_per_s_32", per_s)
        self._keep(target, "failed", failed)
        if target.pid and answered:
            self._keep(target, "cpu_ms_per_short", (targets.cpu_ms(target.pid) - before_ms) / answered)

    def _short_by_own(self, target: Target) -> tuple[float, int, int]:
        found = self._ask(target, kind="short", count=32, seconds=self._size.short_s)
        return found["per_s"], found["answered"], found["failed"]

    def _short_by_wrk(self, target: Target, program: str) -> tuple[float, int, int]:
        """Answers per second, answers, failures. The Python generator shares a core with the stub and would be the limit for nginx."""
        script = self._folder / "post.lua"
        body = json.dumps(short_body(target.model))
        script.write_text(f'wrk.method = "POST"\nwrk.headers["content-type"] = "application/json"\nwrk.body = [==[{body}]==]\n')
        script.chmod(0o600)
        url = f"http://{target.host}:{target.port}/v1/chat/completions"
        argv = ["taskset", "-c", str(self._cores.load), program, "-t1", "-c32", f"-d{self._size.short_s:.0f}s", "-s", str(script), url]
        out = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
        bad = re.search(r"Non-2xx or 3xx responses: (\d+)", out)
        errors = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", out)
        failed = (int(bad[1]) if bad else 0) + (sum(map(int, errors.groups())) if errors else 0)
        return float(_found(r"Requests/sec:\s+([\d.]+)", out)), int(_found(r"(\d+) requests in", out)), failed

    def _keep(self, target: Target, figure: str, value: float) -> None:
        self.figures[figure][target.name].append(value)

    def _ask(self, target: Target, **job: Any) -> dict[str, Any]:
        self._say(target, **job)
        return self._hear()

    def _say(self, target: Target, **job: Any) -> None:
        line = json.dumps(asdict(Job(host=target.host, port=target.port, model=target.model, **job)))
        pipe = self._generator.stdin
        if pipe is None:
            raise SystemExit("the load generator was started without a pipe")
        pipe.write(line + "\n")
        pipe.flush()

    def _hear(self) -> dict[str, Any]:
        line = self._generator.stdout.readline() if self._generator.stdout else ""
        if not line:
            raise SystemExit(f"the load generator died: {(self._folder / 'load.log').read_text()[-2000:]}")
        return dict(json.loads(line))


def measure(options: argparse.Namespace, folder: Path, cores: Cores) -> dict[str, dict[str, float]]:
    """Starts everything, measures, ends everything; the medians as figure -> target -> value."""
    size = _SMALLEST if options.smallest else _FULL
    os.sched_setaffinity(0, {cores.load})
    with ExitStack() as stack:
        uds, port = str(folder / "s"), free_port()
        stack.enter_context(targets.stub(folder, cores.load, uds=uds, model=MODEL))
        stack.enter_context(targets.stub(folder, cores.load, port=port, model=MODEL))
        direct = Target("direct", "127.0.0.1", port, None, MODEL)
        proxies = [stack.enter_context(targets.nginx(folder, cores.proxy, uds, MODEL))]
        proxies.append(stack.enter_context(targets.gateway(folder, cores.proxy, uds, MODEL)))
        bench = Bench(stack.enter_context(targets.generator(folder, cores.load)), size, cores, folder)
        present = [direct, *(proxy for proxy in proxies if proxy is not None)]
        for target in present:
            bench.warm(target)
        for number in range(options.runs):
            for target in present:
                print(f"run {number + 1} of {options.runs}: {target.name}", file=sys.stderr)
                bench.run(target)
        for target in present:
            print(f"{_MANY} streams: {target.name}", file=sys.stderr)
            bench.many(target)
    return _medians(bench.figures, present)


def _medians(figures: dict[str, dict[str, list[float]]], present: list[Target]) -> dict[str, dict[str, float]]:
    result: dict[str, dict[str, float]] = {}
    for name, by_target in figures.items():
        if name == "failed":
            result[name] = {target: sum(values) for target, values in by_target.items()}
            continue
        if _ADDED.match(name):
            base = by_target["direct"]
            by_target = {
                target: values if target == "direct" else [value - less for value, less in zip(values, base, strict=True)]
                for target, values in by_target.items()
            }
        result[name] = {target: statistics.median(values) for target, values in by_target.items()}
    result["rss_idle_mib"] = {target.name: target.rss_idle_kib / 1024 for target in present if target.pid}
    return result


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise SystemExit(f"wrk said something unexpected: {text[-500:]}")
    return match[1]


def judge(figure: str, value: float | None) -> str:
    """The bar's verdict on a value: ok, MISSED, or nothing where there is no bar."""
    bar = _BARS.get(figure)
    if bar is None:
        return ""
    if value is None or value != value:
        return "MISSED"
    kept = value <= bar["at_most"] if "at_most" in bar else value >= bar["at_least"]
    return "ok" if kept else "MISSED"


def show(medians: dict[str, dict[str, float]], notes: list[str]) -> None:
    table = Table(box=box.SIMPLE, title="sparkd gateway")
    for column in ("", "direct", "nginx", "sparkd", "bar", ""):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for figure, label, digits in _ROWS:
        found = medians.get(figure, {})
        cells = [f"{found[name]:,.{digits}f}" if name in found else "-" for name in ("direct", "nginx", "sparkd")]
        bar = _BARS.get(figure, {})
        limit = f"≤ {bar['at_most']:g}" if "at_most" in bar else f"≥ {bar['at_least']:g}" if bar else ""
        verdict = judge(figure, found.get("sparkd"))
        table.add_row(label, *cells, limit, f"[red]{verdict}[/red]" if verdict == "MISSED" else verdict)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)


def main() -> int:
    parser = Parser("tests.bench.gateway", __doc__, runs=1)
    parser.add_argument("--runs", type=count, default=3, help="interleaved runs")
    options = parser.parse_args()
    cores = Cores.choose()
    began_s, busy_s = time.monotonic(), targets.busy_s()
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        medians = measure(options, Path(folder), cores)
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own_s = sum(usage.ru_utime + usage.ru_stime for usage in spent)
    share = max(0.0, targets.busy_s() - busy_s - own_s) / ((time.monotonic() - began_s) * (os.cpu_count() or 1))
    show(medians, _notes(cores, share))
    if options.smallest:
        return int(medians["failed"]["sparkd"] > 0 or medians["whole_streams"]["sparkd"] < _MANY)
    return int(any(judge(figure, medians.get(figure, {}).get("sparkd")) == "MISSED" for figure in _BARS))


def _notes(cores: Cores, other_share: float) -> list[str]:
    packages = ", ".join(f"{name} {version(name)}" for name in ("uvicorn", "httptools"))
    notes = [f"Python {platform.python_version()}, {packages}, {platform.machine()}, {os.cpu_count()} cores."]
    notes.append(f"Everything else on this machine used {other_share:.0%} of it meanwhile: above 5 % do not read p99, above 20 % nothing.")
    if not shutil.which("wrk"):
        notes.append("wrk is not on PATH: short answers are asked for by the bench's own generator, which limits nginx.")
    if not shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"):
        notes.append("nginx is not on PATH: its column is empty.")
    if cores.load == cores.proxy:
        notes.append("One core only: proxy, stub and load share it, so the figures are no proxy's own.")
    return notes


if __name__ == "__main__":
    sys.exit(main())
