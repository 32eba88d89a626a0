"""S3 over real sockets, with short deadlines: what is too large or too slow is refused, and nobody pays for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from sparkd.gateway import ClientLimits
from tests.sparkd.gateway.fakes import (
    DONE,
    EVENT,
    STREAM_HEAD,
    Answer,
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
QUICK = ClientLimits(
    header_bytes=8192,
    header_count=50,
    header_s=0.4,
    body_bytes=1 << 20,
    body_grace_s=0.4,
    body_rate=1 << 20,
    keep_alive_s=0.4,
    client_write_s=0.4,
    linger_s=0.3,
    connections=300,
)


@pytest.fixture
async def quick(engine: RawEngine) -> AsyncIterator[Running]:
    async with serving(engine, limits=QUICK) as running:
        yield running


async def trickle(client: Client, opening: bytes, drop: bytes) -> Answer:
    """The answer that a client gets which never stops sending."""

    async def send() -> None:
        client.send(opening)
        while True:
            await asyncio.sleep(0.03)
            client.send(drop)

    sending = asyncio.create_task(send())
    try:
        return await client.answer()
    finally:
        sending.cancel()


async def test_headers_that_are_too_large(quick: Running) -> None:
    assert (await quick.get("/livez", "X-A: " + "y" * 7000)).status == 200
    cases = {
        "one header": request("GET", "/livez", "X-A: " + "y" * 9000),
        "many headers": request("GET", "/livez", *(f"X-{number}: {'y' * 400}" for number in range(40))),
        "60 headers": request("GET", "/livez", *(f"X-{number}: y" for number in range(60))),
        "1000 headers": request("GET", "/livez", *(f"X-{number}: y" for number in range(1000))),
        "long path": request("GET", "/" + "y" * 9000),
        "unfinished": request("GET", "/livez", "X-A: " + "y" * 9000)[:-4],
        "1 MiB in one header": request("GET", "/livez", "X-A: " + "y" * (1 << 20)),
    }
    for case, raw in cases.items():
        client = await quick.open()
        client.send(raw)
        answer = await client.answer()
        assert is_ours(answer, 431) or (answer.status == 0 and len(raw) > 1 << 20), (case, answer)
        await client.ended()
        await client.close()
    assert (await quick.get("/livez")).status == 200


async def test_slow_and_silent_connections_are_closed(quick: Running) -> None:
    silent = [await quick.open() for _ in range(50)]
    trickling = [await quick.open() for _ in range(50)]

    answers = await asyncio.gather(*(trickle(client, b"GET /livez HTTP/1.1\r\nHost: localhost\r\n", b"X-A: y\r\n") for client in trickling))
    for client in silent:
        assert await client.ended(5) == b""
    assert all(is_ours(answer, 408) for answer in answers)
    for client in silent + trickling:
        await client.close()
    # The connection of the gateway's tests is itself one; a fresh one is served at once.
    assert (await quick.get("/livez")).status == 200


async def test_newlines_do_not_keep_a_connection(quick: Running) -> None:
    client = await quick.open()
    client.send(request("GET", "/livez"))
    assert (await client.answer()).status == 200
    client.send(b"\r\n")
    await client.ended(5)
    await client.close()


async def test_an_idle_connection_is_closed(quick: Running) -> None:
    client = await quick.open()
    client.send(request("GET", "/livez"))
    assert (await client.answer()).status == 200
    assert await client.ended(5) == b""
    await client.close()


async def test_bodies_that_stall_or_trickle(quick: Running) -> None:
    stalled = await quick.open()
    stalled.send(post(CHAT, b"x" * 1000)[:-500])
    unbegun = await quick.open()
    unbegun.send(post(CHAT, b"x" * 1000)[:-1000])
    trickling = await quick.open()
    answer = await trickle(trickling, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n{\r\n")
    assert is_ours(answer, 408)
    assert is_ours(await stalled.answer(), 408)
    assert is_ours(await unbegun.answer(), 408)
    for client in (stalled, unbegun, trickling):
        assert await client.ended(5) == b""
        await client.close()
    assert quick.engine.heard == []


async def test_a_large_body_that_comes_steadily_has_more_time(engine: RawEngine) -> None:
    limits = ClientLimits(body_grace_s=0.3, body_rate=100_000, linger_s=0.2)
    body = b'{"model":"tiny","x":"' + b"y" * 200_000 + b'"}'
    async with serving(engine, limits=limits) as running:
        client = await running.open()
        raw = post(CHAT, body)
        for at in range(0, len(raw), 10_000):
            client.send(raw[at : at + 10_000])
            await asyncio.sleep(0.04)
        assert (await client.answer()).status == 200
        await client.close()
    assert engine.heard[0].body == body


async def test_deadlines_end_with_the_request(quick: Running) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for _ in range(10):
            await asyncio.sleep(0.15)
            writer.write(chunked(EVENT, end=False))
        writer.write(chunked(DONE))

    quick.engine.script = script
    assert (await quick.post(CHAT, BODY)).body == EVENT * 10 + DONE


async def test_a_body_that_is_too_large_is_refused_at_once(quick: Running) -> None:
    declared = await quick.open()
    declared.send(request("POST", CHAT, "Content-Type: application/json", f"Content-Length: {1 << 30}"))
    assert is_ours(await declared.answer(), 413)
    await declared.ended(5)
    await declared.close()
    endless = await quick.open()
    endless.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    try:
        for _ in range(100):
            endless.send(chunked(b"x" * 65536, end=False))
            await endless.writer.drain()
    except ConnectionError:
        pass
    answer = await endless.answer()
    assert is_ours(answer, 413) or answer.status == 0
    await endless.close()
    assert quick.engine.heard == []


async def test_a_refused_upload_is_drained_so_that_the_refusal_is_seen(quick: Running) -> None:
    """urllib, httpx and others send the whole body before they read; a connection reset under them would hide the answer."""
    for body in (b"x" * 3_000_000, b"x" * 100_000):
        client = await quick.open()
        client.send(post("/v1/nowhere", body))
        assert is_ours(await client.answer(), 404)
        await client.close()


async def test_a_connection_is_kept_after_a_refused_request_whose_body_is_in(quick: Running) -> None:
    client = await quick.open()
    client.send(post("/v1/nowhere", b"x" * 1000))
    assert is_ours(await client.answer(), 404)
    client.send(post(CHAT, b'{"model":"nobody"}'))
    assert is_ours(await client.answer(), 404)
    client.send(request("GET", "/livez"))
    assert (await client.answer()).status == 200
    await client.close()


async def test_endless_chunk_extensions_and_trailers(quick: Running) -> None:
    begun = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    for opening in (begun + b"1;", begun + b"1\r\n{\r\n0\r\nX-A: "):
        client = await quick.open()
        client.send(opening)
        try:
            for _ in range(200):
                client.send(b"y" * 65536)
                await client.writer.drain()
        except ConnectionError:
            pass
        answer = await client.answer()
        assert is_ours(answer, 400) or answer.status == 0
        await client.close()


async def test_a_reader_that_takes_nothing_is_cut_off(quick: Running) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for _ in range(5000):
            writer.write(chunked(EVENT * 200, end=False))
            await writer.drain()

    quick.engine.script = flood
    client = await quick.open()
    client.writer.transport.pause_reading()
    client.send(post(CHAT, BODY))
    await soon(lambda: quick.supervisor.held == 1)
    await soon(lambda: quick.supervisor.held == 0)
    await soon(lambda: quick.engine.lost == 1)
    client.writer.transport.abort()


async def test_more_requests_than_allowed(engine: RawEngine) -> None:
    engine.script = until_gone
    async with serving(engine, limits=ClientLimits(requests=2, linger_s=0.2)) as running:
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
    gateway.server.set_limits(QUICK)
    assert (await gateway.get("/livez", "X-A: " + "y" * 9000)).status == 431
    gateway.edge.settings = replace(gateway.edge.settings, limits=ClientLimits(body_bytes=10))
    assert (await gateway.post(CHAT, BODY)).status == 413
