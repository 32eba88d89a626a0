"""Refuses web pages where there are no keys, and lets those of `cors` in by the headers of the Fetch standard (CORS protocol)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from sparkd.errors import Forbidden
from sparkd.gateway.headers import RawHeaders, media_type

CLIENT = b"x-sparkd-client"
PREFLIGHT = b"access-control-request-method"
_KEPT_S = 600
_WISHED = re.compile(rb"[A-Za-z0-9_-]{1,64}(?:[ \t]*,[ \t]*[A-Za-z0-9_-]{1,64}){0,63}")
# The headers that a page's script may read in addition to those that every script may.
_EXPOSED = b"x-request-id, request-id, retry-after, endpoint-load-metrics"
_LOOPBACK = re.compile(rb"(?:localhost|127\.0\.0\.1|\[::1\])(?::[0-9]{1,5})?", re.IGNORECASE)
# A page cannot send these elsewhere without asking the server first (fetch.spec.whatwg.org, "CORS-safelisted").
_NOT_OF_A_PAGE = (CLIENT, b"authorization", b"x-api-key")
# "none": a person typed the address.
_OWN_SITE = (b"same-origin", b"none")


def check_local(headers: Mapping[bytes, bytes], method: str, *, reads_only: bool, allowed_page: bool) -> None:
    """Raise Forbidden for a request that may come from a web page: without keys the loopback address is the only guard, and pages reach it.

    A page comes by a name that it rebinds to 127.0.0.1 (then Host is that name), or by a form, an image or a fetch (then Origin or
    Sec-Fetch-Site says so), also from another port of this machine. Browsers leave these two out now and then. So a POST must show a header
    that a browser sends for a page only after it has asked the server, and sparkd refuses that question.

    reads_only: the route only shows what is.
    allowed_page: Origin is one that the configuration lets in (`cors`).
    """
    host = headers.get(b"host", b"localhost")  # only clients of HTTP/1.0 may leave it out, and no browser is one
    if _LOOPBACK.fullmatch(host) is None:
        raise Forbidden("Without API keys only localhost may be named in Host; configure keys to be reached by another name.")
    if allowed_page:
        return
    origin = headers.get(b"origin")
    if origin is not None and origin.lower() not in (b"http://" + host.lower(), b"https://" + host.lower()):
        raise Forbidden("Without API keys sparkd refuses pages of other web sites and ports; configure keys.")
    if reads_only:
        return
    if headers.get(b"sec-fetch-site", _OWN_SITE[0]) not in _OWN_SITE:
        raise Forbidden("Without API keys sparkd refuses pages of other web sites and ports; configure keys.")
    # Other methods are never sent to another origin without asking first.
    if method == "POST" and media_type(headers) != b"application/json" and not any(name in headers for name in _NOT_OF_A_PAGE):
        raise Forbidden(
            "Without API keys a POST must show that no web page sent it. Send `content-type: application/json`, or the header "
            f"`{CLIENT.decode()}` with any value."
        )


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
