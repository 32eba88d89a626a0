"""The page's stream: the document of the moment, once a second for all pages. The series are kept all the time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
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

EVERY_S, EARLY_S = 1.0, 0.1
# Without a look of the supervisor.
LATE_S = 2.0
# Cables and incidents are asked of every node: that seldom, and sooner where something has happened.
ASK_EVERY_S, ASK_SOONER_S = 30.0, 5.0

DAY_S = 86400
MOST_SERIES = 64

_DOCUMENT: TypeAdapter[LiveDocument] = TypeAdapter(LiveDocument)


class LiveStream:
    """The newest document as one event, the same for all pages. `asked` is set while a page waits for a first one."""

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
        """The events of one page until it leaves. A page that reads slowly gets the newest one next, not those between."""
        self._pages += 1
        try:
            if self._event is None:
                self.asked.set()
            shown: str | None = None
            while True:
                if self._event is None or self._event is shown:
                    await self._news.wait()
                    continue
                shown = self._event
                yield shown
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
        journal.snapshot_followers.append(self._watch)
        # The snapshot of the supervisor's last tick, and the wall clock of the last document.
        self._seen: Snapshot | None = None
        self._shown_s = float("-inf")
        self._supervisor = supervisor
        self._registry = registry
        self._journal = journal
        self._cluster = cluster
        self._scraper = scraper
        self._measured = rates
        self._boundary = boundary
        # The nodes' answers, the moment of the question, and the number of the newest event by then.
        self._answers = NodeAnswers()
        self._asked_s, self._asked_seq = float("-inf"), -1
        self._asking = False

    async def run(self) -> None:
        """Until cancelled: behind a look of the supervisor, once a second, and at once for the first page."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self.stream.asked.clear()
                    with self._boundary.around("live"):
                        await self._turn(tasks)
                    try:
                        async with asyncio.timeout(LATE_S):
                            await self.stream.asked.wait()
                    except TimeoutError:
                        # The supervisor waits for something: its state is shown all the same.
                        self._seen = None
        finally:
            self.series.close()

    async def excerpt(self, names: Sequence[str], span_s: float) -> Excerpt:
        """The figures of the last span_s. Raises StateError."""
        return await asyncio.to_thread(self.series.read, names, span_s, self._journal.wall())

    def _watch(self, snapshot: Snapshot) -> None:
        """The supervisor looks four times a second while a model starts."""
        self._seen = snapshot
        self.starts.look(snapshot)
        if snapshot.at_s - self._shown_s >= EVERY_S - EARLY_S:
            self.stream.asked.set()

    async def _turn(self, tasks: asyncio.TaskGroup) -> None:
        rates, watched = self._scraper.rates(), self.stream.watched
        # For a page another snapshot, of this moment; the series do with what the supervisor saw.
        snapshot = self._supervisor.snapshot() if self._seen is None or watched else self._seen
        self._shown_s = snapshot.at_s
        self._scraper.watched = watched
        if watched:
            last_event = self._journal.feed.behind_newest(0)
            self._ask_soon(tasks, last_event)
            self.stream.publish(await asyncio.to_thread(self._event, snapshot, rates, last_event))
        else:
            self.stream.publish(None)
        await asyncio.to_thread(self.series.write, snapshot.at_s, series_of(snapshot, rates))

    def _event(self, snapshot: Snapshot, rates: Mapping[str, Rates], last_event: int) -> str:
        """On a thread: with many nodes it takes some milliseconds."""
        config = self._registry.config
        pins = frozenset(name for name, model in config.models.items() if model.pin)
        document = document_of(snapshot, rates, pins, config.memory.limits, last_event, self._answers)
        return f"event: snapshot\ndata: {_DOCUMENT.dump_json(document, by_alias=True).decode()}\n\n"

    def _ask_soon(self, tasks: asyncio.TaskGroup, last_event: int) -> None:
        age_s = time.monotonic() - self._asked_s
        due = age_s >= ASK_EVERY_S or (last_event != self._asked_seq and age_s >= ASK_SOONER_S)
        if due and not self._asking:
            self._asking = True
            self._boundary.spawn(tasks, "live", self._ask(last_event))

    async def _ask(self, last_event: int) -> None:
        try:
            report = await fabric_of(self._registry, self._cluster, self._measured())
            by_node = await self._cluster.ask_all("incidents")
            newest = [str(rows[-1]["id"]) for rows in by_node.values() if rows]
            self._answers = NodeAnswers(cables_of(report), max(newest, default=None))
        finally:
            self._asking, self._asked_s, self._asked_seq = False, time.monotonic(), last_event


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
