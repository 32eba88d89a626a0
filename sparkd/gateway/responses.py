"""The types of ASGI, and what the gateway's own answers are made of: ids, dates, JSON headers, error envelopes."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from email.utils import formatdate
from functools import lru_cache
from itertools import count
from typing import Any

from sparkd.errors import SparkdError, error_body

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]  # names in lower case

# Where the scope's extensions have the client's connection, a BoundedProtocol.
CONNECTION = "sparkd.connection"

# Ids need to be unlike each other, not secret: one random part per process is enough.
_ids = count(1)
_process = secrets.token_hex(6)

# docs.anthropic.com, "Errors"; 503 is theirs as 529 overloaded_error.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def new_request_id() -> str:
    return f"req-{_process}-{next(_ids):x}"


def error_bytes(error: SparkdError, request_id: str | None, *, anthropic: bool = False) -> bytes:
    """The error envelope as JSON. The Anthropic shape carries the same members, under the type names of that API."""
    body = error_body(error, request_id)
    if anthropic:
        body["error"]["type"] = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        body = {"type": "error", **body, "request_id": request_id}
    return json.dumps(body).encode()


def json_headers(length: int, more: Mapping[str, str]) -> RawHeaders:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % length)]
    return [*headers, *((name.encode(), value.encode("latin-1", "replace")) for name, value in more.items())]


def date() -> bytes:
    """The Date of an answer that begins now (RFC 9110 6.6.1)."""
    return _date_of(int(time.time()))


@lru_cache(maxsize=1)
def _date_of(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()
