"""Requests for the admin API that come together begin one after the other, so that probes are answered in between."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from starlette.types import Receive, Scope, Send

from sparkd.gateway.edge import Edge
from sparkd.gateway.upstream import Upstream
from tests.sparkd.gateway.fakes import FakeSupervisor, connected

REQUESTS = 50


async def test_the_loop_turns_between_two_of_them() -> None:
    course: list[str] = []

    async def admin(scope: Scope, receive: Receive, send: Send) -> None:
        course.append("begins")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def well() -> tuple[bool, dict[str, Any]]:
        return True, {}

    async def turns() -> None:
        while True:
            course.append("turn")
            await asyncio.sleep(0)

    edge = Edge(FakeSupervisor(Upstream(base_url="http://127.0.0.1:9")), admin=admin, live=well, ready=well)
    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http", "path": "/admin/v1/events",
        "raw_path": b"/admin/v1/events", "query_string": b"", "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 2),
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        return None

    ticker = asyncio.create_task(turns())
    async with asyncio.TaskGroup() as tasks:
        for _ in range(REQUESTS):
            tasks.create_task(connected(edge)(dict(scope), receive, send))
    ticker.cancel()

    assert course.count("begins") == REQUESTS
    begins = [place for place, what in enumerate(course) if what == "begins"]
    assert all("turn" in course[one:other] for one, other in pairwise(begins))
