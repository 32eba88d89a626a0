"""The page's stream: makes the document once a second for all who look, and sends each what changed. Keeps the series all the time."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from sparkd.admin.live_document import Beside, Tree, cables_of, document_of, patch_of, series_of
from sparkd.admin.readings import fabric_of
from sparkd.admin.starts import Starts
from sparkd.cluster.cluster import Cluster
from sparkd.control.journal import Ledger
from sparkd.control.registry import Roster
from sparkd.control.supervisor import Supervisor
from sparkd.errors import StateError, Unavailable
from sparkd.execution.boundary import Boundary
from sparkd.fabric.rates import Rate
from sparkd.gateway.rates import Rates
from sparkd.gateway.scraper import Scraper
from sparkd.state.series import Excerpt, Series
from sparkd.state.snapshot import Snapshot

EVERY_S, EARLY_S = 1.0, 0.1
# Without a look of the supervisor.
LATE_S = 2.0
HEARTBEAT_S = 15.0
# A page that comes back goes on where it was; one that falls further behind than BEHIND is dropped.
KEPT, BEHIND = 60, 30
# A page that is loaded again finds the stream as it left it.
LINGER_S = 10.0
MOST_PAGES = 64
# Cables and incidents are asked of every node: that seldom, and sooner where something has happened.
ASK_EVERY_S, ASK_SOONER_S = 30.0, 5.0

log = logging.getLogger("sparkd")


class OpenPage:
    """The events of one open page. `leave` is called once: at their end, when it is closed, or when it is dropped before its first one."""

    def __init__(self, events: AsyncGenerator[str, None], leave: Callable[[], None]) -> None:
        self._events = events
        self._leave = weakref.finalize(self, leave)

    def __aiter__(self) -> OpenPage:
        return self

    async def __anext__(self) -> str:
        try:
            return await anext(self._events)
        except BaseException:
            self._leave()
            raise

    async def aclose(self) -> None:
        await self._events.aclose()
        self._leave()


class LiveStream:
    """The last document, and the changes that led to it. `asked`: for the next document, also by a page that waits for a first one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.boot = secrets.token_hex(8)
        self.asked = asyncio.Event()
        self._clock = clock
        self._pages = 0
        self._left_s = float("-inf")
        self._document: Tree | None = None
        self._whole: tuple[int, str] | None = None
        self._seq = 0
        # (seq, event): one text for all pages.
        self._changes: deque[tuple[int, str]] = deque(maxlen=KEPT)
        self._news = asyncio.Event()
        self._turns = asyncio.Lock()

    @property
    def watched(self) -> bool:
        """Whether a page is open, or was a moment ago."""
        return self._pages > 0 or self._clock() - self._left_s < LINGER_S

    async def publish(self, make: Callable[[], Tree]) -> None:
        """Take the next document. It is made, and what changed worked out, on a thread: with many nodes that takes some milliseconds."""
        document, event = await asyncio.to_thread(self._made, make)
        if event is not None:
            self._changes.append((self._seq + 1, event))
        elif self._document is not None:
            return
        self._seq += 1
        self._document, self._whole = document, None
        news, self._news = self._news, asyncio.Event()
        news.set()

    def forget(self) -> None:
        """Drop the document and its changes: no page is open."""
        self._document = self._whole = None
        self._changes.clear()

    def follow(self, last_event_id: str) -> OpenPage:
        """The events of one page, until it leaves or has fallen too far behind. Raises Unavailable where too many are open."""
        if self._pages >= MOST_PAGES:
            raise Unavailable(f"{MOST_PAGES} pages are open, which is the most; close one, or try again later.", retry_after_s=30)
        self._pages += 1
        return OpenPage(self._events(last_event_id), self._leave)

    def _leave(self) -> None:
        self._pages -= 1
        self._left_s = self._clock()

    async def _events(self, last_event_id: str) -> AsyncGenerator[str, None]:
        while self._document is None:
            self.asked.set()
            await self._news.wait()
        seen = self._resumed(last_event_id)
        if seen is None:
            seen = self._seq
            yield self._snapshot()
        elif seen < self._seq:
            texts, seen = self._since(seen), self._seq
            yield texts
        while True:
            if seen < self._seq:
                if self._seq - seen > BEHIND:
                    return
                # The loop serves one page in a turn, so that the gateway can send a chunk of an answer between two pages.
                async with self._turns:
                    await asyncio.sleep(0)
                texts, seen = self._since(seen), self._seq
                yield texts
                continue
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._news.wait()
            except TimeoutError:
                yield ": still here\n\n"

    def _resumed(self, last_event_id: str) -> int | None:
        """The change that a page saw last; None where those behind it are no longer there."""
        boot, _, seq = last_event_id.partition("-")
        if boot != self.boot or not (seq.isascii() and seq.isdigit() and len(seq) < 16):
            return None
        oldest = self._changes[0][0] if self._changes else self._seq + 1
        return int(seq) if oldest - 1 <= int(seq) <= self._seq else None

    def _since(self, seen: int) -> str:
        return "".join(event for seq, event in self._changes if seq > seen)

    def _snapshot(self) -> str:
        if self._whole is None or self._whole[0] != self._seq:
            self._whole = self._seq, self._event("snapshot", self._seq, self._document)
        return self._whole[1]

    def _made(self, make: Callable[[], Tree]) -> tuple[Tree, str | None]:
        """The document, and the event of what changed since the last; None where nothing did, or there is no last one."""
        document, before = make(), self._document
        patch = patch_of(before, document) if before is not None else {}
        return document, self._event("change", self._seq + 1, patch) if patch else None

    def _event(self, kind: str, seq: int, tree: Tree | None) -> str:
        return f"id: {self.boot}-{seq}\nevent: {kind}\ndata: {msgspec.json.encode(tree, enc_hook=_plain).decode()}\n\n"


@dataclass(slots=True)
class _Asked:
    """The nodes' answers, and when they came. seq: the last event by then."""

    cables: list[Tree]
    last_incident: str | None
    at_s: float = float("-inf")
    seq: int = -1
    under_way: bool = False


class Live:
    """Keeps the series each second, and feeds `stream` while a page is open. `starts` sees each look of the supervisor."""

    def __init__(
        self,
        supervisor: Supervisor,
        registry: Roster,
        journal: Ledger,
        cluster: Cluster,
        scraper: Scraper,
        rates: Callable[[], list[Rate]],
        path: Path,
        boundary: Boundary,
    ) -> None:
        """rates: what was measured between the nodes. path: of the file of the series."""
        self.stream = LiveStream()
        self.starts = Starts()
        journal.snapshots.follow(self._watch)
        # The snapshot of the supervisor's last tick, and the wall clock of the last document.
        self._seen: Snapshot | None = None
        self._shown_s = float("-inf")
        self._supervisor = supervisor
        self._registry = registry
        self._journal = journal
        self._cluster = cluster
        self._scraper = scraper
        self._measured = rates
        self._path = path
        self._boundary = boundary
        self._former: tuple[Snapshot, Tree] | None = None
        self._series: Series | None = None
        self._full = False
        self._asked = _Asked([], None)

    async def run(self) -> None:
        """Until cancelled: behind a look of the supervisor, once a second, and at once for the first page."""
        self._series = await asyncio.to_thread(self._opened)
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
            if self._series is not None:
                self._series.close()

    def _watch(self, snapshot: Snapshot) -> None:
        """The supervisor looks four times a second while a model starts."""
        self._seen = snapshot
        self.starts.look(snapshot)
        if snapshot.at_s - self._shown_s >= EVERY_S - EARLY_S:
            self.stream.asked.set()

    async def excerpt(self, names: list[str], span_s: float) -> Excerpt:
        """The series of the last span_s. Raises StateError where there is no file."""
        if self._series is None:
            raise StateError(f"{self._path} cannot be used; the daemon's log says why. Free some space on its disk and start sparkd again.")
        try:
            return await asyncio.to_thread(self._series.read, names, span_s, self._journal.wall())
        except OSError as error:
            raise StateError(f"{self._path} cannot be read: {error.strerror}. Remove it; sparkd makes a new one.") from None

    async def _turn(self, tasks: asyncio.TaskGroup) -> None:
        rates = self._scraper.rates()
        # For a page another snapshot, of this moment; the series do with what the supervisor saw.
        snapshot = self._supervisor.snapshot() if self._seen is None or self.stream.watched else self._seen
        before_s, self._shown_s = self._shown_s, snapshot.at_s
        self._scraper.watched = self.stream.watched
        if self.stream.watched:
            await self.stream.publish(partial(self._document, snapshot, self._beside(tasks, rates)))
        else:
            self.stream.forget()
            self._former = None
        await asyncio.to_thread(self._keep, before_s, snapshot, rates)

    def _beside(self, tasks: asyncio.TaskGroup, rates: Mapping[str, Rates]) -> Beside:
        last_seq = self._journal.feed.behind_newest(0)
        self._ask_soon(tasks, last_seq)
        config = self._registry.config
        return Beside(
            boot=self.stream.boot,
            limits=config.memory.limits,
            pins=frozenset(name for name, model in config.models.items() if model.pin),
            rates=rates,
            cables=self._asked.cables,
            last_seq=last_seq,
            last_incident=self._asked.last_incident,
        )

    def _document(self, snapshot: Snapshot, beside: Beside) -> Tree:
        document = document_of(snapshot, beside, self._former)
        self._former = snapshot, document
        return document

    def _ask_soon(self, tasks: asyncio.TaskGroup, last_seq: int) -> None:
        age_s = time.monotonic() - self._asked.at_s
        due = age_s >= ASK_EVERY_S or (last_seq != self._asked.seq and age_s >= ASK_SOONER_S)
        if due and not self._asked.under_way:
            self._asked.under_way = True
            self._boundary.spawn(tasks, "live", self._ask(last_seq))

    async def _ask(self, last_seq: int) -> None:
        try:
            report = await fabric_of(self._registry, self._cluster, self._measured())
            by_node = await self._cluster.everywhere("incidents")
            newest = [str(rows[-1]["id"]) for rows in by_node.values() if rows]
            self._asked.cables, self._asked.last_incident = cables_of(report), max(newest, default=None)
        finally:
            self._asked.under_way, self._asked.at_s, self._asked.seq = False, time.monotonic(), last_seq

    def _opened(self) -> Series | None:
        try:
            return Series(self._path)
        except OSError as error:
            log.warning("%s cannot be used, so the page shows no history: %s", self._path, error.strerror)
            return None

    def _keep(self, before_s: float, snapshot: Snapshot, rates: Mapping[str, Rates]) -> None:
        """One row, and another for the second that a look a little more than a second later has left out. A full disk costs rows, and one
        line of the log."""
        if self._series is None:
            return
        values = series_of(snapshot, rates)
        skipped = int(snapshot.at_s) - int(before_s) == 2 if before_s > 0 else False
        try:
            for at_s in (snapshot.at_s - 1, snapshot.at_s) if skipped else (snapshot.at_s,):
                self._series.write(at_s, values)
            self._full = False
        except OSError as error:
            if not self._full:
                log.warning("%s cannot be written: %s", self._path, error.strerror)
            self._full = True


def _plain(value: Any) -> Any:
    """A mapping that is no dict."""
    return dict(value)
