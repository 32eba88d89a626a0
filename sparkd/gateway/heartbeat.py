"""Shows a client that waits for its stream that the request is alive.

It sends comments while the model loads, before the first token and in each gap, or words in the reasoning field while the model loads.

Proxies cut a connection on which nothing comes (nginx after 60 s, Cloudflare after 100). A comment is what the HTML standard's
"Server-sent events" proposes against that. The first thing said sends the status: what goes wrong afterwards can only be an error event.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from sparkd.errors import SparkdError
from sparkd.gateway.exchange import Exchange
from sparkd.gateway.failures import error_event, is_cut

# Words are for people, who look at them: soon, and again when there is news.
_WORDS_AFTER_S, _WORDS_EVERY_S = 1.0, 2.0
_CHAT = "/v1/chat/completions"
# Anthropic's own sign of life.
_PING = b'event: ping\ndata: {"type": "ping"}\n'
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
    """Begins with its construction, ends with `stop` or `refuse`.

    begun: the client has its status, 200, and an event stream.
    loading: makes the `loading` object while the model loads; None once an engine has the request.
    in_words: for streamed chats.
    """

    def __init__(self, exchange: Exchange, loading: Callable[[], Mapping[str, Any]] | None = None, in_words: bool = False) -> None:
        self.begun = False
        self._client = exchange.client
        self._exchange = exchange
        self._every_s = self._client.limits.heartbeat_s
        self._loading = loading
        self._in_words = in_words and exchange.route == _CHAT
        self._last_words = ""
        self._pieces = 0
        self._timer: asyncio.TimerHandle | None = None
        self._again(_WORDS_AFTER_S if self._in_words else self._every_s)

    def loaded(self) -> None:
        """An engine has the request."""
        self.stop()
        self._loading, self._in_words = None, False
        self._again(self._every_s)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def refuse(self, error: SparkdError) -> None:
        """End the stream that this has begun with an error event."""
        self.stop()
        if self._client.transport.is_closing():
            return
        event = error_event(error, self._exchange)
        self._exchange.bytes_out += len(event)
        self._client.fail(event, cut=is_cut(self._exchange))

    def _beat(self) -> None:
        self._timer = None
        if self._client.transport.is_closing():
            return
        if self._is_due() and not self._client.flow.write_paused:
            if not self._client.cycle.response_started:
                self._begin()
            self._write(self._words() if self._in_words else self._comment())
        self._again(_WORDS_EVERY_S if self._in_words else self._every_s)

    def _again(self, after_s: float) -> None:
        if self._every_s > 0 or self._in_words:
            self._timer = self._client.loop.call_later(after_s, self._beat)

    def _is_due(self) -> bool:
        """Whether nothing came from the engine since the last beat, and a comment may be written now."""
        if self._loading is not None:
            return True
        relay = self._exchange.relay
        if relay is None:
            return False
        before, self._pieces = self._pieces, relay.pieces
        return before == self._pieces and relay.between_events

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
        words = "the engine is at work" if self._loading is None else how_far(self._loading())
        return f": {words}\n".encode() + (_PING if self._exchange.anthropic else b"") + b"\n"

    def _words(self) -> bytes:
        loading = self._loading() if self._loading is not None else {}
        words = how_far(loading)
        if words == self._last_words:
            return self._comment()
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

    def _write(self, event: bytes) -> None:
        self._exchange.bytes_out += len(event)
        self._client.write_event(event)


def how_far(loading: Mapping[str, Any]) -> str:
    """`qwen3-30b is loading, 35 %, about 40 s left`: only what is known."""
    parts = [f"{loading['model']} {_STATES.get(loading['state'], 'is on its way')}"]
    if (fraction := loading.get("progress")) is not None:
        parts.append(f"{fraction:.0%}".replace("%", " %"))
    if (eta_s := loading.get("eta_seconds")) is not None:
        parts.append(f"about {eta_s:.0f} s left")
    return ", ".join(parts)
