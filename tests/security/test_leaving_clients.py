"""Clients that leave at the worst moment: nothing of them may stay behind in the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send

from sparkd.errors import LATER
from sparkd.gateway.engine_connection import EngineConnection
from sparkd.gateway.upstream import Upstream
from tests.sparkd.gateway.fakes import RawEngine, Running, post, request, soon

CHAT = "/v1/chat/completions"
BODY = b'{"model":"tiny"}'


class LeftUpstream(Upstream):
    """Its first client leaves at the moment at which the engine's connection opens."""

    leaving: asyncio.Task[EngineConnection] | None = None

    def opened(self, connection: EngineConnection) -> None:
        super().opened(connection)
        leaving, self.leaving = self.leaving, None
        if leaving is not None:
            leaving.cancel()


async def test_a_client_that_leaves_while_the_engine_is_called_leaves_no_connection(engine: RawEngine) -> None:
    upstream = LeftUpstream(socket_path=str(engine.path))
    upstream.leaving = asyncio.create_task(upstream.connection())
    with pytest.raises(asyncio.CancelledError):
        await upstream.leaving
    await soon(lambda: engine.connections == engine.lost == 1)

    assert not upstream._open
    upstream.close()


async def test_clients_that_send_a_whole_request_and_close_at_once_leave_nothing(gateway: Running, engine: RawEngine) -> None:
    upstream = gateway.supervisor.upstream
    for _ in range(40):
        clients = [await gateway.open() for _ in range(5)]
        for client in clients:
            client.send(post(CHAT, BODY))
            client.writer.transport.abort()
        await asyncio.sleep(0)
    await soon(lambda: not gateway.server.server_state.connections and gateway.supervisor.held == 0)
    upstream.close()
    await soon(lambda: not upstream._open)


class Endless:
    """The admin API's app, for one answer that goes on: the gateway sends what comes behind its head."""

    def __init__(self) -> None:
        self.may_return, self.began, self.closed = asyncio.Event(), False, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.began = True
        await self.may_return.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        scope[LATER].append(self.texts())

    async def texts(self) -> AsyncIterator[str]:
        try:
            yield "first"
            await asyncio.Event().wait()
        finally:
            self.closed = True


EVENTS = request("GET", "/admin/v1/events")


async def test_a_client_that_leaves_an_answer_without_an_end_ends_it(gateway: Running) -> None:
    app = gateway.edge._admin = Endless()
    app.may_return.set()
    client = await gateway.open()
    client.send(EVENTS)
    assert (await client.answer(head_only=True)).status == 200
    await client.reader.readuntil(b"first")
    assert not app.closed
    client.writer.transport.abort()
    await soon(lambda: app.closed and gateway.edge._open_requests == 0)


async def test_a_client_that_left_before_such_an_answer_began_ends_it_too(gateway: Running) -> None:
    app = gateway.edge._admin = Endless()
    client = await gateway.open()
    client.send(EVENTS)
    await soon(lambda: app.began)
    client.writer.transport.abort()
    await soon(lambda: not gateway.server.server_state.connections)
    app.may_return.set()
    await soon(lambda: app.closed and gateway.edge._open_requests == 0)
