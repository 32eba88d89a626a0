"""The page's stream: the newest document for each page; the series are kept without a page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from sparkd.admin import live as module
from sparkd.admin.live import Live, LiveStream
from sparkd.execution.boundary import Boundary
from sparkd.gateway.rates import Rates
from sparkd.state.series import Series
from tests.support.fakes import FakeClock, Scene, stage
from tests.support.waiting import eventually


async def test_each_page_gets_the_newest_document_and_a_slow_one_not_those_between() -> None:
    stream = LiveStream()
    first, slow = stream.follow(), stream.follow()

    async def published(event: str, *pages: AsyncIterator[str]) -> list[str]:
        waiting = [asyncio.ensure_future(anext(page)) for page in pages]
        await asyncio.sleep(0)
        stream.publish(event)
        return await asyncio.gather(*waiting)

    assert await published("1", first, slow) == ["1", "1"]
    assert [await published(event, first) for event in ("2", "3")] == [["2"], ["3"]]
    assert await published("4", first, slow) == ["4", "4"]
    for page in (first, slow):
        await page.aclose()


async def test_a_page_that_comes_when_none_was_open_waits_for_a_document_of_now() -> None:
    stream = LiveStream()
    assert not stream.watched
    page = stream.follow()
    waiting = asyncio.ensure_future(anext(page))
    await stream.asked.wait()
    assert stream.watched
    stream.publish("1")
    await waiting
    await page.aclose()
    assert not stream.watched
    stream.publish(None)
    again = stream.follow()
    waiting = asyncio.ensure_future(anext(again))
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.publish("2")
    assert await waiting == "2"
    await again.aclose()


class FakeScraper:
    watched = False

    def rates(self) -> dict[str, Rates]:
        return {"m": Rates(running=2.0)}


class Shown:
    """A Live over a scene; `asked` counts the questions to the nodes."""

    def __init__(self, made: Scene, path: Path) -> None:
        self.scraper = FakeScraper()
        self.asked = 0
        made.cluster.fabric = self._fabric  # type: ignore[attr-defined]
        made.cluster.ask_all = self._ask_all  # type: ignore[attr-defined,method-assign]
        supervisor = made.supervisor
        parts: Any = (supervisor, supervisor.registry, supervisor.journal, made.cluster, self.scraper, list)
        self.live = Live(*parts, series=Series(path), boundary=Boundary(FakeClock()))

    async def _fabric(self) -> dict[str, Any]:
        self.asked += 1
        return {}

    async def _ask_all(self, method: str) -> dict[str, Any]:
        assert method == "incidents"
        # The oldest first; d was written before the clock was set back.
        return {"n": [{"id": "d"}, {"id": "b"}, {"id": "c"}], "o": None}


@pytest.fixture
async def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shown]:
    monkeypatch.setattr(module, "EVERY_S", 0.02)
    async with stage(tmp_path, models={"m": {"model": "/x", "pin": True}}) as made:
        made.cluster.agents = ("n",)
        made.cluster.node_readings = {"n": made.cluster.reading}  # type: ignore[dict-item]
        await made.supervisor.tick()
        yield Shown(made, tmp_path / "series.db")


async def test_the_series_are_kept_without_a_page_and_the_document_only_for_one(shown: Shown) -> None:
    running = asyncio.ensure_future(shown.live.run())
    await eventually(lambda: value_of(shown, "node.n.available_bytes"), "the first second of the series")
    assert (shown.asked, shown.scraper.watched) == (0, False)
    assert await value_of(shown, "model.m.running") == 2.0
    async with aclosing(shown.live.stream.follow()) as page:
        document = await document_of(page)
        assert (document["models"]["m"]["pin"], document["models"]["m"]["rates"]["running"]) == (True, 2.0)
        while document["last_incident"] is None:
            document = await document_of(page)
        assert (document["last_incident"], shown.asked, shown.scraper.watched) == ("c", 1, True)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def document_of(page: AsyncIterator[str]) -> dict[str, Any]:
    kind, data = (await anext(page)).removesuffix("\n\n").split("\n")
    assert kind == "event: snapshot"
    document: dict[str, Any] = json.loads(data.removeprefix("data: "))
    return document


async def value_of(shown: Shown, name: str) -> float | None:
    values = (await shown.live.excerpt([name], 5)).series[name]
    return next((value for value in reversed(values) if value is not None), None)
