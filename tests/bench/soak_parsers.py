"""The soak's parsers: each reads random inputs of its own kind, and may raise SparkdError only, within LIMIT_S for one input.

Inputs are made of the pieces that a parser knows, whole or spoilt. For HTTP it is the gateway's server on loopback, on a thread of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sparkd.checkpoint.header import DTYPE_BITS, read_header
from sparkd.config.config import load_config
from sparkd.engine.metrics import fault_of, merge
from sparkd.errors import SparkdError
from sparkd.gateway import ClientLimits
from sparkd.gateway.body import model_of_form, model_of_json
from sparkd.gateway.outline import outline
from sparkd.recipes.importer import imported
from sparkd.state.nouns import Event, Operation, Progress, RankHandle
from sparkd.state.store import Store
from tests.sparkd.config.test_random import BASES, KEYS, VALUES, written
from tests.sparkd.gateway.fakes import RawEngine, post, request, serving
from tests.support.daemon_process import ROOT
from workers.rank.log_parser import Parser

LIMIT_S = 5.0
EXAMPLES = 200
SHOWN_CHARACTERS = 300
# Each bound of the server that a client of the soak would have to wait for.
QUICK_S = 0.05


@dataclass(frozen=True, slots=True)
class Target:
    """inputs: what `parse` is given, one after another."""

    inputs: st.SearchStrategy[Any]
    parse: Callable[[Any], object]


class TooSlow(BaseException):
    """One input took more than LIMIT_S; no `except Exception` of a parser stops it."""


def read_random_inputs(target: Target, seconds: float) -> tuple[int, str | None]:
    """(how many inputs were read in so many seconds, the first fault with its input)."""
    deadline_s, count = time.monotonic() + seconds, 0
    while time.monotonic() < deadline_s:
        examples, fault = _try(target, deadline_s)
        count += examples
        if fault is not None:
            return count, fault
    return count, None


def _try(target: Target, deadline_s: float) -> tuple[int, str | None]:
    count, last = 0, None

    # derandomize: hypothesis repeats itself by default where it sees a CI.
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=False,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def run(value: Any) -> None:
        nonlocal count, last
        if count and time.monotonic() > deadline_s:
            return
        count, last = count + 1, value
        with _limited():
            try:
                target.parse(value)
            except SparkdError:
                return

    try:
        run()
    except ExceptionGroup as unsteady:  # a fault that the same input does not bring again
        return count, f"{_short_text(unsteady.exceptions[0])}, once, for {_short(last)}"
    except (Exception, TooSlow) as error:  # noqa: BLE001 - what is looked for
        return count, f"{_short_text(error)} for {_short(last)}"
    return count, None


@contextmanager
def _limited() -> Iterator[None]:
    """Raises TooSlow in the parser where Python runs, and behind it where C does."""

    def end(_number: int, _frame: Any) -> None:
        raise TooSlow(f"more than {LIMIT_S:g} s")

    before, begun_s = signal.signal(signal.SIGALRM, end), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if time.monotonic() - begun_s > LIMIT_S:
        raise TooSlow(f"more than {LIMIT_S:g} s")


def _short_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:SHOWN_CHARACTERS]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}.. ({len(text)} characters)"


# ---------------------------------------------------------------- inputs


def _pieces(*pieces: str) -> st.SearchStrategy[bytes]:
    one = st.sampled_from(pieces) | st.text(max_size=3)
    texts = st.lists(one, max_size=60).map(lambda parts: "".join(parts).encode("utf-8", "replace"))
    return texts | st.binary(max_size=400)


@st.composite
def _spoilt(draw: st.DrawFn, texts: st.SearchStrategy[bytes]) -> bytes:
    """A text in which up to three places are something else."""
    text = draw(texts)
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, len(text)))
        end = begin + draw(st.integers(0, 4))
        text = text[:begin] + draw(st.binary(max_size=3) | st.sampled_from([b"\n", b'"', b"}", b"[", b"\x00", b"9" * 400])) + text[end:]
    return text


_JSON_PIECES = _pieces(
    *'{}[]:,"\\ \n\r0e-.', "model", '"model":"m"', '"stream":true', "\\u00", "--x\r\n", 'name="model"', "vllm:x", "# TYPE ", "1" * 99
)
_HTTP_TEXTS = st.sampled_from(
    [
        request("GET", "/v1/models"),
        request("GET", "/livez", "Connection: close"),
        request("HEAD", "/metrics", "Accept-Encoding: gzip"),
        post("/v1/chat/completions", b'{"model":"tiny","messages":[]}'),
        post("/v1/chat/completions", b"{}", "Expect: 100-continue"),
        request("POST", "/v1/chat/completions", "Content-Type: application/json", "Transfer-Encoding: chunked")
        + b'5\r\n{"a":\r\n2\r\n1}\r\n0\r\n\r\n',
        post("/admin/v1/models", b"{}"),
        request("OPTIONS", "/v1/models", "Origin: http://localhost:3000"),
        request("GET", "/", "Upgrade: h2c"),
    ]
)
_HTTP_PIECES = _pieces(
    "GET / HTTP/1.1\r\n",
    "POST /v1/chat/completions HTTP/1.1\r\n",
    "PRI * HTTP/2.0\r\n",
    "Host: localhost\r\n",
    "Content-Length: 5\r\n",
    "Transfer-Encoding: chunked\r\n",
    "Connection: close\r\n",
    "Expect: 100-continue\r\n",
    "5\r\nhello\r\n",
    "0\r\n\r\n",
    "\r\n",
    "\n",
    ":",
    "%",
    "X-Request-Id: a\r\n",
    "X: " + "y" * 9000 + "\r\n",
    "X:\r\n" * 130,
)
# Bytes, where they are cut into two, and whether the client closes its side behind them.
_HTTP = st.tuples(
    _HTTP_PIECES | _spoilt(_HTTP_TEXTS) | st.tuples(_HTTP_TEXTS, _HTTP_TEXTS).map(b"".join), st.integers(0, 200), st.booleans()
)


@st.composite
def _safetensors(draw: st.DrawFn) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}} if draw(st.booleans()) else {}
    begin = 0
    for name in draw(st.lists(st.text(max_size=6), max_size=5)):
        dtype = draw(st.sampled_from([*DTYPE_BITS, "X", None, 1]))
        shape = draw(st.lists(st.integers(-1, 4) | st.sampled_from([2**63, 2**64, 1.5, None, True]), max_size=3))
        size = _size(dtype, shape) if draw(st.integers(0, 3)) else draw(st.integers(0, 64))
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    text = draw(_spoilt(st.just(text)))
    length = draw(st.just(len(text)) | st.integers(0, 2 * len(text)) | st.integers(0, 2**64 - 1))
    return length.to_bytes(8, "little") + text + bytes(begin + draw(st.sampled_from([0, 0, 0, 1])))


def _size(dtype: Any, shape: list[Any]) -> int:
    count = DTYPE_BITS.get(dtype, 8) if isinstance(dtype, str) else 8
    for length in shape:
        count *= length if isinstance(length, int) and 0 <= length < 8 else 1
    return count // 8


_COMMAND = st.lists(
    st.sampled_from(
        [
            "vllm serve ",
            "{model}",
            "org/model ",
            "{tensor_parallel}",
            "--tensor-parallel-size ",
            "-tp 2 ",
            "--max-model-len=",
            "{n}",
            "{{",
            "}}",
            "\\\n",
            "'",
            '"',
            "$HOME",
            "${X}",
            "--speculative-config ",
            '{"method":"mtp"}',
            "&&",
            ";",
            "`",
            "#",
            "--port 1 ",
            "export A=b\n",
            "--served-model-name a b ",
            "--hf-overrides.a.b 1 ",
            "9" * 30,
            " ",
        ]
    )
    | st.text(max_size=4),
    max_size=20,
).map("".join)
_RECIPE_KEYS = st.sampled_from(
    [
        "recipe_version",
        "sparkrun_version",
        "name",
        "description",
        "model",
        "model_revision",
        "runtime",
        "container",
        "min_nodes",
        "max_nodes",
        "solo_only",
        "cluster_only",
        "mode",
        "defaults",
        "env",
        "command",
        "metadata",
        "mods",
        "build_args",
        "include",
        "pre_exec",
    ]
)
_RECIPES = _spoilt(
    st.fixed_dictionaries(
        {"recipe_version": st.sampled_from(["1", "2"]), "model": st.just("org/model")},
        optional={
            "command": _COMMAND,
            "defaults": st.dictionaries(st.sampled_from(["tensor_parallel", "n", "model", "port", "a"]), _COMMAND | VALUES, max_size=4),
            "env": st.dictionaries(st.text(max_size=4), _COMMAND | VALUES, max_size=3),
        },
    )
    .flatmap(lambda base: st.dictionaries(_RECIPE_KEYS, VALUES | _COMMAND, max_size=3).map(lambda more: base | more))
    .map(lambda value: written(value).encode("utf-8", "replace"))
)
_CONFIGURATIONS = _spoilt(
    st.tuples(
        st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4), BASES, st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5)
    ).map(lambda parts: written({"models": {"m": {**parts[1], **parts[2]}}, **parts[0]}).encode("utf-8", "replace"))
) | _pieces(
    "models:\n",
    "  m:\n",
    "    model: o/m\n",
    "<<: *a\n",
    "&a ",
    "*a ",
    "- ",
    "{",
    "}",
    "[",
    "]",
    "? ",
    "|\n",
    "!!python/x ",
    "${env.A}",
    "\t",
    "---\n",
)

_KINDS: Mapping[str, type | None] = {
    "desired": None,
    "handles": RankHandle,
    "answered": None,
    "specs": None,
    "operations": Operation,
    "events": Event,
}
_CELLS: st.SearchStrategy[Any] = (
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from(["m", "RUNNING", "{}", "[" * 5000, '{"a":' * 40 + "1" + "}" * 40, '{"a": NaN}', '{"a": "\\ud800"}'])
)


def _nouns(noun: type | None) -> st.SearchStrategy[Any]:
    """The JSON of a noun, of whose members some are anything."""
    if noun is None:
        return _CELLS
    names = [field.name for field in fields(noun)]  # type: ignore[arg-type]
    members = {name: st.just("m") | st.integers(0, 9) | VALUES for name in names}
    return _CELLS | st.fixed_dictionaries({}, optional=members).map(json.dumps) | st.fixed_dictionaries(members).map(json.dumps)


_ROWS = st.sampled_from(sorted(_KINDS)).flatmap(
    lambda table: st.tuples(
        st.just(table), st.lists(st.lists(_CELLS | _nouns(_KINDS[table]), min_size=6, max_size=6), min_size=1, max_size=3)
    )
)


def _lines() -> st.SearchStrategy[list[bytes]]:
    logs = sorted((ROOT / "tests/fixtures/vllm-logs").glob("*.txt"))
    known = sorted({line for log in logs for line in log.read_bytes().splitlines() if line.strip()})
    pieces = _pieces(
        "INFO 07-01 10:00:00 [x.py:1] ",
        "ERROR 07-01 10:00:00 [x.py:1] ",
        "(EngineCore pid=1) ",
        "(",
        ")",
        "Loading safetensors checkpoint shards: ",
        "50% Completed | ",
        "1/2",
        "9" * 99,
        ",",
        ".",
        "KV cache size: ",
        " tokens",
        "Checkpoint size: ",
        " GiB",
        "Available KV cache memory: ",
        "Application startup complete.",
        "Worker proc x died unexpectedly (exit code: -",
        "), ",
        "ValueError: ",
        "\x1b[1m",
        "\r",
        " ",
        "Engine core initialization failed. Failed core proc(s): {'a': -",
        "CUDA out of memory",
    )
    return st.lists(_spoilt(st.sampled_from(known)) | pieces, min_size=1, max_size=12)


# ---------------------------------------------------------------- what reads them


class Loopback:
    """The gateway's real server, in front of an engine of raw bytes. `parse` fails where the server logs an error or answers no HTTP."""

    def __init__(self) -> None:
        self._trouble: list[str] = []
        self._port = 0
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Loopback:
        self._thread.start()
        self._up.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def parse(self, data: tuple[bytes, int, bool]) -> None:
        raw, cut, closes = data
        answer = b""
        with socket.create_connection(("127.0.0.1", self._port), timeout=LIMIT_S) as client:
            try:
                for piece in filter(None, (raw[:cut], raw[cut:])):
                    client.sendall(piece)
                if closes:
                    client.shutdown(socket.SHUT_WR)
                while piece := client.recv(65536):
                    answer += piece
            except TimeoutError:
                raise AssertionError(f"the server neither answered nor closed within {LIMIT_S:g} s") from None
            except OSError:
                pass  # the server refused and closed before the end
        if self._trouble:
            raise AssertionError(self._trouble.pop(0))
        if answer and not answer.startswith(b"HTTP/1.1 "):
            raise AssertionError(f"the server answered {answer[:80]!r}")
        if answer.startswith(b"HTTP/1.1 500 "):
            raise AssertionError(f"the server answered {answer[-200:]!r}")

    def _run(self) -> None:
        heard = _Heard(self._trouble)
        logging.getLogger().addHandler(heard)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        finally:
            logging.getLogger().removeHandler(heard)
            self._up.set()

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        limits = ClientLimits(header_s=QUICK_S, body_grace_s=QUICK_S, keep_alive_s=QUICK_S, linger_s=QUICK_S)
        with TemporaryDirectory(prefix="sk") as folder:
            engine = RawEngine(Path(folder) / "engine.sock")
            await engine.start()
            async with serving(engine, limits=limits) as running:
                self._port = running.port
                self._up.set()
                await self._end.wait()
            await engine.stop()


class _Heard(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(f"the server logged: {record.getMessage()} {record.exc_info and record.exc_info[1]!r}")


class Files:
    """A file to read, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._tensors, self._yaml, self._database = folder / "model.safetensors", folder / "sparkd.yaml", folder / "state.db"
        Store(self._database).close()

    def safetensors(self, data: bytes) -> None:
        self._tensors.write_bytes(data)
        read_header(str(self._tensors))

    def configuration(self, data: bytes) -> None:
        self._yaml.write_bytes(data)
        load_config(self._yaml, environ={"A": "1", "HOME": "/"}).preload()

    def rows(self, data: tuple[str, list[list[Any]]]) -> None:
        table, rows = data
        database = sqlite3.connect(self._database, isolation_level=None)
        try:
            database.execute("PRAGMA synchronous=OFF")
            for name in _KINDS:
                database.execute(f"DELETE FROM {name}")
            width = len(database.execute(f"PRAGMA table_info({table})").fetchall())
            for row in rows:
                try:
                    database.execute(f"INSERT INTO {table} VALUES ({','.join('?' * width)})", row[:width])
                except (sqlite3.IntegrityError, sqlite3.OperationalError):
                    continue  # SQLite itself does not take it, nor any row behind the largest number
        finally:
            database.close()
        store = Store(self._database)
        try:
            read = [store.wishes.desired(), store.wishes.specs(), store.ranks.handles(), store.ranks.answered("m")]
            read += [store.history.operations(), store.history.events()]
            json.dumps([repr(read), *map(str, store.damages)]).encode()
        finally:
            store.close()


def _page(data: bytes) -> None:
    page = data.decode("utf-8", "replace")
    fault_of(page)
    merge({("m", "n"): page})


def _log(lines: list[bytes]) -> None:
    parser = Parser()
    for number, line in enumerate(lines):
        parser.feed(line.decode("utf-8", "replace"), float(number))
    json.dumps(asdict(Progress(**parser.progress)), allow_nan=False)


@contextmanager
def targets() -> Iterator[Mapping[str, Target]]:
    """By name. The server and the folder are there as long as this is open."""
    with ExitStack() as held:
        files = Files(Path(held.enter_context(TemporaryDirectory(prefix="sk"))))
        server = held.enter_context(Loopback())
        yield {
            "HTTP": Target(_HTTP, server.parse),
            "body": Target(_JSON_PIECES, model_of_json),
            "outline": Target(_JSON_PIECES, lambda data: asyncio.run(outline(b'{"model":"m","x":"' + b"y" * (1 << 19) + b'",' + data))),
            "form": Target(_JSON_PIECES, lambda data: model_of_form(b"--x\r\n" + data, "multipart/form-data; boundary=x")),
            "metrics page": Target(_JSON_PIECES, _page),
            "safetensors": Target(_safetensors() | st.binary(max_size=64), files.safetensors),
            "recipe": Target(_RECIPES, lambda data: imported(data, "recipe.yaml")),
            "configuration": Target(_CONFIGURATIONS, files.configuration),
            "state rows": Target(_ROWS, files.rows),
            "engine log": Target(_lines(), _log),
        }
