"""The headers by which a browser lets another site's page use the models' API (Fetch standard, "CORS protocol")."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from sparkd.gateway.responses import RawHeaders

PREFLIGHT = b"access-control-request-method"
_KEPT_S = 600
_WISHED = re.compile(rb"[A-Za-z0-9_-]{1,64}(?:[ \t]*,[ \t]*[A-Za-z0-9_-]{1,64}){0,63}")
# The headers that a page's script may read in addition to those that every script may.
_EXPOSED = b"x-request-id, request-id, retry-after, endpoint-load-metrics"


def origins_of(texts: Iterable[str]) -> frozenset[bytes]:
    return frozenset(text.encode() for text in texts)


def page_headers(origin: bytes) -> RawHeaders:
    """On every answer to an allowed page."""
    return [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED), (b"vary", b"origin")]


def preflight_headers(methods: Iterable[str], headers: Mapping[bytes, bytes]) -> RawHeaders:
    """Besides: what the request that the browser asks about may have."""
    allowed: RawHeaders = [
        (b"access-control-allow-methods", ", ".join(methods).encode()),
        (b"access-control-max-age", b"%d" % _KEPT_S),
    ]
    wished = headers.get(b"access-control-request-headers", b"")
    if _WISHED.fullmatch(wished):
        allowed.append((b"access-control-allow-headers", wished))
    if headers.get(b"access-control-request-private-network") == b"true":
        allowed.append((b"access-control-allow-private-network", b"true"))
    return allowed
