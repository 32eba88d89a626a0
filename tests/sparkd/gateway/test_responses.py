"""What the gateway answers itself: the model list, probes, the admin API's door."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fastapi import FastAPI

from sparkd.gateway.limits import ClientLimits
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import Progress
from tests.sparkd.gateway.fakes import (
    RawEngine,
    chunked,
    request,
    serving,
    view,
)


async def test_the_model_list(engine: RawEngine) -> None:
    async with serving(engine) as gateway:
        progress = Progress(phase="loading", fraction=0.25, bytes_done=1, bytes_total=4)
        gateway.supervisor.models = {
            "tiny": view("tiny", aliases=("small",), metadata={"family": "x"}),
            "org/big-model:7b": view("org/big-model:7b", state=ModelState.LOADING, progress=progress, max_model_len=None),
            "hidden": view("hidden", unlisted=True),
        }
        listed = (await gateway.get("/v1/models")).json
        assert [entry["id"] for entry in listed["data"]] == ["tiny", "org/big-model:7b"]
        assert listed["object"] == "list"
        first, second = listed["data"]
        assert first["status"] == {"state": "READY", "want": "RUNNING", "in_flight": 0, "queued": 0}
        assert (first["object"], first["created"], first["owned_by"], first["max_model_len"]) == ("model", 0, "sparkd", 4096)
        assert first["metadata"] == {"family": "x"}
        assert second["status"]["progress"] == 0.25
        assert "eta_seconds" not in second["status"]
        gateway.edge.settings = replace(gateway.edge.settings, include_aliases_in_list=True)
        assert [entry["id"] for entry in (await gateway.get("/v1/models")).json["data"]] == ["tiny", "small", "org/big-model:7b"]
        for path in ("org/big-model:7b", "org%2Fbig-model%3A7b", "hidden", "small"):
            assert (await gateway.get(f"/v1/models/{path}")).status == 200, path
        missing = await gateway.get("/v1/models/nobody")
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")
        assert "hidden" not in missing.error["message"]


async def test_probes(engine: RawEngine) -> None:
    states = {"live": (True, {"tick_age_s": 0.1}), "ready": (False, {"draining": True})}
    async with serving(engine, live=lambda: states["live"], ready=lambda: states["ready"]) as gateway:
        for path in ("/livez", "/healthz", "/health", "/health/liveliness", "/health/liveness"):
            answer = await gateway.get(path)
            assert (answer.status, answer.json) == (200, {"status": "ok", "tick_age_s": 0.1})
        for path in ("/readyz", "/health/readiness"):
            answer = await gateway.get(path)
            assert (answer.status, answer.json) == (503, {"status": "unavailable", "draining": True})
        assert (await gateway.get("/")).json["name"] == "sparkd"


async def test_the_admin_api_gets_bounded_bodies(engine: RawEngine) -> None:
    async with serving(engine, limits=ClientLimits(admin_body_bytes=1000)) as gateway:
        answer = await gateway.post("/admin/v1/models", b"{}", "X-Request-Id: mine")
        assert (answer.status, answer.body, answer.headers["x-request-id"]) == (200, b"{}", "mine")
        assert (await gateway.post("/admin/v1/models", b"x" * 1001)).status == 413
        raw = request("POST", "/admin/v1/models", "X-Sparkd-Client: test", "Transfer-Encoding: chunked")
        assert (await gateway.ask(raw + chunked(b"x" * 600, b"y" * 600))).status == 413
        assert len(gateway.admin_calls) == 1


async def test_a_fault_of_ours_says_nothing_and_logs_no_traceback(engine: RawEngine, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> bytes:
        raise ValueError("canary")

    async with serving(engine, metrics_text=broken) as gateway:
        answer = await gateway.get("/metrics")
    assert (answer.status, answer.error["src"]) == (500, "sparkd")
    (record,) = [record for record in caplog.records if record.name == "sparkd.gateway"]
    assert "ValueError at gateway/" in record.getMessage(), "the innermost line that is ours"
    assert "canary" not in caplog.text + answer.body.decode()
    caplog.clear()


async def test_a_fault_of_the_admin_api_is_told_in_our_words(engine: RawEngine, caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()

    @app.get("/admin/v1/models")
    async def models() -> None:
        raise ValueError("canary")

    async with serving(engine, admin=app) as gateway:
        answer = await gateway.get("/admin/v1/models")
    assert (answer.status, answer.error["src"], answer.error["code"]) == (500, "sparkd", "internal_error")
    assert [record.name for record in caplog.records if record.levelname == "ERROR"] == ["sparkd.gateway"]
    assert "canary" not in caplog.text
    caplog.clear()


async def test_a_browser_is_sent_to_the_page_and_others_are_not(engine: RawEngine) -> None:
    browser = "Accept: text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    async with serving(engine) as gateway:
        for method in ("GET", "HEAD"):
            client = await gateway.open()
            client.send(request(method, "/", browser))
            sent = await client.answer(head_only=method == "HEAD")
            await client.close()
            assert (sent.status, sent.headers["location"], sent.headers["vary"]) == (303, "/ui/", "accept")
        assert (await gateway.get("/", "Accept: */*")).json["name"] == "sparkd"
        assert (await gateway.get("/", "Accept: application/json")).json["name"] == "sparkd"
        moved = await gateway.get("/ui")
        assert (moved.status, moved.headers["location"]) == (308, "/ui/")
        gateway.edge.settings = replace(gateway.edge.settings, web=False)
        assert (await gateway.get("/", browser)).json["name"] == "sparkd"


async def test_the_page_over_a_socket(engine: RawEngine) -> None:
    async with serving(engine) as gateway:
        index = await gateway.get("/ui/", "Accept-Encoding: gzip")
        assert (index.status, index.headers["cache-control"]) == (200, "no-cache")
        assert "x-request-id" in index.headers
        client = await gateway.open()  # one connection: what follows a 304 and a HEAD is read as it should be
        for method, header, status in (("HEAD", "", 200), ("GET", f"If-None-Match: {index.headers['etag']}", 304), ("GET", "", 200)):
            client.send(request(method, "/ui/", "Accept-Encoding: gzip", *([header] if header else [])))
            answer = await client.answer(head_only=method == "HEAD" or status == 304)
            assert (answer.status, answer.headers["etag"]) == (status, index.headers["etag"])
        await client.close()
        old = await gateway.get("/ui/0123456789abcdef/app/main.js")
        assert (old.status, old.error["code"]) == (404, "route_not_found")


async def test_without_the_key_there_is_no_page(engine: RawEngine) -> None:
    async with serving(engine, web=False) as gateway:
        for path in ("/ui", "/ui/", "/ui/0123456789abcdef/app/main.js"):
            answer = await gateway.get(path)
            assert answer.status == 404, path
            assert "/ui" not in answer.error["message"], path
