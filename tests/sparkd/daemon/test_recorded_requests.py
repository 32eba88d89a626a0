"""The record of requests of a real daemon with the stub engine: tokens, the command line, and a marker that must be nowhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sparkd.__main__ import exit_code
from tests.support.stage import ADMIN_KEY, CANARY, KEY, USER, Stage, stored
from tests.support.waiting import HUNG_S, until

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SAYS: dict[str, Any] = {
    "model": "quick", "max_tokens": 100, "messages": [{"role": "user", "content": CANARY}], "user": CANARY, "metadata": {CANARY: CANARY},
    "stop": [CANARY], CANARY: {CANARY: [CANARY]},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _models(stage: Stage) -> Iterator[None]:
    with stage.serving({"quick": stage.entry(aliases=["gpt-4o"])}):
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


# What each route tells of its tokens is tests/sparkd/gateway/test_usage.py.
@pytest.mark.parametrize("name", ["with-usage", "whole", "message-stream"])
def test_tokens(stage: Stage, name: str) -> None:
    path, changes, streamed, completion_tokens = TOKENS_OF[name]
    answer = ask(stage, path, name, **changes)
    assert answer.status_code == 200, answer.text
    row = finished(stage, name)
    assert (row["model"], row["route"], row["key"], row["status"], row["code"]) == ("quick", path, "laptop", 200, None)
    assert (row["streamed"], row["completion_tokens"], row["bytes_out"]) == (streamed, completion_tokens, len(answer.content))
    assert row["prompt_tokens"] is not None
    assert (row["ttft_s"] is None) == (not streamed)


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
    listing = json.loads(cli("requests", "--json", "--model", "quick", "-n", "3")[1])
    assert [row["request_id"] for row in listing["finished"]] == ["shown-2", "shown-1", "shown-0"]
    assert cli("requests", "cancel", "shown-0")[0] == 5
    assert cli("requests", "cancel", "x", "--url", "http://127.0.0.1:1")[0] == 7


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
    texts.append(stage.client.get("/metrics").content)
    texts += [stage.client.get(f"/admin/v1/models/quick{path}").content for path in ("", "/log")]
    assert b"laptop" in b"".join(texts)
    digests = [hashlib.sha256(key.encode()) for key in (KEY, ADMIN_KEY)]
    secrets = [CANARY.encode(), *(digest.digest() for digest in digests), *(digest.hexdigest().encode() for digest in digests)]
    assert not any(secret in text for text in texts for secret in secrets)
