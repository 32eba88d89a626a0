"""The routes of the page over the real edge: its stream is one that does not end, its history is bounded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sparkd.admin.app import admin_app
from sparkd.admin.live import Live
from sparkd.execution.boundary import Boundary
from sparkd.gateway.edge import Edge
from sparkd.gateway.routes import ADMIN_ROOT
from sparkd.state.series import Series
from tests.sparkd.admin.test_app import Stream
from tests.sparkd.admin.test_live import FakeScraper
from tests.sparkd.gateway.fakes import connected
from tests.support.admin_parts import parts_of
from tests.support.answers import check_answer
from tests.support.fakes import FakeClock, stage
from tests.support.waiting import eventually


class Served:
    def __init__(self, made: Any, path: Path) -> None:
        supervisor = made.supervisor
        controlled: Any = (supervisor, supervisor.registry, supervisor.journal, made.cluster)
        self.live = Live(*controlled, FakeScraper(), list, series=Series(path), boundary=Boundary(FakeClock()))  # type: ignore[arg-type]
        self.app = admin_app(*controlled, parts_of(live=self.live))
        self.edge = Edge(supervisor, admin=self.app, live=lambda: (True, {}), ready=lambda: (True, {}))
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=connected(self.edge)), base_url="http://localhost")

    async def get(self, path: str) -> httpx.Response:
        return await self.client.get(ADMIN_ROOT + path)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with stage(tmp_path) as made:
        await made.supervisor.tick()
        served = Served(made, tmp_path / "series.db")
        running = asyncio.ensure_future(served.live.run())
        yield served
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await served.client.aclose()


async def test_the_stream_begins_with_the_document(served: Served) -> None:
    page = Stream(served.edge)
    running = asyncio.ensure_future(page.run("/live", {}))
    await eventually(lambda: "\n\n" in page.text, "the document")
    assert (page.status, page.headers[b"content-type"]) == (200, b"text/event-stream; charset=utf-8")
    kind, data = page.text.split("\n\n")[0].split("\n")
    assert kind == "event: snapshot"
    check_answer(served.app, "GET", f"{ADMIN_ROOT}/live", 200, json.loads(data.removeprefix("data: ")))
    page.leave()
    await running


async def test_history(served: Served) -> None:
    answer = await served.get("/history?series=node.n.free_bytes&series=b&span_s=5")
    check_answer(served.app, "GET", f"{ADMIN_ROOT}/history", 200, answer.json())
    assert (answer.json()["step_s"], {name: len(row) for name, row in answer.json()["series"].items()}) == (
        1,
        {"node.n.free_bytes": 5, "b": 5},
    )
    coarse = (await served.get("/history?series=b&span_s=86400")).json()
    assert (coarse["step_s"], len(coarse["series"]["b"])) == (30, 2880)


@pytest.mark.parametrize(
    "query",
    ["", "series=a&span_s=86401", "&".join(["series=a"] * 65)],
    ids=["no series", "too long", "too many"],
)
async def test_a_question_that_is_refused(served: Served, query: str) -> None:
    assert (await served.get(f"/history?{query}")).status_code == 400
