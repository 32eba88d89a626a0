"""systemd's watchdog: pinged while supervisor and gateway both turn, and left alone where one of them cannot come back."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sparkd.config.config import Config
from sparkd.daemon.daemon import LOOP_DEAD_S, Daemon, Options
from sparkd.execution.boundary import Boundary
from sparkd.gateway.client_connection import client_connection
from sparkd.gateway.limits import ClientLimits
from sparkd.gateway.server import GatewayServer, bind, gateway_server
from sparkd.state.snapshot import Snapshot
from sparkd.state.store import Store
from sparkd.systemd import Systemd
from tests.support.fakes import FakeClock
from tests.support.waiting import eventually


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.setblocking(False)
        yield end


@pytest.fixture
async def daemon(tmp_path: Path, manager: socket.socket) -> AsyncIterator[Daemon]:
    """Built, and none of its parts begun."""
    config, store = Config(state_dir=tmp_path, runtime_dir=tmp_path), Store(tmp_path / "state.db")
    with bind("127.0.0.1", 0) as listening:
        made = Daemon(config, Options(), Systemd(notify_socket=str(tmp_path / "notify")), store, [listening], {})
        yield made
    made._cluster._here.guard.stop()  # on a thread of its own it would take its lock's file
    await made._requests.close()
    made._live_page.series.close()
    store.close()


async def pings(daemon: Daemon, manager: socket.socket) -> int:
    """How often systemd hears of it in one turn of the task that pings."""
    turn = asyncio.create_task(daemon._keep_watchdog_quiet())
    await asyncio.sleep(0)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            count += manager.recv(4096) == b"WATCHDOG=1"
    return count


async def test_a_daemon_whose_loops_turn_is_alive(daemon: Daemon, manager: socket.socket) -> None:
    is_live, ages = daemon._live()

    assert is_live and ages.keys() == {"tick_age_s", "gateway_tick_age_s"}
    assert await pings(daemon, manager) == 1


async def test_a_gateway_that_is_dead_is_not_hidden_from_systemd(
    daemon: Daemon, manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GatewayServer, "tick_age_s", LOOP_DEAD_S)

    assert not daemon._live()[0]
    assert await pings(daemon, manager) == 0


async def test_a_supervisor_that_is_dead_is_not_hidden_from_systemd(
    daemon: Daemon, manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot: Snapshot = replace(daemon._supervisor.snapshot(), tick_age_s=LOOP_DEAD_S)
    monkeypatch.setattr(daemon._supervisor, "snapshot", lambda: snapshot)

    assert not daemon._live()[0]
    assert await pings(daemon, manager) == 0


async def test_a_gateway_is_as_old_as_its_last_turn_and_one_that_ends_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkd.execution.boundary.PAUSE_S", 0.0)
    clock, starts, may_start = FakeClock(), list[float](), asyncio.Event()
    startup = GatewayServer.startup

    async def fails_until_it_may(self: GatewayServer, sockets: list[socket.socket] | None = None) -> None:
        starts.append(clock.now_s)
        if not may_start.is_set():
            raise OSError(24, "Too many open files")
        await startup(self, sockets)

    async def app(scope: object, receive: object, send: object) -> None: ...

    monkeypatch.setattr(GatewayServer, "startup", fails_until_it_may)
    server = gateway_server(app, client_connection(ClientLimits()), drain_s=1.0, boundary=Boundary(clock), clock=clock)
    with bind("127.0.0.1", 0) as listening:
        serving = asyncio.create_task(server.run_until_told([listening]))
        await eventually(lambda: len(starts) > 2, "it is begun again")
        clock.now_s += 31.0
        assert server.tick_age_s == 31.0
        may_start.set()
        await eventually(lambda: server.tick_age_s == 0.0, "a turn")
        clock.now_s += 1.0
        await eventually(lambda: server.tick_age_s == 0.0, "a turn")

        server.should_exit = True
        clock.now_s += 31.0
        assert server.tick_age_s == 0.0
        await serving
