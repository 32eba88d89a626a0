"""Errors in the terms of the client's API, so that no client takes a part of a stream for the whole or retries in vain."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

from sparkd.errors import ModelCannotLoad, RequestCancelled, SparkdError, error_body
from sparkd.gateway.exchange import Exchange
from sparkd.gateway.headers import RawHeaders

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
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,123})"')
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,12})')


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


def status_of(error: SparkdError, exchange: Exchange) -> int:
    """Codex, which asks by /v1/responses, asks again after every status but 400."""
    lasts = isinstance(error, (ModelCannotLoad, RequestCancelled))
    return 400 if lasts and exchange.speaks_responses else error.status


def is_cut(exchange: Exchange) -> bool:
    """Whether the connection is cut behind the event that tells a stream's failure: some readers overlook it and take a part for the
    whole. Those of /v1/responses know a whole answer by its last event, and Codex drops the failure for the cut."""
    return not exchange.speaks_responses


def error_event(error: SparkdError, exchange: Exchange, first: bytes = b"", tail: bytes = b"") -> bytes:
    """The server-sent event by which the client's API says that a stream failed.

    first, tail: the stream's first and last bytes.
    """
    body = error_bytes(error, exchange.request_id, anthropic=exchange.anthropic)
    return failure_event(body, exchange, lasts=error.status < 500, first=first, tail=tail)


def failure_event(body: bytes, exchange: Exchange, *, lasts: bool, first: bytes = b"", tail: bytes = b"") -> bytes:
    """The same event for a body with an error, sparkd's or an engine's.

    lasts: another try does not help.
    """
    if exchange.speaks_responses:
        return _response_failed(body, exchange, lasts, first, tail)
    name = b"event: error\n" if exchange.anthropic else b""
    return name + b"".join(b"data: " + line + b"\n" for line in body.splitlines() or [b""]) + b"\n"


def _response_failed(body: bytes, exchange: Exchange, lasts: bool, first: bytes, tail: bytes) -> bytes:
    """Clients of /v1/responses read that API's own events and codes only, with a number each. Codex tries again unless it is told that the
    request is to blame."""
    try:
        members = dict(json.loads(body))
        error_members = dict(members.pop("error"))
    except (ValueError, TypeError, KeyError):
        members, error_members = {}, {"message": "The engine refused the request."}
    response_id, numbers = _RESPONSE_ID.search(first), _SEQUENCE_NUMBER.findall(tail)
    response: dict[str, Any] = {
        "id": response_id[1].decode() if response_id else f"resp_{exchange.request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": exchange.model,
        "status": "failed",
        "error": {**error_members, "code": "invalid_prompt" if lasts else "server_error"},
        "output": [],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    }
    event = {**members, "type": "response.failed", "sequence_number": int(numbers[-1]) + 1 if numbers else 0, "response": response}
    return b"event: response.failed\ndata: " + json.dumps(event).encode() + b"\n\n"
