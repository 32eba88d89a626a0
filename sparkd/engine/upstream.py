"""The way to one engine's HTTP server, by Unix socket or TCP, with its connections for its whole life. Never reads or changes a body."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import aiohttp

from sparkd.engine.http import Pool

CONNECT_TIMEOUT_S = 2.0
KEEPALIVE_S = 30.0
MAX_MODEL_LIST_BYTES = 1 << 20
MAX_OPENAPI_BYTES = 8 << 20


class Upstream:
    """Where an engine listens. `api_key` goes into the Authorization header of what sparkd sends, and nowhere else.

    `wire` is the data plane's way, `session()` that of probes and scrapes. The session is made on first use because it must belong
    to the running event loop. limit=0: aiohttp's default of 100 connections queues silently beyond it
    (vllm-project/production-stack issue 765). No environment proxies, no cookies, no redirects.
    """

    __slots__ = ("_closed", "_session", "api_key", "base_url", "socket_path", "wire")

    def __init__(self, *, socket_path: str | None = None, base_url: str = "http://engine", api_key: str | None = None) -> None:
        self.socket_path = socket_path
        self.base_url = base_url
        self.api_key = api_key
        self.wire = Pool(socket_path, base_url, api_key)
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    def session(self) -> aiohttp.ClientSession:
        """Raises aiohttp.ClientConnectionError once closed: whoever still holds it then would make a client that nobody closes."""
        if self._closed:
            raise aiohttp.ClientConnectionError("the engine is gone")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                base_url=self.base_url,
                connector=self._connector(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                auto_decompress=False,
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"authorization": f"Bearer {self.api_key}"} if self.api_key else None,
                skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
            )
        return self._session

    async def close(self) -> None:
        self.wire.close()
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _connector(self) -> aiohttp.BaseConnector:
        if self.socket_path:
            return aiohttp.UnixConnector(path=self.socket_path, limit=0, keepalive_timeout=KEEPALIVE_S)
        return aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=None)

    def __repr__(self) -> str:
        return f"Upstream({self.socket_path or self.base_url})"


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
_UNREADABLE = (TimeoutError, OSError, aiohttp.ClientError, ValueError, LookupError, TypeError, RecursionError)


async def _json(upstream: Upstream, path: str, limit: int, timeout_s: float) -> Any:
    async with asyncio.timeout(timeout_s), upstream.session().get(path) as response:
        if response.status != 200:
            raise ValueError(f"{path} answered {response.status}")
        body = bytearray()
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > limit:
                raise ValueError(f"{path} is larger than {limit} bytes")
    return json.loads(body)
