"""The streams of the admin API, which go on until their client leaves: a log as it is written, events as they happen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from sparkd.cluster.cluster import Cluster
from sparkd.control.journal import Journal
from sparkd.control.registry import Registry
from sparkd.errors import LATER, ClusterError, UnknownModel
from sparkd.state.nouns import Event

HEARTBEAT_S = 15.0
FOLLOW_EVERY_S = 0.5
PAGE_BYTES = 65536


class Endless(StreamingResponse):
    """An answer that goes on until its client leaves. The edge sends what comes behind its head, once the app has returned: 2,000 open
    streams, each with the 130 objects that the app has for a request, kept Python's collector busy for 0.2 s at a time."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        scope[LATER].append(self.body_iterator)


async def followed_log(registry: Registry, cluster: Cluster, name: str, cursor: str | None, rank: int) -> AsyncIterator[str]:
    """Until the client has gone or the model is forgotten. A node that does not answer for a while is waited for."""
    while True:
        try:
            page = await log_of(registry, cluster, name, cursor, PAGE_BYTES, rank)
        except UnknownModel:
            return
        except ClusterError:
            await asyncio.sleep(FOLLOW_EVERY_S)
            continue
        cursor = page["cursor"]
        if page["text"]:
            yield page["text"]
        else:
            await asyncio.sleep(FOLLOW_EVERY_S)


async def log_of(registry: Registry, cluster: Cluster, name: str, cursor: str | None, max_bytes: int, rank: int = 0) -> dict[str, str]:
    """The log of one rank of the engine: {"text", "cursor"}; give the cursor back to go on from there. Raises UnknownModel."""
    record = registry.find(name)
    other = next((handle for handle in record.attempt.handles if rank and handle.rank == rank), None)
    node, path = (other.node_id, other.log_path) if other else (record.attempt.node_id, None if rank else record.observed.log_path)
    if path is None:
        return {"text": "", "cursor": cursor or ""}
    return await cluster.launcher.read_log(node, path, cursor, max_bytes)


async def event_page(journal: Journal, after: int, limit: int) -> str:
    """The answer's JSON: the next `limit` events behind `after`, or the newest where that is 0."""
    seen = after or journal.feed.behind_newest(limit)
    texts: list[str] = []
    while len(texts) < limit:
        events, last = await journal.feed.slice_of_events(seen, limit - len(texts))
        if last == seen:
            break
        seen = last
        texts += map(_json, events)
    return f'{{"events": [{", ".join(texts)}]}}'


async def event_stream(journal: Journal, after: int, limit: int) -> AsyncIterator[str]:
    """Everything after `after`, or the newest `limit` where that is 0 or of another state directory; then what happens."""
    seen = after if 0 < after <= journal.feed.behind_newest(0) else journal.feed.behind_newest(limit)
    while True:
        written = journal.feed.written
        text, last = await _next_texts(journal, seen, limit)
        if text:
            yield text
        if last != seen:
            seen = last
            continue
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await journal.feed.wait_for_more(written)
        except TimeoutError:
            yield ": still here\n\n"


async def _next_texts(journal: Journal, seen: int, limit: int) -> tuple[str, int]:
    """A slow client holds one text: the events of 2,000 slices were 87,000 objects for Python's collector to look at."""
    events, last = await journal.feed.slice_of_events(seen, limit)
    return "".join(map(_sse, events)), last


def _sse(event: Event) -> str:
    return f"id: {event.seq}\nevent: {event.kind}\ndata: {_json(event)}\n\n"


def _json(event: Event) -> str:
    return json.dumps(asdict(event))
