"""What the admin API goes on telling: a log as it is written, events as they happen. Never decides, never ends by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict

from sparkd.errors import ClusterError, UnknownModel
from sparkd.state import Event
from sparkd.supervisor import Supervisor

HEARTBEAT_S = 15.0
FOLLOW_EVERY_S = 0.5
PAGE_BYTES = 65536


async def followed_log(supervisor: Supervisor, name: str, cursor: str | None, rank: int) -> AsyncIterator[str]:
    """Until the client has gone or the model is forgotten. A node that does not answer for a while is waited for."""
    while True:
        try:
            page = await supervisor.log_text(name, cursor, PAGE_BYTES, rank)
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


async def event_stream(supervisor: Supervisor, after: int, limit: int) -> AsyncIterator[str]:
    """Everything after `after`, or the newest `limit` where that is 0 or of another state directory; then what happens."""
    async with supervisor.ledger.listen() as queue:
        newest = supervisor.ledger.events(0, 1)
        seen = after if newest and after <= newest[-1].seq else 0
        while page := supervisor.ledger.events(seen, limit):
            for event in page:
                seen = event.seq
                yield _sse(event)
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    event = await queue.get()
            except TimeoutError:
                yield ": still here\n\n"
                continue
            if event.seq > seen:
                seen = event.seq
                yield _sse(event)


def _sse(event: Event) -> str:
    return f"id: {event.seq}\nevent: {event.kind}\ndata: {json.dumps(asdict(event))}\n\n"
