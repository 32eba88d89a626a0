"""The address of one engine's HTTP server, its connections, and the two questions that sparkd asks it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from sparkd.errors import EngineError
from sparkd.gateway.connection import ConnectionPool
from sparkd.gateway.responses import RawHeaders

MAX_MODEL_LIST_BYTES = 1 << 20
MAX_OPENAPI_BYTES = 8 << 20


class Upstream:
    """Where an engine listens. sparkd sends `api_key` in the Authorization header, and nowhere else."""

    __slots__ = ("api_key", "base_url", "pool", "socket_path")

    def __init__(self, *, socket_path: str | None = None, base_url: str = "http://engine", api_key: str | None = None) -> None:
        self.socket_path = socket_path
        self.base_url = base_url
        self.api_key = api_key
        self.pool = ConnectionPool(socket_path, base_url, api_key)

    async def get(self, path: str, most_bytes: int, timeout_s: float) -> bytes:
        """The body of the engine's answer, cut off somewhere after `most_bytes`.

        Raises EngineError for a status other than 200, for an incomplete answer and for none within timeout_s, EngineGone if no server
        listens.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._get(path, most_bytes)
        except TimeoutError:
            raise EngineError(f"The engine did not answer {path} within {timeout_s:g} s.") from None

    async def _get(self, path: str, most_bytes: int) -> bytes:
        connection = await self.pool.connection()
        body = _Body(most_bytes)
        try:
            await connection.ask(b"GET " + path.encode() + self.pool.preamble + b"\r\n", b"", body)
            return await body.whole
        finally:
            # After a complete answer the pool may have lent the connection to another request already.
            if not body.ended:
                connection.abort()

    def close(self) -> None:
        self.pool.close()

    def __repr__(self) -> str:
        return f"Upstream({self.socket_path or self.base_url})"


class _Body:
    """The sink that collects one whole answer."""

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
    """The model names that a server serves. max_model_len: its longest request in tokens, None if it does not report it."""

    names: tuple[str, ...]
    max_model_len: int | None = None


async def served_models(upstream: Upstream, timeout_s: float = 2.0) -> ServedModels | None:
    """The model list of the server behind `upstream`, or None while it is not up. A 200 without such a list does not count."""
    try:
        models = (await _json(upstream, "/v1/models", MAX_MODEL_LIST_BYTES, timeout_s))["data"]
        names = tuple(str(model["id"]) for model in models)
    except _UNREADABLE:
        return None
    length = models[0].get("max_model_len") if models else None
    return ServedModels(names, length if isinstance(length, int) else None)


async def served_routes(upstream: Upstream, timeout_s: float = 10.0) -> frozenset[str] | None:
    """The paths in the server's OpenAPI document; None if it has no document, or none of the inference paths is in it.

    An engine other than vLLM may serve those by a catch-all, a mount, or routes that its document leaves out.
    """
    try:
        document = await _json(upstream, "/openapi.json", MAX_OPENAPI_BYTES, timeout_s)
        paths = frozenset(map(str, document["paths"]))
    except _UNREADABLE:
        return None
    return paths if paths & _INFERENCE else None


# Every vLLM that serves a model has one of these paths.
_INFERENCE = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/pooling", "/classify", "/score", "/v1/audio/transcriptions"}
)
_UNREADABLE = (EngineError, ValueError, LookupError, TypeError, RecursionError)


async def _json(upstream: Upstream, path: str, most_bytes: int, timeout_s: float) -> Any:
    body = await upstream.get(path, most_bytes, timeout_s)
    if len(body) > most_bytes:
        raise ValueError(f"{path} is larger than {most_bytes} bytes")
    return json.loads(body)
