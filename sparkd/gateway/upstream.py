"""The HTTP server of one engine: its address, its connections, and the two questions that sparkd asks it."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from sparkd.errors import EngineError, EngineGone
from sparkd.gateway.engine_connection import EngineConnection
from sparkd.gateway.headers import RawHeaders

CONNECT_TIMEOUT_S = 2.0
# vLLM closes a connection that was idle for 5 s, or for VLLM_HTTP_TIMEOUT_KEEP_ALIVE, which workers.rank.command raises. A request written
# at that moment is lost and may not be sent again, so the gateway closes first.
IDLE_S = 4.0

_CONNECT_AGAIN_S = 0.05
_GONE = "The engine does not take connections; it may be restarting. Try again soon."


class Upstream:
    """Where an engine listens, with one connection for each exchange and idle ones for IDLE_S.

    socket_path: a Unix socket; without it the host and port of `base_url` are used.
    api_key: sent in the Authorization header, and nowhere else.

    preamble: follows the target in the head of every request.
    """

    def __init__(self, *, socket_path: str | None = None, base_url: str = "http://engine", api_key: str | None = None) -> None:
        url = urlsplit(base_url)
        self._path = socket_path
        self._host, self._port = url.hostname or "", url.port or 80
        self._address = socket_path or base_url
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self.preamble = f" HTTP/1.1\r\nhost: {url.netloc}\r\n{key}".encode()
        self._open: set[EngineConnection] = set()
        self._idle: deque[EngineConnection] = deque()  # the longest idle one first; some may have closed since
        self._sweeper: asyncio.TimerHandle | None = None
        self._shut = False

    def __repr__(self) -> str:
        return f"Upstream({self._address})"

    async def get(self, path: str, timeout_s: float) -> bytes:
        """The body of the engine's answer.

        Raises EngineError for a status other than 200, for an incomplete answer and for none within timeout_s, EngineGone if no server
        listens.
        """
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self.connection()
                answer = _Answer()
                try:
                    await connection.ask(b"GET " + path.encode() + self.preamble + b"\r\n", b"", answer)
                    return await answer.whole
                finally:
                    connection.abort(answer)
        except TimeoutError:
            raise EngineError(f"The engine did not answer {path} within {timeout_s:g} s.") from None

    async def connection(self) -> EngineConnection:
        """An open idle connection, or a new one. Raises EngineGone if two attempts to connect fail."""
        if self._shut:
            raise EngineGone(_GONE)
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        try:
            return await self._connect()
        except OSError:
            await asyncio.sleep(_CONNECT_AGAIN_S)
        try:
            return await self._connect()
        except OSError:
            raise EngineGone(_GONE) from None

    def keep(self, connection: EngineConnection) -> None:
        """Take back a connection whose exchange is over."""
        if self._shut or not connection.usable:
            connection.transport.abort()
            return
        connection.resume()
        connection.idle_since_s = monotonic()
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(IDLE_S, self._sweep)

    def close(self) -> None:
        """Close all connections. Exchanges in progress get EngineGone."""
        self._shut = True
        self._idle.clear()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in self._open:
            connection.transport.abort()

    def opened(self, connection: EngineConnection) -> None:
        self._open.add(connection)

    def closed(self, connection: EngineConnection) -> None:
        self._open.discard(connection)

    async def _connect(self) -> EngineConnection:
        loop = asyncio.get_running_loop()
        connection = EngineConnection(self)
        opening: Coroutine[Any, Any, tuple[Any, EngineConnection]]
        if self._path is not None:
            opening = loop.create_unix_connection(lambda: connection, self._path)
        else:
            opening = loop.create_connection(lambda: connection, self._host, self._port)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await opening
            if self._shut:
                raise ConnectionError("closed meanwhile")
        except BaseException:  # includes the cancellation by a client that leaves now
            connection.discard()
            raise
        return connection

    def _sweep(self) -> None:
        self._sweeper = None
        stale_s = monotonic() - IDLE_S
        while self._idle and (self._idle[0].idle_since_s <= stale_s or not self._idle[0].usable):
            self._idle.popleft().transport.abort()
        if self._idle:
            self._sweeper = asyncio.get_running_loop().call_later(max(0.01, self._idle[0].idle_since_s - stale_s), self._sweep)


class _Answer:
    """The sink that collects one whole answer."""

    def __init__(self) -> None:
        self.whole: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pieces = bytearray()

    def head(self, status: int, headers: RawHeaders) -> None:
        if status != 200:
            self.broken(EngineError(f"The engine answered with HTTP {status}."))

    def body(self, data: bytes, ended: bool) -> None:
        self._pieces += data
        if ended and not self.whole.done():
            self.whole.set_result(bytes(self._pieces))

    def broken(self, error: EngineError) -> None:
        if not self.whole.done():
            self.whole.set_exception(error)


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The model names that a server serves. max_model_len: its longest request in tokens, None if it does not report it."""

    names: tuple[str, ...]
    max_model_len: int | None = None


async def served_models(upstream: Upstream, timeout_s: float = 2.0) -> ServedModels | None:
    """The model list of the server behind `upstream`, or None while it is not up. A 200 without such a list does not count."""
    try:
        models = (await _json(upstream, "/v1/models", timeout_s))["data"]
        names = tuple(str(model["id"]) for model in models)
    except _UNREADABLE:
        return None
    return ServedModels(names, models[0].get("max_model_len") if models else None)


async def served_routes(upstream: Upstream, timeout_s: float = 10.0) -> frozenset[str] | None:
    """The paths in the server's OpenAPI document; None if it has no document."""
    try:
        return frozenset((await _json(upstream, "/openapi.json", timeout_s))["paths"])
    except _UNREADABLE:
        return None


_UNREADABLE = (EngineError, ValueError, LookupError, TypeError)


async def _json(upstream: Upstream, path: str, timeout_s: float) -> Any:
    return json.loads(await upstream.get(path, timeout_s))
