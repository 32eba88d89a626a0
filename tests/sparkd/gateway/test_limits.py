"""S3 over real sockets, with a time that stands until it is turned: what is too large or too slow is refused, and no other client pays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from sparkd.gateway.limits import ClientLimits
from tests.sparkd.gateway.fakes import (
    DONE,
    EVENT,
    STREAM_HEAD,
    Client,
    RawEngine,
    Running,
    chunked,
    is_ours,
    post,
    request,
    serving,
    soon,
    until_gone,
)

CHAT = "/v1/chat/completions"
BODY = b'{"model":"tiny","messages":[]}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
PIECE = b"y" * 65536
LIMITS = ClientLimits(
    header_bytes=8192,
    header_count=50,
    header_s=10.0,
    body_bytes=1 << 20,
    body_grace_s=60.0,
    body_rate=1000,
    keep_alive_s=75.0,
    client_write_s=120.0,
    linger_s=2.0,
)
# The shortest time that matters here: nothing is due before it.
JUST_S = 0.1


@pytest.fixture
async def limited(engine: RawEngine) -> AsyncIterator[Running]:
    async with serving(engine, limits=LIMITS) as running:
        yield running


async def connected(running: Running, count: int) -> None:
    """Returns once the gateway knows of so many connections."""
    await soon(lambda: len(running.server.server_state.connections) == count)


async def opened(running: Running, sent: bytes = b"") -> Client:
    """A connection that the gateway knows of, once it has read `sent`."""
    known = set(running.server.server_state.connections)
    client = await running.open()
    await connected(running, len(known) + 1)
    (protocol,) = running.server.server_state.connections - known
    client.send(sent)
    await soon(lambda: read_bytes(protocol) >= len(sent) or protocol._stage.value == "body")
    return client


def read_bytes(protocol: object) -> int:
    """What the gateway has read of the present head, or of the present body."""
    return protocol._body_bytes if protocol._stage.value == "body" else protocol._unparsed_bytes  # type: ignore[attr-defined, no-any-return]


async def reads(running: Running, client: Client, sent: bytes, total: int) -> None:
    """Sends, and returns once the only connection's head, or body, has `total` bytes."""
    (protocol,) = running.server.server_state.connections
    client.send(sent)
    await soon(lambda: read_bytes(protocol) == total)


async def test_headers_that_are_too_large(limited: Running) -> None:
    # As they are counted: the path's 6 bytes, 17 for the Host, 7 for the name and what is between two headers.
    largest = "y" * (8192 - 6 - 17 - 7)
    assert (await limited.get("/livez", "X-A: " + largest)).status == 200
    assert (await limited.get("/livez", *(f"X-{number}: y" for number in range(49)))).status == 200
    cases = {
        "one header": request("GET", "/livez", "X-A: y" + largest),
        "many headers": request("GET", "/livez", *(f"X-{number}: {'y' * 400}" for number in range(40))),
        "51 headers": request("GET", "/livez", *(f"X-{number}: y" for number in range(50))),
        "long path": request("GET", "/" + "y" * 9000),
        "unfinished": request("GET", "/livez", "X-A: " + "y" * 9000)[:-4],
        "100 KiB in one header": request("GET", "/livez", "X-A: " + "y" * 100_000),
    }
    for case, raw in cases.items():
        client = await limited.open()
        client.send(raw)
        assert is_ours(await client.answer(), 431), case
        await client.ended()
    assert (await limited.get("/livez")).status == 200


async def test_slow_and_silent_connections_are_closed(limited: Running) -> None:
    silent = [await opened(limited) for _ in range(3)]
    slow = [await opened(limited, b"GET /livez HTTP/1.1\r\nHost: localhost\r\n") for _ in range(3)]
    limited.turn(LIMITS.header_s - JUST_S)
    for client in slow:
        client.send(b"X-A: y\r\n")
    assert (await limited.get("/livez")).status == 200
    await connected(limited, 6)

    limited.turn(JUST_S)
    for client in silent:
        assert await client.ended() == b""
    for client in slow:
        assert is_ours(await client.answer(), 408)
        assert await client.ended() == b""
    assert (await limited.get("/livez")).status == 200


async def test_an_idle_connection_is_closed_after_its_time(limited: Running) -> None:
    client = await opened(limited)
    for _ in range(2):
        client.send(request("GET", "/livez"))
        assert (await client.answer()).status == 200
        limited.turn(LIMITS.keep_alive_s - JUST_S)
    await connected(limited, 1)
    limited.turn(JUST_S)
    assert await client.ended() == b""


@pytest.mark.parametrize("begun", [b"\r\n", b"GET /livez HTTP/1.1\r\nX-A: "], ids=["newlines", "a head"])
async def test_a_second_head_has_as_long_as_the_first_from_its_first_byte(limited: Running, begun: bytes) -> None:
    client = await opened(limited)
    client.send(request("GET", "/livez"))
    assert (await client.answer()).status == 200
    limited.turn(LIMITS.keep_alive_s - JUST_S)
    await reads(limited, client, begun, len(begun))
    limited.turn(LIMITS.header_s - JUST_S)
    await reads(limited, client, b"\r\n", len(begun) + 2)
    await connected(limited, 1)
    limited.turn(JUST_S)
    assert is_ours(await client.answer(), 408)


async def test_bodies_that_stall_or_trickle(limited: Running) -> None:
    unbegun = await opened(limited, post(CHAT, b"x" * 1000)[:-1000])
    stalled = await opened(limited, post(CHAT, b"x" * 1000)[:-500])
    limited.turn(LIMITS.body_grace_s)
    assert is_ours(await unbegun.answer(), 408)
    limited.turn(0.5 - JUST_S)
    await soon(lambda: len(limited.server.server_state.tasks) == 1)  # 500 bytes are worth half a second
    limited.turn(2 * JUST_S)
    assert is_ours(await stalled.answer(), 408)
    for client in (unbegun, stalled):
        assert await client.ended() == b""
    assert limited.engine.heard == []


async def test_a_large_body_that_comes_steadily_has_more_time(limited: Running) -> None:
    body = b'{"model":"tiny","x":"' + b"y" * 199_977 + b'"}'
    client = await opened(limited, post(CHAT, body)[: -len(body)])
    for at in range(0, 190_000, 10_000):
        await reads(limited, client, body[at : at + 10_000], at + 10_000)
        limited.turn(10.0)
    client.send(body[190_000:])
    assert (await client.answer()).status == 200
    await client.close()
    assert limited.engine.heard[0].body == body


async def test_deadlines_end_with_the_request(limited: Running) -> None:
    go_on = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(EVENT, end=False))
        await go_on.wait()
        writer.write(chunked(EVENT, DONE))

    limited.engine.script = script
    client = await opened(limited)
    client.send(post(CHAT, BODY))
    begun = await client.answer(head_only=True)
    limited.turn(10_000.0)
    go_on.set()
    await client._body(begun)
    assert begun.body == EVENT * 2 + DONE


async def test_a_body_that_is_too_large_is_refused(limited: Running) -> None:
    largest = b'{"model":"tiny","x":"' + b"y" * ((1 << 20) - 23) + b'"}'
    assert (await limited.post(CHAT, largest)).status == 200
    limited.server.set_limits(replace(LIMITS, linger_s=0.0))
    declared = await limited.open()
    declared.send(request("POST", CHAT, "Content-Type: application/json", f"Content-Length: {len(largest) + 1}"))
    assert is_ours(await declared.answer(), 413)
    await declared.ended()
    limited.server.set_limits(LIMITS)
    endless = await limited.open()
    endless.send(CHUNKED + chunked(*[PIECE] * 16, b"y", end=False))
    assert is_ours(await endless.answer(), 413)
    await endless.close()
    assert len(limited.engine.heard) == 1


async def test_a_refused_upload_is_drained_so_that_the_refusal_is_seen(limited: Running) -> None:
    """urllib, httpx and others send the whole body before they read; a connection reset under them would hide the answer."""
    for body in (b"x" * 3_000_000, b"x" * 100_000):
        client = await limited.open()
        client.send(post("/v1/nowhere", body))
        assert is_ours(await client.answer(), 404)


async def test_a_refused_client_that_stays_is_cut_off(limited: Running) -> None:
    client = await opened(limited)
    client.send(b"hello\r\n\r\n")
    assert is_ours(await client.answer(), 400)
    limited.turn(LIMITS.linger_s - JUST_S)
    await connected(limited, 1)
    limited.turn(JUST_S)
    await connected(limited, 0)


async def test_a_connection_is_kept_after_a_refused_request_whose_body_is_in(limited: Running) -> None:
    client = await limited.open()
    client.send(post("/v1/nowhere", b"x" * 1000))
    assert is_ours(await client.answer(), 404)
    client.send(post(CHAT, b'{"model":"nobody"}'))
    assert is_ours(await client.answer(), 404)
    client.send(request("GET", "/livez"))
    assert (await client.answer()).status == 200


async def test_a_connection_ends_with_an_answer_that_came_before_its_body(limited: Running) -> None:
    client = await limited.open()
    client.send(request("GET", "/livez", "Content-Length: 1000"))
    assert (await client.answer()).status == 200
    assert await client.ended() == b"", "what comes next would be taken for a request"


@pytest.mark.parametrize("opening", [b"1;", b"1\r\n{\r\n0\r\nX-A: "], ids=["extension", "trailer"])
async def test_endless_chunk_extensions_and_trailers(limited: Running, opening: bytes) -> None:
    client = await limited.open()
    client.send(CHUNKED + opening + PIECE * 9)  # what comes with the head is not counted: at most 256 KiB
    assert is_ours(await client.answer(), 400)
    with pytest.raises(ConnectionError):
        while True:
            client.send(PIECE)
            await client.writer.drain()
    client.writer.transport.abort()


async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD)
    while True:
        writer.write(chunked(EVENT * 200, end=False))
        await writer.drain()


@pytest.mark.parametrize("leaves", [False, True], ids=["it stays", "it leaves"])
async def test_a_reader_that_takes_nothing_is_cut_off(limited: Running, leaves: bool) -> None:
    limited.engine.script = flood
    client = await opened(limited)
    client.writer.transport.pause_reading()
    (protocol,) = limited.server.server_state.connections
    client.send(post(CHAT, BODY))
    await soon(lambda: protocol.flow is not None and protocol.flow.write_paused)
    limited.turn(LIMITS.client_write_s - JUST_S)
    assert (limited.supervisor.held, limited.engine.lost) == (1, 0)
    if leaves:
        client.writer.transport.abort()
    else:
        limited.turn(JUST_S)
    await soon(lambda: limited.supervisor.held == 0 and limited.engine.lost == 1)
    await connected(limited, 0)
    assert limited.timers.pending == 0
    client.writer.transport.abort()


async def test_more_requests_than_allowed(engine: RawEngine) -> None:
    engine.script = until_gone
    async with serving(engine, limits=ClientLimits(requests=2)) as running:
        clients = [await running.open() for _ in range(2)]
        for client in clients:
            client.send(post(CHAT, BODY))
        await soon(lambda: running.supervisor.held == 2)
        assert is_ours(await running.post(CHAT, BODY), 503)
        assert (await running.get("/livez")).status == 200
        for client in clients:
            await client.close()
        await soon(lambda: running.supervisor.held == 0)


async def test_limits_may_change_while_it_runs(gateway: Running) -> None:
    assert (await gateway.get("/livez", "X-A: " + "y" * 9000)).status == 200
    gateway.server.set_limits(replace(LIMITS, connections=7))
    assert (await gateway.get("/livez", "X-A: " + "y" * 9000)).status == 431
    assert gateway.server.config.http.limits.connections == 7
    gateway.server.set_limits(ClientLimits(body_bytes=10))
    assert (await gateway.post(CHAT, BODY)).status == 413
