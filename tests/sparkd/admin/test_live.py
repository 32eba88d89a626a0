"""The page's stream: snapshot and changes, resumed and bounded; the series go on without anybody who looks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sparkd.admin import live as module
from sparkd.admin.live import BEHIND, KEPT, LINGER_S, MOST_PAGES, Live, LiveStream
from sparkd.errors import StateError, Unavailable
from sparkd.execution.boundary import Boundary
from sparkd.gateway.rates import Rates
from sparkd.state.series import Series
from tests.support.fakes import FakeClock, Scene, stage
from tests.support.waiting import eventually


def parsed(text: str) -> list[tuple[str, str, Any]]:
    """(id, event, data) of each event."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        events.append((lines["id"], lines["event"], json.loads(lines["data"])))
    return events


async def following(stream: LiveStream, last: str = "") -> tuple[Any, list[tuple[str, str, Any]]]:
    events = stream.follow(last)
    return events, parsed(await anext(events))


async def test_a_snapshot_then_what_changed() -> None:
    stream = LiveStream()
    await stream.publish(lambda: {"n": 1, "m": {"a": 1, "b": 2}})
    page, first = await following(stream)
    assert [(kind, data) for _, kind, data in first] == [("snapshot", {"n": 1, "m": {"a": 1, "b": 2}})]
    await stream.publish(lambda: {"n": 1, "m": {"a": 1}})
    await stream.publish(lambda: {"n": 2, "m": {"a": 1}})
    changes = parsed(await anext(page))
    assert [(kind, data) for _, kind, data in changes] == [("change", {"m": {"b": None}}), ("change", {"n": 2})]
    assert [name for name, _, _ in (*first, *changes)] == [f"{stream.boot}-{seq}" for seq in (1, 2, 3)]
    await page.aclose()


async def test_what_does_not_change_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.01)
    stream = LiveStream()
    await stream.publish(lambda: {"n": 1})
    page, _ = await following(stream)
    await stream.publish(lambda: {"n": 1})
    assert await anext(page) == ": still here\n\n"
    await page.aclose()


async def test_a_page_that_comes_back_goes_on() -> None:
    stream = LiveStream()
    for number in range(5):
        await stream.publish(partial(dict, n=number))
    for last, kinds in (("1", ["change"] * 4), ("4", ["change"]), ("0", ["snapshot"]), ("6", ["snapshot"]), ("x", ["snapshot"])):
        page, events = await following(stream, f"{stream.boot}-{last}")
        assert [kind for _, kind, _ in events] == kinds, last
        await page.aclose()
    page, events = await following(stream, "another-4")
    assert [kind for _, kind, _ in events] == ["snapshot"], "another run of the daemon"
    await page.aclose()
    current = stream.follow(f"{stream.boot}-5")
    waiting = asyncio.ensure_future(anext(current))
    await asyncio.sleep(0)
    await stream.publish(lambda: {"n": 9})
    assert [data for _, _, data in parsed(await waiting)] == [{"n": 9}]
    await current.aclose()


@pytest.mark.parametrize(("behind", "kind"), [(KEPT, "change"), (KEPT + 1, "snapshot")])
async def test_only_so_many_changes_are_kept(behind: int, kind: str) -> None:
    stream = LiveStream()
    for number in range(behind + 1):
        await stream.publish(partial(dict, n=number))
    page, events = await following(stream, f"{stream.boot}-1")
    assert {found for _, found, _ in events} == {kind}
    await page.aclose()


@pytest.mark.parametrize(("behind", "ends"), [(BEHIND, False), (BEHIND + 1, True)])
async def test_a_slow_page_is_dropped(behind: int, ends: bool) -> None:
    stream = LiveStream()
    await stream.publish(lambda: {"n": 0})
    page, _ = await following(stream)
    for number in range(behind):
        await stream.publish(partial(dict, n=number + 1))
    assert await anext(page, "ended") == "ended" if ends else len(parsed(await anext(page))) == behind
    await page.aclose()


async def test_when_the_last_page_has_left_nothing_is_held() -> None:
    clock = FakeClock()
    stream = LiveStream(clock)
    assert not stream.watched
    await stream.publish(lambda: {"n": 0})
    page, _ = await following(stream)
    await page.aclose()
    assert stream.watched, "it may only be loading again"
    clock.now_s += LINGER_S
    assert not stream.watched
    stream.forget()
    waiting = asyncio.ensure_future(anext(stream.follow(f"{stream.boot}-1")))
    await stream.asked.wait()
    assert stream.watched
    await stream.publish(lambda: {"n": 5})
    assert [(kind, data) for _, kind, data in parsed(await waiting)] == [("snapshot", {"n": 5})]


async def test_only_so_many_pages_are_open() -> None:
    stream = LiveStream()
    await stream.publish(lambda: {"n": 0})
    pages = [stream.follow("") for _ in range(MOST_PAGES)]
    with pytest.raises(Unavailable):
        stream.follow("")  # although none of them has had an event
    for page in pages:
        await anext(page)
    await pages.pop().aclose()
    stream.follow("")  # its client left before its first event
    async with aclosing(stream.follow("")) as again:
        await anext(again)
    for page in pages:
        await page.aclose()


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
        made.cluster.everywhere = self._everywhere  # type: ignore[attr-defined,method-assign]
        supervisor = made.supervisor
        parts: Any = (supervisor, supervisor.registry, supervisor.ledger, made.cluster, self.scraper, list)
        self.live = Live(*parts, path=path, boundary=Boundary(FakeClock()))

    async def _fabric(self) -> dict[str, Any]:
        self.asked += 1
        return {}

    async def _everywhere(self, method: str) -> dict[str, Any]:
        assert method == "incidents"
        # The oldest first; d was written before the clock was set back.
        return {"n": [{"id": "d"}, {"id": "b"}, {"id": "c"}], "o": None}


@pytest.fixture
async def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shown]:
    monkeypatch.setattr(module, "LATE_S", 0.02)
    async with stage(tmp_path, models={"m": {"model": "/x", "pin": True}}) as made:
        made.cluster.agents = ("n",)
        made.cluster.node_readings = {"n": made.cluster.reading}  # type: ignore[dict-item]
        await made.supervisor.tick()
        yield Shown(made, tmp_path / "history.bin")


async def test_the_series_are_kept_without_a_page_and_the_document_only_for_one(shown: Shown) -> None:
    running = asyncio.ensure_future(shown.live.run())
    await eventually(lambda: _excerpt(shown, "node.n.available_bytes"), "the first row of the history")
    assert (shown.asked, shown.scraper.watched) == (0, False)
    assert await _excerpt(shown, "model.m.running") == 2.0
    async with aclosing(shown.live.stream.follow("")) as page:
        ((_, kind, document),) = parsed(await anext(page))
        assert (kind, document["models"]["m"]["pin"], document["models"]["m"]["rates"]["running"]) == ("snapshot", True, 2.0)
        merged: dict[str, Any] = {}
        while "incidents" not in merged:
            for _, _, change in parsed(await anext(page)):
                merged |= change
        assert (merged["incidents"], shown.asked, shown.scraper.watched) == ({"last_id": "c"}, 1, True)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def _excerpt(shown: Shown, name: str) -> float | None:
    try:
        read = await shown.live.excerpt([name], 5)
    except StateError:
        return None
    return next((value for value in reversed(read.values[name]) if value is not None), None)


async def test_a_full_disk_ends_nothing(shown: Shown, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(self: Series, at_s: float, values: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Series, "write", full)
    running = asyncio.ensure_future(shown.live.run())
    async with aclosing(shown.live.stream.follow("")) as page:
        await anext(page)
        await anext(page)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert sum("No space left" in record.getMessage() for record in caplog.records) == 1
