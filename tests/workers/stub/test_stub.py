"""Tests of the stub engine, most of them on the real process. Never tests the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
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
from workers.stub.load import UNITS, StubLoad

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


@pytest.mark.parametrize("environ", [{"SPARKD_STUB_TOKEN": "3"}, {"SPARKD_STUB_TOKENS": "three"}, {"SPARKD_STUB_EXIT_AT": "noon"}])
def test_refuses_a_behaviour_it_does_not_know(environ: dict[str, str]) -> None:
    with pytest.raises(SystemExit, match="stub: "):
        Life.read(environ)


def test_starts_like_vllm_with_its_load_held_half_way_and_ends_on_sigterm(spawn: Any, tmp_path: Path) -> None:
    gate, path = tmp_path / "gate", tmp_path / "m.load"
    (tmp_path / "key").write_text("secret\n")
    process = spawn(
        "--enforce-eager", "--model-loader-extra-config", json.dumps({"progress": str(path)}), load_bytes=10**9, load_gate=gate,
        CANARY="$(reboot)", SPARKD_ENGINE_KEY_FILE=str(tmp_path / "key"),
    )  # fmt: skip
    process.wait_log("1/2 [")
    until(lambda: read_load(path, time.time()).get("bytes_done") == 10**9 // 2, "half of the weights are loaded")
    with socket.socket(socket.AF_UNIX) as early, pytest.raises(ConnectionRefusedError):
        early.connect(str(process.uds))

    gate.touch()
    process.wait_ready()
    done = read_load(path, time.time())
    assert (done["bytes_done"], done["units_done"], done["fraction"], done["failure"]) == (10**9, UNITS, 1.0, None)
    process.wait_log("Application startup complete.")
    log = process.log.read_text()
    lines = ["Loading safetensors checkpoint shards:  50% Completed | 1/2 [", "Loading weights took ", "Model loading took "]
    lines += ["GPU KV cache size: 524,288 tokens, Maximum concurrency for ", "init engine (profile, "]
    assert [line for line in lines if line not in log] == []
    with process.client() as client:
        refused = client.get("/v1/models")
        assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        assert client.get("/version").status_code == 401
        models = client.get("/v1/models", headers={"authorization": "Bearer secret"}).json()
    assert [model["id"] for model in models["data"]] == ["a", "b"]
    assert "secret" not in log

    record = json.loads(process.record.read_text())
    assert (record["argv"][-1], record["environ"]["CANARY"]) == (json.dumps({"progress": str(path)}), "$(reboot)")
    assert (record["pid"], stat.S_IMODE(process.record.stat().st_mode)) == (process.child.pid, 0o600)
    process.child.terminate()
    assert process.wait_exit() == 0


def test_an_order_to_stop_ends_a_load_that_is_held(spawn: Any, tmp_path: Path) -> None:
    process = spawn(load_gate=tmp_path / "never")
    process.wait_log("1/2 [")
    process.child.terminate()
    assert process.wait_exit() == 0


def test_loader_settings_that_are_none_are_refused() -> None:
    for words in ("{", "[]", "7"):
        with pytest.raises(SystemExit):
            StubLoad({"model-loader-extra-config": [words]}, 1)


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


@pytest.mark.parametrize(("exit_at", "exit_code"), [("start", 0), ("load", 1), ("ready", 3)])
def test_dies_where_it_is_told(spawn: Any, tmp_path: Path, exit_at: str, exit_code: int) -> None:
    path = tmp_path / "m.load"
    loader = ("--model-loader-extra-config", json.dumps({"progress": str(path)}))
    assert spawn(*loader, exit_at=exit_at, exit_code=exit_code, load_bytes=1).wait_exit() == exit_code
    assert bool(read_load(path, time.time()).get("failure")) == (exit_at == "load")


def test_dies_after_requests(spawn: Any) -> None:
    process = spawn(exit_at="after_2_requests", exit_code=0)
    process.wait_ready()
    with process.client() as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert process.child.poll() is None
        with contextlib.suppress(httpx.TransportError):
            client.post("/v1/chat/completions", json=CHAT)
    assert process.wait_exit() == 0


def test_a_rank_other_than_zero_serves_nothing(spawn: Any) -> None:
    process = spawn("--headless", "--node-rank", "1")
    process.wait_log("init engine")
    assert not process.uds.exists()
    process.child.terminate()
    assert process.wait_exit() == 0


def test_hangs_before_it_listens_and_leaves_a_stubborn_child_behind(spawn: Any) -> None:
    process = spawn(hang_at="start", children=3)
    process.wait_log("1/2 [")
    with socket.socket(socket.AF_UNIX) as early, pytest.raises(ConnectionRefusedError):
        early.connect(str(process.uds))
    children = json.loads(process.record.read_text())["children"]
    assert process.group() == {process.child.pid, *children}
    process.child.terminate()
    assert process.wait_exit() == 0
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
async def test_serves_uploads(path: str) -> None:
    async with stub() as (_, client):
        files = {"file": ("x.wav", b"\r\nRIFF" * 1000)}
        assert (await client.post(path, data={"model": "a"}, files=files)).json()["text"] == text(7)
        assert (await client.post(path, data={"model": "z"}, files=files)).status_code == 404


@pytest.mark.parametrize(("tokens", "interval_s"), [(0, 0.0), (7, 0.0001), (100, 0.0)])
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


def content(raw: bytes) -> list[str]:
    """The pieces of a stream, as far as it has come."""
    return [found[1].decode() for found in re.finditer(rb'"delta":\{"content":"([^"]*)"', raw)]


async def test_a_stream_is_held_behind_its_first_pieces_until_its_gate_is_there(tmp_path: Path) -> None:
    """By its own body: each request can have a gate of its own."""
    gates = [tmp_path / "0", tmp_path / "1"]
    async with stub() as (engine, client):
        held = [await post(engine, CHAT | {"stream": True, "stub": {"gate": str(gate), "gate_after": 3}}) for gate in gates]
        begun = [await reader.readuntil(b'"seq":2,') for reader, _ in held]
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200, "others are answered meanwhile"
        assert [len(content(raw)) for raw in begun] == [3, 3]
        assert engine.running == 2

        for gate, (reader, _), raw in zip(gates, held, begun, strict=True):
            gate.touch()
            assert "".join(content(raw + await reader.readuntil(b"[DONE]"))) == text(7)
        await eventually(lambda: engine.running == 0)
        for _, writer in held:
            writer.close()


async def test_an_answer_in_one_piece_is_held_until_its_gate_is_there(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with stub(gate=str(gate), gate_after=2) as (engine, client):
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await eventually(lambda: engine.running == 1)
        assert (await client.get("/health")).status_code == 200
        assert not asked.done()
        gate.touch()
        assert (await asked).json()["choices"][0]["message"]["content"] == text(7)


@pytest.mark.parametrize(("stream", "hang_at"), [(True, "none"), (False, "none"), (False, "request")])
async def test_counts_a_client_that_left(stream: bool, hang_at: str, tmp_path: Path) -> None:
    async with stub(gate=str(tmp_path / "never"), hang_at=hang_at) as (engine, client):
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
