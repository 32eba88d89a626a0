"""One request to one engine: which headers go and come back, and what its failures are called. Never retries what it may have seen."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import aiohttp
from yarl import URL

from sparkd.errors import EngineError, EngineGone, SparkdError
from sparkd.gateway.answers import RawHeaders
from sparkd.upstream import Upstream

_FORWARDED = (
    (b"content-type", "content-type"),
    (b"accept", "accept"),
    (b"user-agent", "user-agent"),
    (b"traceparent", "traceparent"),
    (b"tracestate", "tracestate"),
    (b"anthropic-version", "anthropic-version"),
    (b"anthropic-beta", "anthropic-beta"),
    (b"openai-beta", "openai-beta"),
)
# RFC 9110 7.6.1, and what the gateway says itself.
_DROPPED = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"server",
        b"date",
        b"x-request-id",
    )
)
_PRINTABLE = re.compile(rb"[\t\x20-\x7e]*")
_SLICED_BYTES = 256 * 1024
_SLICE_BYTES = 64 * 1024
_CONNECT_AGAIN_S = 0.05
_URLS_KEPT = 512


async def ask(
    upstream: Upstream, method: str, path: str, query: str, headers: dict[str, str], body: bytes | bytearray | None
) -> aiohttp.ClientResponse:
    """The head of the engine's answer. Raises EngineGone where nobody answers, EngineError where the answer is no HTTP.

    A connection that could not be made is tried once more; from the first byte written on, the engine may be working.
    """
    url = _url(upstream.base_url, path, query)
    if body is not None and len(body) > _SLICED_BYTES:
        headers = {**headers, "content-length": str(len(body))}
    for last in (False, True):
        try:
            response = await upstream.session().request(method, url, data=_payload(body), headers=headers, allow_redirects=False)
        except aiohttp.ClientConnectorError as error:
            if last:
                raise translated(error) from None
            await asyncio.sleep(_CONNECT_AGAIN_S)
        except (aiohttp.ClientError, OSError) as error:
            raise translated(error) from None
        else:
            if response.status < 200:
                response.close()
                raise EngineError(f"The engine answered with status {response.status}, which ends no request.")
            return response
    raise EngineGone("The engine does not take connections.")


def request_headers(headers: dict[bytes, bytes], request_id: str) -> dict[str, str]:
    """What of a client's request an engine is told: an allow-list, less what `Connection` names, in printable ASCII.

    Not the client's key. No encoding is accepted, because bytes are passed on as they come.
    """
    told = {"x-request-id": request_id, "accept-encoding": "identity"}
    for raw, name in _FORWARDED:
        value = headers.get(raw)
        if value is not None and _PRINTABLE.fullmatch(value):
            told[name] = value.decode("ascii")
    connection = headers.get(b"connection")
    if connection is not None:
        for token in _tokens(connection):
            told.pop(token.decode("latin-1"), None)
    return told


def response_headers(response: aiohttp.ClientResponse, request_id: str) -> tuple[RawHeaders, bool]:
    """The client's headers for an engine's answer, and whether it is an event stream."""
    dropped: frozenset[bytes] = _DROPPED
    connection = response.headers.get("connection")
    if connection is not None:
        dropped = dropped.union(_tokens(connection.encode("latin-1", "replace")))
    if response.status in (204, 304):
        dropped = dropped.union((b"content-length",))
    kept: RawHeaders = [(b"x-request-id", request_id.encode())]
    streams = False
    for raw, value in response.raw_headers:
        name = raw.lower()
        if name in dropped or name.startswith(b"access-control-"):
            continue
        if name == b"content-type" and value[:17].lower() == b"text/event-stream":
            streams = True
        kept.append((name, value))
    if streams:
        # nginx and its like would hold a stream back; browsers and caches would keep it.
        kept = [pair for pair in kept if pair[0] != b"cache-control"]
        kept += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    return kept, streams


def translated(error: Exception) -> SparkdError:
    """What a failed exchange is to a client. The engine's bytes, which aiohttp puts into its messages, stay out."""
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ServerTimeoutError):
        return EngineGone("The engine does not take connections; it may be restarting. Try again soon.")
    if isinstance(error, aiohttp.ClientResponseError):
        return EngineError("The engine's answer is not valid HTTP. Its log may say why.")
    if isinstance(error, aiohttp.ClientPayloadError):
        return EngineError("The engine broke its answer off. Its log may say why.")
    return EngineGone("The engine closed the connection before its answer was complete; it may have died. Try again soon.")


def _payload(body: bytes | bytearray | None) -> bytes | bytearray | AsyncIterator[bytes] | None:
    if body is None or len(body) <= _SLICED_BYTES:
        return body
    return _slices(body)


async def _slices(body: bytes | bytearray) -> AsyncIterator[bytes]:
    """A large body in pieces: given whole, the transport would copy what the socket does not take at once."""
    with memoryview(body) as view:
        for at in range(0, len(view), _SLICE_BYTES):
            yield bytes(view[at : at + _SLICE_BYTES])


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip().lower() for token in value.split(b",")]


_urls: dict[tuple[str, str], URL] = {}


def _url(base_url: str, path: str, query: str) -> URL:
    if query:
        return URL(f"{base_url}{path}?{query}", encoded=True)
    url = _urls.get((base_url, path))
    if url is None:
        if len(_urls) >= _URLS_KEPT:
            _urls.clear()
        url = _urls[(base_url, path)] = URL(base_url + path, encoded=True)
    return url
