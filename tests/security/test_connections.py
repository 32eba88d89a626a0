"""More clients than may be connected, and fewer descriptors than they want: the longest idle one goes, and the server stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkd import metrics
from sparkd.gateway.client_connection import ClientConnection
from sparkd.gateway.limits import ClientLimits, most_connections, most_requests
from sparkd.gateway.server import GatewayServer
from tests.sparkd.gateway.fakes import Client, RawEngine, Running, is_ours, post, request, serving, soon, until_gone
from tests.support.waiting import HUNG_S, until

CHAT = "/v1/chat/completions"
BODY = b'{"model":"tiny"}'
LIVEZ = request("GET", "/livez")
# No client of these tests is slow, however slow the machine is.
PATIENT = ClientLimits(header_s=HUNG_S, body_grace_s=HUNG_S, keep_alive_s=HUNG_S, linger_s=HUNG_S)


@pytest.mark.parametrize(
    ("configured", "limit", "most"),
    [(4096, 65536, 4096), (4096, 1024, 448), (10, 256, 10), (4096, 64, 8)],
)
def test_how_many_may_be_connected(configured: int, limit: int, most: int) -> None:
    assert most_connections(configured, limit) == most


@given(st.integers(1, 1 << 20))
def test_some_connections_stay_for_what_is_answered_at_once(connections: int) -> None:
    models, together = most_requests(connections)
    assert 1 <= models <= together <= connections
    assert together < connections or connections == 1


async def test_probes_are_answered_while_requests_have_all_their_places(engine: RawEngine) -> None:
    engine.script = until_gone
    async with serving(engine, limits=replace(PATIENT, connections=5, requests=2, any_requests=3, linger_s=0.2)) as running:
        clients = [await running.open() for _ in range(3)]
        for client in clients[:2]:
            await busy(running, client)
        assert is_ours(await running.post(CHAT, BODY), 503)
        assert (await running.get("/admin/v1/status")).status == 200
        clients[2].send(request("POST", "/admin/v1/reload", "Content-Length: 5"))  # its body does not come
        await soon(lambda: len(running.server.server_state.tasks) == 3)
        assert is_ours(await running.get("/admin/v1/status"), 503)
        assert (await running.get("/livez")).status == 200
        for client in clients:
            await client.close()


@contextlib.asynccontextmanager
async def with_five(engine: RawEngine) -> AsyncIterator[tuple[Running, list[Client]]]:
    """A gateway that takes five connections, and the five."""
    async with serving(engine, limits=replace(PATIENT, connections=5)) as running:
        clients = [await running.open() for _ in range(5)]
        await soon(lambda: len(running.server.server_state.connections) == 5)
        yield running, clients
        for client in clients:
            await client.close()


async def busy(running: Running, client: Client) -> None:
    before = running.supervisor.held
    client.send(post(CHAT, BODY))
    await soon(lambda: running.supervisor.held == before + 1)


async def alive(client: Client) -> bool:
    client.send(LIVEZ)
    return (await client.answer()).status == 200


def turned_away(how: str) -> float:
    return metrics.CONNECTIONS_TURNED_AWAY.labels(how)._value.get()


async def test_a_new_client_takes_the_place_of_the_one_that_is_idle_for_longest(engine: RawEngine) -> None:
    engine.script = until_gone
    async with with_five(engine) as (running, clients):
        before = turned_away("displaced")
        await busy(running, clients[0])  # the oldest, but not idle
        assert await alive(clients[1])  # idle again, for the shortest time
        clients[2].send(b"GET /livez HTTP/1.1\r\nhost: lo")  # no whole request yet
        assert (await running.get("/livez")).status == 200
        assert await clients[2].ended() == b""

        sixth = await running.open()
        assert await alive(sixth)
        assert turned_away("displaced") == before + 1  # the one of get had gone by itself
        seventh = await running.open()
        assert await alive(seventh)
        assert await clients[3].ended() == b""

        assert await alive(clients[1])
        assert running.supervisor.held == 1
        assert "ConnectionsFull" in str(running.server.config.http.condition())
        await sixth.close()
        await seventh.close()


async def test_a_refused_connection_gives_its_descriptor_back_at_once(engine: RawEngine) -> None:
    engine.script = until_gone
    async with with_five(engine) as (running, clients):
        for client in clients:
            await busy(running, client)
        before, open_files = turned_away("refused"), len(os.listdir("/proc/self/fd"))
        refused = [await running.open() for _ in range(60)]
        answers = [await client.answer() for client in refused]

        assert all(is_ours(answer, 503) and answer.headers["retry-after"] == "1" for answer in answers)
        assert [await client.ended() for client in refused] == [b""] * 60
        await soon(lambda: len(running.server.server_state.connections) == 5)
        assert len(os.listdir("/proc/self/fd")) <= open_files + 60  # the test's own ends
        assert turned_away("refused") == before + 60
        for client in refused:
            await client.close()
        assert running.supervisor.held == 5


async def test_one_that_was_refused_for_its_request_gives_way_too(engine: RawEngine) -> None:
    engine.script = until_gone
    async with with_five(engine) as (running, clients):
        for client in clients[1:]:
            await busy(running, client)
        clients[0].send(b"this is no HTTP\r\n\r\n")  # and does not close when it is told so
        assert is_ours(await clients[0].answer(), 400)
        assert (await running.get("/livez")).status == 200


SERVES = """
import asyncio, socket, sys
import uvloop
from sparkd.gateway.edge import Edge
from sparkd.gateway.limits import ClientLimits, descriptor_limit
from sparkd.gateway.client_connection import client_connection
from sparkd.gateway.server import gateway_server
from tests.sparkd.gateway.fakes import FakeSupervisor
from sparkd.gateway.upstream import Upstream

async def main():
    def well():
        return True, {}
    edge = Edge(FakeSupervisor(Upstream(base_url="http://127.0.0.1:9")), admin=None, live=well, ready=well)
    listening = socket.create_server(("127.0.0.1", 0))
    print(descriptor_limit(), listening.getsockname()[1], flush=True)
    await gateway_server(edge, client_connection(ClientLimits(header_s=600))).run_until_told([listening])

uvloop.run(main())
"""


def test_a_gateway_that_runs_out_of_descriptors_serves_again_once_clients_leave() -> None:
    command = ("sh", "-c", 'ulimit -n 64 && exec "$@"', "sh", sys.executable, "-c", SERVES)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serves:
        try:
            assert serves.stdout is not None
            limit, port = map(int, serves.stdout.readline().split())
            with contextlib.ExitStack() as held:
                for _ in range(2 * limit):
                    held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=HUNG_S))
                until(lambda: len(os.listdir(f"/proc/{serves.pid}/fd")) == limit, "the last descriptor")
            until(lambda: answers(port), "an answer")
            assert serves.poll() is None
        finally:
            serves.kill()


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=HUNG_S) as client:
        client.sendall(LIVEZ)
        return client.recv(12) == b"HTTP/1.1 200"
    return False


@pytest.mark.parametrize("turns", [0, 1, 3])
async def test_a_connection_that_is_being_opened_when_the_server_ends_is_answered(
    engine: RawEngine, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """The end begins so many turns of the loop after the accept. A connection that is never lost holds the server up until drain_s."""
    loop, accept = asyncio.get_running_loop(), ClientConnection.__init__
    told: asyncio.Future[None] = loop.create_future()

    async def until_told(_: GatewayServer) -> None:
        await told

    def end_after(turns: int) -> None:
        if turns:
            loop.call_soon(end_after, turns - 1)
        else:
            told.set_result(None)

    def accept_and_end(connection: ClientConnection, *arguments: Any, **named: Any) -> None:
        end_after(turns)
        accept(connection, *arguments, **named)

    monkeypatch.setattr(GatewayServer, "main_loop", until_told)
    monkeypatch.setattr(ClientConnection, "__init__", accept_and_end)
    async with serving(engine, drain_s=HUNG_S) as running:
        early = socket.create_connection(("127.0.0.1", running.port))
        early.sendall(LIVEZ)
        client = Client(*await asyncio.open_connection(sock=early))
        answer = await client.answer()
        await client.close()
    assert answer.status == 200
    assert not running.server.server_state.connections


async def test_a_server_that_begins_again_ends_the_listening_of_before(gateway: Running) -> None:
    (before,) = gateway.server.servers
    with socket.socket(fileno=os.dup(before.sockets[0].fileno())) as listening:
        await gateway.server.startup([listening])

    assert not before.is_serving()
    assert (await gateway.get("/livez")).status == 200
