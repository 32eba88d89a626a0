"""vLLM's routes and what leads to a model: no model named, questions about an engine, paths that a model has not, paths that are none."""

from __future__ import annotations

import pytest

from sparkd.gateway.keys import KeyDigests
from sparkd.gateway.routes import EXACT, RouteKind, nearest
from sparkd.state.abilities import GENERATE, POOL, Abilities
from sparkd.state.model_state import ModelState
from tests.sparkd.gateway.fakes import RawEngine, Running, serving, view

CHAT = "/v1/chat/completions"
CLIENT = "X-Sparkd-Client: test"
INFERENCE, ADMIN = "X-Api-Key: inference", "X-Api-Key: admin"
FORM = b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nx\r\n--XX--\r\n'


async def test_a_request_without_a_model_gets_the_only_one(gateway: Running) -> None:
    for path, body, kind in ((CHAT, b"{}", "application/json"), ("/v1/audio/translations", FORM, "multipart/form-data; boundary=XX")):
        assert (await gateway.post(path, body, f"Content-Type: {kind}", CLIENT)).status == 200
        assert gateway.engine.heard[-1].body == body
    assert [name for name, _ in gateway.supervisor.leased] == ["tiny", "tiny"]
    gateway.supervisor.models["hidden"] = view("hidden", unlisted=True)
    assert (await gateway.post(CHAT, b'{"model":null}')).status == 200


async def test_a_request_without_a_model_gets_the_default(gateway: Running) -> None:
    gateway.supervisor.models |= {"other": view("other", default=True), "third": view("third")}
    assert (await gateway.post("/v1/messages", b"{}")).status == 200
    assert gateway.supervisor.leased == [("other", False)]


async def test_a_request_without_a_model_hears_which_there_are(gateway: Running) -> None:
    gateway.supervisor.models |= {"other": view("other"), "hidden": view("hidden", unlisted=True)}
    refusal = await gateway.post(CHAT, b"{}")
    assert (refusal.status, refusal.error["param"], refusal.error["code"]) == (400, "model", "bad_request")
    assert "other, tiny" in refusal.error["message"]
    assert "hidden" not in refusal.error["message"]
    gateway.supervisor.models = {}
    assert (await gateway.post(CHAT, b"{}")).status == 400


async def test_the_model_list_has_vllms_members(engine: RawEngine) -> None:
    async with serving(engine, keys=KeyDigests.of(inference=["inference"], admin=["admin"])) as gateway:
        gateway.supervisor.models = {
            "folder": view("folder", source="/models/Some-Model"),
            "hub": view("hub", source="owner/Some-Model", max_model_len=None),
        }
        for path in ("/v1/models", "/v1/models/"):
            folder, hub = (await gateway.get(path, INFERENCE)).json["data"]
            assert (folder["root"], folder["max_model_len"]) == ("Some-Model", 4096)
            assert (hub["root"], hub["max_model_len"]) == ("owner/Some-Model", None)
            assert (await gateway.get(path, ADMIN)).json["data"][0]["root"] == "/models/Some-Model"
        assert (await gateway.get("/v1/models/folder", INFERENCE)).json["root"] == "Some-Model"
        assert (await gateway.get("/v1/models/folder", ADMIN)).json["root"] == "/models/Some-Model"
    async with serving(engine) as gateway:  # without keys every client is an admin
        assert (await gateway.get("/v1/models")).json["data"][0]["root"] == "/models/tiny"


async def test_ping_is_a_probe(engine: RawEngine) -> None:
    async with serving(engine, keys=KeyDigests.of(inference=["inference"])) as gateway:
        assert (await gateway.get("/ping")).status == 200
        assert (await gateway.post("/ping", b"")).status == 200
    async with serving(engine, live=lambda: (False, {})) as gateway:
        assert (await gateway.get("/ping")).status == 503
    assert engine.heard == []


async def test_questions_about_an_engine_load_nothing(gateway: Running) -> None:
    paths = [path for path, route in EXACT.items() if route.kind is RouteKind.ENGINE]
    assert {"/version", "/load", "/tokenizer_info"} <= set(paths)
    for path in paths:
        assert (await gateway.get(path)).status == 200
        assert gateway.engine.heard[-1].head.startswith(f"GET {path} HTTP/1.1\r\n".encode())
    gateway.supervisor.models |= {"away": view("away", state=ModelState.STOPPED)}
    assert (await gateway.get("/version")).status == 200  # the only one that runs
    assert (await gateway.get("/version?model=small")).status == 200
    refusal = await gateway.get("/version?model=away")
    assert (refusal.status, refusal.error["code"]) == (503, "unavailable")
    assert (await gateway.get("/version?model=nobody")).status == 404
    gateway.supervisor.models |= {"other": view("other")}
    assert (await gateway.get("/load")).status == 400
    assert {name for name, _ in gateway.supervisor.leased} == {"tiny"}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/rerank", "/v2/embed", "/v1/audio/transcriptions"])
async def test_a_path_that_the_model_has_not_is_refused(gateway: Running, path: str) -> None:
    gateway.supervisor.abilities["tiny"] = Abilities(frozenset((GENERATE,)))
    form = "audio" in path
    headers = ["Content-Type: multipart/form-data; boundary=XX", CLIENT] if form else []
    refusal = await gateway.post(path, FORM if form else b'{"model":"tiny"}', *headers)
    assert (refusal.status, refusal.error["code"], refusal.error["type"]) == (404, "route_not_served", "invalid_request_error")
    assert refusal.error["param"] == "model"
    assert gateway.engine.heard == []


async def test_what_the_engine_told_counts_before_its_architecture(gateway: Running) -> None:
    gateway.supervisor.abilities["tiny"] = Abilities(frozenset((GENERATE,)), routes=frozenset(("/v1/embeddings", "/tokenize")))
    statuses = {path: (await gateway.post(path, b"{}")).status for path in ("/v1/embeddings", "/tokenize", CHAT, "/v1/responses")}
    assert statuses == {"/v1/embeddings": 200, "/tokenize": 200, CHAT: 404, "/v1/responses": 404}
    assert (await gateway.get("/v1/responses/resp_1")).status == 404
    gateway.supervisor.abilities["tiny"] = Abilities(frozenset((POOL,)))
    assert (await gateway.post("/tokenize", b"{}")).status == 200


async def test_what_vllm_has_disabled_it_says_itself(gateway: Running) -> None:
    """Its document leaves such routes out, and its answer names the flag."""
    gateway.supervisor.abilities["tiny"] = Abilities(routes=frozenset(("/v1/completions",)))
    gateway.engine.replies(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 4\r\n\r\nflag")
    answer = await gateway.post("/v1/chat/completions/render", b"{}")
    assert (answer.status, answer.body) == (403, b"flag")


async def test_a_response_is_kept_or_refused(gateway: Running) -> None:
    gateway.supervisor.models["tiny"] = view("tiny", stores_responses=False)
    refusal = await gateway.post("/v1/responses", b'{"model":"tiny","store":true}')
    assert (refusal.status, refusal.error["param"]) == (400, "store")
    assert "VLLM_ENABLE_RESPONSES_API_STORE" in refusal.error["message"]
    for body in (b'{"model":"tiny"}', b'{"model":"tiny","store":false}'):
        assert (await gateway.post("/v1/responses", body)).status == 200
    assert (await gateway.post(CHAT, b'{"model":"tiny","store":true}')).status == 200
    gateway.supervisor.models["tiny"] = view("tiny", stores_responses=True)
    assert (await gateway.post("/v1/responses", b'{"model":"tiny","store":true}')).status == 200


def test_the_nearest_path() -> None:
    for wrong, meant in {
        "/v1/chat/completion": CHAT,
        "/v1/chat/completions/": CHAT,
        "/chat/completions": CHAT,
        "/v1/Models": "/v1/models",
        "/v1/embedding": "/v1/embeddings",
        "/metric": "/metrics",
        "/qqq": None,
        "/" + "v1" * 5000: None,
    }.items():
        assert nearest(wrong) == meant, wrong


async def test_only_who_may_ask_hears_the_nearest_path(engine: RawEngine) -> None:
    async with serving(engine, keys=KeyDigests.of(inference=["inference"])) as gateway:
        assert CHAT in (await gateway.post("/v1/chat/completion", b"{}", INFERENCE)).error["message"]
        refusal = await gateway.post("/v1/chat/completion", b"{}")
        assert (refusal.status, refusal.error["code"]) == (404, "route_not_found")
        assert CHAT not in refusal.error["message"]


# --- web pages ---------------------------------------------------------------------------------------------------------------

PAGE = "https://chat.example"
ALLOW = "access-control-allow-origin"


async def test_no_page_is_let_in_by_default(engine: RawEngine) -> None:
    async with serving(engine, keys=KeyDigests.of(inference=["inference"])) as gateway:
        answer = await gateway.get("/v1/models", INFERENCE, f"Origin: {PAGE}")
        assert (answer.status, ALLOW in answer.headers) == (200, False)
        preflight = ("Access-Control-Request-Method: POST", f"Origin: {PAGE}")
        assert (await gateway.get(CHAT, *preflight, method="OPTIONS")).status == 405


@pytest.mark.parametrize("keys", [KeyDigests(), KeyDigests.of(inference=["inference"], admin=["admin"])], ids=["open", "keys"])
async def test_an_allowed_page_may_use_v1_and_nothing_else(engine: RawEngine, keys: KeyDigests) -> None:
    async with serving(engine, keys=keys, page_origins=frozenset((PAGE.encode(),))) as gateway:
        asks = (f"Origin: {PAGE}", "Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization, content-type")
        preflight = await gateway.get(CHAT, *asks, method="OPTIONS")
        assert (preflight.status, preflight.body, preflight.headers[ALLOW]) == (204, b"", PAGE)
        assert preflight.headers["access-control-allow-methods"] == "POST"
        assert preflight.headers["access-control-allow-headers"] == "authorization, content-type"
        assert preflight.headers["vary"] == "origin"
        answers = [
            await gateway.post(CHAT, b"{}", INFERENCE, f"Origin: {PAGE}"),
            await gateway.get("/v1/models", INFERENCE, f"Origin: {PAGE}"),
            await gateway.post(CHAT, b"[", INFERENCE, f"Origin: {PAGE}"),
        ]
        assert [answer.status for answer in answers] == [200, 200, 400]
        assert {answer.headers[ALLOW] for answer in answers} == {PAGE}
        for path in ("/admin/v1/models", "/metrics", "/", "/tokenize"):
            assert (await gateway.get(path, *asks, method="OPTIONS")).status in (403, 405), path
            assert ALLOW not in (await gateway.get(path, ADMIN, f"Origin: {PAGE}")).headers, path
        for other in ("https://evil.example", "null", PAGE + ".evil.example", "http://chat.example"):
            answer = await gateway.get("/v1/models", INFERENCE, f"Origin: {other}")
            assert (answer.status, ALLOW in answer.headers) == (403 if keys.open else 200, False), other
            assert (await gateway.get(CHAT, *asks[1:], f"Origin: {other}", method="OPTIONS")).status == 405
        if keys.open:
            assert (await gateway.get("/admin/v1/models", f"Origin: {PAGE}")).status == 403
        unknown = await gateway.get("/v1/nothing", INFERENCE, f"Origin: {PAGE}")
        assert (unknown.status, unknown.headers[ALLOW]) == (404, PAGE)  # else the page could not read why
        again = await gateway.post(CHAT, b"{}", INFERENCE)
        assert (again.status, ALLOW in again.headers) == (200, False)


async def test_answers_to_anthropics_clients_have_its_name_of_the_request_id(gateway: Running) -> None:
    for body, status in ((b'{"model":"tiny"}', 200), (b"[", 400)):
        answer = await gateway.post("/v1/messages", body, "X-Request-Id: mine")
        assert (answer.status, answer.headers["request-id"], answer.headers["x-request-id"]) == (status, "mine", "mine")
    assert "request-id" not in (await gateway.post(CHAT, b'{"model":"tiny"}')).headers


async def test_every_page(engine: RawEngine) -> None:
    async with serving(engine, keys=KeyDigests.of(inference=["inference"]), page_origins=frozenset((b"*",))) as gateway:
        answer = await gateway.get("/v1/models", INFERENCE, f"Origin: {PAGE}")
        assert (answer.status, answer.headers[ALLOW]) == (200, PAGE)
        refusal = await gateway.get("/v1/models", f"Origin: {PAGE}")
        assert (refusal.status, refusal.headers[ALLOW]) == (401, PAGE)  # else the page could not read why
