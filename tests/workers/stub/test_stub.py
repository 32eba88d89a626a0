"""Tests of the stub engine, most of them on the real process. Never tests the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.facts import facts
from tests.support.waiting import HUNG_S, eventually, until
from workers.rank.kv_report import read_kv
from workers.rank.load_report import read_load
from workers.stub.__main__ import CommandLine, Life, StubEngine, start_stub
from workers.stub.answers import STAMP, text
from workers.stub.faults import FAULTS, broken_answer
from workers.stub.load import UNITS

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30
CHAT = {"model": "a", "messages": [{"role": "user", "content": "What is the capital of France?"}]}


class Process:
    """One `python -m workers.stub` in a session of its own, its socket in a folder short enough for sun_path."""

    def __init__(self, folder: Path, environ: dict[str, str], *flags: str) -> None:
        self.uds = folder / "s"
        self.log = folder / "log"
        self.record = folder / "record"
        kept = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "SPARKD_STUB_RECORD": str(self.record)}
        argv = [sys.executable, "-m", "workers.stub", "serve", "/models/x", "--uds", str(self.uds), "--served-model-name", "a", "b"]
        with self.log.open("wb") as log:
            self.child = subprocess.Popen([*argv, *flags], env=kept | environ, stdout=log, stderr=log, cwd=folder, start_new_session=True)

    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.HTTPTransport(uds=str(self.uds)), base_url="http://stub", timeout=HUNG_S)

    def wait_ready(self) -> None:
        until(lambda: self.child.poll() is not None or self._listens())
        assert self.child.poll() is None, self.log.read_text()

    def wait_log(self, words: str) -> None:
        until(lambda: words in self.log.read_text())

    def wait_exit(self) -> int:
        return self.child.wait(HUNG_S)

    def group(self) -> set[int]:
        """Live processes of the group, zombies not counted."""
        return {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._belongs(pid)}

    def _belongs(self, pid: int) -> bool:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return int(fields[2]) == self.child.pid and fields[0] != "Z"

    def _listens(self) -> bool:
        # Not by httpx: httpcore 1.0 leaks the socket of a refused Unix connection.
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.uds))
            except OSError:
                return False
        return True

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait(HUNG_S)


@pytest.fixture
def spawn() -> Iterator[Any]:
    started: list[Process] = []
    with tempfile.TemporaryDirectory(prefix="stub") as base:

        def start(*flags: str, **behaviour: object) -> Process:
            folder = Path(base, str(len(started)))
            folder.mkdir()
            environ = {name if name.isupper() else f"SPARKD_STUB_{name.upper()}": str(value) for name, value in behaviour.items()}
            started.append(Process(folder, environ, *flags))
            return started[-1]

        yield start
        for process in started:
            process.end()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["serve", "/m"], CommandLine("/m", ("/m",), None, "0.0.0.0", 8000, False)),
        (["--model", "/m", "--uds", "/s"], CommandLine("/m", ("/m",), "/s", "0.0.0.0", 8000, False)),
        (["--enforce-eager", "--model=/m", "--port=9", "--host", "::1"], CommandLine("/m", ("/m",), None, "::1", 9, False)),
        (
            ["serve", "/m", "--served_model_name", "a", "b", "-tp", "2", "--seed", "-1", "--headless"],
            CommandLine("/m", ("a", "b"), None, "0.0.0.0", 8000, True),
        ),
    ],
)
def test_takes_vllm_command_line(argv: list[str], expected: CommandLine) -> None:
    assert CommandLine.parse(argv) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {"SPARKD_STUB_TOKEN": "3"},
        {"SPARKD_STUB_TOKENS": "three"},
        {"SPARKD_STUB_EXIT_AT": "noon"},
        {"SPARKD_STUB_HANG_AT": "noon"},
        {"SPARKD_STUB_MALFORMED": "noise"},
    ],
)
def test_refuses_a_behaviour_it_does_not_know(environ: dict[str, str]) -> None:
    with pytest.raises(SystemExit, match="stub: "):
        Life.read(environ)


def test_starts_like_vllm_and_ends_on_sigterm(spawn: Any) -> None:
    process = spawn("--enforce-eager", "--max-model-len", "2048", start_delay_s=1, tokens=3)
    process.wait_log("1/2 [")
    with socket.socket(socket.AF_UNIX) as early, pytest.raises(ConnectionRefusedError):
        early.connect(str(process.uds))
    process.wait_ready()
    log = process.log.read_text()
    lines = ["Loading safetensors checkpoint shards:  50% Completed | 1/2 [", "Loading weights took ", "Model loading took "]
    lines += ["GPU KV cache size: 524,288 tokens, Maximum concurrency for ", "init engine (profile, ", "Application startup complete."]
    for line in lines:
        assert line in log
    with process.client() as client:
        models = client.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["a", "b"]
    process.child.terminate()
    assert process.wait_exit() == 0


def test_tells_how_far_its_loader_is(spawn: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.load"
    process = spawn("--model-loader-extra-config", json.dumps({"progress": str(path)}), start_delay_s=2, load_bytes=10**9)
    until(lambda: 0 < read_load(path, time.time()).get("bytes_done", 0) < 10**9)
    process.wait_ready()
    done = read_load(path, time.time())

    assert (done["bytes_done"], done["units_done"], done["fraction"], done["failure"]) == (10**9, UNITS, 1.0, None)


def test_says_why_its_load_failed(spawn: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.load"
    process = spawn("--model-loader-extra-config", json.dumps({"progress": str(path)}), exit_at="load", load_bytes=1)

    assert process.wait_exit() == 1
    assert "cut off" in read_load(path, time.time())["failure"]


@pytest.mark.parametrize("text", ["{", "[]", "7"])
def test_refuses_loader_settings_that_are_none(spawn: Any, text: str) -> None:
    process = spawn("--model-loader-extra-config", text)

    assert process.wait_exit() == 1
    assert "no JSON object" in process.log.read_text()


def sized(spawn: Any, folder: Path, *flags: str, **asked: Any) -> Any:
    told = {"report": str(folder / "m.kv"), "profiles": str(folder / "profiles")} | asked
    return spawn("--worker-cls", "workers.kv.SparkCPUWorker", *flags, SPARKD_KV=json.dumps(told), room_bytes=8 * GIB)


def test_sizes_a_cache_as_the_worker_does_and_remembers(spawn: Any, tmp_path: Path) -> None:
    process = sized(spawn, tmp_path, "--max-model-len", "2048", at_most_bytes=GIB)
    process.wait_ready()
    first = read_kv(tmp_path / "m.kv")
    sized(spawn, tmp_path, "--max-model-len", "2048").wait_ready()
    second = read_kv(tmp_path / "m.kv")

    assert (first["phase"], first["source"], first["pool_bytes"], first["sequences"]) == ("ready", "rehearsal", GIB, 256.0)
    assert "GPU KV cache size: 524,288 tokens, Maximum concurrency for 2,048 tokens per request: 256.00x" in process.log.read_text()
    assert (second["source"], second["error_bytes"]) == ("profile", 0)
    assert 6.5 * GIB < second["pool_bytes"] < 7 * GIB, "all that is left, less the margin"


def test_refuses_a_cache_that_does_not_fit(spawn: Any, tmp_path: Path) -> None:
    process = sized(spawn, tmp_path, bytes=9 * GIB)

    assert process.wait_exit() == 1
    refused = read_kv(tmp_path / "m.kv")
    assert (refused["phase"], facts(refused["why"]).split()[0]) == ("refused", "9.00")
    assert f"ValueError: {refused['why']}" in process.log.read_text()


def test_refuses_what_its_worker_could_not_read(spawn: Any) -> None:
    process = spawn("--worker-cls", "workers.kv.SparkWorker", SPARKD_KV="{")

    assert process.wait_exit() == 1
    assert "SPARKD_KV " in process.log.read_text()


def test_a_rehearsal_can_be_cut_short(spawn: Any, tmp_path: Path) -> None:
    told = json.dumps({"report": str(tmp_path / "m.kv")})
    process = spawn("--worker-cls", "workers.kv.SparkWorker", SPARKD_KV=told, start_delay_s=4)
    until(lambda: read_kv(tmp_path / "m.kv").get("phase") == "rehearsing")
    process.child.terminate()

    assert process.wait_exit() == 0


def test_records_how_it_was_started(spawn: Any) -> None:
    process = spawn("--seed", "7", CANARY="$(reboot)")
    process.wait_ready()
    record = json.loads(process.record.read_text())
    assert record["argv"][-2:] == ["--seed", "7"]
    assert record["environ"]["CANARY"] == "$(reboot)"
    assert record["pid"] == process.child.pid
    assert stat.S_IMODE(process.record.stat().st_mode) == 0o600


@pytest.mark.parametrize("exit_code", [0, 3])
@pytest.mark.parametrize("exit_at", ["start", "load", "ready"])
def test_dies_where_it_is_told(spawn: Any, exit_at: str, exit_code: int) -> None:
    assert spawn(exit_at=exit_at, exit_code=exit_code).wait_exit() == exit_code


def test_dies_after_requests(spawn: Any) -> None:
    process = spawn(exit_at="after_2_requests", exit_code=0)
    process.wait_ready()
    with process.client() as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert process.child.poll() is None
        with contextlib.suppress(httpx.TransportError):
            client.post("/v1/chat/completions", json=CHAT)
    assert process.wait_exit() == 0


def test_hangs_before_it_listens(spawn: Any) -> None:
    process = spawn(hang_at="start")
    process.wait_log("1/2 [")
    with socket.socket(socket.AF_UNIX) as early, pytest.raises(ConnectionRefusedError):
        early.connect(str(process.uds))
    process.child.terminate()
    assert process.wait_exit() == 0


def test_a_rank_other_than_zero_serves_nothing(spawn: Any) -> None:
    process = spawn("--headless", "--node-rank", "1")
    process.wait_log("init engine")
    assert not process.uds.exists()
    process.child.terminate()
    assert process.wait_exit() == 0


def test_leaves_a_stubborn_child_behind(spawn: Any) -> None:
    process = spawn(children=3)
    process.wait_ready()
    children = json.loads(process.record.read_text())["children"]
    assert process.group() == {process.child.pid, *children}
    process.child.terminate()
    process.wait_exit()
    until(lambda: len(process.group()) == 1)
    assert process.group() == {children[0]}


def test_ignores_sigterm(spawn: Any) -> None:
    process = spawn(ignore_sigterm=1)
    process.wait_ready()
    process.child.terminate()
    with process.client() as client:
        assert client.get("/health").status_code == 200
    process.child.kill()
    assert process.wait_exit() == -signal.SIGKILL


def test_wants_the_key_on_every_path(spawn: Any, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    process = spawn(SPARKD_ENGINE_KEY_FILE=str(tmp_path / "key"))
    process.wait_ready()
    with process.client() as client:
        refused = client.get("/v1/models")
        assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        assert client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        assert client.get("/version").status_code == 401
    assert "secret" not in process.log.read_text()


@contextlib.asynccontextmanager
async def stub(**behaviour: Any) -> Any:
    async with await start_stub(models=("a",), **behaviour) as engine, httpx.AsyncClient(base_url=engine.url) as client:
        yield engine, client


@pytest.mark.parametrize(
    ("path", "body", "member"),
    [
        ("/v1/chat/completions", {}, "choices"),
        ("/v1/completions", {"prompt": "x"}, "choices"),
        ("/v1/embeddings", {"input": ["x", "y"]}, "data"),
        ("/v1/responses", {"input": "x"}, "output"),
        ("/v1/messages", {"max_tokens": 9}, "content"),
        ("/v1/messages/count_tokens", {}, "input_tokens"),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}, "results"),
        ("/v1/score", {"text_1": "x", "text_2": ["y"]}, "data"),
        ("/tokenize", {"prompt": "x y"}, "tokens"),
        ("/detokenize", {"tokens": [1, 2]}, "prompt"),
    ],
)
async def test_serves_every_route(path: str, body: dict[str, Any], member: str) -> None:
    async with stub() as (engine, client):
        found = await client.post(path, json={"model": "a", **body})
        assert found.status_code == 200
        assert member in found.json()
        lost = await client.post(path, json={"model": "z", **body})
        expected = {"message": "The model `z` does not exist.", "type": "NotFoundError", "param": "model", "code": 404}
        assert (lost.status_code, lost.json()) == (404, {"error": expected})
        assert (await client.get(path)).status_code == 405
        assert [request.path for request in engine.seen] == [path] * 3


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
@pytest.mark.parametrize(("model", "status"), [("a", 200), ("z", 404)])
async def test_serves_uploads(path: str, model: str, status: int) -> None:
    async with stub() as (_, client):
        answer = await client.post(path, data={"model": model}, files={"file": ("x.wav", b"\r\nRIFF" * 1000)})
        assert answer.status_code == status
        if status == 200:
            assert answer.json()["text"] == text(7)


@pytest.mark.parametrize("tokens", [0, 1, 7, 100])
@pytest.mark.parametrize("interval_s", [0.0, 0.0001])
async def test_streams_what_it_also_answers_whole(tokens: int, interval_s: float) -> None:
    async with stub(tokens=tokens, chunk_interval_s=interval_s) as (engine, client):
        whole = (await client.post("/v1/chat/completions", json=CHAT)).json()["choices"][0]["message"]["content"]
        raw = (await client.post("/v1/chat/completions", json=CHAT | {"stream": True})).content
        events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
        assert events.pop() == b"[DONE]"
        parts = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
        assert "".join(parts) == whole == text(tokens)
        stamps = [(int(seq), int(ns)) for seq, ns in STAMP.findall(raw)]
        assert [seq for seq, _ in stamps] == list(range(tokens))
        assert [ns for _, ns in stamps] == sorted(ns for _, ns in stamps)
        assert engine.generation_tokens == 2 * tokens
        assert engine.running == engine.aborts == 0


async def test_a_request_may_choose_its_own_behaviour() -> None:
    async with stub() as (_, client):
        answer = await client.post("/v1/completions", json={"model": "a", "stub": {"tokens": 2}})
        assert answer.json()["choices"][0]["text"] == text(2)
        assert (await client.post("/v1/completions", json={"stub": {"status": 503}})).status_code == 503
        assert (await client.post("/v1/completions", json={"stub": {"tokns": 2}})).status_code == 400
        assert (await client.post("/v1/completions", json={"max_tokens": "many"})).status_code == 400
        assert (await client.post("/v1/completions", content=b"{")).status_code == 400


async def test_keeps_responses() -> None:
    async with stub() as (_, client):
        made = (await client.post("/v1/responses", json={"model": "a", "background": True})).json()
        assert made["id"].startswith("resp_")
        assert (await client.get(f"/v1/responses/{made['id']}")).json() == made
        cancelled = await client.post(f"/v1/responses/{made['id']}/cancel")
        assert cancelled.json() == made | {"status": "cancelled"}
        assert (await client.post(f"/v1/responses/{made['id']}/cancel")).status_code == 400
        assert (await client.get("/v1/responses/resp_other")).status_code == 404


@pytest.mark.parametrize(
    ("stream", "behaviour"),
    [
        (True, {"tokens": 1000, "chunk_interval_s": 1.0}),
        (True, {"first_delay_s": 60.0}),
        (False, {"first_delay_s": 60.0}),
        (False, {"hang_at": "request"}),
    ],
)
async def test_counts_a_client_that_left(stream: bool, behaviour: dict[str, Any]) -> None:
    async with stub(**behaviour) as (engine, client):
        _, writer = await post(engine, CHAT | {"stream": stream})
        await eventually(lambda: engine.running == 1)
        assert (await client.get("/health")).status_code == 200
        assert engine.aborts == 0
        writer.close()
        await eventually(lambda: engine.aborts == 1)
        assert engine.running == 0
        assert (await client.get("/metrics")).text.count("stub:aborts_total{") == 1


async def test_waits_for_a_slow_reader() -> None:
    async with stub(tokens=1_000_000) as (engine, client):
        reader, writer = await post(engine, CHAT | {"stream": True})
        count = -1
        while count != engine.generation_tokens:
            count = engine.generation_tokens
            assert (await client.get("/health")).status_code == 200
        assert 0 < count < 1_000_000
        assert max(transport.get_write_buffer_size() for transport in engine.connections) < 1_000_000
        while engine.generation_tokens == count:
            assert await reader.read(1 << 20)
        writer.close()


@pytest.mark.parametrize("name", FAULTS)
async def test_breaks_as_named(name: str) -> None:
    async with stub(malformed=name) as (engine, _):
        reader, writer = await post(engine, CHAT | {"stream": True})
        expected, closes = broken_answer(name)
        assert await reader.readexactly(len(expected)) == expected
        if closes:
            assert await reader.read() == b""
        writer.close()
        assert engine.aborts == 0


async def test_metrics_are_an_exposition() -> None:
    async with stub() as (_, client):
        await client.post("/v1/completions", json={"model": "a"})
        lines = (await client.get("/metrics")).text.splitlines()
    assert 'vllm:generation_tokens_total{engine="0",model_name="a"} 7.0' in lines


async def test_answers_pipelined_requests_in_turn() -> None:
    async with stub(first_delay_s=0.001) as (engine, _):
        reader, writer = await post(engine, {"stub": {"tokens": 1}}, {"stub": {"tokens": 2}})
        for tokens in (1, 2):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            assert body["choices"][0]["message"]["content"] == text(tokens)
        writer.close()


async def post(engine: StubEngine, *bodies: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(engine.url.rpartition(":")[2]))
    for body in map(json.dumps, bodies):
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nhost: stub\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    return reader, writer
