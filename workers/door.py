"""The door of an engine that listens on an address: asks for the engine's key on every path, websockets included. Never sees a body.

vLLM's own key guards four prefixes (vllm/entrypoints/serve/middleware/authenticate.py, GUARDED_PREFIX); `/invocations`, `/tokenize`,
`/metrics`, `/docs` and `/scale_elastic_ep` answer every client. vLLM puts the class that its last `--middleware` names around all others
(register.py beside it). The standard library alone: this runs in the engine's own Python.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

# Where the key is, in the engine's environment: neither an environment nor a command line holds the key itself.
KEY_FILE = "SPARKD_ENGINE_KEY_FILE"
MIDDLEWARE = "workers.door.Door"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Lock:
    """Compares what a client says with a key, in a time that tells nothing of either."""

    def __init__(self, key: str) -> None:
        self._expected = _digest(f"Bearer {key}".encode())

    def opens(self, authorization: Iterable[bytes]) -> bool:
        """authorization: every header of that name. More than one is refused: two readers may not take the same."""
        values = list(authorization)
        return len(values) == 1 and hmac.compare_digest(_digest(values[0]), self._expected)


class Door:
    """ASGI middleware. Raises RuntimeError or OSError where there is no key: an engine without one must not answer."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._lock = Lock(key_of(os.environ))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and not self._lock.opens(value for name, value in scope["headers"] if name == b"authorization"):
            await _refuse(scope, send)
            return
        await self._app(scope, receive, send)


def key_of(environ: Mapping[str, str]) -> str:
    path = environ.get(KEY_FILE)
    if not path:
        raise RuntimeError(f"The engine has no key: {KEY_FILE} is not set. Start it by sparkd.")
    with open(path, encoding="ascii") as file:
        key = file.read().strip()
    if not key:
        raise RuntimeError(f"The engine's key file {path} is empty: load the model again, sparkd writes a new one.")
    return key


async def _refuse(scope: Message, send: Send) -> None:
    prefix = ""
    if scope["type"] == "websocket":
        if "websocket.http.response" not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": 1008})
            return
        prefix = "websocket."
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": f"{prefix}http.response.start", "status": 401, "headers": headers})
    await send({"type": f"{prefix}http.response.body", "body": b'{"error":"Unauthorized"}'})


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
