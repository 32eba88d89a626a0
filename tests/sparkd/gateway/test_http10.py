"""Clients of HTTP/1.0, which nginx is to its upstreams by default: bodies end with the connection."""

from __future__ import annotations

import asyncio
import socket

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from sparkd.gateway.limits import ClientLimits
from sparkd.state.model_state import ModelState
from tests.sparkd.gateway.fakes import ANSWER, DONE, EVENT, STREAM_HEAD, Answer, RawEngine, Running, chunked, serving, soon, view

CHAT = "/v1/chat/completions"
STREAM = b'{"model":"tiny","stream":true,"messages":[]}'


def old(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.0", "Host: localhost", *headers]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def until_closed(gateway: Running, raw: bytes) -> Answer:
    """The one answer of a connection, its body whatever comes before the close. Raises ConnectionResetError for a reset."""
    client = await gateway.open()
    client.send(raw)
    answer = await client.answer(head_only=True)
    answer.body = await client.reader.read(-1)
    await client.close()
    return answer


def is_open_ended(answer: Answer) -> bool:
    return answer.headers["connection"] == "close" and not {"transfer-encoding", "content-length"} & set(answer.headers)


async def test_a_stream_ends_with_the_connection(gateway: Running) -> None:
    gateway.engine.replies(STREAM_HEAD, chunked(EVENT, end=False), chunked(EVENT, end=False), chunked(DONE))
    answer = await until_closed(gateway, old("POST", CHAT, STREAM))
    assert (answer.status, answer.body) == (200, EVENT + EVENT + DONE)
    assert is_open_ended(answer)


async def test_an_answer_with_a_length_keeps_it(gateway: Running) -> None:
    answer = await until_closed(gateway, old("POST", CHAT, STREAM, "Connection: keep-alive"))
    assert (answer.body, answer.headers["content-length"], answer.headers["connection"]) == (ANSWER, str(len(ANSWER)), "close")


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
async def test_a_broken_body_is_never_closed_in_order(gateway: Running, kind: str) -> None:
    """Without a length an orderly close would be its end."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    gateway.engine.replies(head, chunked(EVENT[:20], end=False), then_close=True)
    with pytest.raises(ConnectionResetError):
        await until_closed(gateway, old("POST", CHAT, STREAM))


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/v1/models"])
async def test_a_health_check_that_names_no_host(gateway: Running, path: str) -> None:
    """HAProxy's and Nagios's own."""
    answer = await until_closed(gateway, f"GET {path} HTTP/1.0\r\n\r\n".encode())
    assert answer.status == 200


async def test_a_broken_stream_gets_its_error_event_and_a_reset(gateway: Running) -> None:
    gateway.engine.replies(STREAM_HEAD, chunked(EVENT, end=False), then_close=True)
    loop, found = asyncio.get_running_loop(), b""
    with socket.socket() as client:  # asyncio's streams drop what came before a reset
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", gateway.port))
        await loop.sock_sendall(client, old("POST", CHAT, STREAM))
        with pytest.raises(ConnectionResetError):
            while piece := await loop.sock_recv(client, 1000):
                found += piece
    assert b'"engine_error"' in found


async def test_beats_of_a_model_that_loads(engine: RawEngine) -> None:
    engine.replies(STREAM_HEAD, chunked(EVENT, DONE))
    async with serving(engine) as gateway:
        gateway.supervisor.models = {"tiny": view("tiny", state=ModelState.LOADING)}
        gateway.supervisor.gate.clear()
        client = await gateway.open()
        client.send(old("POST", CHAT, STREAM))
        await soon(lambda: gateway.supervisor.waiting)
        gateway.turn(ClientLimits().heartbeat_s)
        answer = await client.answer(head_only=True)
        beat = await client.reader.readuntil(b"\n\n")
        gateway.supervisor.gate.set()
        rest = await client.ended()
    assert is_open_ended(answer)
    assert beat.startswith(b": tiny is loading")
    assert rest == EVENT + DONE


async def test_what_the_admin_api_streams(engine: RawEngine) -> None:
    app = FastAPI()

    async def pieces() -> object:
        yield b"one\n"
        yield b"two\n"

    @app.get("/admin/v1/models/tiny/logs")
    async def logs() -> StreamingResponse:
        return StreamingResponse(pieces(), media_type="text/plain")

    async with serving(engine, admin=app) as gateway:
        answer = await until_closed(gateway, old("GET", "/admin/v1/models/tiny/logs", b"", "X-Request-Id: mine"))
        assert (answer.body, answer.headers["x-request-id"]) == (b"one\ntwo\n", "mine")
        assert is_open_ended(answer)
        assert "date" in answer.headers
        assert (await until_closed(gateway, old("HEAD", "/admin/v1/models/tiny/logs"))).body == b""
