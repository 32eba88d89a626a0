"""The bounded protocol over real sockets: S3 (huge and slow) with short deadlines, S4 (smuggling), and what of uvicorn it relies on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvicorn

from sparkd.gateway import Limits
from tests.gateway.fakes import (
    ANSWER,
    DONE,
    EVENT,
    STREAM_HEAD,
    Answer,
    Client,
    RawEngine,
    Running,
    chunked,
    post,
    request,
    serving,
    soon,
    until_gone,
)

CHAT = "/v1/chat/completions"
BODY = b'{"model":"tiny","messages":[]}'
QUICK = Limits(
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


def test_uvicorn_is_the_one_whose_inner_workings_are_known() -> None:
    assert uvicorn.__version__ == "0.54.0"


def is_ours(answer: Answer, status: int) -> bool:
    return answer.status == status and answer.error["src"] == "sparkd" and answer.headers["content-type"] == "application/json"


# --- S4: smuggling ------------------------------------------------------------------------------------------------------

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HIDDEN = b"GET /admin/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKS = b"1e\r\n" + BODY + b"\r\n0\r\n\r\n"
SMUGGLED = {
    "CL and TE": HEAD + b"Content-Length: 30\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS + HIDDEN,
    "TE and CL": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n" + CHUNKS + HIDDEN,
    "two CL": HEAD + b"Content-Length: 30\r\nContent-Length: 5\r\n\r\n" + BODY + HIDDEN,
    "two equal CL": HEAD + b"Content-Length: 30\r\nContent-Length: 30\r\n\r\n" + BODY + HIDDEN,
    "CL list": HEAD + b"Content-Length: 30, 30\r\n\r\n" + BODY,
    "CL with sign": HEAD + b"Content-Length: +30\r\n\r\n" + BODY,
    "CL negative": HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    "CL hexadecimal": HEAD + b"Content-Length: 0x1e\r\n\r\n" + BODY,
    "CL beyond 64 bits": HEAD + b"Content-Length: 99999999999999999999\r\n\r\n" + BODY,
    "TE with a space before the colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n" + CHUNKS,
    "TE xchunked": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS,
    "TE identity": HEAD + b"Transfer-Encoding: identity\r\n\r\n" + CHUNKS,
    "TE chunked, identity": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKS,
    "TE with vertical tab": HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + CHUNKS,
    "bare LF": HEAD.replace(b"\r\n", b"\n") + b"Content-Length: 30\n\n" + BODY,
    "bare LF in one header": HEAD + b"X-A: b\nContent-Length: 30\r\n\r\n" + BODY,
    "bare CR": HEAD + b"X-A: b\rX-B: c\r\nContent-Length: 30\r\n\r\n" + BODY,
    "obs-fold": HEAD + b"X-A: b\r\n folded\r\nContent-Length: 30\r\n\r\n" + BODY,
    "space before the first header": HEAD.replace(b"Host", b" Host") + b"Content-Length: 30\r\n\r\n" + BODY,
    "NUL in a header": HEAD + b"X-A: b\x00c\r\nContent-Length: 30\r\n\r\n" + BODY,
    "NUL in a name": HEAD + b"X\x00A: b\r\nContent-Length: 30\r\n\r\n" + BODY,
    "no colon": HEAD + b"nonsense\r\nContent-Length: 30\r\n\r\n" + BODY,
    "LF behind a chunk extension": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1e;a\nX\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk size with a sign": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1e\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk size of 17 digits": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1000000000000001e\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk longer than said": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n" + BODY + b"\r\n0\r\n\r\n",
    "no Host": HEAD.replace(b"Host: localhost\r\n", b"") + b"Content-Length: 30\r\n\r\n" + BODY,
    "two Hosts": HEAD + b"Host: localhost\r\nContent-Length: 30\r\n\r\n" + BODY,
    "Host with a path": HEAD.replace(b"localhost", b"localhost/health?") + b"Content-Length: 30\r\n\r\n" + BODY,
    "Host with user and fragment": HEAD.replace(b"localhost", b"localhost:1/#@x") + b"Content-Length: 30\r\n\r\n" + BODY,
    "Host with a space": HEAD.replace(b"localhost", b"a b") + b"Content-Length: 30\r\n\r\n" + BODY,
    "empty Host": HEAD.replace(b" localhost", b"") + b"Content-Length: 30\r\n\r\n" + BODY,
    "no HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/3.0": HEAD.replace(b"HTTP/1.1", b"HTTP/3.0") + b"\r\n",
    "HTTP/0.9": b"GET /livez\r\n\r\n",
    "unknown method": HEAD.replace(b"POST", b"BREW") + b"Content-Length: 30\r\n\r\n" + BODY,
    "lower-case method": HEAD.replace(b"POST", b"post") + b"Content-Length: 30\r\n\r\n" + BODY,
    "CONNECT": b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "space in the path": b"GET /livez x HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "bytes above ASCII in the path": b"GET /\xc3\xa9 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "websocket": b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n",
    "h2c": HEAD + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nContent-Length: 30\r\n\r\n" + BODY,
    "upgrade of a POST": HEAD + b"Connection: upgrade\r\nUpgrade: tls/1.0\r\nContent-Length: 30\r\n\r\n" + BODY,
}


async def test_what_may_hide_a_second_request_is_refused(gateway: Running) -> None:
    wrong = {}
    for case, raw in SMUGGLED.items():
        client = await gateway.open()
        client.send(raw)
        answer = await client.answer()
        try:
            rest = await client.ended(2)
        except TimeoutError:
            rest = b"still open"
        await client.close()
        if not is_ours(answer, 400) or rest or answer.headers["connection"] != "close":
            wrong[case] = (answer, rest)
    assert not wrong
    assert gateway.engine.heard == []
    assert gateway.admin_calls == []


async def test_a_refusal_behind_a_good_request_comes_after_its_answer(gateway: Running) -> None:
    client = await gateway.open()
    client.send(post(CHAT, BODY))
    assert (await client.answer()).body == ANSWER
    client.send(SMUGGLED["CL and TE"])
    assert is_ours(await client.answer(), 400)
    assert await client.ended() == b""
    await client.close()
    assert len(gateway.engine.heard) == 1


async def test_a_request_behind_an_unfinished_one_is_not_read(gateway: Running) -> None:
    client = await gateway.open()
    client.send(post(CHAT, BODY) + post(CHAT, BODY) + HIDDEN)
    answer = await client.answer()
    assert (answer.status, answer.body, answer.headers["connection"]) == (200, ANSWER, "close")
    assert await client.ended() == b""
    await client.close()
    assert len(gateway.engine.heard) == 1
    assert gateway.admin_calls == []


async def test_a_request_behind_a_running_stream_is_not_read(gateway: Running) -> None:
    go_on = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(EVENT, end=False))
        await go_on.wait()
        writer.write(chunked(DONE))

    gateway.engine.script = script
    client = await gateway.open()
    client.send(post(CHAT, BODY))
    await soon(lambda: gateway.engine.heard)
    client.send(HIDDEN)
    await asyncio.sleep(0.05)
    go_on.set()
    assert (await client.answer()).body == EVENT + DONE
    assert await client.ended() == b""
    await client.close()
    assert gateway.admin_calls == []


async def test_the_disconnect_of_a_client_that_pipelined_is_seen(gateway: Running) -> None:
    gateway.engine.script = until_gone
    client = await gateway.open()
    client.send(post(CHAT, BODY) + post(CHAT, BODY))
    await soon(lambda: gateway.engine.heard)
    await client.close()
    await soon(lambda: gateway.engine.lost == 1)
    await soon(lambda: gateway.supervisor.held == 0)


async def test_endless_pipelining_is_cut_off(gateway: Running) -> None:
    gateway.engine.script = until_gone
    client = await gateway.open()
    client.send(post(CHAT, BODY))
    await soon(lambda: gateway.engine.heard)
    with pytest.raises(ConnectionError):
        for _ in range(100_000):
            client.send(HIDDEN * 1000)
            await client.writer.drain()
    await client.close()
    await soon(lambda: gateway.engine.lost == 1)


async def test_requests_one_after_the_other_share_a_connection(gateway: Running) -> None:
    client = await gateway.open()
    for _ in range(3):
        client.send(post(CHAT, BODY))
        assert (await client.answer()).body == ANSWER
    client.send(request("GET", "/livez"))
    assert (await client.answer()).status == 200
    await client.close()
    assert gateway.engine.connections == 1


async def test_chunked_bodies_and_their_trailers(gateway: Running) -> None:
    trailers = b"Authorization: Bearer x\r\nHost: evil\r\nX-Request-Id: from-a-trailer\r\n"
    raw = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY[:7], BODY[7:], end=False) + b"0;ext=1\r\n" + trailers + b"\r\n"
    answer = await gateway.ask(raw)
    assert answer.status == 200
    (heard,) = gateway.engine.heard
    assert heard.body == BODY
    assert heard.headers["x-request-id"] != "from-a-trailer"
    assert "transfer-encoding" not in heard.headers


async def test_expect_continue(gateway: Running) -> None:
    client = await gateway.open()
    client.send(post(CHAT, BODY, "Expect: 100-continue")[: -len(BODY)])
    assert (await client.answer()).status == 100
    client.send(BODY)
    assert (await client.answer()).body == ANSWER
    await client.close()


async def test_expect_continue_is_not_granted_to_a_body_that_is_too_large(gateway: Running) -> None:
    raw = request("POST", CHAT, "Content-Type: application/json", "Expect: 100-continue", f"Content-Length: {1 << 30}")
    client = await gateway.open()
    client.send(raw)
    answer = await client.answer()
    assert is_ours(answer, 413)
    assert await client.ended() == b""
    await client.close()


async def test_http_1_0(gateway: Running) -> None:
    client = await gateway.open()
    client.send(b"GET /livez HTTP/1.0\r\nHost: localhost\r\n\r\n")
    answer = await client.answer()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert await client.ended() == b""
    await client.close()


# --- S3: huge and slow --------------------------------------------------------------------------------------------------


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

    answers = await asyncio.gather(
        *(trickle(client, b"GET /livez HTTP/1.1\r\nHost: localhost\r\n", b"X-A: y\r\n") for client in trickling)
    )
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
    limits = Limits(body_grace_s=0.3, body_rate=100_000, linger_s=0.2)
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


async def test_more_connections_than_allowed(engine: RawEngine) -> None:
    async with serving(engine, limits=Limits(connections=5, linger_s=0.2)) as running:
        clients = [await running.open() for _ in range(5)]
        sixth = await running.open()
        answer = await sixth.answer()
        assert is_ours(answer, 503)
        assert answer.headers["retry-after"] == "1"
        await sixth.close()
        for client in clients:
            await client.close()
        await asyncio.sleep(0.1)
        assert (await running.get("/livez")).status == 200


async def test_more_requests_than_allowed(engine: RawEngine) -> None:
    engine.script = until_gone
    async with serving(engine, limits=Limits(requests=2, linger_s=0.2)) as running:
        clients = [await running.open() for _ in range(2)]
        for client in clients:
            client.send(post(CHAT, BODY))
        await soon(lambda: running.supervisor.held == 2)
        assert is_ours(await running.post(CHAT, BODY), 503)
        assert (await running.get("/livez")).status == 200
        for client in clients:
            await client.close()
        await soon(lambda: running.supervisor.held == 0)
