"""Clients that leave at the worst moment: nothing of them may stay behind in the gateway."""

from __future__ import annotations

import asyncio

import pytest

from sparkd.wire import Connection, Pool
from tests.gateway.fakes import RawEngine, Running, post, soon

CHAT = "/v1/chat/completions"
BODY = b'{"model":"tiny"}'


class LeavingPool(Pool):
    """Its first client leaves at the moment at which the engine's connection opens."""

    leaving: asyncio.Task[Connection] | None = None

    def opened(self, connection: Connection) -> None:
        super().opened(connection)
        leaving, self.leaving = self.leaving, None
        if leaving is not None:
            leaving.cancel()


async def test_a_client_that_leaves_while_the_engine_is_called_leaves_no_connection(engine: RawEngine) -> None:
    pool = LeavingPool(str(engine.path), "http://engine", None)
    pool.leaving = asyncio.create_task(pool.connection())
    with pytest.raises(asyncio.CancelledError):
        await pool.leaving
    await soon(lambda: engine.connections == engine.lost == 1)

    assert not pool._open
    pool.close()


async def test_clients_that_send_a_whole_request_and_close_at_once_leave_nothing(gateway: Running, engine: RawEngine) -> None:
    pool = gateway.supervisor.upstream.wire
    for _ in range(40):
        clients = [await gateway.open() for _ in range(5)]
        for client in clients:
            client.send(post(CHAT, BODY))
            client.writer.transport.abort()
        await asyncio.sleep(0)
    await soon(lambda: not gateway.server.server_state.connections and gateway.supervisor.held == 0)
    pool.close()
    await soon(lambda: not pool._open)
