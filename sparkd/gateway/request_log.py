"""The record of the requests for models: those in flight, and the finished ones on their way to disk. It holds no body and no key."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from itertools import islice
from time import perf_counter, time

from sparkd.errors import NotFound, StateError
from sparkd.execution.threads import Threads
from sparkd.gateway.exchange import Exchange, Tokens
from sparkd.state.request_store import REQUESTS_KEPT, ROWS_AT_ONCE, RequestRow, RequestStore

_log = logging.getLogger("sparkd.requests")

WRITE_EVERY_S = 0.5
_NO_TOKENS = Tokens(None, None, None)


class RequestLog:
    """`begin` and `end` are for the edge. Finished requests reach the disk within WRITE_EVERY_S, on a thread of its own.

    keeps: whether finished requests are recorded; it may be replaced at any time.
    """

    def __init__(self, store: RequestStore | None = None, *, keeps: bool = True) -> None:
        self.keeps = keeps and store is not None
        self._store = store
        self._number = store.last_number() if store is not None else 0
        self._open: set[Exchange] = set()
        self._finished: deque[RequestRow] = deque(maxlen=REQUESTS_KEPT)
        self._more = asyncio.Event()
        self._threads = Threads("requests", 1)
        self._fault = ""

    def begin(self, exchange: Exchange) -> None:
        self._open.add(exchange)

    def end(self, exchange: Exchange) -> None:
        """Record a request that `begin` had. Its status and code are final."""
        if exchange not in self._open:
            return
        self._open.remove(exchange)
        if not self.keeps or self._store is None:
            return
        self._number += 1
        self._finished.append(_row(exchange, self._number, "done"))
        self._more.set()

    def in_flight(self, model: str | None = None) -> list[RequestRow]:
        """Oldest first."""
        rows = [_row(exchange, None, _phase(exchange)) for exchange in self._open if model is None or exchange.model == model]
        return sorted(rows, key=lambda row: row.started_s)

    async def finished(
        self, before: int | None = None, limit: int = REQUESTS_KEPT, model: str | None = None, failed: bool | None = None
    ) -> list[RequestRow]:
        """Newest first, as RequestStore.read has it. Raises StateError."""
        if self._store is None:
            return []
        await self._write()
        return await self._threads.run(self._store.read, before, limit, model, failed)

    def cancel(self, request_id: str) -> RequestRow:
        """End a request in flight, with an error for its client. Raises NotFound.

        Clients choose ids: if two requests have the same one, both end.
        """
        exchanges = [exchange for exchange in self._open if exchange.request_id == request_id]
        for exchange in exchanges:
            exchange.cancel()
        if not exchanges:
            raise NotFound(f"No request {request_id[:128]!r} is in flight. `sparkd requests` lists those that are.")
        return _row(exchanges[0], None, _phase(exchanges[0]))

    async def run(self) -> None:
        """Write finished requests until cancelled."""
        while True:
            await self._more.wait()
            await asyncio.sleep(WRITE_EVERY_S)
            self._more.clear()
            await self._write()

    async def close(self) -> None:
        """Write the last ones, and close the file."""
        await self._write()
        if self._store is not None:
            await self._threads.run(self._store.close)

    async def _write(self) -> None:
        # The supervisor writes to the same file, on the loop's thread: while it waits, the next rows wait too.
        while self._finished and self._store is not None:
            rows = list(islice(self._finished, ROWS_AT_ONCE))
            try:
                await self._threads.run(self._store.write, rows)
            except StateError as error:
                self._more.set()
                if error.message != self._fault:
                    self._fault = error.message
                    _log.warning("finished requests wait in memory: %s", error.message)
                return
            self._fault = ""
            while self._finished and (self._finished[0].number or 0) <= (rows[-1].number or 0):
                self._finished.popleft()


def _phase(exchange: Exchange) -> str:
    if exchange.queued_s is None:
        return "queued"
    return "forwarded" if exchange.first_s is None else "streaming"


def _row(exchange: Exchange, number: int | None, phase: str) -> RequestRow:
    seconds = perf_counter() - exchange.started_s
    prompt, cached, completion = exchange.tokens or _NO_TOKENS
    relay = exchange.relay
    return RequestRow(
        number,
        exchange.request_id,
        exchange.model,
        exchange.route,
        exchange.key,
        time() - seconds,
        exchange.status or None,
        exchange.code,
        seconds,
        exchange.queued_s,
        None if exchange.first_s is None else exchange.first_s - exchange.started_s,
        prompt,
        cached,
        completion,
        exchange.bytes_out + (0 if relay is None else relay.passed_bytes),
        exchange.streamed,
        phase,
        relay.pieces if relay is not None and phase == "streaming" else None,
    )
