"""Owns a stub engine's decisions and counts: routes, refusals, metrics. Never parses HTTP, paces an answer or reads the environment."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from tests.stub import answers, metrics
from workers.door import Lock

_KEPT_RESPONSES = 1000
_FORM_FIELD = rb'name="%s"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n'
_JSON = "application/json"
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How requests are answered. A request may override any field with a body member `"stub": {"tokens": 3, …}`.

    tokens: per answer; a smaller max_tokens wins. chunk_interval_s: 0 is unpaced. status: any but 200 answers with vLLM's error body.
    second_hangs: all POSTs but the first are never answered, nor counted as running, and /health goes on: as in a vLLM that hangs in the
    step that it begins with.
    gate: a file; until it exists an answer of more than `gate_after` tokens is held, a stream behind so many pieces, so that a test makes
    the moment in which requests are in flight. The question that makes a model READY has 4.
    """

    tokens: int = 7
    chunk_interval_s: float = 0.0
    status: int = 200
    second_hangs: bool = False
    gate: str = ""
    gate_after: int = 4

    def held(self, pieces: int) -> bool:
        """Whether an answer of which `pieces` were sent waits for the gate."""
        return bool(self.gate) and pieces >= self.gate_after and not os.path.exists(self.gate)


@dataclass(frozen=True, slots=True)
class Request:
    """One received request. `headers` keeps order, case and repetitions as they came."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    keep_alive: bool
    chunked_reply: bool

    @property
    def path(self) -> str:
        return unquote(self.target.split("?", 1)[0])

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")


@dataclass(slots=True)
class StubEngine:
    """The engine behind every connection. Counters are monotonic, except `running`."""

    models: tuple[str, ...] = ("stub",)
    lock: Lock | None = None
    behaviour: Behaviour = field(default_factory=Behaviour)
    # Whether requests cannot go on now, because another rank gives no sign.
    stalled: Callable[[], bool] = lambda: False
    running: int = 0
    posts: int = 0
    aborts: int = 0
    generation_tokens: int = 0
    responses: dict[str, dict[str, Any]] = field(default_factory=dict)
    connections: set[asyncio.Transport] = field(default_factory=set)
    server: asyncio.Server | None = None
    uds: str | None = None
    url: str = "http://stub"

    async def __aenter__(self) -> StubEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stops listening and breaks every open connection."""
        if self.server is None:
            return
        self.server.close()
        for transport in list(self.connections):
            transport.abort()
        await self.server.wait_closed()
        self.server = None

    def metrics(self) -> bytes:
        values = {
            "vllm:num_requests_running": self.running,
            "vllm:generation_tokens_total": self.generation_tokens,
            "stub:aborts_total": self.aborts,
            "stub:requests_total": self.posts,
        }
        return metrics.page(self.models[0], values)


@dataclass(frozen=True, slots=True)
class Answer:
    """A route's decision: a whole body, or a stream of `tokens` chunks when `stream` is set. `behaviour` None: at once, no fault.

    With a behaviour it is a request to the model: running while it lasts, its tokens generated. `hang`: nothing is ever sent.
    """

    status: int = 200
    body: bytes = b""
    content_type: str = _JSON
    stream: answers.Stream | None = None
    tokens: int = 0
    behaviour: Behaviour | None = None
    hang: bool = False


def route(engine: StubEngine, request: Request) -> Answer:
    """The answer to one request, as vLLM would route, authenticate and refuse it."""
    path = request.path
    if engine.lock and not engine.lock.opens(value.encode("latin-1") for name, value in request.headers if name.lower() == "authorization"):
        return Answer(401, b'{"error":"Unauthorized"}')
    if request.method in ("GET", "HEAD"):
        return _get(engine, path)
    if request.method != "POST":
        return Answer(405, b'{"detail":"Method Not Allowed"}')
    engine.posts += 1
    if path.startswith("/v1/responses/") and path.endswith("/cancel"):
        return _cancel(engine, path.removeprefix("/v1/responses/").removesuffix("/cancel"))
    if path not in _POSTS:
        return Answer(404, b'{"detail":"Not Found"}')
    try:
        return _post(engine, path, request.body)
    except (ValueError, AttributeError, TypeError) as broken:
        return Answer(400, answers.error(400, "BadRequestError", f"The body cannot be read: {type(broken).__name__}"))


def _post(engine: StubEngine, path: str, content: bytes) -> Answer:
    body = _form(content) if path.startswith("/v1/audio/") else json.loads(content)
    how = replace(engine.behaviour, **body["stub"]) if body.get("stub") else engine.behaviour
    model = body.get("model") or engine.models[0]
    if model not in engine.models:
        return Answer(404, answers.error(404, "NotFoundError", f"The model `{model}` does not exist.", "model"))
    if how.status != 200:
        phrase = HTTPStatus(how.status).phrase
        text = answers.error(how.status, phrase.replace(" ", ""), f"{phrase}, as the stub was told.")
        return Answer(how.status, text, behaviour=how)
    if how.second_hangs and engine.posts > 1:
        return Answer(hang=True)
    return _POSTS[path](engine, path, body, model, len(content) // 4, how)


def _get(engine: StubEngine, path: str) -> Answer:
    if path in ("/health", "/ping"):
        return Answer()
    if path == "/metrics":
        return Answer(body=engine.metrics(), content_type=_EXPOSITION)
    if path == "/version":
        return Answer(body=b'{"version":"0.32.0+stub"}')
    if path == "/v1/models":
        card = {"object": "model", "created": int(time.time()), "owned_by": "vllm", "root": engine.models[0], "parent": None}
        cards = [{"id": name, **card, "max_model_len": answers.MAX_MODEL_LEN} for name in engine.models]
        return Answer(body=answers.dump({"object": "list", "data": cards}))
    if path.startswith("/v1/responses/"):
        return _stored(engine, path.removeprefix("/v1/responses/"))
    if path in _POSTS:
        return Answer(405, b'{"detail":"Method Not Allowed"}')
    return Answer(404, b'{"detail":"Not Found"}')


def _stored(engine: StubEngine, name: str) -> Answer:
    if name not in engine.responses:
        return Answer(404, answers.error(404, "invalid_request_error", f"Response with id '{name}' not found.", "response_id"))
    return Answer(body=answers.dump(engine.responses[name]))


def _cancel(engine: StubEngine, name: str) -> Answer:
    found = engine.responses.get(name)
    if found is not None and found["status"] not in ("queued", "in_progress"):
        text = "Cannot cancel a synchronous response."
        return Answer(400, answers.error(400, "invalid_request_error", text, "response_id"))
    if found is not None:
        found["status"] = "cancelled"
    return _stored(engine, name)


def _form(body: bytes) -> dict[str, Any]:
    """The two fields a multipart upload is routed by; enough for a stub, no parser."""
    found = {name: re.search(_FORM_FIELD % name.encode(), body) for name in ("model", "stream", "stub")}
    values = {name: match[1].decode() for name, match in found.items() if match}
    return {
        "model": values.get("model"),
        "stream": values.get("stream", "").lower() == "true",
        "stub": json.loads(values.get("stub", "{}")),
    }


def _generate(engine: StubEngine, path: str, body: dict[str, Any], model: str, prompt: int, how: Behaviour) -> Answer:
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or body.get("max_output_tokens") or how.tokens
    tokens = min(how.tokens, int(limit))
    reason = "length" if tokens < how.tokens else "stop"
    if path == "/v1/responses":
        return _respond(engine, body, model, prompt, tokens, how)
    if path == "/v1/completions" and body.get("return_token_ids") and not body.get("stream"):
        return Answer(body=answers.scored_completion(body, model, tokens, reason), tokens=tokens, behaviour=how)
    if not body.get("stream"):
        return Answer(body=_WHOLE[path](model, prompt, tokens, reason), tokens=tokens, behaviour=how)
    if path == "/v1/messages":
        return Answer(stream=answers.message_stream(model, prompt, tokens, reason), tokens=tokens, behaviour=how)
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    begin = answers.completion_stream if path == "/v1/completions" else answers.chat_stream
    return Answer(stream=begin(model, prompt, tokens, reason, with_usage=with_usage), tokens=tokens, behaviour=how)


def _respond(engine: StubEngine, body: dict[str, Any], model: str, prompt: int, tokens: int, how: Behaviour) -> Answer:
    background = bool(body.get("background"))
    made = answers.response(model, prompt, tokens, status="queued" if background else "completed", background=background)
    while len(engine.responses) >= _KEPT_RESPONSES:
        del engine.responses[next(iter(engine.responses))]
    engine.responses[made["id"]] = made
    if body.get("stream"):
        return Answer(stream=answers.response_stream(made, tokens), tokens=tokens, behaviour=how)
    return Answer(body=answers.dump(made), tokens=tokens, behaviour=how)


def _embed(engine: StubEngine, path: str, body: dict[str, Any], model: str, prompt: int, how: Behaviour) -> Answer:
    given = body.get("input")
    count = len(given) if isinstance(given, list) else 1
    data = [{"index": index, "object": "embedding", "embedding": [0.5, -0.5, 0.25, -0.25]} for index in range(count)]
    used = {"prompt_tokens": prompt, "total_tokens": prompt, "completion_tokens": 0}
    return Answer(body=answers.dump({"id": "embd-stub", "object": "list", "model": model, "data": data, "usage": used}), behaviour=how)


def _score(engine: StubEngine, path: str, body: dict[str, Any], model: str, prompt: int, how: Behaviour) -> Answer:
    texts = body.get("documents") or body.get("text_2") or []
    texts = texts if isinstance(texts, list) else [texts]
    used = {"prompt_tokens": prompt, "total_tokens": prompt}
    if path == "/v1/rerank":
        results = [{"index": n, "document": {"text": str(t)}, "relevance_score": 1 / (n + 1)} for n, t in enumerate(texts)]
        return Answer(body=answers.dump({"id": "rerank-stub", "model": model, "usage": used, "results": results}), behaviour=how)
    data = [{"index": n, "object": "score", "score": 1 / (n + 1)} for n in range(len(texts))]
    return Answer(body=answers.dump({"id": "embd-stub", "object": "list", "model": model, "data": data, "usage": used}), behaviour=how)


def _count(engine: StubEngine, path: str, body: dict[str, Any], model: str, prompt: int, how: Behaviour) -> Answer:
    if path == "/v1/messages/count_tokens":
        return Answer(body=answers.dump({"input_tokens": prompt}), behaviour=how)
    if path == "/detokenize":
        return Answer(body=answers.dump({"prompt": answers.text(len(body.get("tokens") or []))}), behaviour=how)
    words = len(str(body.get("prompt") or body.get("messages") or "").split())
    return Answer(body=answers.dump({"count": words, "max_model_len": answers.MAX_MODEL_LEN, "tokens": list(range(words))}), behaviour=how)


def _speech(engine: StubEngine, path: str, body: dict[str, Any], model: str, prompt: int, how: Behaviour) -> Answer:
    if body.get("stream"):
        return Answer(stream=answers.speech_stream(path.rsplit("/", 1)[1].removesuffix("s"), model), tokens=how.tokens, behaviour=how)
    whole = {"text": answers.text(how.tokens), "usage": {"type": "duration", "seconds": 1}}
    return Answer(body=answers.dump(whole), tokens=how.tokens, behaviour=how)


_WHOLE = {"/v1/chat/completions": answers.chat, "/v1/completions": answers.completion, "/v1/messages": answers.message}
_POSTS: dict[str, Callable[[StubEngine, str, dict[str, Any], str, int, Behaviour], Answer]] = {
    "/v1/chat/completions": _generate,
    "/v1/completions": _generate,
    "/v1/responses": _generate,
    "/v1/messages": _generate,
    "/v1/messages/count_tokens": _count,
    "/tokenize": _count,
    "/detokenize": _count,
    "/v1/embeddings": _embed,
    "/v1/rerank": _score,
    "/v1/score": _score,
    "/v1/audio/transcriptions": _speech,
    "/v1/audio/translations": _speech,
}
