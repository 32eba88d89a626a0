"""Fixtures of the gateway's tests: an engine of raw bytes and the gateway in front of it, on the event loops that the daemon may have."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import uvloop

from sparkd.gateway.keys import KeyDigests
from sparkd.gateway.upstream import Upstream
from tests.sparkd.gateway.fakes import KEY, RawEngine, Running, serving
from tests.stub.__main__ import start_stub

# The files whose tests depend on a transport: how it closes, pauses, writes and loses its peer.
TRANSPORTS = ("test_disconnects.py", "test_heartbeat.py", "test_http10.py", "test_limits.py", "test_protocol.py")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The daemon takes uvloop where it can, asyncio's own where it cannot; their transports differ in what they do on close."""
    if item.path.name in TRANSPORTS:
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def engine() -> AsyncIterator[RawEngine]:
    with TemporaryDirectory(prefix="sparkd-") as folder:  # pytest's own paths are too long for a socket
        engine = RawEngine(Path(folder) / "engine.sock")
        await engine.start()
        yield engine
        await engine.stop()


@pytest.fixture
async def gateway(engine: RawEngine) -> AsyncIterator[Running]:
    async with serving(engine) as running:
        yield running


@pytest.fixture
async def stubbed(engine: RawEngine) -> AsyncIterator[Running]:
    """A gateway with a key in front of the stub engine."""
    path = engine.path.with_name("stub.sock")
    async with serving(engine, keys=KeyDigests.of(inference=[KEY])) as gateway, await start_stub(uds=str(path), models=("tiny",)):
        gateway.supervisor.upstream.close()
        gateway.supervisor.upstream = Upstream(socket_path=str(path))
        yield gateway
        gateway.supervisor.upstream.close()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """No test may leave a traceback or an error of uvicorn or asyncio in a log."""
    caplog.set_level(logging.INFO)


@pytest.fixture(autouse=True)
def no_tracebacks(quiet: None, caplog: pytest.LogCaptureFixture) -> object:
    yield
    bad = [record for record in caplog.get_records("call") if record.exc_info or record.levelno >= logging.ERROR]
    assert not bad, [record.getMessage() for record in bad]
