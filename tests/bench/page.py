"""`python -m tests.bench.page`: what the page's stream costs the daemon, and in Chromium how soon the page paints and what it fetches, how
soon a change is drawn and how its heap grows.

The page is served by the daemon's parts over made-up nodes (page_target.py), in a process of its own. CPU is that of the process, percent
of a core, and memory its VmRSS, before the stream begins and with ten clients that read it. First paint and transferred bytes: an empty
cache each time, the median. A change's delay: from the moment that the document shows (at_s) until it is painted, with many nodes and
models. Heap: documents that were recorded are sent as fast as the page draws them, the user going from page to page meanwhile; what is
measured after a forced collection, on the overview, is compared with the same after one walk through all pages. Exit code 1: a bar is
missed; 2: there is no Chromium.
"""

from __future__ import annotations

import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from playwright.sync_api import Browser, Page
from rich import box
from rich.console import Console
from rich.table import Table

from tests.bench.arguments import Parser
from tests.bench.targets import cpu_ms, part, rss_kib
from tests.web.browser import chromium, context_of

CPU_PERCENT, RSS_MIB = 3.0, 25.0
PAINT_S, MOST_BYTES, DELAY_MS, GROWTH_MB = 1.0, 120_000, 200.0, 5.0
NO_CHROMIUM = 2
FEW = {"nodes": 2, "models": 10, "loaded": 4}
LOADED = "model-0"
ADDRESSES = ("", "models", f"models/{LOADED}/live", f"models/{LOADED}/load", f"models/{LOADED}/log", "requests", "playground", "events")
RECORDED_S = 20
# A frame is drawn before it is asked for the next document.
_FAST = ("--disable-frame-rate-limit", "--disable-gpu-vsync")

_DRAWN = "() => document.querySelectorAll('article h2').length > 0"
_FEED = """(documents) => {
  const real = window.fetch;
  const encoder = new TextEncoder();
  const event = (data) => encoder.encode(`event: snapshot\\ndata: ${JSON.stringify(data)}\\n\\n`);
  window.fed = 0;
  window.wanted = 0;
  window.fetch = (path, options) => {
    if (!String(path).endsWith("/live")) return real(path, options);
    const feed = {
      start: (controller) => controller.enqueue(event(documents[0])),
      pull: async (controller) => {
        while (window.fed >= window.wanted) await new Promise((resolve) => setTimeout(resolve, 20));
        await new Promise(requestAnimationFrame);
        window.fed += 1;
        controller.enqueue(event({ ...documents[window.fed % documents.length], at_s: documents[0].at_s + window.fed }));
      },
    };
    const body = new ReadableStream(feed, { highWaterMark: 0 });
    return Promise.resolve(new Response(body, { headers: { "content-type": "text/event-stream" } }));
  };
}"""
_WATCH = """async () => {
  const { now } = await import(document.querySelector("script[type=module]").src.replace("main.js", "store.js"));
  window.delays = [];
  let first = true;
  now.subscribe((atS) => {
    if (first) return void (first = false);
    requestAnimationFrame(() => setTimeout(() => window.delays.push(Date.now() - atS * 1000)));
  });
}"""


class Figure(NamedTuple):
    """One row. at_most: None where there is no bar."""

    name: str
    value: float
    digits: int
    at_most: float | None = None

    @property
    def missed(self) -> bool:
        return self.at_most is not None and self.value > self.at_most


class Target:
    """The process of page_target.py."""

    def __init__(self, child: subprocess.Popen[bytes], port: int) -> None:
        self._child = child
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def rss_mib(self) -> float:
        return rss_kib(self._child.pid) / 1024

    def begin(self) -> None:
        """The stream."""
        if self._child.stdin is None:
            raise RuntimeError("The target has no standard input.")
        self._child.stdin.write(b"live\n")
        self._child.stdin.flush()
        time.sleep(2)

    def cpu_percent(self, seconds: float) -> float:
        before_ms = cpu_ms(self._child.pid)
        time.sleep(seconds)
        return (cpu_ms(self._child.pid) - before_ms) / seconds / 10


def main() -> int:
    parser = Parser("tests.bench.page", __doc__, nodes=3, models=4, loaded=2, pages=2, seconds=3, rounds=1, changes=80)
    # loaded: models with an engine, whose figures change each second; seconds: for which CPU is measured, and changes are watched on each
    # of two pages; rounds: cold loads; changes: that the heap has to bear, 8 h at one a second.
    parser.set_defaults(nodes=100, models=200, loaded=20, pages=10, seconds=30, rounds=5, changes=28_800)
    asked = parser.parse_args()
    if shutil.which("chromium") is None:
        sys.stdout.write("chromium is missing (Debian's package chromium).\n")
        return NO_CHROMIUM
    figures = [*stream(asked), *few(asked), *many(asked)]
    show(figures)
    return 1 if any(figure.missed for figure in figures) and not asked.smallest else 0


@contextmanager
def target(nodes: int, models: int, loaded: int) -> Iterator[Target]:
    numbers = {"nodes": nodes, "models": models, "loaded": loaded}
    with tempfile.TemporaryDirectory(prefix="sp") as folder, part(Path(folder), "page", {"folder": folder, **numbers}) as started:
        yield Target(*started)


def stream(asked: Any) -> list[Figure]:
    with target(asked.nodes, asked.models, asked.loaded) as made, ThreadPoolExecutor(asked.pages) as pages:
        time.sleep(min(3.0, asked.seconds))
        without, rss_mib = made.cpu_percent(asked.seconds), made.rss_mib
        made.begin()
        until_s = time.monotonic() + asked.seconds + 2
        reads = [pages.submit(read, made.port, until_s) for _ in range(asked.pages)]
        time.sleep(1)
        with_pages = made.cpu_percent(asked.seconds)
        more_mib = made.rss_mib - rss_mib
        nbytes = [one.result() for one in reads]
    return [
        Figure("CPU without the stream: % of a core", without, 2),
        Figure(f"CPU more, {asked.pages} pages open", with_pages - without, 2, CPU_PERCENT),
        Figure("memory more: MiB", more_mib, 1, RSS_MIB),
        Figure("KB a second and page", sum(nbytes) / len(nbytes) / asked.seconds / 1000, 1),
    ]


def read(port: int, until_s: float) -> int:
    """The bytes that a client got from the stream until then."""
    total = 0
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /admin/v1/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        client.settimeout(0.2)
        while time.monotonic() < until_s:
            try:
                piece = client.recv(1 << 20)
            except TimeoutError:
                continue
            if not piece:
                raise RuntimeError("The target's stream has ended.")
            total += len(piece)
    return total


def few(asked: Any) -> list[Figure]:
    with target(**FEW) as made:
        made.begin()
        with chromium() as browser:
            loads = [cold(browser, made.url) for _ in range(asked.rounds)]
        paint_s, drawn_s, nbytes = (statistics.median(one) for one in zip(*loads, strict=True))
        documents = recorded(made.url, min(RECORDED_S, asked.seconds))
        with chromium(*_FAST, "--js-flags=--expose-gc") as browser:
            before, after, changes_s = heap(browser, made.url, documents, asked.changes)
    return [
        Figure("first paint, cold: s", paint_s, 2, PAINT_S),
        Figure("the overview with its figures: s", drawn_s, 2, PAINT_S),
        Figure("transferred bytes, cold", nbytes, 0, MOST_BYTES),
        Figure("heap after each page was seen: MB", before, 2),
        Figure(f"growth over {asked.changes:,} changes: MB", after - before, 2, GROWTH_MB),
        Figure("changes a second that were drawn", changes_s, 0),
    ]


def cold(browser: Browser, url: str) -> tuple[float, float, float]:
    """Seconds to the first paint and to the overview, and the bytes that came over the wire until then."""
    context = context_of(browser)
    page = context.new_page()
    network = context.new_cdp_session(page)
    network.send("Network.enable")
    sizes: list[float] = []
    network.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    # Before any script of the page, so that the moment is the browser's own.
    page.add_init_script(
        f"new MutationObserver(() => {{ if (!window.drawnMs && ({_DRAWN})()) requestAnimationFrame(() => setTimeout(() => "
        "(window.drawnMs ??= performance.now()))); }).observe(document, { childList: true, subtree: true })"
    )
    page.goto(f"{url}/ui/")
    page.wait_for_function("() => window.drawnMs && performance.getEntriesByName('first-contentful-paint').length")
    paint_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    drawn_ms = page.evaluate("window.drawnMs")
    page.wait_for_timeout(500)
    context.close()
    return paint_ms / 1000, drawn_ms / 1000, sum(sizes)


def recorded(url: str, seconds: float) -> list[dict[str, Any]]:
    """The stream's documents of some seconds."""
    until_s, documents = time.monotonic() + seconds, []
    with httpx.stream("GET", f"{url}/admin/v1/live", timeout=30, trust_env=False) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                documents.append(json.loads(line.removeprefix("data: ")))
            if documents and time.monotonic() > until_s:
                return documents
    raise RuntimeError("The target's stream has ended.")


def heap(browser: Browser, url: str, documents: list[dict[str, Any]], number: int) -> tuple[float, float, float]:
    """Megabytes before and after so many changes, and how many were drawn in a second."""
    page = context_of(browser).new_page()
    page.add_init_script(f"({_FEED})({json.dumps(documents)})")
    page.goto(f"{url}/ui/")
    page.wait_for_function(_DRAWN)
    walk(page, number // 8)
    before = used_mb(page)
    begin_s = time.monotonic()
    walk(page, number)
    return before, used_mb(page), number / (time.monotonic() - begin_s)


def walk(page: Page, changes: int) -> None:
    """So many changes, spread over all pages; ends on the overview."""
    for address in ADDRESSES:
        page.evaluate("(address) => { location.hash = `#/${address}`; }", address)
        page.evaluate("(more) => { window.wanted += more; }", max(1, changes // len(ADDRESSES)))
        page.wait_for_function("() => window.fed >= window.wanted", timeout=600_000)
    page.evaluate("() => { location.hash = '#/'; window.wanted += 5; }")
    page.wait_for_function("() => window.fed >= window.wanted")


def used_mb(page: Page) -> float:
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.enable")
    for _ in range(3):
        session.send("HeapProfiler.collectGarbage")
        page.wait_for_timeout(200)
    used = float(session.send("Runtime.getHeapUsage")["usedSize"])
    session.detach()
    return used / 1e6


def many(asked: Any) -> list[Figure]:
    figures = []
    with target(asked.nodes, asked.models, asked.loaded) as made, chromium() as browser:
        made.begin()
        page = context_of(browser).new_page()
        page.goto(f"{made.url}/ui/")
        page.wait_for_function(_DRAWN)
        page.evaluate(_WATCH)
        for address, name in (("", "overview"), ("models", "models")):
            page.evaluate("(address) => { location.hash = `#/${address}`; }", address)
            page.wait_for_timeout(2000)
            page.evaluate("() => { window.delays.length = 0; }")
            page.wait_for_timeout(1000 * asked.seconds)
            delays = sorted(page.evaluate("window.delays"))
            figures.append(Figure(f"delay until a change is painted, {name}, p50: ms", statistics.median(delays), 0))
            figures.append(Figure(f"delay, {name}, longest of {len(delays)}: ms", delays[-1], 0, DELAY_MS))
    return figures


def show(figures: list[Figure]) -> None:
    table = Table(box=box.SIMPLE, title="the page")
    for column in ("", "sparkd", "bar", ""):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for figure in figures:
        bar = "" if figure.at_most is None else f"≤ {figure.at_most:g}"
        verdict = "" if figure.at_most is None else "[red]MISSED[/red]" if figure.missed else "ok"
        table.add_row(figure.name, f"{figure.value:,.{figure.digits}f}", bar, verdict)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    sys.exit(main())
