"""The pass-through: what reaches the engine, what comes back, and what is refused before."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest
import zstandard

from sparkd.errors import Draining, ModelCannotLoad, ModelFailed, ModelLoading, TooManyRequests
from sparkd.gateway import proxy
from sparkd.gateway.body import unpacked
from sparkd.gateway.keys import KeyDigests
from sparkd.gateway.limits import ClientLimits
from sparkd.gateway.routes import EXACT, RouteKind
from sparkd.gateway.upstream import Upstream
from sparkd.state.model_state import ModelState
from sparkd.vllm.parsers import Parsers
from tests.sparkd.gateway.fakes import (
    ANSWER,
    DONE,
    EVENT,
    JSON_ANSWER,
    PROBE_TOKEN,
    STREAM_HEAD,
    RawEngine,
    Running,
    answer_json,
    chunked,
    post,
    request,
    serving,
    soon,
    until_gone,
    view,
)

CHAT = "/v1/chat/completions"
BODY = b'{ "model" : "tiny",  "messages":[{"role":"user","content":"caf\xc3\xa9"}] , "stream":false}'
FORM = b'--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n--XX--\r\n'


# --- there and back -------------------------------------------------------------------------------------------------------


async def test_the_same_bytes_reach_the_engine_and_come_back(gateway: Running) -> None:
    answer = await gateway.post(CHAT, BODY)
    assert (answer.status, answer.body) == (200, ANSWER)
    (heard,) = gateway.engine.heard
    assert heard.body == BODY
    assert heard.head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert gateway.supervisor.leased == [("tiny", False)]
    assert gateway.supervisor.held == 0


async def test_every_forwarded_route_reaches_the_engine_under_its_own_path(gateway: Running) -> None:
    paths = [path for path, route in EXACT.items() if route.kind in (RouteKind.JSON, RouteKind.FORM)]
    assert len(paths) > 30
    for path in paths:
        form = EXACT[path].kind is RouteKind.FORM
        headers = ["Content-Type: multipart/form-data; boundary=XX", "X-Api-Key: any"] if form else []
        answer = await gateway.post(path, FORM if form else BODY, *headers)
        assert answer.status == 200
        heard = gateway.engine.heard[-1]
        assert heard.head.split(b" ")[1] == path.encode()
        assert heard.body == (FORM if form else BODY)
        assert heard.headers["content-type"] == ("multipart/form-data; boundary=XX" if form else "application/json")


async def test_large_bodies_arrive_whole(gateway: Running) -> None:
    body = b'{"model":"tiny","x":"' + b"0123456789abcdef" * 200_000 + b'"}'
    assert (await gateway.post(CHAT, body)).status == 200
    assert gateway.engine.heard[-1].body == body
    raw = request("POST", CHAT, "Content-Type: application/json", "Transfer-Encoding: chunked")
    assert (await gateway.ask(raw + chunked(*(body[at : at + 10_000] for at in range(0, len(body), 10_000))))).status == 200
    assert gateway.engine.heard[-1].body == body


async def test_a_stream_is_passed_on_unaltered_and_unbuffered(gateway: Running) -> None:
    go_on = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(EVENT, end=False))
        await go_on.wait()
        writer.write(chunked(EVENT, end=False) + chunked(EVENT, DONE))

    gateway.engine.script = script
    client = await gateway.open()
    client.send(post(CHAT, BODY))
    head = await client.answer(head_only=True)
    assert (head.headers["x-accel-buffering"], head.headers["cache-control"]) == ("no", "no-cache")
    assert await client.reader.readuntil(b"\n\n\r\n") == chunked(EVENT, end=False)
    go_on.set()
    rest = await client.reader.readuntil(b"0\r\n\r\n")
    assert rest.count(EVENT) == 2
    assert DONE in rest


async def test_request_headers_reach_the_engine_but_credentials_and_what_is_ours(engine: RawEngine) -> None:
    passed = {
        "accept": "text/event-stream",
        "user-agent": "OpenAI/Python",
        "traceparent": "00-1-2-01",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "x",
        "openai-organization": "org",
        "endpoint-load-metrics-format": "JSON",
        "x-session-id": "one",
        "x-data-parallel-rank": "0",
        "x-forwarded-for": "1.2.3.4",
    }
    kept = (
        "Authorization: Bearer secret-key",
        "X-Api-Key: secret-key",
        "Api-Key: secret-key",
        "X-Goog-Api-Key: secret-key",
        "Cookie: a=secret-key",
        "Proxy-Authorization: Basic secret-key",
        "Proxy-Anything: x",
        "Accept-Encoding: gzip, br",
        "Origin: http://localhost:3000",
        "Access-Control-Request-Method: POST",
        "Tracestate: a=1",
        "OpenAI-Beta: y",
        "X-Sparkd-Probe: nonsense",
        "X-Amzn-SageMaker-Adapter-Identifier: another-model",
        "TE: trailers",
        "Trailer: x",
        "Keep-Alive: timeout=5",
        "Connection: tracestate, Keep-Alive, openai-beta",
    )
    async with serving(engine, keys=KeyDigests.of(inference=["secret-key"])) as gateway:
        lines = [f"{name}: {value}" for name, value in passed.items()]
        assert (await gateway.post(CHAT, BODY, *lines, *kept, "X-Request-Id: my.id-1")).status == 200
    assert engine.heard[0].headers == passed | {
        "host": "engine",
        "authorization": "Bearer the-engine-key",
        "content-type": "application/json",
        "content-length": str(len(BODY)),
        "accept-encoding": "identity",
        "x-request-id": "my.id-1",
    }


async def test_headers_that_are_not_printable_are_not_told(gateway: Running) -> None:
    answer = await gateway.post(CHAT, BODY, "User-Agent: caf\xe9", "Accept: a\tb")
    assert answer.status == 200
    told = gateway.engine.heard[0].headers
    assert "user-agent" not in told
    assert told["accept"] == "a\tb"


async def test_response_headers_lose_what_is_between_two_hops(gateway: Running) -> None:
    gateway.engine.replies(
        b"HTTP/1.1 418 I'm a teapot\r\nServer: engine\r\nDate: today\r\nConnection: keep-alive\r\n"
        b"Keep-Alive: timeout=5\r\n"
        b"X-Request-Id: theirs\r\nAccess-Control-Allow-Origin: *\r\nContent-Type: text/plain\r\nX-Kept: a\r\nX-Kept: b\r\n"
        b"Set-Cookie: session=1\r\nX-Sparkd-Probe: 1\r\nProxy-Authenticate: Basic\r\nProxy-Anything: x\r\n"
        b"Content-Length: 5\r\n\r\nshort"
    )
    client = await gateway.open()
    client.send(post(CHAT, BODY, "X-Request-Id: mine"))
    raw = await client.reader.readuntil(b"short")
    await client.close()
    lines = raw.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 418 I'm a Teapot"
    (own,) = [line.partition(": ")[2] for line in lines if line.startswith("date: ")]
    assert parsedate_to_datetime(own).tzinfo is UTC
    others = sorted(line for line in lines[1:-2] if not line.startswith("date: "))
    assert others == ["content-length: 5", "content-type: text/plain", "x-kept: a", "x-kept: b", "x-request-id: mine"]


async def test_request_ids(gateway: Running) -> None:
    good = ("a", "req_1.2:3-4", "x" * 128)
    bad = ("", " ", "a b", "x" * 129, "-a", "caf\xe9", 'a"b', "<script>")
    for given in good:
        assert (await gateway.get("/livez", f"X-Request-Id: {given}")).headers["x-request-id"] == given
    made = {(await gateway.get("/livez", f"X-Request-Id: {given}")).headers["x-request-id"] for given in bad}
    assert len(made) == len(bad)
    assert all(name.startswith("req-") for name in made)
    paths = ("/health", "/v1/models", "/nothing")
    assert [path for path in paths if "x-request-id" not in (await gateway.get(path)).headers] == []


async def test_a_redirect_is_not_followed(gateway: Running) -> None:
    gateway.engine.replies(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n")
    assert (await gateway.post(CHAT, BODY)).status == 307
    assert len(gateway.engine.heard) == 1


async def test_the_probe_header_is_checked_and_not_passed_on(gateway: Running) -> None:
    for token in (PROBE_TOKEN, "wrong", ""):
        assert (await gateway.post(CHAT, BODY, f"X-Sparkd-Probe: {token}")).status == 200
    assert [probe for _, probe in gateway.supervisor.leased] == [True, False, False]
    assert all("x-sparkd-probe" not in heard.headers for heard in gateway.engine.heard)


async def test_aliases_lead_to_their_model(gateway: Running) -> None:
    assert (await gateway.post(CHAT, b'{"model":"small"}')).status == 200
    assert gateway.supervisor.leased == [("tiny", False)]
    assert gateway.engine.heard[0].body == b'{"model":"small"}'


# --- /v1/responses/{id} --------------------------------------------------------------------------------------------------------


RESPONSE = b'{"id":"resp_abc","object":"response"}'
NO_RESPONSE = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("path", ["/v1/responses/resp_abc?stream=true&starting_after=3", "/v1/responses/resp_abc/cancel"])
async def test_a_response_is_found_at_the_engine_that_has_it_by_a_gateway_that_never_saw_it(
    gateway: Running, path: str, tmp_path: Path
) -> None:
    other = RawEngine(tmp_path / "other.sock")
    await other.start()
    gateway.supervisor.models["other"] = view("other")
    gateway.supervisor.upstreams["other"] = Upstream(socket_path=str(other.path))
    gateway.engine.replies(NO_RESPONSE)
    other.replies(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(RESPONSE), RESPONSE))
    answer = await (gateway.post(path, b"") if path.endswith("cancel") else gateway.get(path))
    assert (answer.status, answer.body) == (200, RESPONSE)
    assert [head.head.split(b"\r\n")[0].split(b" ")[1] for head in other.heard] == [b"/v1/responses/resp_abc", path.encode()]
    assert sorted(gateway.supervisor.leased[:2]) == [("other", True), ("tiny", True)], "to be asked is no use of a model"
    assert gateway.supervisor.leased[2:] == [("other", False)]
    await other.stop()


async def test_a_response_that_no_engine_has_is_unknown_and_a_single_engine_says_so_itself(gateway: Running) -> None:
    assert (await gateway.get("/v1/responses/resp_x")).status == 200
    gateway.supervisor.models["other"] = view("other")
    gateway.engine.replies(NO_RESPONSE)
    answer = await gateway.get("/v1/responses/resp_x")
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    gateway.supervisor.models["other"] = view("other", state=ModelState.STOPPED)
    gateway.engine.script = answer_json
    assert (await gateway.get("/v1/responses/resp_x")).status == 200


# --- refusals before an answer -----------------------------------------------------------------------------------------------


async def test_content_types(gateway: Running) -> None:
    for kind, status in (
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=XX", 415),
        ("application/jsonx", 415),
    ):
        assert (await gateway.post(CHAT, BODY, f"Content-Type: {kind}", "X-Api-Key: any")).status == status, kind
    assert (await gateway.ask(request("POST", CHAT, f"Content-Length: {len(BODY)}", "X-Api-Key: any") + BODY)).status == 200
    assert (await gateway.post("/v1/audio/transcriptions", BODY)).status == 415
    encoded = await gateway.post(CHAT, BODY, "Content-Encoding: br")
    assert (encoded.status, encoded.headers["accept-encoding"]) == (415, "gzip, zstd, identity")
    assert "accept-encoding" not in (await gateway.post(CHAT, BODY, "Content-Type: text/html")).headers
    alike = ("X-Api-Key: any", "Content-Type: application/json", "X-Api-Key: any", "Content-Type: application/json")
    assert (await gateway.post(CHAT, BODY, *alike)).status == 200
    assert (await gateway.post(CHAT, BODY, "Content-Encoding: identity")).status == 200
    assert (await gateway.post(CHAT, BODY, "X-Api-Key: any", "Content-Type: application/json", "Content-Type: text/plain")).status == 400


async def test_s7_names_from_a_payload_list_are_only_ever_keys(gateway: Running) -> None:
    payloads = ("../../etc/passwd", "--trust-remote-code", "$(touch /tmp/x)", "`id`", "a\nb", "a\x00b", "%00", "tiny%00", "x" * 10_000)
    payloads += ("http://169.254.169.254/", "tiny/../tiny", "__class__", "{{7*7}}", "' OR 1=1 --", "", "\u202etiny", "TINY")
    for name in payloads:
        answer = await gateway.post(CHAT, json.dumps({"model": name}).encode())
        assert answer.status == 404, name
        assert answer.error["code"] == "model_not_found"
        assert "tiny" in answer.error["message"]
        assert len(answer.body) < 1500
    assert gateway.engine.heard == []


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("zstd", zstandard.compress)])
async def test_a_body_is_unpacked_within_its_limit(engine: RawEngine, encoding: str, pack: Callable[[bytes], bytes]) -> None:
    async with serving(engine, limits=ClientLimits(body_bytes=100_000, buffered_bytes=150_000)) as gateway:
        header = f"Content-Encoding: {encoding}"
        assert (await gateway.post(CHAT, pack(BODY), header)).status == 200
        (heard,) = engine.heard
        assert heard.body == BODY and "content-encoding" not in heard.headers

        assert (await gateway.post(CHAT, pack(b" " * 100_001), header)).status == 413
        damaged = await gateway.post(CHAT, b"no" + pack(BODY), header)
        assert damaged.status == 400 and encoding in damaged.error["message"]
        assert (await gateway.post(CHAT, pack(BODY)[:-9], header)).status == 400
        assert gateway.edge._proxy._buffered_bytes == 0
        assert len(engine.heard) == 1


async def test_a_gzip_body_has_one_member(gateway: Running) -> None:
    """Millions of empty ones would take seconds, and every packed body waits for them."""
    for body in (gzip.compress(b"") * 2, gzip.compress(BODY) + gzip.compress(b""), gzip.compress(b"") + gzip.compress(BODY)):
        answer = await gateway.post(CHAT, body, "Content-Encoding: gzip")
        assert answer.status == 400 and "member" in answer.error["message"]
    assert not gateway.engine.heard


async def test_bodies_that_are_unpacked_at_once_wait_for_each_other(engine: RawEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest that each could be is more than all may have together; none is refused for that."""
    gate = threading.Event()

    def held(body: bytes, encoding: bytes, limit: int) -> bytes:
        gate.wait()
        return unpacked(body, encoding, limit)

    monkeypatch.setattr(proxy, "unpacked", held)
    async with serving(engine, limits=ClientLimits(body_bytes=100_000, buffered_bytes=150_000)) as gateway:
        posts = [asyncio.create_task(gateway.post(CHAT, gzip.compress(BODY), "Content-Encoding: gzip")) for _ in range(3)]
        try:
            await soon(lambda: gateway.edge._open_requests == 3)
        finally:
            gate.set()
        assert [answer.status for answer in await asyncio.gather(*posts)] == [200, 200, 200]


@pytest.mark.parametrize("path", [path for path, route in EXACT.items() if route.asks])
async def test_no_model_is_waited_for_with_a_body_that_no_engine_can_answer(gateway: Running, path: str) -> None:
    """An engine that runs refuses it in its own words."""
    asks, empty = EXACT[path].asks, b'{"model": "tiny", "stream": false}'
    assert (await gateway.post(path, empty)).status == 200
    gateway.supervisor.gate.clear()
    waiting = [asyncio.create_task(gateway.post(path, json.dumps({"model": "tiny", member: "x"}).encode())) for member in asks]
    await soon(lambda: gateway.supervisor.waiting == len(asks))
    refused = await gateway.post(path, empty)
    assert (refused.status, refused.error["param"]) == (400, asks[0])
    assert all(f"`{member}`" in refused.error["message"] for member in asks) and "tiny" in refused.error["message"]
    gateway.supervisor.gate.set()
    assert {answer.status for answer in await asyncio.gather(*waiting)} == {200}


async def test_errors_of_the_supervisor(gateway: Running) -> None:
    loading = {"model": "tiny", "state": "LOADING", "progress": 0.5, "eta_seconds": 12}
    for refusal, status, retry in (
        (ModelLoading("The model is loading.", loading=loading, retry_after_s=7), 503, "7"),
        (ModelFailed("The model failed.", retry_after_s=10), 503, "10"),
        (ModelCannotLoad("Its folder is gone."), 424, None),
        (Draining("Going down."), 503, "5"),
        (TooManyRequests("Full.", retry_after_s=2), 429, "2"),
    ):
        gateway.supervisor.refusal = refusal
        for path in (CHAT, "/v1/messages"):
            answer = await gateway.post(path, BODY)
            assert (answer.status, answer.headers.get("retry-after")) == (status, retry)
            assert answer.error["message"] == refusal.message
            assert answer.error["code"] == refusal.code
            if isinstance(refusal, ModelLoading):
                assert answer.json["loading"] == loading


async def test_errors_of_the_messages_api_have_its_shape(engine: RawEngine) -> None:
    async with serving(engine, keys=KeyDigests.of(inference=["k"])) as gateway:
        cases = (
            (await gateway.post("/v1/messages", BODY), 401, "authentication_error"),
            (await gateway.post("/v1/messages", b"[]", "X-Api-Key: k"), 400, "invalid_request_error"),
            (await gateway.post("/v1/messages/count_tokens", b'{"model":"x"}', "X-Api-Key: k"), 404, "not_found_error"),
            (await gateway.post("/v1/messages", BODY, "X-Api-Key: k", "Content-Type: text/plain"), 415, "invalid_request_error"),
        )
        engine.replies(then_close=True)
        cases += ((await gateway.post("/v1/messages", BODY, "X-Api-Key: k"), 502, "api_error"),)
        for answer, status, kind in cases:
            assert (answer.status, answer.json["type"], answer.error["type"], answer.error["src"]) == (status, "error", kind, "sparkd")
            assert answer.json["request_id"] == answer.headers["x-request-id"]


async def test_all_bodies_together_are_bounded(engine: RawEngine) -> None:
    limits = ClientLimits(buffered_bytes=3_000_000)
    engine.script = until_gone
    part = b'{"model":"tiny","x":"' + b"y" * 2_000_000
    async with serving(engine, limits=limits) as gateway:
        first = await gateway.open()
        first.send(post(CHAT, part + b'"}')[:-10])
        await soon(lambda: gateway.edge._proxy._buffered_bytes > 1_900_000)
        second = await gateway.post(CHAT, part + b'"}')
        assert (second.status, second.headers["retry-after"]) == (503, "1")
        await first.close()
        await soon(lambda: gateway.edge._proxy._buffered_bytes == 0)
        engine.replies(JSON_ANSWER)
        assert (await gateway.post(CHAT, part + b'"}')).status == 200
        assert gateway.edge._proxy._buffered_bytes == 0


TOOLS = b'[{"type":"function","function":{"name":"f","parameters":{}}}]'


def with_tools(tools: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"tiny","messages":[],"tools":' + tools + more + b"}"


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
async def test_tools_without_a_parser_are_refused_with_the_key_that_helps(gateway: Running, path: str) -> None:
    gateway.supervisor.parsers = Parsers(nearest="llama3_json")
    custom = b'[{"name":"f","input_schema":{}}]'
    for tools in (TOOLS, custom) if path == "/v1/messages" else (TOOLS,):
        answer = await gateway.post(path, with_tools(tools))
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "no_tool_parser", "tools")
        assert "tool_call_parser: llama3_json" in answer.error["message"]
        assert "--" not in answer.error["message"]
    assert gateway.engine.heard == []


async def test_what_needs_no_parser_reaches_the_engine(gateway: Running) -> None:
    gateway.supervisor.parsers = Parsers(nearest="hermes")
    bodies = (
        (CHAT, with_tools(TOOLS, b',"tool_choice":"none"')),
        ("/v1/messages", with_tools(b'[{"name":"f","input_schema":{}}]', b',"tool_choice":{"type":"none"}')),
        ("/v1/responses", with_tools(b'[{"type":"web_search_preview"}]')),
        (CHAT, with_tools(b"[]")),
        (CHAT, with_tools(b"null")),
        (CHAT, with_tools(b'"odd"')),
        ("/tokenize", with_tools(TOOLS)),
    )
    for path, body in bodies:
        assert (await gateway.post(path, body)).status == 200
    assert not any(need and need.tools for need in gateway.supervisor.needs)
    for parsers in (Parsers("hermes"), None):
        gateway.supervisor.parsers = parsers
        assert (await gateway.post(CHAT, with_tools(TOOLS))).status == 200
    assert len(gateway.engine.heard) == len(bodies) + 2
    assert [need and need.tools for need in gateway.supervisor.needs[-2:]] == [True, True]
