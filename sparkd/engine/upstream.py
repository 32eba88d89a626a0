"""The way to one engine's HTTP server, by Unix socket or TCP, with its connections for its whole life. Never reads or changes a body."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from sparkd.engine.http import ConnectionPool, RawHeaders
from sparkd.errors import EngineError

MAX_MODEL_LIST_BYTES = 1 << 20
MAX_OPENAPI_BYTES = 8 << 20


class Upstream:
    """Where an engine listens. `api_key` goes into the Authorization header of what sparkd sends, and nowhere else."""

    __slots__ = ("api_key", "base_url", "socket_path", "wire")

    def __init__(self, *, socket_path: str | None = None, base_url: str = "http://engine", api_key: str | None = None) -> None:
        self.socket_path = socket_path
        self.base_url = base_url
        self.api_key = api_key
        self.wire = ConnectionPool(socket_path, base_url, api_key)

    async def get(self, path: str, most_bytes: int, timeout_s: float) -> bytes:
        """The body of what the engine answers with 200, cut off somewhere behind `most_bytes`.

        Raises EngineError for another status and for what is no whole answer, EngineGone where nobody listens, TimeoutError.
        """
        async with asyncio.timeout(timeout_s):
            connection = await self.wire.connection()
            body = _Body(most_bytes)
            try:
                await connection.ask(b"GET " + path.encode() + self.wire.preamble + b"\r\n", b"", body)
                return await body.whole
            finally:
                # At the end of its answer the connection is kept for others, and one may have taken it before this task goes on.
                if not body.ended:
                    connection.abort()

    async def close(self) -> None:
        self.wire.close()

    def __repr__(self) -> str:
        return f"Upstream({self.socket_path or self.base_url})"


class _Body:
    """The sink of one answer that is wanted whole."""

    def __init__(self, most_bytes: int) -> None:
        self.whole: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.ended = False
        self._most_bytes = most_bytes
        self._pieces = bytearray()

    def head(self, status: int, headers: RawHeaders) -> None:
        if status != 200:
            self.broken(EngineError(f"The engine answered with HTTP {status}."))

    def body(self, data: bytes, ended: bool) -> None:
        self.ended = ended
        self._pieces += data
        if (ended or len(self._pieces) > self._most_bytes) and not self.whole.done():
            self.whole.set_result(bytes(self._pieces))

    def broken(self, error: EngineError) -> None:
        if not self.whole.done():
            self.whole.set_exception(error)


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The names that a server answers for. max_model_len: the longest request in tokens that it takes, None where it does not tell."""

    names: tuple[str, ...]
    max_model_len: int | None = None


async def served_models(upstream: Upstream, timeout_s: float = 2.0) -> ServedModels | None:
    """The model list of the server behind `upstream`; None while it is not up. A 200 from anything else is not enough."""
    try:
        models = (await _json(upstream, "/v1/models", MAX_MODEL_LIST_BYTES, timeout_s))["data"]
        names = tuple(str(model["id"]) for model in models)
    except _UNREADABLE:
        return None
    length = models[0].get("max_model_len") if models else None
    return ServedModels(names, length if isinstance(length, int) else None)


async def served_routes(upstream: Upstream, timeout_s: float = 10.0) -> frozenset[str] | None:
    """The paths that the server behind `upstream` has; None where it does not tell, or not of those that models are asked by.

    An engine that is no vLLM may serve them by a catch-all, a mount, or routes that its document leaves out.
    """
    try:
        paths = frozenset(map(str, (await _json(upstream, "/openapi.json", MAX_OPENAPI_BYTES, timeout_s))["paths"]))
    except _UNREADABLE:
        return None
    return paths if paths & _ASKED else None


# Every vLLM that serves a model has one of these.
_ASKED = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/pooling", "/classify", "/score", "/v1/audio/transcriptions"}
)
_UNREADABLE = (TimeoutError, EngineError, ValueError, LookupError, TypeError, RecursionError)


async def _json(upstream: Upstream, path: str, most_bytes: int, timeout_s: float) -> Any:
    body = await upstream.get(path, most_bytes, timeout_s)
    if len(body) > most_bytes:
        raise ValueError(f"{path} is larger than {most_bytes} bytes")
    return json.loads(body)
