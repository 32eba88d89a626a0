"""The data plane's HTTP client: framing as tables over a transport that is none, the upstream over real sockets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from sparkd.errors import EngineError, EngineGone
from sparkd.gateway import upstream as wire
from sparkd.gateway.engine_connection import EngineConnection
from sparkd.gateway.headers import RawHeaders
from sparkd.gateway.upstream import Upstream
from tests.sparkd.gateway.fakes import soon
from tests.support.fakes import FakeClock

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ASKED = b"GET / HTTP/1.1\r\n\r\n"


class Taker:
    """A sink that keeps everything. `write` stands for the client's transport."""

    def __init__(self, connection: EngineConnection | None = None) -> None:
        self.status = 0
        self.headers: RawHeaders = []
        self.got = b""
        self.passed: list[bytes] = []
        self.ended = False
        self.error: EngineError | None = None
        self.over = asyncio.Event()
        self._connection = connection

    def head(self, status: int, headers: RawHeaders) -> None:
        self.status, self.headers = status, headers

    def body(self, data: bytes, ended: bool) -> None:
        self.got += data
        if self._connection is not None and data:
            self._connection.pass_chunks(self.write)
        if ended:
            self.ended = True
            self.over.set()

    def broken(self, error: EngineError) -> None:
        self.error = error
        self.over.set()

    def write(self, raw: bytes) -> None:
        self.passed.append(raw)
        match = re.match(rb"([0-9a-f]+)\r\n", raw)
        assert match is not None
        size = int(match[1], 16)
        assert len(raw) == match.end() + size + 2
        self.got += raw[match.end() : -2]


class Transport:
    """Enough of one for a EngineConnection. `open` ends with the first close or abort."""

    def __init__(self) -> None:
        self.open = True
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.open = False

    def is_closing(self) -> bool:
        return not self.open

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def hear(*reads: bytes, then_lost: bool = False, passing: bool = True) -> tuple[Taker, Transport]:
    """What a sink gets of an answer that comes in `reads`."""
    connection, transport = EngineConnection(Upstream(socket_path="/nowhere")), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    taker = Taker(connection if passing else None)
    await connection.ask(ASKED, b"", taker)
    for data in reads:
        if transport.open:
            connection.data_received(data)
    if then_lost:
        connection.connection_lost(None)
    return taker, transport


def frame(*bodies: bytes) -> list[bytes]:
    return [b"%x\r\n%b\r\n" % (len(body), body) for body in bodies]


async def test_a_read_that_is_one_chunk_is_passed_as_it_came() -> None:
    bodies = [b"data: %b\n\n" % (b"x" * size) for size in (1, 4, 5, 6, 200, 241, 242, 243, 1000, 2032, 2033, 2034, 4000)]
    taker, transport = await hear(CHUNKED, *frame(*bodies), b"0\r\n\r\n")
    assert taker.ended
    assert taker.got == b"".join(bodies)
    assert b"".join(taker.passed) == b"".join(frame(*bodies[1:-2]))  # not the first, which begins the answer, and none above 2 KiB
    assert transport.open


async def test_every_size_that_may_be_passed_is_found() -> None:
    bodies = [b"y" * size for size in range(1, 2042)]
    taker, _ = await hear(CHUNKED, *frame(b"first"), *frame(*bodies), b"0\r\n\r\n")
    assert taker.got == b"first" + b"".join(bodies)
    assert len(taker.passed) == len(bodies)


async def test_reads_may_be_cut_anywhere() -> None:
    bodies = [b"data: a\n\n", b"\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"data: [DONE]\n\n"]
    raw = CHUNKED + b"".join(frame(*bodies)) + b"0\r\n\r\n"
    for step in range(1, len(raw)):
        taker, transport = await hear(*(raw[at : at + step] for at in range(0, len(raw), step)))
        assert (taker.ended, taker.got, transport.open) == (True, b"".join(bodies), True), step
    for at in range(len(CHUNKED) + 14, len(raw)):
        for width in (1, 2, 3, 7, 14):
            taker, _ = await hear(raw[: len(CHUNKED) + 14], raw[len(CHUNKED) + 14 : at], raw[at : at + width], raw[at + width :])
            assert (taker.ended, taker.got) == (True, b"".join(bodies)), (at, width)


@pytest.mark.parametrize(
    "raw",
    [
        b"+5\r\nhello\r\n",
        b"5\nhello\r\n",
        b"6\r\nhello\r\n\r\n",
        b"4\r\nhello\r\n",
        b"5\r\nhello\n\n",
        b"5_0\r\n" + b"y" * 80 + b"\r\n",
        b"ffffffffffffffffff\r\n",
    ],
)
async def test_what_only_looks_like_a_chunk_breaks_the_answer(raw: bytes) -> None:
    taker, transport = await hear(CHUNKED, *frame(b"first"), raw, *frame(b"more"))
    assert isinstance(taker.error, EngineError)
    assert taker.passed == []
    assert not taker.ended
    assert not transport.open


async def test_chunks_that_are_written_otherwise_are_read_all_the_same() -> None:
    reads = [b"05\r\nhello\r\n", b"A\r\n0123456789\r\n", b"5;a=b\r\nhello\r\n", b"5\r\nhello\r\n5\r\nworld\r\n"]
    taker, _ = await hear(CHUNKED, *frame(b"first"), *reads, b"0\r\nX-Trailer: a\r\n\r\n")
    assert taker.ended
    assert taker.got == b"firsthello0123456789hellohelloworld"
    assert taker.headers == [(b"transfer-encoding", b"chunked")]
    assert taker.passed == []


GOOD = {
    "length": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", 200, b"hi", True),
    "length 0": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b"", True),
    "close": (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi", 200, b"hi", False),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", 200, b"hi", False),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
    "304": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", 304, b"", True),
    "interim": (b"HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", 200, b"hi", True),
    "bytes behind it": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi!", 200, b"hi", False),
    "an answer behind it": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhiHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        200,
        b"hi",
        False,
    ),
}


@pytest.mark.parametrize("case", GOOD)
async def test_answers(case: str) -> None:
    raw, status, body, kept = GOOD[case]
    for reads in ([raw], [raw[at : at + 1] for at in range(len(raw))]):
        taker, transport = await hear(*reads)
        assert (taker.status, taker.got, taker.ended, taker.error) == (status, body, True, None)
        assert transport.open == kept or (len(reads) > 1 and "behind" in case)


BAD = {
    "no HTTP": b"hello\r\n\r\n",
    "upgrade": b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nhi",
    "length and chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
    "NUL": b"HTTP/1.1 200 OK\r\nX-A: a\x00b\r\nContent-Length: 2\r\n\r\nhi",
    "bare LF": b"HTTP/1.1 200 OK\nContent-Length: 2\n\nhi",
}


@pytest.mark.parametrize("case", BAD)
async def test_answers_that_are_none(case: str) -> None:
    raw = BAD[case]
    for step in (len(raw), 1000, 7):
        taker, transport = await hear(*(raw[at : at + step] for at in range(0, len(raw), step)))
        assert isinstance(taker.error, EngineError)
        assert (taker.ended, taker.got, transport.open) == (False, b"", False), step


async def test_a_connection_that_is_lost() -> None:
    for reads, kind in (
        ([], EngineGone),
        ([CHUNKED[:10]], EngineGone),
        ([CHUNKED], EngineError),
        ([CHUNKED, *frame(b"a", b"b")], EngineError),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhi"], EngineError),
    ):
        taker, _ = await hear(*reads, then_lost=True)
        assert type(taker.error) is kind, reads
        assert not taker.ended


# --- the connections --------------------------------------------------------------------------------------------------------------


class Server:
    """Answers every request by `reply`, on a Unix socket."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.reply = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
        self.heard: list[bytes] = []
        self.connections = 0
        self.lost = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                match = re.search(rb"content-length: (\d+)", head)
                self.heard.append(await reader.readexactly(int(match[1])) if match else head)
                writer.write(self.reply)
        except (asyncio.IncompleteReadError, ConnectionError, RuntimeError):
            self.lost += 1
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    with TemporaryDirectory(prefix="sparkd-") as folder:
        server = Server(Path(folder) / "s")
        listener = await asyncio.start_unix_server(server.serve, server.path)
        yield server
        for writer in server.writers:
            writer.close()
        listener.close()


@pytest.fixture
async def upstream(server: Server) -> AsyncIterator[Upstream]:
    upstream = Upstream(socket_path=server.path, api_key="k")
    yield upstream
    upstream.close()
    await soon(lambda: server.lost == server.connections)


async def ask(upstream: Upstream, body: bytes = b"") -> Taker:
    taker = Taker()
    connection = await upstream.connection()
    length = b"content-length: %d\r\n" % len(body) if body else b""
    await connection.ask(b"POST /" + upstream.preamble + length + b"\r\n", body, taker)
    await taker.over.wait()
    return taker


async def test_connections_are_kept_and_let_go(server: Server, upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(wire, "monotonic", clock)

    def sweep_after(seconds: float) -> None:
        clock.now_s += seconds
        assert upstream._sweeper is not None
        upstream._sweeper.cancel()
        upstream._sweep()

    for _ in range(3):
        assert (await ask(upstream)).got == b"hi"
    assert server.connections == 1
    assert server.heard[0] == b"POST / HTTP/1.1\r\nhost: engine\r\nauthorization: Bearer k\r\n\r\n"
    await asyncio.gather(*(ask(upstream) for _ in range(5)))
    opened = server.connections
    sweep_after(wire.IDLE_S - 1.0)
    assert (await ask(upstream)).got == b"hi"
    assert (server.connections, server.lost) == (opened, 0)
    sweep_after(1.0)
    await soon(lambda: server.lost == opened - 1)
    sweep_after(wire.IDLE_S - 1.0)
    await soon(lambda: server.lost == opened)
    assert (await ask(upstream)).got == b"hi"
    assert server.connections == opened + 1


async def test_a_connection_that_the_engine_closed_is_not_used_again(server: Server, upstream: Upstream) -> None:
    assert (await ask(upstream)).got == b"hi"
    kept = await upstream.connection()
    upstream.keep(kept)
    server.writers[0].close()
    await soon(lambda: not kept.usable)
    assert (await ask(upstream)).got == b"hi"
    assert server.connections == 2


async def test_bytes_that_nobody_asked_for_end_an_idle_connection(server: Server, upstream: Upstream) -> None:
    assert (await ask(upstream)).got == b"hi"
    server.writers[0].write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
    await soon(lambda: server.lost == 1)
    assert (await ask(upstream)).got == b"hi"
    assert server.connections == 2


async def test_a_large_body_goes_in_slices_and_whole(server: Server, upstream: Upstream) -> None:
    body = b"0123456789abcdef" * 300_000
    assert (await ask(upstream, body)).got == b"hi"
    assert server.heard == [body]
    assert (await ask(upstream, bytearray(b"small"))).got == b"hi"
    assert server.connections == 1


async def test_an_answer_before_the_bodys_end_ends_the_writing(server: Server, upstream: Upstream) -> None:
    read: list[int] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 2\r\n\r\nno")
        while data := await reader.read(65536):
            read.append(len(data))
        writer.close()

    path = server.path + "2"
    listener = await asyncio.start_unix_server(refuse, path)
    narrow = Upstream(socket_path=path)
    taker = await ask(narrow, b"x" * 20_000_000)
    assert (taker.status, taker.got) == (413, b"no")
    narrow.close()
    assert sum(read) < 20_000_000
    listener.close()


async def test_closing_tells_those_who_wait(server: Server, upstream: Upstream) -> None:
    server.reply = b""
    asking = asyncio.create_task(ask(upstream))
    await soon(lambda: server.heard)
    upstream.close()
    assert isinstance((await asking).error, EngineGone)
    with pytest.raises(EngineGone):
        await upstream.connection()


async def test_hanging_up_is_silent(server: Server, upstream: Upstream) -> None:
    server.reply = CHUNKED
    taker = Taker()
    connection = await upstream.connection()
    await connection.ask(b"POST /" + upstream.preamble + b"\r\n", b"", taker)
    await soon(lambda: taker.status)
    connection.abort(taker)
    await soon(lambda: server.lost)
    assert not taker.over.is_set()


async def test_tcp(server: Server) -> None:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    upstream = Upstream(base_url=f"http://127.0.0.1:{port}")
    assert (await ask(upstream)).got == b"hi"
    assert b"host: 127.0.0.1:%d\r\n" % port in server.heard[0]
    upstream.close()
    await soon(lambda: server.lost == 1)
    listener.close()
