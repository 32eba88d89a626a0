"""The record of requests of a real daemon with the stub engine: tokens, cancels, kill -9, and a marker that must be nowhere."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from sparkd.__main__ import exit_code
from tests.support.daemon_process import ROOT, DaemonProcess
from tests.support.waiting import until

CANARY = "canary-7f3a91"
KEY, ADMIN_KEY = f"{CANARY}-key-of-a-laptop", f"{CANARY}-key-of-the-boss"
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SAYS: dict[str, Any] = {
    "model": "quick", "max_tokens": 100, "messages": [{"role": "user", "content": CANARY}], "user": CANARY, "metadata": {CANARY: CANARY},
    "stop": [CANARY], CANARY: {CANARY: [CANARY]},
}  # fmt: skip
# A stream of 10 s.
SLOW = {"stream": True, "stub": {"tokens": 200, "chunk_interval_s": 0.05}}


class Recorded(DaemonProcess):
    """A daemon with keys, and a client for each key."""

    def __init__(self, folder: Path) -> None:
        model = {"model": str(folder / "model"), "memory_gib": 1}
        (folder / "model").mkdir()
        self.settings: dict[str, Any] = {
            "keys": {"inference": [{"laptop": KEY}], "admin": [f"boss: {ADMIN_KEY}"]},
            "engine": {"entrypoint": "workers.stub", "stop_timeout_s": 2},
            "models": {
                "quick": model | {"preload": True, "aliases": ["gpt-4o"]},
                "late": model | {"env": {"SPARKD_STUB_START_DELAY_S": "60"}},
            },
        }
        super().__init__(folder, self.settings)
        self.config.chmod(0o600)
        self.client.headers["authorization"] = f"Bearer {ADMIN_KEY}"

    def ask(self, path: str, request_id: str, **changes: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": request_id, f"x-{CANARY}": CANARY}
        url = f"{self.url}{path}?{CANARY}={CANARY}"
        return httpx.post(url, json=SAYS | changes, headers=headers, timeout=60, trust_env=False)

    def in_flight(self, request_id: str) -> dict[str, Any] | None:
        rows = self.get("/admin/v1/requests?state=in_flight")["in_flight"]
        return next((row for row in rows if row["request_id"] == request_id), None)

    def finished(self, request_id: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            rows = self.get("/admin/v1/requests?state=finished&limit=1000")["finished"]
            return next((row for row in rows if row["request_id"] == request_id), None)

        return until(look, f"{request_id} finished") or {}

    def stored(self) -> list[str]:
        """Ids of the requests that are on disk."""
        with closing(sqlite3.connect(f"file:{self.state_dir / 'requests.db'}?mode=ro", uri=True)) as db:
            return [row[0] for row in db.execute("SELECT request_id FROM requests ORDER BY number")]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    made = Recorded(tmp_path_factory.mktemp("recorded"))
    made.start()
    try:
        made.settled()
        made.wait_for("quick", "READY")
        yield made
    finally:
        made.gone()


@pytest.fixture
def cli(daemon: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setenv("SPARKD_URL", daemon.url)
    monkeypatch.setenv("SPARKD_ADMIN_KEY", ADMIN_KEY)

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return (exit_code(list(argv)), *capsys.readouterr())

    return run


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
def test_tokens(daemon: Recorded, name: str) -> None:
    path, changes, streamed, completion_tokens = TOKENS_OF[name]
    answer = daemon.ask(path, name, **changes)
    assert answer.status_code == 200, answer.text
    row = daemon.finished(name)
    assert (row["model"], row["route"], row["key"], row["status"], row["code"]) == ("quick", path, "laptop", 200, None)
    assert (row["streamed"], row["completion_tokens"], row["bytes_out"]) == (streamed, completion_tokens, len(answer.content))
    assert (row["prompt_tokens"] is None) == (name == "without-usage")
    assert (row["ttft_s"] is None) == (not streamed)


def test_a_client_that_leaves(daemon: Recorded) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{daemon.url}{CHAT}",
            json=SAYS | {"stub": {"tokens": 3, "first_delay_s": 30}},
            headers={"x-api-key": KEY, "x-request-id": "left"},
            timeout=1.0,
            trust_env=False,
        )
    row = daemon.finished("left")
    assert (row["status"], row["code"], row["phase"]) == (499, None, "done")


def asked(daemon: Recorded, path: str, request_id: str, **changes: Any) -> tuple[ThreadPoolExecutor, Future[httpx.Response]]:
    pool = ThreadPoolExecutor(1)
    return pool, pool.submit(daemon.ask, path, request_id, **changes)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_cancel_in_a_stream(daemon: Recorded, cli: Any, path: str) -> None:
    name = f"stream{path.replace('/', '-')}"
    pool, answer = asked(daemon, path, name, **SLOW)
    until(lambda: (daemon.in_flight(name) or {}).get("phase") == "streaming", "it streams")
    code, out, err = cli("requests", "cancel", name)
    assert (code, err) == (0, "") and name in out
    with pool:
        *_, last = answer.result(20).text.strip().split("\n\n")
    assert last.startswith("event: error\n") == (path == MESSAGES)
    assert json.loads(last.partition("data: ")[2])["error"]["code"] == "request_cancelled"
    row = daemon.finished(name)
    assert (row["status"], row["code"]) == (200, "request_cancelled")
    assert 0 < row["seconds"] < 10
    until(lambda: daemon.metric("vllm:num_requests_running") == 0, "the engine has ended it")
    assert cli("requests", "cancel", name)[0] == 5


def test_a_cancel_in_the_queue(daemon: Recorded) -> None:
    pool, answer = asked(daemon, CHAT, "queued", model="late")
    row = until(lambda: daemon.in_flight("queued"), "it waits") or {}
    assert (row["phase"], row["model"], row["key"], row["number"]) == ("queued", "late", "laptop", None)
    assert daemon.client.delete("/admin/v1/requests/queued").status_code == 202
    with pool:
        refused = answer.result(20)
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "request_cancelled")
    assert daemon.finished("queued")["queued_s"] is None
    daemon.unload("late")


def test_the_command_line(daemon: Recorded, cli: Any) -> None:
    for number in range(3):
        daemon.ask(CHAT, f"shown-{number}")
    daemon.ask(CHAT, "failed", model=CANARY)
    daemon.finished("failed")
    code, out, err = cli("requests", "-n", "2")
    assert (code, err) == (0, "")
    assert "laptop" in out and "404 model_not_found" in out and len(out.splitlines()) == 5
    listing = json.loads(cli("requests", "--json", "--failed", "-n", "1")[1])
    assert [(row["request_id"], row["model"]) for row in listing["finished"]] == [("failed", "unknown")]
    rows = list(csv.DictReader(io.StringIO(cli("requests", "--csv", "--model", "quick", "-n", "3")[1])))
    assert [row["request_id"] for row in rows] == ["shown-2", "shown-1", "shown-0"]
    assert cli("requests", "--csv", "--json")[0] == 2
    assert cli("requests", "--url", "http://127.0.0.1:1", "cancel", "x")[0] == 7


def test_following(daemon: Recorded) -> None:
    argv = [sys.executable, "-m", "sparkd", "requests", "--follow", "-n", "1"]
    environ = os.environ | {"SPARKD_URL": daemon.url, "SPARKD_ADMIN_KEY": ADMIN_KEY}
    lines: list[str] = []
    with subprocess.Popen(argv, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        reader = threading.Thread(target=lambda: lines.extend(iter(following.stdout.readline, "")))  # type: ignore[union-attr]
        reader.start()
        until(lambda: len(lines) == 1, "the last one is shown")
        for number in range(3):
            daemon.ask(MESSAGES, f"followed-{number}")
        until(lambda: len(lines) == 4, f"three more: {lines}")
        following.terminate()
        reader.join(20)
    assert all(re.search(r"quick  laptop  /v1/messages  200  [0-9.]+ s, ", line) for line in lines[1:])


def test_a_killed_daemon_comes_back_with_its_record(daemon: Recorded) -> None:
    daemon.ask(CHAT, "before-the-kill")
    last = daemon.finished("before-the-kill")
    until(lambda: "before-the-kill" in daemon.stored(), "it is on disk")
    pool, lost = asked(daemon, CHAT, "lost", **SLOW)
    until(lambda: daemon.in_flight("lost"), "it streams")
    daemon.kill()
    with pool:
        assert isinstance(lost.exception(20), httpx.TransportError)
    daemon.start()
    daemon.settled()
    daemon.wait_for("quick", "READY")
    assert daemon.finished("before-the-kill") == last
    daemon.ask(CHAT, "after-the-kill")
    assert daemon.finished("after-the-kill")["number"] > last["number"]
    rows = daemon.get("/admin/v1/requests?limit=1000")
    assert "lost" not in [row["request_id"] for row in (*rows["finished"], *rows["in_flight"])]


def test_a_record_that_is_turned_off(daemon: Recorded) -> None:
    try:
        daemon.configure(daemon.settings | {"request_log": False})
        assert daemon.client.post("/admin/v1/reload").json()["changed"] == ["request_log"]
        daemon.ask(CHAT, "off")
    finally:
        daemon.configure(daemon.settings)
        daemon.client.post("/admin/v1/reload").raise_for_status()
    daemon.ask(CHAT, "on")
    daemon.finished("on")
    until(lambda: "on" in daemon.stored(), "it is on disk")
    assert "off" not in daemon.stored()


def test_the_marker_is_nowhere(daemon: Recorded) -> None:
    """It was in every part of each body, in the query, in a header and in the keys."""
    for name, (path, changes, _, _) in TOKENS_OF.items():
        daemon.ask(path, f"marked-{name}", **changes)
    assert daemon.ask(CHAT, "marked-model", model=CANARY).status_code == 404
    assert daemon.ask(CHAT, "marked-status", stub={"status": 500}).status_code == 500
    assert daemon.client.post(CHAT, content=f'{{"{CANARY}'.encode(), headers={"content-type": "application/json"}).status_code == 400
    assert daemon.client.post(CHAT, json=SAYS, headers={"authorization": f"Bearer {CANARY}"}).status_code == 401
    until(lambda: "marked-status" in daemon.stored(), "it is on disk")

    texts = [path.read_bytes() for folder in (daemon.state_dir, daemon.runtime_dir) for path in folder.rglob("*") if path.is_file()]
    texts.append(daemon.output.read_bytes())
    document = daemon.client.get("/admin/v1/openapi.json").json()
    for path in (path for path, item in document["paths"].items() if "get" in item and "{" not in path):
        if path != "/admin/v1/live":  # it does not end
            texts.append(daemon.client.get(path).content)
    texts += [daemon.client.get("/admin/v1/requests", headers={"accept": "text/csv"}).content, daemon.client.get("/metrics").content]
    texts += [daemon.client.get(f"/admin/v1/models/quick{path}").content for path in ("", "/log")]
    assert b"laptop" in b"".join(texts)
    digests = [hashlib.sha256(key.encode()) for key in (KEY, ADMIN_KEY)]
    secrets = [CANARY.encode(), *(digest.digest() for digest in digests), *(digest.hexdigest().encode() for digest in digests)]
    assert not any(secret in text for text in texts for secret in secrets)
