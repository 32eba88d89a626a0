"""The record of requests of a real daemon with the stub engine: tokens, cancels, and a marker that must be nowhere."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from sparkd.__main__ import exit_code
from tests.support.daemon_process import ROOT
from tests.support.stage import ADMIN_KEY, CANARY, KEY, USER, Stage, stored
from tests.support.stream import held
from tests.support.waiting import HUNG_S, until

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SAYS: dict[str, Any] = {
    "model": "quick", "max_tokens": 100, "messages": [{"role": "user", "content": CANARY}], "user": CANARY, "metadata": {CANARY: CANARY},
    "stop": [CANARY], CANARY: {CANARY: [CANARY]},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _models(stage: Stage) -> Iterator[None]:
    late = {"SPARKD_STUB_LOAD_GATE": str(stage.gate("late"))}
    with stage.serving({"quick": stage.entry(aliases=["gpt-4o"]), "late": stage.entry(env=late)}):
        stage.ready("quick")
        yield


@pytest.fixture
def cli(stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setenv("SPARKD_URL", stage.url)
    monkeypatch.setenv("SPARKD_ADMIN_KEY", ADMIN_KEY)

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return (exit_code(list(argv)), *capsys.readouterr())

    return run


def ask(stage: Stage, path: str, request_id: str, **changes: Any) -> httpx.Response:
    headers = USER | {"x-request-id": request_id, f"x-{CANARY}": CANARY}
    return httpx.post(f"{stage.url}{path}?{CANARY}={CANARY}", json=SAYS | changes, headers=headers, timeout=HUNG_S, trust_env=False)


def in_flight(stage: Stage, request_id: str) -> dict[str, Any]:
    """Its row; empty where it is not in flight."""
    rows = stage.get("/admin/v1/requests?state=in_flight")["in_flight"]
    return next((dict(row) for row in rows if row["request_id"] == request_id), {})


def finished(stage: Stage, request_id: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        rows = stage.get("/admin/v1/requests?state=finished&limit=1000")["finished"]
        return next((row for row in rows if row["request_id"] == request_id), None)

    return until(look, f"{request_id} finished") or {}


TOKENS_OF: dict[str, tuple[str, dict[str, Any], bool, int | None]] = {
    "with-usage": (CHAT, {"stream": True, "stream_options": {"include_usage": True}}, True, 7),
    "without-usage": (CHAT, {"stream": True}, True, None),
    "whole": (CHAT, {"model": "gpt-4o"}, False, 7),
    "completion": ("/v1/completions", {"prompt": CANARY, "stream": True, "stream_options": {"include_usage": True}}, True, 7),
    "message": (MESSAGES, {}, False, 7),
    "message-stream": (MESSAGES, {"stream": True}, True, 7),
    "response": ("/v1/responses", {"input": CANARY}, False, 7),
    "response-stream": ("/v1/responses", {"input": CANARY, "stream": True}, True, 7),
    "embedding": ("/v1/embeddings", {"input": [CANARY]}, False, 0),
    "rerank": ("/v1/rerank", {"query": CANARY, "documents": [CANARY]}, False, None),
}


@pytest.mark.parametrize("name", TOKENS_OF)
def test_tokens(stage: Stage, name: str) -> None:
    path, changes, streamed, completion_tokens = TOKENS_OF[name]
    answer = ask(stage, path, name, **changes)
    assert answer.status_code == 200, answer.text
    row = finished(stage, name)
    assert (row["model"], row["route"], row["key"], row["status"], row["code"]) == ("quick", path, "laptop", 200, None)
    assert (row["streamed"], row["completion_tokens"], row["bytes_out"]) == (streamed, completion_tokens, len(answer.content))
    assert (row["prompt_tokens"] is None) == (name == "without-usage")
    assert (row["ttft_s"] is None) == (not streamed)


def test_a_client_that_leaves(stage: Stage) -> None:
    with stage.client_of("quick", "left", **held(stage.gate("never"))):
        until(lambda: in_flight(stage, "left"), "it waits for its answer")
    row = finished(stage, "left")
    assert (row["status"], row["code"], row["phase"]) == (499, None, "done")


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_cancel_in_a_stream(stage: Stage, cli: Any, path: str) -> None:
    name = f"stream{path.replace('/', '-')}"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, stage, path, name, stream=True, **held(stage.gate("never")))
        until(lambda: in_flight(stage, name).get("phase") == "streaming", "it streams")
        code, out, err = cli("requests", "cancel", name)
        assert (code, err) == (0, "") and name in out
        *_, last = answer.result().text.strip().split("\n\n")
    assert last.startswith("event: error\n") == (path == MESSAGES)
    assert json.loads(last.partition("data: ")[2])["error"]["code"] == "request_cancelled"
    row = finished(stage, name)
    assert (row["status"], row["code"]) == (200, "request_cancelled")
    until(lambda: stage.metric("vllm:num_requests_running", 'model="quick"') == 0, "the engine has ended it")
    assert cli("requests", "cancel", name)[0] == 5


def test_a_cancel_in_the_queue(stage: Stage) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, stage, CHAT, "queued", model="late")
        row = until(lambda: in_flight(stage, "queued"), "it waits")
        assert (row["phase"], row["model"], row["key"], row["number"]) == ("queued", "late", "laptop", None)
        assert stage.client.delete("/admin/v1/requests/queued").status_code == 202
        refused = answer.result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "request_cancelled")
    assert finished(stage, "queued")["queued_s"] is None
    stage.stopped("late")


def test_the_command_line(stage: Stage, cli: Any) -> None:
    for number in range(3):
        ask(stage, CHAT, f"shown-{number}")
    ask(stage, CHAT, "failed", model=CANARY)
    finished(stage, "failed")
    code, out, err = cli("requests", "-n", "2")
    assert (code, err) == (0, "")
    assert "laptop" in out and "404 model_not_found" in out and len(out.splitlines()) == 5
    listing = json.loads(cli("requests", "--json", "--failed", "-n", "1")[1])
    assert [(row["request_id"], row["model"]) for row in listing["finished"]] == [("failed", "unknown")]
    rows = list(csv.DictReader(io.StringIO(cli("requests", "--csv", "--model", "quick", "-n", "3")[1])))
    assert [row["request_id"] for row in rows] == ["shown-2", "shown-1", "shown-0"]
    assert cli("requests", "--csv", "--json")[0] == 2
    assert cli("requests", "--url", "http://127.0.0.1:1", "cancel", "x")[0] == 7


@pytest.mark.rest
def test_following(stage: Stage) -> None:
    argv = [sys.executable, "-m", "sparkd", "requests", "--follow", "-n", "1"]
    environ = os.environ | {"SPARKD_URL": stage.url, "SPARKD_ADMIN_KEY": ADMIN_KEY}
    lines: list[str] = []
    with subprocess.Popen(argv, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        reader = threading.Thread(target=lambda: lines.extend(iter(following.stdout.readline, "")))  # type: ignore[union-attr]
        reader.start()
        until(lambda: len(lines) == 1, "the last one is shown")
        for number in range(3):
            ask(stage, MESSAGES, f"followed-{number}")
        until(lambda: len(lines) == 4, f"three more: {lines}")
        following.terminate()
        reader.join()
    assert all(re.search(r"quick  laptop  /v1/messages  200  [0-9.]+ s, ", line) for line in lines[1:])


def test_a_record_that_is_turned_off(stage: Stage) -> None:
    given = stage.given
    try:
        assert stage.reload(given | {"request_log": False})["changed"] == ["request_log"]
        ask(stage, CHAT, "off")
    finally:
        stage.reload(given)
    ask(stage, CHAT, "on")
    finished(stage, "on")
    until(lambda: "on" in stored(stage), "it is on disk")
    assert "off" not in stored(stage)


def test_the_marker_is_nowhere(stage: Stage) -> None:
    """It was in every part of each body, in the query, in a header and in the keys."""
    for name, (path, changes, _, _) in TOKENS_OF.items():
        ask(stage, path, f"marked-{name}", **changes)
    assert ask(stage, CHAT, "marked-model", model=CANARY).status_code == 404
    assert ask(stage, CHAT, "marked-status", stub={"status": 500}).status_code == 500
    assert stage.client.post(CHAT, content=f'{{"{CANARY}'.encode(), headers={"content-type": "application/json"}).status_code == 400
    # The gateway may close a connection whose request it refused by its head.
    refused = httpx.post(f"{stage.url}{CHAT}", json=SAYS, headers={"authorization": f"Bearer {CANARY}"}, trust_env=False)
    assert refused.status_code == 401
    assert stage.client.get(f"/nothing?key={CANARY}").status_code == 404
    until(lambda: "marked-status" in stored(stage), "it is on disk")

    texts = [path.read_bytes() for folder in (stage.state_dir, stage.runtime_dir) for path in folder.rglob("*") if path.is_file()]
    texts.append(stage.output.read_bytes())
    document = stage.client.get("/admin/v1/openapi.json").json()
    for path in (path for path, item in document["paths"].items() if "get" in item and "{" not in path):
        if path != "/admin/v1/live":  # it does not end
            texts.append(stage.client.get(path).content)
    texts += [stage.client.get("/admin/v1/requests", headers={"accept": "text/csv"}).content, stage.client.get("/metrics").content]
    texts += [stage.client.get(f"/admin/v1/models/quick{path}").content for path in ("", "/log")]
    assert b"laptop" in b"".join(texts)
    digests = [hashlib.sha256(key.encode()) for key in (KEY, ADMIN_KEY)]
    secrets = [CANARY.encode(), *(digest.digest() for digest in digests), *(digest.hexdigest().encode() for digest in digests)]
    assert not any(secret in text for text in texts for secret in secrets)
