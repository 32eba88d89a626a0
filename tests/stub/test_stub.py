"""Tests of what a test asks of the stub engine by name: gates, a behaviour. Everything else of it is used by the daemon's tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.stub.__main__ import Life, StubEngine, start_stub
from tests.stub.answers import text
from tests.support.waiting import HUNG_S, eventually, until

ROOT = Path(__file__).resolve().parents[2]
CHAT = {"model": "a", "messages": [{"role": "user", "content": "What is the capital of France?"}]}


@pytest.mark.parametrize("environ", [{"SPARKD_STUB_TOKEN": "3"}, {"SPARKD_STUB_TOKENS": "three"}, {"SPARKD_STUB_EXIT_AT": "noon"}])
def test_refuses_a_behaviour_it_does_not_know(environ: dict[str, str]) -> None:
    with pytest.raises(SystemExit, match="stub: "):
        Life.read(environ)


def test_an_order_to_stop_ends_a_load_that_is_held(tmp_path: Path) -> None:
    log, environ = tmp_path / "log", {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "SPARKD_STUB_LOAD_GATE": str(tmp_path / "never")}
    with log.open("wb") as output:
        argv = [sys.executable, "-m", "tests.stub", "serve", "/models/x", "--port", "0"]
        process = subprocess.Popen(argv, env=environ, stdout=output, stderr=output, cwd=tmp_path)
    try:
        until(lambda: "1/2 [" in log.read_text(), "half of the weights are loaded")
        process.send_signal(signal.SIGTERM)
        assert process.wait(HUNG_S) == 0
    finally:
        process.kill()
        process.wait(HUNG_S)


@contextlib.asynccontextmanager
async def stub(**behaviour: Any) -> Any:
    async with await start_stub(models=("a",), **behaviour) as engine, httpx.AsyncClient(base_url=engine.url) as client:
        yield engine, client


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


async def post(engine: StubEngine, *bodies: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(engine.url.rpartition(":")[2]))
    for body in map(json.dumps, bodies):
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nhost: stub\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    return reader, writer
