"""The page's stream: the document of the moment, once a second for all pages. The series are kept all the time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import TypeAdapter

from sparkd.admin.answers import answers
from sparkd.admin.fabric import fabric_of
from sparkd.admin.live_document import LiveDocument, NodeAnswers, cables_of, document_of, series_of
from sparkd.admin.starts import Starts
from sparkd.admin.streams import Endless
from sparkd.cluster.cluster import Cluster
from sparkd.control.journal import Journal
from sparkd.control.registry import Registry
from sparkd.control.supervisor import Supervisor
from sparkd.execution.boundary import Boundary
from sparkd.fabric.rates import Rate
from sparkd.gateway.rates import Rates
from sparkd.gateway.scraper import Scraper
from sparkd.state.series import Excerpt, Series
from sparkd.state.snapshot import Snapshot

EVERY_S = 1.0
# Cables and incidents are asked of every node, and so not every second.
ASK_EVERY_S = 10.0

DAY_S = 86400
MOST_SERIES = 64

_DOCUMENT: TypeAdapter[LiveDocument] = TypeAdapter(LiveDocument)


class LiveStream:
    """The newest document as one event, the same for all pages. `asked` is set when a page comes, which waits for its first one."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._pages = 0
        self._event: str | None = None
        self._news = asyncio.Event()

    @property
    def watched(self) -> bool:
        """Whether a page is open."""
        return self._pages > 0

    def publish(self, event: str | None) -> None:
        """Take the next event; None where no page is open."""
        self._event = event
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def follow(self) -> AsyncGenerator[str, None]:
        """The events of one page until it leaves. A page that reads slowly gets the next one, not those that it missed."""
        self._pages += 1
        self.asked.set()
        try:
            while True:
                await self._news.wait()
                if self._event is not None:
                    yield self._event
        finally:
            self._pages -= 1


class Live:
    """Keeps the series each second, and feeds `stream` while a page is open. `starts` sees each look of the supervisor."""

    def __init__(
        self,
        supervisor: Supervisor,
        registry: Registry,
        journal: Journal,
        cluster: Cluster,
        scraper: Scraper,
        rates: Callable[[], list[Rate]],
        series: Series,
        boundary: Boundary,
    ) -> None:
        """rates: what was measured between the nodes."""
        self.stream = LiveStream()
        self.starts = Starts()
        self.series = series
        supervisor.snapshot_followers.append(self.starts.look)
        self._supervisor = supervisor
        self._registry = registry
        self._journal = journal
        self._cluster = cluster
        self._scraper = scraper
        self._measured = rates
        self._boundary = boundary
        self._answers = NodeAnswers()
        self._asked_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until cancelled: once in each second of the wall clock, and at once for the first page."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self.stream.asked.clear()
                    with self._boundary.around("live"):
                        await self._turn(tasks)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(EVERY_S - self._journal.wall() % EVERY_S):
                            await self.stream.asked.wait()
        finally:
            self.series.close()

    async def excerpt(self, names: Sequence[str], span_s: float) -> Excerpt:
        """The figures of the last span_s. Raises StateError."""
        return await asyncio.to_thread(self.series.read, names, span_s, self._journal.wall())

    async def _turn(self, tasks: asyncio.TaskGroup) -> None:
        snapshot, rates, watched = self._supervisor.snapshot(), self._scraper.rates(), self.stream.watched
        self._scraper.watched = watched
        event = None
        if watched:
            self._ask_nodes(tasks)
            event = await asyncio.to_thread(self._event, snapshot, rates, self._journal.feed.behind_newest(0))
        self.stream.publish(event)
        await asyncio.to_thread(self.series.write, snapshot.at_s, series_of(snapshot, rates))

    def _event(self, snapshot: Snapshot, rates: Mapping[str, Rates], last_event: int) -> str:
        """On a thread: with many nodes it takes some milliseconds."""
        config = self._registry.config
        pins = frozenset(name for name, model in config.models.items() if model.pin)
        document = document_of(snapshot, rates, pins, config.memory.limits, last_event, self._answers)
        return f"event: snapshot\ndata: {_DOCUMENT.dump_json(document, by_alias=True).decode()}\n\n"

    def _ask_nodes(self, tasks: asyncio.TaskGroup) -> None:
        if time.monotonic() - self._asked_s >= ASK_EVERY_S and (self._asking is None or self._asking.done()):
            self._asked_s = time.monotonic()
            self._asking = self._boundary.spawn(tasks, "live", self._ask())

    async def _ask(self) -> None:
        report = await fabric_of(self._registry, self._cluster, self._measured())
        by_node = await self._cluster.ask_all("incidents")
        newest = [str(rows[-1]["id"]) for rows in by_node.values() if rows]
        self._answers = NodeAnswers(cables_of(report), max(newest, default=None))


def register_live(api: APIRouter, live: Live) -> None:
    @api.get(
        "/live",
        **answers(LiveDocument, media_type="text/event-stream"),
        summary="The page's stream: `snapshot`, the whole document, once a second",
    )
    async def stream() -> Response:
        return Endless(live.stream.follow(), media_type="text/event-stream", headers={"cache-control": "no-cache"})

    @api.get("/history", summary="Figures of the last 15 minutes by the second, or of 24 hours by half a minute")
    async def history(
        series: Annotated[list[str], Query(min_length=1, max_length=MOST_SERIES)],
        span_s: Annotated[float, Query(ge=1, le=DAY_S)] = 900.0,
    ) -> Excerpt:
        return await live.excerpt(series, span_s)
