"""The client of one engine: where it connects, what it sends by itself, and whose answers count as a model list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sparkd.cluster.model_files import ModelFiles
from sparkd.errors import EngineError, EngineGone
from sparkd.gateway.engine_connection import EngineConnection
from sparkd.gateway.upstream import (
    ServedModels,
    Upstream,
    _Answer,
    served_models,
    served_routes,
)
from sparkd.state.abilities import Abilities
from tests.sparkd.gateway.fakes import JSON_ANSWER, RawEngine, until_gone

KEY = "an-engines-own-key"


@pytest.fixture
async def upstream(engine: RawEngine) -> AsyncIterator[Upstream]:
    made = Upstream(socket_path=str(engine.path), api_key=KEY)
    yield made
    made.close()


async def get(upstream: Upstream, path: str = "/x") -> bytes:
    return await upstream.get(path, 20.0)


async def test_it_says_nothing_but_host_and_key(engine: RawEngine, upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    await get(upstream)
    assert engine.heard[0].headers == {"host": "engine", "authorization": f"Bearer {KEY}"}


async def test_without_a_key_no_authorization(engine: RawEngine) -> None:
    upstream = Upstream(socket_path=str(engine.path))
    await get(upstream)
    upstream.close()

    assert "authorization" not in engine.heard[0].headers


async def test_it_keeps_no_cookies_and_its_connection(engine: RawEngine, upstream: Upstream) -> None:
    engine.replies(JSON_ANSWER.replace(b"server: engine", b"set-cookie: a=b; Path=/"))
    for _ in range(3):
        await get(upstream)

    assert engine.connections == 1
    assert not any("cookie" in heard.headers for heard in engine.heard)


async def test_who_takes_its_connection_at_once_keeps_it(engine: RawEngine, upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may take the connection before the task that asked for the page goes on."""
    keep, answers = upstream.keep, []

    def keep_and_take(connection: EngineConnection) -> None:
        keep(connection)
        if not answers:
            answers.append(_Answer())
            with pytest.raises(StopIteration):
                upstream.connection().send(None)
            with pytest.raises(StopIteration):
                connection.ask(b"GET /other" + upstream.preamble + b"\r\n", b"", answers[0]).send(None)

    monkeypatch.setattr(upstream, "keep", keep_and_take)
    await get(upstream)

    assert await answers[0].whole
    assert engine.connections == 1


async def test_once_closed_it_stays_closed(engine: RawEngine, upstream: Upstream) -> None:
    await get(upstream)
    upstream.close()
    upstream.close()

    with pytest.raises(EngineGone):
        await get(upstream)
    assert await served_models(upstream) is None


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno", EngineError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabcd", EngineError),
        (b"garbage\r\n\r\n", EngineError),
        (b"", EngineGone),
    ],
    ids=["another status", "cut off", "no HTTP", "hung up"],
)
async def test_an_answer_that_is_none(engine: RawEngine, upstream: Upstream, raw: bytes, error: type[EngineError]) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        writer.close()

    engine.script = script
    with pytest.raises(error):
        await get(upstream)


def test_its_key_is_not_in_its_repr() -> None:
    assert repr(Upstream(socket_path="/run/x.sock", api_key=KEY)) == "Upstream(/run/x.sock)"
    assert repr(Upstream(base_url="http://10.0.0.2:8001", api_key=KEY)) == "Upstream(http://10.0.0.2:8001)"


def answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


MANY = tuple(f"model-{number}" for number in range(5000))


@pytest.mark.parametrize(
    ("raw", "models"),
    [
        (answer(b'{"data": [{"id": "m"}, {"id": "alias", "max_model_len": 1}]}'), ServedModels(("m", "alias"))),
        (answer(b'{"data": [{"id": "m", "max_model_len": 4096}]}'), ServedModels(("m",), 4096)),
        (answer(b'{"data": [{"id": "m", "max_model_len": null}]}'), ServedModels(("m",))),
        (answer(b'{"data": []}'), ServedModels(())),
        (answer(b'{"data": [%s]}' % b",".join(b'{"id": "%s"}' % name.encode() for name in MANY)), ServedModels(MANY)),
        (answer(b'{"data": [{"id": "m"}]}', b"503 Service Unavailable"), None),
        (answer(b'{"data": [{"name": "m"}]}'), None),
        (answer(b"[]"), None),
        (answer(b"hello"), None),
    ],
)
async def test_served_models(engine: RawEngine, upstream: Upstream, raw: bytes, models: ServedModels | None) -> None:
    engine.replies(raw)

    assert await served_models(upstream, 20.0) == models
    assert engine.heard[0].head.startswith(b"GET /v1/models HTTP/1.1")


async def test_served_models_of_a_server_that_hangs_or_is_not_there(engine: RawEngine, upstream: Upstream) -> None:
    engine.script = until_gone
    assert await served_models(upstream, 0.05) is None
    await engine.stop()
    assert await served_models(upstream, 20.0) is None


@pytest.mark.parametrize(
    ("raw", "routes"),
    [
        (answer(b'{"paths": {"/v1/embeddings": {}, "/ping": {}}}'), {"/v1/embeddings", "/ping"}),
        (answer(b'{"detail": "Not Found"}', b"404 Not Found"), None),
    ],
)
async def test_served_routes(engine: RawEngine, upstream: Upstream, raw: bytes, routes: set[str] | None) -> None:
    engine.replies(raw)
    assert await served_routes(upstream, 20.0) == routes


async def test_an_engine_is_asked_for_its_models_once(engine: RawEngine, upstream: Upstream) -> None:
    engine.replies(answer(b'{"data": [{"id": "m", "max_model_len": 4096}]}'))
    facts = object.__new__(ModelFiles)
    models = await facts.served_models(upstream)
    assert models is not None

    abilities = await facts.served_abilities(upstream, Abilities(max_model_len=8192), models)

    assert abilities.max_model_len == 4096
    assert [request.head.split()[1] for request in engine.heard] == [b"/v1/models", b"/openapi.json"]
