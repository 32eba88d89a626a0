"""What a client hears while its model loads: the real gateway, a real client, an engine of raw bytes that is not there yet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sparkd.errors import ModelCannotLoad, ModelLoading, Unavailable
from sparkd.gateway.heartbeat import how_far
from sparkd.gateway.limits import ClientLimits
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import Progress
from tests.sparkd.gateway.fakes import (
    ANSWER,
    DONE,
    EVENT,
    JSON_ANSWER,
    STREAM_HEAD,
    Client,
    RawEngine,
    Running,
    chunked,
    post,
    serving,
    soon,
    until_gone,
    view,
)

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
STREAM = b'{"model": "tiny", "stream": true, "messages": [], "prompt": "", "input": ""}'
PROGRESS = Progress(phase="loading", fraction=0.35, bytes_done=35, bytes_total=100, eta_s=40.4)
BEAT = b": tiny is loading, 35 %, about 40 s left\n\n"
AT_WORK = b": the engine is at work\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
LOADING = {"model": "tiny", "state": "LOADING", "progress": 0.35, "bytes_done": 35, "bytes_total": 100, "eta_seconds": 40.4}


@pytest.fixture
async def loading(engine: RawEngine) -> AsyncIterator[Running]:
    """A gateway whose one model loads until its gate is opened."""
    async with serving(engine) as running:
        running.supervisor.models = {"tiny": view("tiny", state=ModelState.LOADING, progress=PROGRESS)}
        running.supervisor.gate.clear()
        yield running


EVERY_S = ClientLimits().heartbeat_s


async def begun(running: Running, client: Client, beat: bytes = BEAT) -> dict[str, str]:
    """The head and the first two beats, each when its time has come."""
    await soon(lambda: running.supervisor.waiting)
    running.turn(EVERY_S)
    answer = await client.answer(head_only=True)
    assert answer.status == 200
    assert await chunk(client) == beat
    running.turn(EVERY_S)
    assert await chunk(client) == beat
    return answer.headers


async def chunk(client: Client) -> bytes:
    """b"" is the end."""
    size = int(await client.reader.readuntil(b"\r\n"), 16)
    return (await client.reader.readexactly(size + 2))[:-2]


async def rest(client: Client) -> bytes:
    """Everything up to the end."""
    found = b""
    while piece := await chunk(client):
        found += piece
    return found


async def cut_off(client: Client) -> bytes:
    """Everything up to the connection's end, which comes in place of the answer's."""
    found = b""
    with pytest.raises(asyncio.IncompleteReadError):
        while piece := await chunk(client):
            found += piece
    await client.close()
    return found


def event_of(raw: bytes) -> Any:
    assert raw.endswith(b"\n\n") and raw.count(b"data: ") == 1
    return json.loads(raw.partition(b"data: ")[2])


@pytest.mark.parametrize(("path", "beat"), [(CHAT, BEAT), (MESSAGES, BEAT[:-1] + PING)])
async def test_comments_and_then_the_engines_own_stream(loading: Running, path: str, beat: bytes) -> None:
    loading.engine.replies(STREAM_HEAD, chunked(EVENT, EVENT, DONE))
    client = await loading.open()
    client.send(post(path, STREAM, "X-Request-Id: mine"))
    headers = await begun(loading, client, beat)
    loading.supervisor.gate.set()

    assert await rest(client) == EVENT + EVENT + DONE
    assert (headers["content-type"], headers["x-request-id"]) == ("text/event-stream; charset=utf-8", "mine")
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")
    client.send(post(path, b'{"model": "tiny"}'))
    loading.engine.replies(STREAM_HEAD, chunked(EVENT))
    assert (await client.answer()).body == EVENT


@pytest.mark.parametrize("asked", [b"", b', "stream": false', b', "stream": "yes"'])
async def test_who_asked_for_no_stream_hears_nothing(loading: Running, asked: bytes) -> None:
    client = await loading.open()
    client.send(post(CHAT, b'{"model": "tiny", "messages": []%b}' % asked))
    await soon(lambda: loading.supervisor.waiting)
    loading.turn(10 * EVERY_S)
    loading.supervisor.gate.set()

    answer = await client.answer()
    assert (answer.status, answer.headers["content-type"], answer.body) == (200, "application/json", ANSWER)


async def test_a_short_wait_is_silent_and_its_refusal_a_status(engine: RawEngine) -> None:
    for every_s, wait_s in ((5.0, 4.9), (0.0, 1000.0)):
        async with serving(engine, limits=ClientLimits(heartbeat_s=every_s)) as running:
            running.supervisor.gate.clear()
            client = await running.open()
            client.send(post(CHAT, STREAM))
            await soon(lambda running=running: running.supervisor.waiting)
            running.turn(wait_s)
            running.supervisor.refusal = ModelLoading("It is on its way.", loading=LOADING, retry_after_s=7)
            running.supervisor.gate.set()

            answer = await client.answer()
            assert (answer.status, answer.headers["retry-after"], answer.json["loading"]) == (503, "7", LOADING)
            await client.close()


@pytest.mark.parametrize(
    ("path", "beat", "name", "kind"),
    [(CHAT, BEAT, b"", "model_loading"), (MESSAGES, BEAT[:-1] + PING, b"event: error\n", "overloaded_error")],
)
async def test_a_wait_that_ends_without_the_model_is_an_error_event(
    loading: Running, path: str, beat: bytes, name: bytes, kind: str
) -> None:
    client = await loading.open()
    client.send(post(path, STREAM))
    await begun(loading, client, beat)
    held = [{"model": "other", "memory_gib": 60}]
    loading.supervisor.refusal = ModelLoading("It is on its way.", loading=LOADING, held_by=held)
    loading.supervisor.gate.set()

    raw = await cut_off(client)
    told = event_of(raw)
    assert raw.startswith(name + b"data: ")
    assert (told["error"]["code"], told["error"]["type"], told["error"]["src"]) == ("model_loading", kind, "sparkd")
    assert (told["loading"], told["held_by"]) == (LOADING, held)


@pytest.mark.parametrize(("path", "beat", "name"), [(CHAT, BEAT, b""), (MESSAGES, BEAT[:-1] + PING, b"event: error\n")])
async def test_an_engines_refusal_becomes_one_event(loading: Running, path: str, beat: bytes, name: bytes) -> None:
    body = b'{"error":{"message":"too long",\n"code":400}}'
    loading.engine.replies(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body), body)
    client = await loading.open()
    client.send(post(path, STREAM))
    await begun(loading, client, beat)
    loading.supervisor.gate.set()

    assert await cut_off(client) == name + b'data: {"error":{"message":"too long",\ndata: "code":400}}\n\n'


async def test_an_engine_that_dies_before_it_answers_is_an_error_event(loading: Running) -> None:
    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    loading.engine.script = dies
    client = await loading.open()
    client.send(post(CHAT, STREAM))
    await begun(loading, client)
    loading.supervisor.gate.set()

    assert event_of(await cut_off(client))["error"]["code"] == "engine_gone"


async def test_an_error_event_is_read_before_the_connection_ends(engine: RawEngine) -> None:
    """A browser that finds the end of a broken answer in the same read drops what came before it."""
    limits = ClientLimits()
    async with serving(engine, limits=limits) as running:
        running.supervisor.models = {"tiny": view("tiny", state=ModelState.LOADING, progress=PROGRESS)}
        running.supervisor.gate.clear()
        client = await running.open()
        client.send(post(CHAT, STREAM))
        await begun(running, client)
        running.supervisor.refusal = Unavailable("It is gone.")
        running.supervisor.gate.set()

        assert event_of(await chunk(client))["error"]["message"] == "It is gone."
        client.send(post(CHAT, STREAM))
        running.turn(limits.cut_s / 2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.reader.read(1), 0.05)
        running.turn(limits.cut_s / 2)
        assert await cut_off(client) == b""


class Steps:
    """An engine's script that writes a piece each time when it is told to."""

    def __init__(self, engine: RawEngine) -> None:
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        engine.script = self._write

    def write(self, piece: bytes) -> None:
        self._pieces.put_nowait(piece)

    async def _write(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await self._pieces.get():
            writer.write(piece)


@pytest.mark.parametrize(("path", "beat"), [(CHAT, AT_WORK), (RESPONSES, AT_WORK), (MESSAGES, AT_WORK[:-1] + PING)])
async def test_comments_before_the_first_token_and_in_each_gap(gateway: Running, path: str, beat: bytes) -> None:
    """Where the engine has said nothing for so long: neither while it speaks, nor within an event."""
    engine = Steps(gateway.engine)
    client = await gateway.open()
    client.send(post(path, STREAM))
    await soon(lambda: gateway.engine.heard)
    gateway.turn(EVERY_S)
    assert (await client.answer(head_only=True)).headers["content-type"] == "text/event-stream; charset=utf-8"
    assert await chunk(client) == beat
    engine.write(STREAM_HEAD + chunked(EVENT, end=False))
    assert await chunk(client) == EVENT
    gateway.turn(EVERY_S)  # the event came since the last beat
    gateway.turn(EVERY_S)
    assert await chunk(client) == beat
    engine.write(chunked(EVENT[:20], end=False))
    assert await chunk(client) == EVENT[:20]
    gateway.turn(3 * EVERY_S)
    engine.write(chunked(EVENT[20:], DONE, end=False))
    assert await chunk(client) == EVENT[20:] + DONE
    gateway.turn(2 * EVERY_S)
    assert await chunk(client) == beat
    engine.write(b"0\r\n\r\n")
    engine.write(b"")
    assert await rest(client) == b""
    await soon(lambda: gateway.supervisor.answered == [True])


async def test_an_engine_that_dies_before_its_first_token_is_an_error_event(gateway: Running) -> None:
    client = await gateway.open()
    gateway.engine.script = until_gone
    client.send(post(CHAT, STREAM))
    await soon(lambda: gateway.engine.heard)
    gateway.turn(EVERY_S)
    assert (await client.answer(head_only=True)).status == 200
    assert await chunk(client) == AT_WORK
    gateway.supervisor.upstream.close()

    assert event_of(await cut_off(client))["error"]["code"] == "engine_gone"
    await soon(lambda: gateway.supervisor.answered == [False])


async def test_an_answer_that_is_no_stream_has_no_comments(gateway: Running) -> None:
    engine = Steps(gateway.engine)
    client = await gateway.open()
    client.send(post(CHAT, STREAM))
    engine.write(JSON_ANSWER[:-1])
    head = await client.answer(head_only=True)
    gateway.turn(3 * EVERY_S)
    engine.write(JSON_ANSWER[-1:])
    assert await client.reader.readexactly(int(head.headers["content-length"])) == ANSWER
    engine.write(b"")


FAILED = b"event: response.failed\ndata: "


REFUSAL = b'{"error":{"message":"too long","code":400}}'


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (ModelLoading("It is on its way.", loading=LOADING), {"message": "It is on its way.", "code": "server_error"}),
        (ModelCannotLoad("It is no model."), {"message": "It is no model.", "code": "invalid_prompt"}),
        (None, {"message": "too long", "code": "invalid_prompt"}),
    ],
    ids=["what passes", "what lasts", "an engine's refusal"],
)
async def test_a_failure_in_the_words_of_the_responses_api(loading: Running, refusal: Unavailable | None, error: dict[str, str]) -> None:
    """Clients of it know no other event of a failure, no other codes and no cut behind it (Codex, the AI SDK)."""
    loading.engine.replies(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n" % len(REFUSAL), REFUSAL)
    client = await loading.open()
    client.send(post(RESPONSES, STREAM))
    await begun(loading, client)
    loading.supervisor.refusal = refusal
    loading.supervisor.gate.set()

    raw = await rest(client)
    told = event_of(raw)
    assert raw.startswith(FAILED)
    assert (told["type"], told["sequence_number"]) == ("response.failed", 0)
    assert (told["response"]["status"], told["response"]["object"], told["response"]["model"]) == ("failed", "response", "tiny")
    assert told["response"]["id"].startswith("resp_")
    assert told["response"]["error"].items() >= error.items()


async def test_a_response_that_breaks_fails_with_its_id_and_the_next_number(gateway: Running) -> None:
    events = (
        b'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":{"id":"resp_7"}}\n\n',
        b'event: response.output_text.delta\ndata: {"delta":"\\"sequence_number\\": 9","sequence_number":1}\n\n',
    )
    gateway.engine.replies(STREAM_HEAD, *(chunked(event, end=False) for event in events), then_close=True)
    answer = await gateway.post(RESPONSES, STREAM)

    told = event_of(answer.body.removeprefix(b"".join(events)))
    assert answer.complete
    assert (told["sequence_number"], told["response"]["id"], told["response"]["error"]["code"]) == (2, "resp_7", "server_error")


async def test_a_client_that_leaves_while_it_hears_is_forgotten(loading: Running) -> None:
    client = await loading.open()
    client.send(post(CHAT, STREAM))
    await begun(loading, client)
    await client.close()

    await soon(lambda: loading.supervisor.withdrawn and not loading.server.server_state.connections)
    assert loading.engine.heard == []
    await soon(lambda: loading.timers.pending == 0)


async def test_the_daemons_end_is_an_error_event(engine: RawEngine, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(engine, drain_s=0.0) as running:
        running.supervisor.models = {"tiny": view("tiny", state=ModelState.LOADING, progress=PROGRESS)}
        running.supervisor.gate.clear()
        client = await running.open()
        client.send(post(CHAT, STREAM))
        await begun(running, client)
    assert event_of((await cut_off(client)).replace(BEAT, b""))["error"]["code"] == "draining"
    caplog.clear()  # uvicorn says that it cancels the request


async def test_words_in_the_reasoning_field_where_they_are_asked_for(loading: Running) -> None:
    """The first after a second, for people; then every two, as words again where there is news."""
    loading.supervisor.in_words = True
    loading.engine.replies(STREAM_HEAD, chunked(EVENT, DONE))
    client = await loading.open()
    client.send(post(CHAT, STREAM, "X-Request-Id: mine"))
    await soon(lambda: loading.supervisor.waiting)
    loading.turn(1.0)
    assert (await client.answer(head_only=True)).status == 200
    told = event_of(await chunk(client))
    words = "tiny is loading, 35 %, about 40 s left"
    assert {key: told[key] for key in ("id", "object", "model", "choices")} == {
        "id": "chatcmpl-mine",
        "object": "chat.completion.chunk",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "delta": {"role": "assistant", "reasoning": f"{words}\n", "reasoning_content": f"{words}\n"},
                "finish_reason": None,
            }
        ],
    }
    loading.turn(2.0)
    assert await chunk(client) == BEAT
    loading.supervisor.models = {"tiny": view("tiny", state=ModelState.WARMING)}
    loading.turn(2.0)
    assert event_of(await chunk(client))["choices"][0]["delta"]["reasoning"].startswith("tiny ")
    loading.supervisor.gate.set()
    assert await rest(client) == EVENT + DONE

    loading.supervisor.gate.clear()
    client.send(post(COMPLETIONS, STREAM))
    await begun(loading, client, b": tiny is warming up\n\n")


async def test_a_refusal_names_who_holds_the_memory(loading: Running) -> None:
    held = [{"model": "other", "node": "n", "memory_gib": 60, "state": "READY", "in_flight": 0, "queued": 0, "idle_seconds": 12.5}]
    loading.supervisor.refusal = Unavailable("No room.", retry_after_s=30, held_by=held)
    loading.supervisor.gate.set()

    answer = await loading.post(CHAT, STREAM)
    assert (answer.status, answer.headers["retry-after"], answer.json["held_by"]) == (503, "30", held)


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"model": "m", "state": "STOPPED"}, "m waits for its turn"),
        ({"model": "m", "state": "LOADING", "progress": 0.0}, "m is loading, 0 %"),
        ({"model": "m", "state": "LOADING", "eta_seconds": 0.4}, "m is loading, about 0 s left"),
    ],
)
def test_only_what_is_known_is_told(known: dict[str, Any], words: str) -> None:
    assert how_far(known) == words
