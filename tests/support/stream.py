"""A client in the middle of an answer, on a thread of its own, and what has come of it so far."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.support.waiting import HUNG_S


def held(gate: Path, after: int = 1, **how: Any) -> dict[str, Any]:
    """The field of a request whose answer the stub engine holds until `gate` exists: a stream behind its first `after` pieces."""
    return {"stub": {"gate": str(gate), "gate_after": after, **how}}


@contextlib.contextmanager
def asking(port: int, model: str, headers: Mapping[str, str] | None = None, **fields: Any) -> Iterator[None]:
    """A client that has asked for an answer of the model and goes away at the end. fields: of the body."""
    body = json.dumps({"model": model, "messages": []} | fields).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: localhost", "content-type: application/json", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        yield


def answers(client: httpx.Client, model: str) -> bool:
    """Whether it gives a short answer within a few seconds."""
    body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    with contextlib.suppress(httpx.HTTPError):
        return client.post("/v1/chat/completions", json=body, timeout=5.0).status_code == 200
    return False


class Stream:
    """inside: a context in which the thread asks, a namespace for example; fields: of the body, beside its model."""

    def __init__(
        self,
        url: str,
        model: str,
        headers: Mapping[str, str] | None = None,
        inside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        **fields: Any,
    ) -> None:
        self.text = ""
        self.status = 0
        self.began = threading.Event()
        self.ended = threading.Event()
        self._url = url
        self._body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "x"}]} | fields
        self._headers = dict(headers or {})
        self._inside = inside

    def ask(self) -> Stream:
        """Returns at once."""
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def start(self) -> Stream:
        """Returns once the answer has begun."""
        self.ask()
        assert self.began.wait(HUNG_S), "an answer begins"
        return self

    def end(self) -> str:
        """Everything that came, once no more comes."""
        assert self.ended.wait(HUNG_S), "an answer ends"
        return self.text

    def whole(self) -> bool:
        """Whether it comes to its proper end."""
        return self.end().endswith("data: [DONE]\n\n")

    @property
    def clean(self) -> bool:
        """It ended with its answer, an error event or a status, not in the middle of nothing."""
        return self.ended.is_set() and (self.status >= 400 or "[DONE]" in self.text or '"error"' in self.text)

    def _read(self) -> None:
        try:
            with (
                self._inside(),
                httpx.Client(timeout=HUNG_S, trust_env=False, headers=self._headers) as client,
                client.stream("POST", f"{self._url}/v1/chat/completions", json=self._body) as answer,
            ):
                self.status = answer.status_code
                for piece in answer.iter_text():
                    self.text += piece
                    self.began.set()
        except httpx.HTTPError as error:
            self.text += type(error).__name__
        finally:
            self.began.set()
            self.ended.set()
