"""Memory of the gateway's process under what is huge, endless or never read: its peak, from the kernel."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.bench.targets import part
from tests.sparkd.gateway.fakes import EVENT, STREAM_HEAD, Client, RawEngine, chunked, post, request, soon

pytestmark = pytest.mark.rest

CHAT = "/v1/chat/completions"
BODY = b'{"model":"tiny"}'
MIB = 1 << 20
LIMITS = {"body_bytes": 8 * MIB, "client_write_s": 0.2, "linger_s": 0.2}


@dataclass
class Process:
    pid: int
    port: int

    def peak_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")  # proc(5): resets VmHWM to the present RSS

    async def open(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port))

    async def served(self) -> bool:
        client = await self.open()
        client.send(request("GET", "/livez"))
        answer = await client.answer()
        await client.close()
        return answer.status == 200


@pytest.fixture
async def process(engine: RawEngine, tmp_path: Path) -> AsyncIterator[Process]:
    with part(tmp_path, "gateway", {"stub-socket": engine.path, "model": "tiny", "limits": json.dumps(LIMITS)}) as (child, port):
        process = Process(child.pid, port)
        client = await process.open()
        for _ in range(200):
            client.send(post(CHAT, BODY))
            assert (await client.answer()).status == 200
        await client.close()
        process.forget_peak()
        yield process
        assert child.poll() is None


async def flood(client: Client, opening: bytes, piece: bytes, times: int) -> None:
    """Sends until it is done or thrown out."""
    try:
        client.send(opening)
        for _ in range(times):
            client.send(piece)
            await client.writer.drain()
        await client.ended()
    except (ConnectionError, RuntimeError):
        return
    finally:
        client.writer.transport.abort()


async def test_what_is_huge_is_not_kept(process: Process) -> None:
    before = process.peak_bytes()
    piece = b"x" * 65536
    json_head = ("Content-Type: application/json",)
    for opening, sent, times in (
        (request("POST", CHAT, *json_head, f"Content-Length: {1 << 30}"), piece, 1000),
        (request("POST", CHAT, *json_head, "Transfer-Encoding: chunked"), chunked(piece, end=False), 1000),
        (request("POST", "/v1/nowhere", *json_head, f"Content-Length: {7 << 20}"), piece, 112),
        (request("POST", CHAT, *json_head, "Transfer-Encoding: chunked") + b"1;", piece, 1000),
        (request("GET", "/livez")[:-2] + b"X-A: ", piece, 320),
        (request("GET", "/livez")[:-2], b"X-A: y\r\n" * 8192, 320),
        (b"\r\n", b"\r\n" * 32768, 320),
    ):
        clients = [await process.open() for _ in range(3)]
        await asyncio.gather(*(flood(client, opening, sent, times) for client in clients))
        assert process.peak_bytes() - before < 32 * MIB, opening  # three bodies of at most 8 MiB, and what is in flight
        assert await process.served()


async def test_a_reader_that_takes_nothing_costs_little(process: Process, engine: RawEngine) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for _ in range(5000):
            writer.write(chunked(EVENT * 200, end=False))
            await writer.drain()

    engine.script = script
    before = process.peak_bytes()
    clients = [await process.open() for _ in range(16)]
    for client in clients:
        client.writer.transport.pause_reading()
        client.send(post(CHAT, BODY))
    await soon(lambda: engine.lost >= 16)  # all of them are cut off after client_write_s
    for client in clients:
        client.writer.transport.abort()
    assert process.peak_bytes() - before < 16 * MIB


async def test_a_large_body_is_held_once(process: Process, engine: RawEngine) -> None:
    body = b'{"model":"tiny","x":"' + b"y" * (7 * MIB) + b'"}'
    before = process.peak_bytes()
    for _ in range(5):
        client = await process.open()
        client.send(post(CHAT, body))
        assert (await client.answer()).status == 200
        await client.close()
        assert engine.heard.pop().body == body
    assert process.peak_bytes() - before < 2.5 * 7 * MIB
