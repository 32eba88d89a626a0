"""The load generator: a process that takes jobs as JSON lines on stdin and gives figures as JSON lines on stdout. Never starts a server.

Plain asyncio protocols, because a client library costs more per chunk than the proxy it would measure. Latency is the time from the
stamp the stub put into a chunk to its arrival here, both CLOCK_MONOTONIC of one host.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools

from tests.stub.answers import STAMP

# 1.6 kB in and about 0.5 kB out, as the published figures this is compared with.
_SHORT_BODY_BYTES = 1600


@dataclass(frozen=True, slots=True)
class Job:
    """kind streams: `count` streams of `chunks` every `interval_s`, their starts spread over `spread_s`.
    kind short: `count` connections ask for whole answers for `seconds`. `limit_s` ends any streams."""

    kind: str
    host: str
    port: int
    model: str
    count: int
    chunks: int = 0
    interval_s: float = 0.0
    spread_s: float = 0.0
    seconds: float = 0.0
    limit_s: float = 60.0

    def request(self, body: dict[str, Any]) -> bytes:
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self.host}:{self.port}\r\ncontent-type: application/json\r\n"
        return head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data


class Exchange(asyncio.Protocol):
    """One connection, one request at a time; `ended` is called with itself when an answer is complete or lost."""

    def __init__(self, request: bytes, ended: Callable[[Exchange], None]) -> None:
        self.complete = False
        self.status = 0
        self.ordered = True
        self.chunks = 0
        self.asked_ns = time.monotonic_ns()
        self.first_ns = 0
        self.delays_ns: list[int] = []
        self._request = request
        self._ended = ended
        self._rest = b""
        self._done = False
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.ask()

    def ask(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.complete = False
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now_ns = time.monotonic_ns()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if not self.complete:
            self._ended(self)

    def on_body(self, body: bytes) -> None:
        self.first_ns = self.first_ns or self._now_ns
        data = self._rest + body if self._rest else body
        end = 0
        for stamp in STAMP.finditer(data):
            self.ordered = self.ordered and int(stamp[1]) == self.chunks
            self.chunks += 1
            self.delays_ns.append(self._now_ns - int(stamp[2]))
            end = stamp.end()
        self._rest = data[end:]

    def on_message_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._done = self._rest.endswith(b"data: [DONE]\n\n")
        self.complete = True
        self._ended(self)

    def whole_stream(self, chunks: int) -> bool:
        return self.status == 200 and self.complete and self._done and self.ordered and self.chunks == chunks


async def streams(job: Job) -> dict[str, Any]:
    """Delays in ms over all chunks, time to the first body byte in ms from before the connect, and how many streams were whole."""
    loop = asyncio.get_running_loop()
    behaviour = {"tokens": job.chunks, "chunk_interval_s": job.interval_s}
    request = job.request({"model": job.model, "stream": True, "messages": [{"role": "user", "content": "x" * 80}], "stub": behaviour})
    left = job.count
    finished = loop.create_future()

    def ended(_: Exchange) -> None:
        nonlocal left
        left -= 1
        if left == 0 and not finished.done():
            finished.set_result(None)

    exchanges: list[Exchange] = []

    async def start(number: int) -> None:
        if job.spread_s:
            await asyncio.sleep(job.spread_s * number / job.count)
        exchange = Exchange(request, ended)
        exchanges.append(exchange)
        try:
            await loop.create_connection(lambda: exchange, job.host, job.port)
        except OSError:
            ended(exchange)

    began_s = time.monotonic()
    try:
        async with asyncio.timeout(job.limit_s):
            async with asyncio.TaskGroup() as tasks:
                for number in range(job.count):
                    tasks.create_task(start(number))
            await finished
    except TimeoutError:
        pass  # what is incomplete is counted below
    elapsed_s = time.monotonic() - began_s
    for exchange in exchanges:
        if hasattr(exchange, "transport"):
            exchange.transport.abort()
    delays = sorted(delay for exchange in exchanges for delay in exchange.delays_ns)
    firsts = sorted(exchange.first_ns - exchange.asked_ns for exchange in exchanges if exchange.first_ns)
    return {
        "whole": sum(exchange.whole_stream(job.chunks) for exchange in exchanges),
        "chunks": len(delays),
        "elapsed_s": elapsed_s,
        "p50_ms": _quantile(delays, 0.5) / 1e6,
        "p99_ms": _quantile(delays, 0.99) / 1e6,
        "ttfb_p50_ms": _quantile(firsts, 0.5) / 1e6,
    }


async def short(job: Job) -> dict[str, Any]:
    """Closed loop of `count` connections."""
    loop = asyncio.get_running_loop()
    request = job.request(short_body(job.model))
    stop_ns = time.monotonic_ns() + int(job.seconds * 1e9)
    asking = job.count
    took: list[int] = []
    failed = 0
    none_asks = loop.create_future()

    def ended(exchange: Exchange) -> None:
        nonlocal asking, failed
        now = time.monotonic_ns()
        is_answer = exchange.complete and exchange.status == 200
        if is_answer:
            took.append(now - exchange.asked_ns)
        else:
            failed += 1
        if is_answer and now < stop_ns and not exchange.lost:
            exchange.asked_ns = now
            exchange.ask()
            return
        asking -= 1
        if not asking and not none_asks.done():
            none_asks.set_result(None)

    opened = [await loop.create_connection(lambda: Exchange(request, ended), job.host, job.port) for _ in range(asking)]
    began_s = time.monotonic()
    try:
        await asyncio.wait_for(none_asks, job.seconds)
    except TimeoutError:
        pass  # so `seconds` end
    elapsed_s = time.monotonic() - began_s
    for transport, _ in opened:
        transport.abort()
    took.sort()
    return {
        "per_s": len(took) / elapsed_s,
        "answered": len(took),
        "failed": failed,
        "p50_ms": _quantile(took, 0.5) / 1e6,
        "p99_ms": _quantile(took, 0.99) / 1e6,
    }


def short_body(model: str) -> dict[str, Any]:
    """1600 bytes as JSON."""
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": ""}]}
    body["messages"][0]["content"] = "x" * (_SHORT_BODY_BYTES - len(json.dumps(body)))
    return body


def _quantile(ordered: list[int], share: float) -> float:
    return float(ordered[min(len(ordered) - 1, int(len(ordered) * share))]) if ordered else float("nan")


def main() -> None:
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = asyncio.new_event_loop  # type: ignore[assignment]
    kinds = {"streams": streams, "short": short}
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        for line in sys.stdin:
            job = Job(**json.loads(line))
            print(json.dumps(runner.run(kinds[job.kind](job))), flush=True)


if __name__ == "__main__":
    main()
