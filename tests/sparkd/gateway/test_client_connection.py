"""S4 over real sockets: what may hide a second request is refused, and what of uvicorn the protocol relies on."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
import uvicorn

from sparkd.gateway.keys import KeyDigests
from tests.sparkd.gateway.fakes import (
    ANSWER,
    DONE,
    EVENT,
    STREAM_HEAD,
    Running,
    chunked,
    is_ours,
    post,
    request,
    soon,
    until_gone,
)

CHAT = "/v1/chat/completions"
BODY = b'{"model":"tiny","messages":[]}'
# As a browser asks (RFC 6455 4.1).
WEBSOCKET = ("Connection: keep-alive, Upgrade", "Upgrade: WebSocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZQ==")


def test_uvicorn_is_the_one_whose_inner_workings_are_known() -> None:
    assert uvicorn.__version__ == "0.54.0"


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HIDDEN = b"GET /admin/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
# As Java's HttpClient and `curl --http2` offer it in each request (RFC 7540 3.2).
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
CHUNKS = b"1e\r\n" + BODY + b"\r\n0\r\n\r\n"
SMUGGLED = {
    "CL and TE": HEAD + b"Content-Length: 30\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS + HIDDEN,
    "two CL": HEAD + b"Content-Length: 30\r\nContent-Length: 5\r\n\r\n" + BODY + HIDDEN,
    "CL negative": HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    "CL beyond 64 bits": HEAD + b"Content-Length: 99999999999999999999\r\n\r\n" + BODY,
    "TE with a space before the colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n" + CHUNKS,
    "TE xchunked": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS,
    "TE chunked, identity": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKS,
    "bare LF": HEAD.replace(b"\r\n", b"\n") + b"Content-Length: 30\n\n" + BODY,
    "bare CR": HEAD + b"X-A: b\rX-B: c\r\nContent-Length: 30\r\n\r\n" + BODY,
    "obs-fold": HEAD + b"X-A: b\r\n folded\r\nContent-Length: 30\r\n\r\n" + BODY,
    "NUL in a header": HEAD + b"X-A: b\x00c\r\nContent-Length: 30\r\n\r\n" + BODY,
    "no colon": HEAD + b"nonsense\r\nContent-Length: 30\r\n\r\n" + BODY,
    "LF behind a chunk extension": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1e;a\nX\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk size with a sign": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1e\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk longer than said": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n" + BODY + b"\r\n0\r\n\r\n",
    "no Host": HEAD.replace(b"Host: localhost\r\n", b"") + b"Content-Length: 30\r\n\r\n" + BODY,
    "two Hosts": HEAD + b"Host: localhost\r\nContent-Length: 30\r\n\r\n" + BODY,
    "Host with a path": HEAD.replace(b"localhost", b"localhost/health?") + b"Content-Length: 30\r\n\r\n" + BODY,
    "Host with a space": HEAD.replace(b"localhost", b"a b") + b"Content-Length: 30\r\n\r\n" + BODY,
    "no HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    "HTTP/3.0": HEAD.replace(b"HTTP/1.1", b"HTTP/3.0") + b"\r\n",
    "HTTP/0.9": b"GET /livez\r\n\r\n",
    "unknown method": HEAD.replace(b"POST", b"BREW") + b"Content-Length: 30\r\n\r\n" + BODY,
    "CONNECT": b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "space in the path": b"GET /livez x HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "bytes above ASCII in the path": b"GET /\xc3\xa9 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "CL and TE behind an offer": HEAD + H2C + b"Content-Length: 30\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS,
}


async def test_what_may_hide_a_second_request_is_refused(gateway: Running) -> None:
    wrong = {}
    for case, raw in SMUGGLED.items():
        client = await gateway.open()
        client.send(raw)
        answer = await client.answer()
        rest = await client.ended()
        if not is_ours(answer, 400) or rest or answer.headers["connection"] != "close":
            wrong[case] = (answer, rest)
    assert not wrong
    assert gateway.engine.heard == []
    assert gateway.admin_calls == []


@pytest.mark.parametrize("path", ["/v1/realtime?model=m", CHAT, "/admin/v1/live", "/nothing"])
@pytest.mark.parametrize("keys", [KeyDigests(), KeyDigests.of(["inference"], ["admin"])], ids=["open", "with keys"])
async def test_a_websocket_is_refused_on_every_path(gateway: Running, path: str, keys: KeyDigests) -> None:
    """It has a code of its own, in the error body that every other refusal has; the engine and the admin API never see it."""
    gateway.edge.settings = replace(gateway.edge.settings, keys=keys)
    client = await gateway.open()
    client.send(request("GET", path, *WEBSOCKET))
    answer = await client.answer()
    assert is_ours(answer, 426) and answer.error["code"] == "upgrade_not_served"
    assert (answer.headers["upgrade"], answer.headers["connection"]) == ("HTTP/1.1", "upgrade, close")
    assert await client.ended() == b""
    assert (gateway.engine.heard, gateway.admin_calls) == ([], [])


TLS = b"Connection: upgrade\r\nUpgrade: TLS/1.0\r\n"  # RFC 2817 3.1
SENT = (b"Content-Length: 30\r\n\r\n" + BODY, b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY[:7], BODY[7:]))


@pytest.mark.parametrize("offer", [H2C, TLS], ids=["h2c", "TLS"])
@pytest.mark.parametrize("sent", SENT, ids=["sized", "chunked"])
@pytest.mark.parametrize("piece_bytes", [1, 1000])
async def test_an_offer_of_another_protocol_is_ignored(gateway: Running, offer: bytes, sent: bytes, piece_bytes: int) -> None:
    """The request is served as HTTP/1.1 with its body, however it is cut into reads, and so is the next on the connection."""
    client = await gateway.open()
    await soon(lambda: gateway.server.server_state.connections)
    (protocol,) = gateway.server.server_state.connections
    for _ in range(2):
        raw = HEAD + offer + sent
        for at in range(0, len(raw), piece_bytes):
            protocol.data_received(raw[at : at + piece_bytes])
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, ANSWER)
    first, second = gateway.engine.heard
    assert first.body == second.body == BODY
    assert not {"upgrade", "connection", "http2-settings"} & set(first.headers)
    client.send(request("GET", "/livez"))
    assert (await client.answer()).status == 200


async def test_a_route_that_is_a_websocket_elsewhere_is_no_route_here(gateway: Running) -> None:
    answer = await gateway.get("/v1/realtime")
    assert is_ours(answer, 404) and answer.error["code"] == "route_not_found"


async def test_a_refusal_behind_a_good_request_comes_after_its_answer(gateway: Running) -> None:
    client = await gateway.open()
    client.send(post(CHAT, BODY))
    assert (await client.answer()).body == ANSWER
    client.send(SMUGGLED["CL and TE"])
    assert is_ours(await client.answer(), 400)
    assert await client.ended() == b""
    assert len(gateway.engine.heard) == 1


async def test_a_request_behind_an_unfinished_one_is_not_read(gateway: Running) -> None:
    client = await gateway.open()
    client.send(post(CHAT, BODY) + post(CHAT, BODY) + HIDDEN)
    answer = await client.answer()
    assert (answer.status, answer.body, answer.headers["connection"]) == (200, ANSWER, "close")
    assert await client.ended() == b""
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
    (protocol,) = gateway.server.server_state.connections
    client.send(HIDDEN)
    await soon(lambda: protocol._ignores_input)
    go_on.set()
    assert (await client.answer()).body == EVENT + DONE
    assert await client.ended() == b""
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


async def test_expect_continue_is_not_granted_to_a_body_that_is_too_large(gateway: Running) -> None:
    raw = request("POST", CHAT, "Content-Type: application/json", "Expect: 100-continue", f"Content-Length: {1 << 30}")
    client = await gateway.open()
    client.send(raw)
    answer = await client.answer()
    assert is_ours(answer, 413)
    assert await client.ended() == b""


async def test_expect_continue_is_not_granted_behind_a_refusal(gateway: Running, caplog: pytest.LogCaptureFixture) -> None:
    """The request is refused in the turn of the loop in which it came, before the gateway asks for its body."""
    client = await gateway.open()
    client.send(HEAD + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n")
    assert is_ours(await client.answer(), 400)
    assert await client.ended() == b""
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_http_1_0(gateway: Running) -> None:
    client = await gateway.open()
    client.send(b"GET /livez HTTP/1.0\r\nHost: localhost\r\n\r\n")
    answer = await client.answer()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert await client.ended() == b""


@pytest.mark.parametrize("host", [b"[fe80::1%enP7s7]:4000", b"[fe80::1%25enP7s7]"])
async def test_a_host_may_have_a_scope(gateway: Running, host: bytes) -> None:
    """It is where a daemon at a link-local address asks itself; curl leaves the scope out, httpx does not."""
    gateway.edge.settings = replace(gateway.edge.settings, keys=KeyDigests.of(["inference"], ["admin"]))
    client = await gateway.open()
    client.send(b"GET /livez HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
    assert (await client.answer()).status == 200
