"""Whether an answer of the daemon is one that it may give. Only the standard library: schemathesis runs it in an environment of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# The answers of 500 and more that the README names: the engine broke the exchange, and try again later.
DOCUMENTED = (502, 503)
TRACEBACK = b"Traceback (most recent call last)"
MEMBERS = ("message", "type", "code")


def fault_of(path: str, method: str, status: int, headers: Mapping[str, str], body: bytes) -> str | None:
    """headers: names in lower case. None: the answer may be given."""
    if TRACEBACK in body:
        return f"{status} with a traceback"
    if status >= 500 and status not in DOCUMENTED:
        return f"the status {status}"
    if status < 400 or method == "HEAD":
        return None
    if not headers.get("x-request-id"):
        return f"{status} without x-request-id"
    try:
        answer = json.loads(body)
    except ValueError:
        return f"{status} whose body is no JSON"
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        return f"{status} without an error object"
    return _shape_fault(path, status, error, headers["x-request-id"])


def _shape_fault(path: str, status: int, error: Mapping[str, Any], request_id: str) -> str | None:
    """sparkd's own errors carry everything; an engine's at least a message."""
    ours = error.get("src") == "sparkd"
    missing = [name for name in (MEMBERS if ours else MEMBERS[:1]) if not isinstance(error.get(name), str)]
    if missing:
        return f"{status} whose error has no {', '.join(missing)}"
    if path.startswith("/admin/") and not ours:
        return f"{status} of the admin API that is not sparkd's"
    if ours and error.get("request_id") != request_id:
        return f"{status} whose request_id is not that of its header"
    return None
