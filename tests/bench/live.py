"""`python -m tests.bench.live`: what the page's stream costs the daemon, with many nodes, models and pages. Exit code 1: a bar is missed.

The daemon's parts run in a process of their own (live_target.py): a supervisor over made-up nodes whose figures all change each second, the
gateway and the admin API. In turn: without the stream; with the series that are kept although no page is open; with pages that read. Then a
day of series is written without a pause. CPU is that of the process, of one core; memory is its VmRSS. The delay is from the moment that a
document shows (at_s) to its arrival at each page.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from sparkd.engine.rates import sample_of
from sparkd.state.series import FILE_BYTES
from tests.bench.arguments import Parser, count
from tests.bench.targets import cpu_ms, rss_kib
from workers.stub import metrics

CPU_PERCENT, DELAY_MS, RSS_MIB, FLAT_MIB = 3.0, 200.0, 25.0, 2.0
_AT = re.compile(rb'"at_s":([0-9.]+)')
_ID = re.compile(rb"id: [0-9a-f]+-([0-9]+)\n")


class Figure(NamedTuple):
    """One row. at_most: None where there is no bar."""

    name: str
    value: float
    digits: int
    at_most: float | None = None

    @property
    def missed(self) -> bool:
        return self.at_most is not None and self.value > self.at_most


@dataclass
class Page:
    """One that reads the stream and merges nothing. delays_ms: of each event; missed: numbers that never came."""

    port: int
    events: int = 0
    bytes: int = 0
    seq: int = 0
    missed: int = 0

    def __post_init__(self) -> None:
        self.delays_ms: list[float] = []

    async def read(self, until_s: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        writer.write(b"GET /admin/v1/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        try:
            async with asyncio.timeout(until_s - time.monotonic()):
                while True:
                    event = await reader.readuntil(b"\n\n")
                    arrived_s, found = time.time(), _AT.search(event)
                    self.bytes += len(event)
                    self.events += 1
                    if number := _ID.match(event):
                        self.missed += int(number[1]) - self.seq - 1 if self.seq else 0
                        self.seq = int(number[1])
                    # The first is of a document that was there already.
                    if found and self.events > 1:
                        self.delays_ms.append((arrived_s - float(found[1])) * 1000)
        except TimeoutError:
            writer.close()


class Target:
    def __init__(self, folder: str, nodes: int, models: int, loaded: int) -> None:
        numbers = {"nodes": nodes, "models": models, "loaded": loaded}
        argv = [sys.executable, "-m", "tests.bench.live_target", "--folder", folder]
        argv += [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
        self._child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self._line().split()[1])

    @property
    def rss_mib(self) -> float:
        return rss_kib(self._child.pid) / 1024

    def order(self, words: str) -> None:
        if self._child.stdin is None:
            raise RuntimeError("The target has no standard input.")
        self._child.stdin.write(f"{words}\n")
        self._child.stdin.flush()
        self._line()

    def cpu_percent(self, seconds: float) -> float:
        before_ms = cpu_ms(self._child.pid)
        time.sleep(seconds)
        return (cpu_ms(self._child.pid) - before_ms) / seconds / 10

    def read(self, pages: int, seconds: float) -> tuple[list[Page], float]:
        """The pages afterwards, and the CPU that the target took meanwhile, percent of a core, without the first second."""

        async def run() -> tuple[list[Page], float]:
            made, until_s = [Page(self.port) for _ in range(pages)], time.monotonic() + seconds + 1
            readers = [asyncio.create_task(page.read(until_s)) for page in made]
            await asyncio.sleep(1)
            before_ms, begin_s = cpu_ms(self._child.pid), time.monotonic()
            await asyncio.gather(*readers)
            return made, (cpu_ms(self._child.pid) - before_ms) / (time.monotonic() - begin_s) / 10

        return asyncio.run(run())

    def end(self) -> None:
        self._child.terminate()
        self._child.wait(30)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()

    def _line(self) -> str:
        line = self._child.stdout.readline() if self._child.stdout else ""
        if not line:
            raise RuntimeError("The target has ended.")
        return line


def main() -> int:
    parser = Parser("tests.bench.live", __doc__, nodes=3, models=4, loaded=2, pages=2, seconds=2, day_s=90)
    parser.add_argument("--nodes", type=count, default=100)
    parser.add_argument("--models", type=count, default=200)
    parser.add_argument("--loaded", type=count, default=20, help="models with an engine, whose figures change each second")
    parser.add_argument("--pages", type=count, default=10)
    parser.add_argument("--seconds", type=count, default=30, help="of each of the three parts")
    parser.add_argument("--day-s", type=count, default=86_400, help="seconds of series that are written without a pause")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    asked = parser.parse_args()
    if asked.loaded > asked.models:
        parser.error("argument --loaded: more than --models")
    with tempfile.TemporaryDirectory(prefix="sl") as folder:
        target = Target(folder, asked.nodes, asked.models, asked.loaded)
        try:
            figures = measured(target, asked)
        finally:
            target.end()
    show(figures, as_json=asked.json)
    return 1 if any(figure.missed for figure in figures) and not asked.smallest else 0


def measured(target: Target, asked: Any) -> list[Figure]:
    time.sleep(min(3.0, asked.seconds))
    without = target.cpu_percent(asked.seconds)
    rss_mib = target.rss_mib
    target.order("live")
    time.sleep(1)
    kept = target.cpu_percent(asked.seconds)
    pages, read = target.read(asked.pages, asked.seconds)
    read_mib = target.rss_mib - rss_mib
    delays = sorted(delay for page in pages for delay in page.delays_ms)
    quarters = []
    for _ in range(4):
        target.order(f"day {asked.day_s // 4}")
        quarters.append(target.rss_mib - rss_mib)
    return [
        Figure("CPU without the stream: % of a core", without, 2),
        Figure("CPU more, series kept and no page open", kept - without, 2),
        Figure(f"CPU more, {asked.pages} pages open", read - without, 2, CPU_PERCENT),
        Figure("delay from the document to a page, p50: ms", statistics.median(delays), 1),
        Figure("delay, p99: ms", delays[int(len(delays) * 0.99)], 1, DELAY_MS),
        Figure("events that a page missed", sum(page.missed for page in pages), 0, 0),
        Figure("events a second", min(page.events for page in pages) / (asked.seconds + 1), 2),
        Figure("KB a second and page", sum(page.bytes for page in pages) / len(pages) / asked.seconds / 1000, 1),
        Figure("RSS more, pages open: MiB", read_mib, 1, RSS_MIB),
        Figure(f"RSS more, after {asked.day_s / 3600:.0f} h of series: MiB", quarters[-1], 1, RSS_MIB),
        Figure("growth over the second half of these: MiB", quarters[-1] - quarters[1], 1, FLAT_MIB),
        Figure("history.bin: MiB", FILE_BYTES / (1 << 20), 1),
        Figure("an engine's page read for its rates: ms", page_ms(), 2),
    ]


def page_ms() -> float:
    """Milliseconds for a page like vLLM's, with the buckets of three histograms."""
    page = metrics.page("m", {}).decode()
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        page += "".join(f'vllm:{name}_bucket{{engine="0",model_name="m",le="{bound}"}} {bound}.0\n' for bound in range(25))
    begin_s = time.perf_counter()
    for number in range(20):
        sample_of(page, number)
    return (time.perf_counter() - begin_s) / 20 * 1000


def show(figures: list[Figure], *, as_json: bool, title: str = "the page's stream") -> None:
    if as_json:
        sys.stdout.write(json.dumps([figure._asdict() for figure in figures]) + "\n")
        return
    table = Table(box=box.SIMPLE, title=title)
    for column in ("", "sparkd", "bar", ""):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for figure in figures:
        bar = "" if figure.at_most is None else f"≤ {figure.at_most:g}"
        verdict = "" if figure.at_most is None else "[red]MISSED[/red]" if figure.missed else "ok"
        table.add_row(figure.name, f"{figure.value:,.{figure.digits}f}", bar, verdict)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    sys.exit(main())
