"""Exchanges that end early: the engine fails, the client goes, the server stops."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.types import Receive, Scope, Send

from sparkd.gateway.engine_connection import EngineConnection
from sparkd.gateway.server import REST_S
from sparkd.gateway.upstream import Upstream
from tests.sparkd.gateway.fakes import (
    ANSWER,
    DONE,
    EVENT,
    JSON_ANSWER,
    STREAM_HEAD,
    RawEngine,
    Running,
    chunked,
    post,
    request,
    serving,
    soon,
    until_gone,
)
from tests.support.fakes import FakeClock

CHAT = "/v1/chat/completions"
BODY = b'{ "model" : "tiny",  "messages":[{"role":"user","content":"caf\xc3\xa9"}] , "stream":false}'


# --- an engine that fails ------------------------------------------------------------------------------------------------------


async def test_no_engine(engine: RawEngine) -> None:
    async with serving(engine) as gateway:
        gateway.supervisor.upstream = Upstream(socket_path=str(engine.path.with_name("nothing.sock")))
        answer = await gateway.post(CHAT, BODY)
        assert (answer.status, answer.error["code"], answer.error["src"]) == (502, "engine_gone", "sparkd")
        gateway.supervisor.upstream.close()
        gateway.supervisor.upstream = Upstream(base_url="http://127.0.0.1:1")
        assert (await gateway.post(CHAT, BODY)).status == 502
        assert str(engine.path.parent) not in answer.body.decode()


async def test_a_connection_that_could_not_be_made_is_tried_again(engine: RawEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    late = RawEngine(engine.path.with_name("late.sock"))
    async with serving(engine) as gateway:
        gateway.supervisor.upstream = Upstream(socket_path=str(late.path))
        wire = gateway.supervisor.upstream
        connect = wire._connect

        async def comes_then() -> EngineConnection:
            try:
                return await connect()
            except OSError:
                await late.start()
                raise

        monkeypatch.setattr(wire, "_connect", comes_then)
        assert (await gateway.post(CHAT, BODY)).status == 200
        assert len(late.heard) == 1
    await late.stop()


async def test_what_the_engine_may_have_seen_is_not_sent_twice(gateway: Running) -> None:
    gateway.engine.replies(then_close=True)
    answer = await gateway.post(CHAT, BODY)
    assert (answer.status, answer.error["code"]) == (502, "engine_gone")
    assert len(gateway.engine.heard) == 1


async def test_an_engine_that_died_between_two_requests(gateway: Running) -> None:
    """Its idle connection is closed by the time of the second request: a fresh one is made."""
    assert (await gateway.post(CHAT, BODY)).status == 200
    gateway.engine.replies(JSON_ANSWER, then_close=True)
    assert (await gateway.post(CHAT, BODY)).status == 200
    await soon(lambda: gateway.engine.lost == 1)
    gateway.engine.replies(JSON_ANSWER)
    assert (await gateway.post(CHAT, BODY)).status == 200
    assert gateway.engine.connections == 2


@pytest.mark.parametrize(
    "raw",
    [
        b"hello\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nX-A: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
async def test_answers_that_are_no_http(gateway: Running, raw: bytes) -> None:
    gateway.engine.replies(raw, then_close=True)
    answer = await gateway.post(CHAT, BODY)
    assert answer.status == 502
    assert answer.error["src"] == "sparkd"


async def test_a_stream_that_breaks_between_two_events_gets_an_error_event_and_is_cut(gateway: Running) -> None:
    gateway.engine.replies(STREAM_HEAD, chunked(EVENT, end=False), then_close=True)
    answer = await gateway.post(CHAT, BODY)
    assert not answer.complete
    assert answer.body.startswith(EVENT)
    assert b"[DONE]" not in answer.body
    event = answer.body.removeprefix(EVENT)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert (error["code"], error["src"]) == ("engine_error", "sparkd")
    assert error["request_id"] == answer.headers["x-request-id"]


async def test_the_error_event_of_the_messages_api_has_a_name(gateway: Running) -> None:
    gateway.engine.replies(STREAM_HEAD, chunked(EVENT, end=False), then_close=True)
    answer = await gateway.post("/v1/messages", BODY)
    event = answer.body.removeprefix(EVENT)
    assert event.startswith(b"event: error\ndata: ")
    body = json.loads(event.partition(b"data: ")[2])
    assert (body["type"], body["error"]["type"]) == ("error", "api_error")


async def test_a_stream_that_breaks_before_its_first_event(gateway: Running) -> None:
    gateway.engine.replies(STREAM_HEAD, then_close=True)
    answer = await gateway.post(CHAT, BODY)
    assert answer.body.startswith(b'data: {"error"')


async def test_a_stream_that_breaks_within_an_event_is_cut(gateway: Running) -> None:
    gateway.engine.replies(STREAM_HEAD, chunked(EVENT, EVENT[:20], end=False), then_close=True)
    answer = await gateway.post(CHAT, BODY)
    assert not answer.complete
    assert answer.body == EVENT + EVENT[:20]


async def test_an_answer_that_breaks_is_cut(gateway: Running) -> None:
    gateway.engine.replies(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{", then_close=True)
    answer = await gateway.post(CHAT, BODY)
    assert (answer.status, answer.complete, answer.body) == (200, False, b"{")


# --- a client that goes --------------------------------------------------------------------------------------------------------


HALF_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"


@pytest.mark.parametrize(
    ("begun", "last", "answered"),
    [
        (b"", b"", False),
        (STREAM_HEAD, b"\r\n\r\n", False),
        (STREAM_HEAD + chunked(EVENT, end=False), b"\n\n\r\n", True),
        (HALF_ANSWER, b"{", True),
    ],
    ids=["no answer yet", "a stream's head", "within a stream", "within an answer"],
)
async def test_gone_while_the_engine_answers(gateway: Running, begun: bytes, last: bytes, answered: bool) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        await until_gone(reader, writer)

    gateway.engine.script = script
    client = await gateway.open()
    client.send(post(CHAT, BODY))
    await soon(lambda: gateway.engine.heard)
    if last:
        await client.reader.readuntil(last)
    await client.close()
    await soon(lambda: gateway.engine.lost == 1)
    await soon(lambda: gateway.supervisor.held == 0)
    assert gateway.supervisor.answered == [answered]


RESPONSE = b'event: response.completed\ndata: {"type":"response.completed","sequence_number":9}\n\n'
MESSAGE = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
SAID = json.dumps({"choices": [{"delta": {"content": "\ndata: [DONE]\n\n"}}]}).encode()


@pytest.mark.parametrize(
    ("path", "last", "status"),
    [(CHAT, DONE, 200), ("/v1/responses", RESPONSE, 200), ("/v1/messages", MESSAGE, 200), (CHAT, b"data: " + SAID + b"\n\n", 499)],
    ids=["chat", "a response", "a message", "a text that looks like it"],
)
async def test_gone_behind_the_last_event(gateway: Running, path: str, last: bytes, status: int, caplog: pytest.LogCaptureFixture) -> None:
    """openai's SDK closes there, before the end of the body has come."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(EVENT, last, end=False))
        await until_gone(reader, writer)

    gateway.engine.script = script
    client = await gateway.open()
    client.send(post(path, BODY))
    await client.reader.readuntil(last)
    await client.close()
    await soon(lambda: gateway.edge._open_requests == 0)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "sparkd.access"]
    assert f" status={status} " in line and f" gone={status == 499:d} " in line
    assert gateway.supervisor.answered == [True]


async def test_gone_while_queued_withdraws_the_wish(gateway: Running) -> None:
    gateway.supervisor.gate.clear()
    client = await gateway.open()
    client.send(post(CHAT, BODY))
    await soon(lambda: gateway.supervisor.waiting == 1)
    await client.close()
    await soon(lambda: gateway.supervisor.withdrawn == 1)
    assert gateway.engine.heard == []
    assert gateway.supervisor.waiting == 0


async def test_gone_within_its_own_body(gateway: Running) -> None:
    client = await gateway.open()
    client.send(post(CHAT, BODY)[:-5])
    await soon(lambda: gateway.edge._open_requests == 1)
    await client.close()
    await soon(lambda: gateway.edge._open_requests == 0)
    assert gateway.engine.heard == []


async def test_clients_go_at_any_moment(gateway: Running) -> None:
    """Each after another number of the loop's turns, so that they go at every step of a request."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for _ in range(5):
            writer.write(chunked(EVENT, end=False))
            await asyncio.sleep(0)
        writer.write(chunked(DONE))

    gateway.engine.script = script

    async def leave(turns: int) -> None:
        client = await gateway.open()
        client.send(post(CHAT, BODY))
        for _ in range(turns):
            await asyncio.sleep(0)
        client.writer.transport.abort()

    await asyncio.gather(*(leave(turns) for turns in range(100)))
    await soon(lambda: gateway.edge._open_requests == 0)
    assert gateway.supervisor.held == 0
    assert (await gateway.post(CHAT, BODY)).body == EVENT * 5 + DONE


# --- the server's end ----------------------------------------------------------------------------------------------------------


async def test_at_the_servers_end_streams_get_an_error_event(engine: RawEngine, caplog: pytest.LogCaptureFixture) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(EVENT, end=False))
        await until_gone(reader, writer)

    engine.script = script
    async with serving(engine, drain_s=0.0) as gateway:
        streaming = await gateway.open()
        streaming.send(post(CHAT, BODY))
        await streaming.reader.readuntil(b"\n\n\r\n")
        gateway.supervisor.gate.clear()
        queued = await gateway.open()
        queued.send(post(CHAT, BODY))
        await soon(lambda: gateway.supervisor.waiting == 1)
    rest = await streaming.ended()
    assert b'"code": "draining"' in rest
    assert b"[DONE]" not in rest
    answer = await queued.answer()
    assert (answer.status, answer.error["code"]) == (503, "draining")
    await streaming.close()
    await queued.close()
    assert [record.levelname for record in caplog.records].count("ERROR") == 1  # uvicorn's count of what it cancelled
    caplog.clear()


async def test_at_the_servers_end_the_admin_apis_streams_are_cut(engine: RawEngine, caplog: pytest.LogCaptureFixture) -> None:
    async def admin(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await asyncio.Event().wait()

    async with serving(engine, drain_s=0.0, admin=admin) as gateway:
        client = await gateway.open()
        client.send(request("GET", "/admin/v1/events"))
        await client.reader.readuntil(b"\n\n\r\n")
    assert await client.ended() == b""
    assert [record.levelname for record in caplog.records].count("ERROR") == 1  # uvicorn's count of what it cancelled
    caplog.clear()


async def test_an_idle_client_may_ask_once_more_while_the_server_ends(gateway: Running) -> None:
    asks, stays = [await gateway.open() for _ in range(2)]
    for client in (asks, stays):
        client.send(request("GET", "/livez"))
        assert (await client.answer()).status == 200
    gateway.server.should_exit = True
    await soon(lambda: all(connection._shutting_down for connection in gateway.server.server_state.connections))
    asks.send(request("GET", "/livez"))
    answer = await asks.answer()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    gateway.turn(0.25)
    assert await stays.ended() == b""


async def test_the_end_waits_for_what_engines_work_on_and_cuts_what_else_is_open(engine: RawEngine) -> None:
    works, looks = asyncio.Event(), 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await works.wait()
        writer.write(JSON_ANSWER)

    def running() -> int:
        nonlocal looks
        looks += 1
        return gateway.supervisor.held

    async def two_looks() -> None:
        before = looks
        await soon(lambda: looks >= before + 2)

    engine.script = script
    async with serving(engine) as gateway:
        gateway.server._clock = clock = FakeClock()
        asks, silent = [await gateway.open() for _ in range(2)]
        asks.send(post(CHAT, BODY))
        await soon(lambda: gateway.supervisor.held == 1 and len(gateway.server.server_state.connections) == 2)
        ending = asyncio.create_task(gateway.server.finish(gateway.serves, asyncio.Event(), running))
        await two_looks()
        clock.now_s += REST_S
        await two_looks()
        works.set()
        assert (await asks.answer()).body == ANSWER
        await soon(lambda: gateway.supervisor.held == 0)
        await two_looks()
        clock.now_s += REST_S - 0.1
        await two_looks()
        assert len(gateway.server.server_state.connections) == 1
        clock.now_s += 0.1
        assert await silent.ended() == b""
        await ending


async def test_an_end_at_once_cuts_what_engines_work_on(engine: RawEngine) -> None:
    engine.script = until_gone
    async with serving(engine) as gateway:
        asks, silent = [await gateway.open() for _ in range(2)]
        asks.send(post(CHAT, BODY))
        await soon(lambda: gateway.supervisor.held == 1 and len(gateway.server.server_state.connections) == 2)
        at_once = asyncio.Event()
        at_once.set()
        await gateway.server.finish(gateway.serves, at_once, lambda: 1)
        assert (await asks.answer()).error["code"] == "draining"
        assert await silent.ended() == b""
        assert (gateway.supervisor.held, gateway.supervisor.answered) == (0, [False])


async def test_an_end_at_once_has_come_when_it_returns(gateway: Running) -> None:
    await gateway.open()
    await soon(lambda: gateway.server.server_state.connections)
    at_once = asyncio.Event()
    at_once.set()
    await gateway.server.finish(gateway.serves, at_once, lambda: 0)
    assert gateway.serves.done()


SAYS = {b"200 OK": True, b"400 Bad Request": None, b"500 Internal Server Error": False}


@pytest.mark.parametrize(("status", "answered"), SAYS.items(), ids=["200", "400", "500"])
async def test_what_an_answer_says_of_the_engine(gateway: Running, status: bytes, answered: bool | None) -> None:
    gateway.engine.replies(b"HTTP/1.1 " + status + b"\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
    await gateway.post(CHAT, BODY)
    assert gateway.supervisor.answered == [answered]
