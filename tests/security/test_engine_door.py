"""The door of an engine on an address: without the key nothing answers, whatever the path, the method and the kind of connection."""

from __future__ import annotations

import http.client
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.embedded_model import FOLDER_NAME, is_prepared, prepare
from sparkd.gateway.upstream import Upstream, served_models
from tests.stub import stub_engine
from tests.support.daemon_process import ROOT
from tests.support.waiting import HUNG_S, until
from workers.agent.actor import Agent
from workers.door import KEY_FILE, Door
from workers.host.runtime import probe

KEY = "k" * 64
# Beside what the engine tells of itself: its documents, what vLLM mounts, what it has in another mode, and what no release has.
PATHS = (
    "/", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json", "/metrics", "/metrics/", "/health", "/ping", "/load", "/version",
    "/invocations", "/tokenize", "/detokenize", "/scale_elastic_ep", "/is_scaling_elastic_ep", "/v1/models", "/v1", "/V1/models",
    "//v1/models", "/%761/models", "/sleep", "/collective_rpc", "/reset_prefix_cache", "/server_info", "/nothing",
)  # fmt: skip
WRONG: tuple[dict[str, str], ...] = (
    {}, {"authorization": "Bearer wrong"}, {"authorization": f"Bearer {KEY}x"}, {"authorization": KEY}, {"authorization": "Bearer"},
    {"x-api-key": KEY}, {"authorization": f"Basic {KEY}"}, {"cookie": f"authorization=Bearer {KEY}"},
)  # fmt: skip


async def call(door: Door, scope: dict[str, Any]) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("nothing is read of a client that has no key")

    async def send(message: Any) -> None:
        sent.append(dict(message))

    await door(scope, receive, send)
    return sent


class App:
    def __init__(self) -> None:
        self.scopes: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope["type"])


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def door(app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Door:
    (tmp_path / "key").write_text(f"{KEY}\n")
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))
    return Door(app)


def headers(*values: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", value.encode()) for value in values]


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_the_key_opens_and_nothing_else_does(kind: str, door: Door, app: App) -> None:
    await call(door, {"type": kind, "headers": headers(f"Bearer {KEY}")})
    assert app.scopes == [kind]

    for said in ([], ["Bearer wrong"], [f"bearer {KEY}"], [f"Bearer {KEY}", f"Bearer {KEY}"], ["", f"Bearer {KEY}"], [f"Bearer {KEY} "]):
        sent = await call(door, {"type": kind, "headers": headers(*said), "extensions": {"websocket.http.response": {}}})
        assert [message["status"] for message in sent if message["type"].endswith("http.response.start")] == [401]
    assert app.scopes == [kind]


async def test_a_server_that_cannot_answer_a_websocket_closes_it(door: Door, app: App) -> None:
    (sent,) = await call(door, {"type": "websocket", "headers": []})
    assert (sent["type"], app.scopes) == ("websocket.close", [])


async def test_a_kind_of_connection_that_nobody_knows_is_refused_and_the_start_is_not(door: Door, app: App) -> None:
    await call(door, {"type": "webtransport", "headers": []})
    assert app.scopes == []
    await call(door, {"type": "lifespan"})
    assert app.scopes == ["lifespan"]


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_an_engine_without_a_key_does_not_start(text: str | None, app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if text is None:
        monkeypatch.delenv(KEY_FILE, raising=False)
    else:
        (tmp_path / "key").write_text(text)
        monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))
    with pytest.raises(RuntimeError):
        Door(app)


@dataclass(frozen=True)
class Engine:
    url: str
    key: str
    log: Path

    def status(self, method: str, path: str, said: dict[str, str]) -> int:
        """By the standard library's client, which tidies no path."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=HUNG_S)
        try:
            connection.request(method, path, headers=said)
            return connection.getresponse().status
        finally:
            connection.close()


@pytest.fixture(scope="module", params=["stub", pytest.param("vllm", marks=pytest.mark.rest)])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Started as the agent of a second node starts it."""
    model = ROOT / ".sparkd" / "models" / FOLDER_NAME
    started = stub_engine()
    if request.param == "vllm":
        if not is_prepared(model):
            prepare(model)
        started = {"entrypoint": str(probe(sys.executable).entrypoint), "env": {"VLLM_CPU_KVCACHE_SPACE": "1"}}
    folder = tmp_path_factory.mktemp("door")
    agent = Agent("127.0.0.1", str(folder / "run"), str(folder / "log"))
    spec = {
        "rank_id": "m-1-0123abcd", "model_name": "m", "served_names": ["m"], "model": str(model), "generation": 1, "node_id": "127.0.0.1",
        "rank": 0, "runtime": sys.executable, "log_path": str(folder / "log" / "m.log"), "config_hash": "c",
        "platform": "cpu", "stop_timeout_s": 5.0, **started,
        "flags": ["--max-model-len", "512", "--max-num-seqs", "2", "--enforce-eager"],
    }  # fmt: skip
    handle = agent.spawn(spec, True)
    made = Engine(f"http://{handle['host']}:{handle['port']}", agent.api_key(handle["rank_id"]), folder / "log" / "m.log")
    try:
        until(lambda: _ended(agent, made) or (made.log.exists() and "Application startup complete" in made.log.read_text()))
        yield made
    finally:
        agent.destroy(handle, 5.0)
        agent.guard.stop()


def _ended(agent: Agent, engine: Engine) -> bool:
    (fact,) = agent.observe()["ranks"]
    assert fact["exit_code"] is None, engine.log.read_text()[-3000:]
    return False


async def test_the_daemon_has_the_key_and_is_answered(engine: Engine) -> None:
    upstream = Upstream(base_url=engine.url, api_key=engine.key)
    try:
        models = await served_models(upstream)
        assert models is not None and models.names == ("m",)
        for path in ("/health", "/metrics"):
            await upstream.get(path, HUNG_S)
    finally:
        upstream.close()


def test_nothing_answers_without_the_key(engine: Engine) -> None:
    told = httpx.get(f"{engine.url}/openapi.json", headers={"authorization": f"Bearer {engine.key}"}, trust_env=False)
    # The stub has no document; vLLM's has every route of its release.
    paths = told.json()["paths"] if told.status_code == 200 else {}
    routes = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert (told.status_code, len(routes) > 20) in ((404, False), (200, True))
    routes |= {(method, path) for path in PATHS for method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE", "PUT")}

    answers = {(method, path): engine.status(method, re.sub(r"\{[^}]*\}", "x", path), {}) for method, path in routes}
    assert {route: status for route, status in answers.items() if status != 401} == {}
    for said in WRONG:
        assert engine.status("GET", "/metrics", {name: value.replace(KEY, engine.key) for name, value in said.items()}) == 401


def test_no_websocket_opens_without_the_key(engine: Engine) -> None:
    said = {
        "connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }  # fmt: skip
    for path in ("/v1/realtime", "/", "/nothing"):
        assert engine.status("GET", path, said) == 401
