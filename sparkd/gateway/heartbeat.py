"""Owns the signs of life for a client that asked for a stream while its model loads: comments, or words in the reasoning field. Never ends
the wait.

A comment is what the HTML standard's "Server-sent events" proposes against proxies that drop silent connections. The first thing said
sends the status: what goes wrong afterwards can only be an error event.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from sparkd.errors import SparkdError
from sparkd.gateway.body import wants_stream
from sparkd.gateway.exchange import Exchange
from sparkd.gateway.protocol import BoundedProtocol
from sparkd.gateway.responses import error_event
from sparkd.gateway.routes import Route

# Words are for people, who look at them: soon, and again when there is news.
_WORDS_AFTER_S, _WORDS_EVERY_S = 1.0, 2.0
_CHAT = "/v1/chat/completions"
# The states of a model that is waited for, in words for people.
_STATES = {
    "STOPPED": "waits for its turn",
    "PLANNED": "is being placed",
    "LOADING": "is loading",
    "WARMING": "is warming up",
    "SIZING": "is warming up",
    "DRAINING": "is being unloaded first",
    "STOPPING": "is being unloaded first",
}


class Heartbeat:
    """Begins with its construction, ends with `stop` or `refuse`. begun: the client has its status, 200, and an event stream.

    every_s: 0 is never. loading: makes the `loading` object. in_words: for streamed chats.
    """

    __slots__ = ("_client", "_every_s", "_exchange", "_in_words", "_last_words", "_loading", "_timer", "anthropic", "begun")

    def __init__(
        self,
        client: BoundedProtocol,
        exchange: Exchange,
        route: Route,
        every_s: float,
        loading: Callable[[], Mapping[str, Any]],
        in_words: bool,
    ) -> None:
        self.begun = False
        self.anthropic = route.anthropic
        self._client = client
        self._exchange = exchange
        self._loading = loading
        self._in_words = in_words and route.label == _CHAT
        self._every_s = _WORDS_EVERY_S if self._in_words else every_s
        self._last_words = ""
        self._timer: asyncio.TimerHandle | None = None
        if self._every_s > 0:
            self._timer = client.loop.call_later(_WORDS_AFTER_S if self._in_words else every_s, self._beat)

    def stop(self) -> None:
        """The engine's turn."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def refuse(self, error: SparkdError) -> None:
        """Ends what `begun` has begun: an error event, and no `[DONE]`."""
        self.stop()
        self._exchange.code = error.code
        if self._client.transport.is_closing():
            return
        self._write(error_event(error, self._exchange.request_id, anthropic=self.anthropic), last=True)
        self._client.end_answer()

    def _beat(self) -> None:
        self._timer = None
        if self._client.transport.is_closing():
            return
        if not self.begun:
            if not wants_stream(self._exchange.outline):
                return
            self._begin()
        if not self._client.flow.write_paused:
            self._write(self._words() if self._in_words else self._comment())
        self._timer = self._client.loop.call_later(self._every_s, self._beat)

    def _begin(self) -> None:
        self.begun = True
        self._exchange.status, self._exchange.streamed = 200, True
        head = [
            (b"x-request-id", self._exchange.request_id.encode()),
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        if self._client.takes_chunks:
            head.append((b"transfer-encoding", b"chunked"))
        self._client.transport.write(self._client.begin_answer(200, head))

    def _comment(self) -> bytes:
        return f": {how_far(self._loading())}\n\n".encode()

    def _words(self) -> bytes:
        loading = self._loading()
        words = how_far(loading)
        if words == self._last_words:
            return f": {words}\n\n".encode()
        self._last_words = words
        # vLLM 0.26 says reasoning, earlier ones and many programs reasoning_content.
        delta = {"role": "assistant", "reasoning": f"{words}\n", "reasoning_content": f"{words}\n"}
        chunk = {
            "id": f"chatcmpl-{self._exchange.request_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": loading["model"],
            "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
        }
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    def _write(self, event: bytes, *, last: bool = False) -> None:
        self._exchange.bytes_out += len(event)
        if self._client.takes_chunks:
            event = b"%x\r\n%b\r\n%b" % (len(event), event, b"0\r\n\r\n" if last else b"")
        self._client.transport.write(event)


def how_far(loading: Mapping[str, Any]) -> str:
    """`qwen3-30b is loading, 35 %, about 40 s left`: only what is known."""
    parts = [f"{loading['model']} {_STATES.get(loading['state'], 'is on its way')}"]
    if (fraction := loading.get("progress")) is not None:
        parts.append(f"{fraction:.0%}".replace("%", " %"))
    if (eta_s := loading.get("eta_seconds")) is not None:
        parts.append(f"about {eta_s:.0f} s left")
    return ", ".join(parts)
