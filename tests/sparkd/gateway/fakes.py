"""What the gateway's tests stand on: a supervisor, an engine of raw bytes, a client of raw bytes. Never parses what is under test."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import uvicorn.server
from starlette.types import ASGIApp, Receive, Scope, Send

from sparkd.errors import NoToolParser, RouteNotServed, SparkdError, UnknownModel
from sparkd.gateway.client_connection import client_connection
from sparkd.gateway.edge import Edge, EdgeSettings
from sparkd.gateway.exchange import CONNECTION
from sparkd.gateway.keys import KeyDigests
from sparkd.gateway.limits import ClientLimits
from sparkd.gateway.proxy import OnWait
from sparkd.gateway.server import GatewayServer, gateway_server
from sparkd.gateway.upstream import Upstream
from sparkd.state.abilities import Abilities, RequestNeeds
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import Want
from sparkd.state.snapshot import ModelView, Snapshot
from sparkd.vllm.parsers import Parsers
from tests.support.waiting import HUNG_S, eventually

PROBE_TOKEN = "the-probe-token"
# The key of a gateway's clients, where it has one.
KEY = "inference-key"
ANSWER = b'{"id":"chatcmpl-1","choices":[]}'
JSON_ANSWER = b"HTTP/1.1 200 OK\r\nserver: engine\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"delta":{"content":"Paris"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def chunked(*pieces: bytes, end: bool = True) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + (b"0\r\n\r\n" if end else b"")


def view(name: str, **changes: Any) -> ModelView:
    """A READY model; `changes` are fields of ModelView."""
    plain: dict[str, Any] = {field.name: None for field in dataclasses.fields(ModelView)}
    plain |= {
        "name": name,
        "aliases": (),
        "unlisted": False,
        "default": False,
        "stores_responses": True,
        "adopted": False,
        "metadata": {},
        "max_model_len": 4096,
        "source": "/models/" + name,
        "state": ModelState.READY,
        "want": Want.RUNNING,
        "wanted_by": "config",
        "generation": 1,
        "since_s": 1000.0,
        "ranks": (),
        "in_flight": 0,
        "queued": 0,
        "failures": 0,
    }
    return ModelView(**(plain | changes))


@dataclass
class FakeLease:
    model: str
    upstream: Upstream
    answered: bool | None = False
    load_s: float | None = None


class FakeConnection:
    """The part of a client's connection that the edge uses, for a test without a server. when_gone: what the client's end calls."""

    limits = ClientLimits()

    def __init__(self) -> None:
        self.when_gone: Callable[[], object] | None = None

    def call_on_disconnect(self, callback: Callable[[], object] | None) -> None:
        self.when_gone = callback


def connected(edge: Edge) -> ASGIApp:
    """The edge for a transport that gives its requests no connection."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await edge({**scope, "extensions": {CONNECTION: FakeConnection()}}, receive, send)

    return app


class FakeSupervisor:
    """Leases every model of `models` on one upstream, but those of `upstreams`. `gate` closed: leases wait; `refusal`: they are refused."""

    def __init__(self, upstream: Upstream, *models: ModelView) -> None:
        self.upstream = upstream
        self.upstreams: dict[str, Upstream] = {}
        self.models = {model.name: model for model in models or (view("tiny", aliases=("small",)),)}
        self.gate = asyncio.Event()
        self.gate.set()
        self.refusal: SparkdError | None = None
        self.in_words = False
        self.parsers: Parsers | None = None
        self.waiting = 0
        self.withdrawn = 0
        self.held = 0
        self.abilities: dict[str, Abilities] = {}
        self.leased: list[tuple[str, bool]] = []
        self.needs: list[RequestNeeds | None] = []
        self.answered: list[bool | None] = []

    @contextlib.asynccontextmanager
    async def lease(
        self, name: str, *, probe: bool = False, on_wait: OnWait | None = None, need: RequestNeeds | None = None
    ) -> AsyncIterator[FakeLease]:
        found = next((model for model in self.models.values() if name == model.name or name in model.aliases), None)
        if found is None:
            raise UnknownModel(name, list(self.models))
        if need is not None and not self.abilities.get(found.name, Abilities()).has(need):
            raise RouteNotServed(found.name, need.path, None)
        if need is not None and need.tools and self.parsers is not None and self.parsers.tool is None:
            raise NoToolParser(found.name, self.parsers.nearest)
        self.needs.append(need)
        self.waiting += 1
        if on_wait is not None and not self.gate.is_set():
            on_wait(lambda: self.models[found.name].loading(), self.in_words)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.withdrawn += 1
            raise
        finally:
            self.waiting -= 1
        if self.refusal is not None:
            raise self.refusal
        self.leased.append((found.name, probe))
        self.held += 1
        lease = FakeLease(found.name, self.upstreams.get(found.name, self.upstream))
        try:
            yield lease
        finally:
            self.held -= 1
            self.answered.append(lease.answered)

    def snapshot(self) -> Snapshot:
        return Snapshot(time.time(), True, False, 0.0, self.models, (), {})


@dataclass
class Heard:
    """One request as it reached the engine."""

    head: bytes
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def answer_json(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(JSON_ANSWER)


class RawEngine:
    """An engine of raw bytes on a Unix socket: hears requests, then runs `script`, then serves the next on the same connection."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.script: Script = answer_json
        self.heard: list[Heard] = []
        self.connections = 0
        self.lost = 0

    async def start(self) -> None:
        self.server = await asyncio.start_unix_server(self._serve, str(self.path), limit=1 << 20)

    async def stop(self) -> None:
        self.server.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def replies(self, *pieces: bytes, then_close: bool = False) -> None:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if then_close:
                writer.close()

        self.script = script

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n"))[:-4]
                heard = Heard(head, b"")
                length = int(heard.headers.get("content-length", "0"))
                heard.body = await reader.readexactly(length) if length else b""
                self.heard.append(heard)
                await self.script(reader, writer)
                if writer.is_closing():
                    return
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, RuntimeError):  # RuntimeError: uvloop's word for a closed transport
            return
        finally:
            self.lost += 1
            writer.close()


async def until_gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A script that answers nothing and returns when the gateway hangs up."""
    await reader.read(1)
    writer.close()


class TurnedLoop:
    """The running loop as a client's connection sees it: the time of its timers stands until a test turns it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._now_s = 0.0
        self._timers: list[asyncio.TimerHandle] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self._now_s

    def call_later(self, delay_s: float, callback: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        if not delay_s:
            return self._loop.call_later(0, callback, *arguments)
        timer = asyncio.TimerHandle(self._now_s + delay_s, callback, arguments, self)  # type: ignore[arg-type]
        self._timers.append(timer)
        return timer

    @property
    def pending(self) -> int:
        """How many timers may still fall due."""
        return sum(not timer.cancelled() for timer in self._timers)

    def turn(self, seconds: float) -> None:
        """Let `seconds` pass: what falls due is called at its time, the earliest first."""
        until_s = self._now_s + seconds
        while due := [timer for timer in self._timers if timer.when() <= until_s and not timer.cancelled()]:
            first = min(due, key=asyncio.TimerHandle.when)
            self._timers.remove(first)
            self._now_s = first.when()
            first._run()
        self._timers = [timer for timer in self._timers if not timer.cancelled()]
        self._now_s = until_s

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        """Called by a timer's `cancel`."""


class ShortLooks:
    """asyncio for uvicorn, which would look only ten times a second whether it was told to end and whether its connections have ended."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


@dataclass
class Answer:
    """One response as a client of raw bytes saw it. `closed`: the connection ended behind it; `complete`: its framing came to its end."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool = True
    closed: bool = False
    rest: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


@dataclass
class Running:
    """A gateway that serves on `port` until its fixture ends."""

    port: int
    edge: Edge
    server: GatewayServer
    supervisor: FakeSupervisor
    engine: RawEngine
    timers: TurnedLoop
    serves: asyncio.Task[None]
    admin_calls: list[Scope] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    def turn(self, seconds: float) -> None:
        """Let `seconds` pass for the connections of clients: their deadlines and heartbeats."""
        self.timers.turn(seconds)

    async def turn_until(self, condition: Callable[[], object]) -> None:
        """Let time pass until `condition` holds."""

        def turned() -> bool:
            self.turn(0.1)
            return bool(condition())

        await eventually(turned)

    async def open(self) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.clients.append(Client(reader, writer))
        return self.clients[-1]

    async def ask(self, raw: bytes) -> Answer:
        """Sends `raw` on a connection of its own and reads one answer."""
        client = await self.open()
        try:
            client.send(raw)
            return await client.answer()
        finally:
            await client.close()

    async def post(self, path: str, body: bytes, *headers: str) -> Answer:
        return await self.ask(post(path, body, *headers))

    async def get(self, path: str, *headers: str, method: str = "GET") -> Answer:
        return await self.ask(request(method, path, *headers))


class Client:
    """One connection of a client that writes and reads bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, raw: bytes) -> None:
        self.writer.write(raw)

    async def answer(self, *, head_only: bool = False) -> Answer:
        """The next response, without its body if `head_only`; status 0 where the connection ended without one."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            return Answer(0, {}, getattr(error, "partial", b""), complete=False, closed=True)
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
        answer = Answer(int(lines[0].split(" ")[1]), headers, b"")
        if head_only:
            return answer
        try:
            await self._body(answer)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            answer.body += getattr(error, "partial", b"")
            answer.complete = False
            answer.closed = True
        return answer

    async def _body(self, answer: Answer) -> None:
        if "transfer-encoding" in answer.headers:
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                answer.body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        elif length := int(answer.headers.get("content-length", "0")):
            answer.body = await self.reader.readexactly(length)

    async def ended(self) -> bytes:
        """What still comes until the server closes; then this end is closed, too."""
        try:
            return await self.reader.read(-1)
        except ConnectionError:
            return b""
        finally:
            await self.close()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def request(method: str, path: str, *headers: str) -> bytes:
    """`headers` replace the default Host if one of them is a Host."""
    lines = list(headers)
    if not any(line.lower().startswith("host:") for line in lines):
        lines.insert(0, "Host: localhost")
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode("latin-1")


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [*headers, f"Content-Length: {len(body)}"]
    if not any(line.lower().startswith("content-type:") for line in lines):
        lines.append("Content-Type: application/json")
    return request("POST", path, *lines) + body


@contextlib.asynccontextmanager
async def serving(
    engine: RawEngine,
    *,
    limits: ClientLimits | None = None,
    keys: KeyDigests | None = None,
    drain_s: float = HUNG_S,
    **options: Any,
) -> AsyncIterator[Running]:
    """The real server, on a real port, in front of `engine`.

    drain_s: how long open requests have at the end of the block, in real seconds; 0 cuts them, else their clients leave before.
    Deadlines of clients and heartbeats pass only where a test turns the time.
    """
    limits = limits or ClientLimits(cut_s=0.0)
    changed = {name: options.pop(name) for name in ("metrics_need_key", "page_origins", "web") if name in options}
    settings = EdgeSettings(keys=keys or KeyDigests(), **changed)
    upstream = Upstream(socket_path=str(engine.path), api_key="the-engine-key")
    supervisor = FakeSupervisor(upstream)
    calls: list[Scope] = []

    async def admin(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append(scope)
        body = (await receive())["body"]
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def well() -> tuple[bool, dict[str, Any]]:
        return True, {}

    named: dict[str, Any] = {"admin": admin, "live": well, "ready": well, "probe_token": PROBE_TOKEN} | options
    edge = Edge(supervisor, settings=settings, **named)
    server = gateway_server(edge, client_connection(limits), drain_s=drain_s)
    timers = TurnedLoop()
    server.config.http = _with_timers(server.config.http, timers)
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    with mock.patch.object(uvicorn.server, "asyncio", ShortLooks()):
        async with asyncio.TaskGroup() as tasks:
            serves = tasks.create_task(server.run_until_told([listener]))
            running = Running(listener.getsockname()[1], edge, server, supervisor, engine, timers, serves, calls)
            await soon(lambda: server.started)
            try:
                yield running
            finally:
                if drain_s:
                    for client in running.clients:
                        await client.close()
                server.should_exit = True
                await running.turn_until(serves.done)
    for each in (upstream, supervisor.upstream, *supervisor.upstreams.values()):
        each.close()


def _with_timers(protocol: Any, timers: TurnedLoop) -> Any:
    class Timed(protocol):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named | {"_loop": timers})

    return Timed


def is_ours(answer: Answer, status: int) -> bool:
    """Whether it has `status` and the gateway's own error body, which names the request as its header does."""
    if answer.status != status or answer.headers["content-type"] != "application/json":
        return False
    return answer.error["src"] == "sparkd" and answer.error["request_id"] == answer.headers["x-request-id"]


async def soon(condition: Callable[[], object]) -> None:
    """Returns when `condition` holds."""
    await eventually(condition, every_s=0.002)
