"""A stub engine: takes vLLM's command line and environment, logs like vLLM, answers like vLLM. Never loads a model.

    python -m tests.stub serve MODEL --uds PATH --served-model-name A B

Flags it does not know are recorded and ignored. Its own behaviour comes from the environment, because flags belong to vLLM:

    SPARKD_STUB_START_DELAY_S     seconds from start to listening, vLLM's log lines meanwhile
    SPARKD_STUB_LOAD_BYTES        weights it pretends to load in half of that time, reported in the loader's progress file
    SPARKD_STUB_LOAD_GATE         a file; the load stands still half-way until it exists
    SPARKD_STUB_TOKENS, _CHUNK_INTERVAL_S, _STATUS, _SECOND_HANGS, _GATE, _GATE_AFTER
                                  tests.stub.engine.Behaviour
    SPARKD_STUB_EXIT_AT           none, start or load
    SPARKD_STUB_EXIT_CODE         the exit status of that, 0 included (a dead vLLM engine exits 0: vllm#48966)
    SPARKD_STUB_IGNORE_SIGTERM    1: only SIGKILL ends it
    SPARKD_STUB_CHILDREN          sleeping children in its process group; the first ignores SIGTERM
    SPARKD_STUB_CORE              1: the last of them stands for the engine core, whose end is the engine's, exit code 1
    SPARKD_STUB_RECORD            a file for {"argv", "environ", "pid", "children"}, written at the start, mode 0600
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

from tests.stub.engine import Behaviour, Request, StubEngine
from tests.stub.http import StubProtocol
from tests.stub.load import StubLoad, pause
from tests.stub.rehearsal import CacheRefused, StubKv
from tests.stub.team import StubTeam
from workers.door import KEY_FILE, Lock, key_of

__all__ = ["Behaviour", "CommandLine", "Life", "Request", "StubEngine", "main", "start_stub"]

_PREFIX = "SPARKD_STUB_"
_BACKLOG = 2048
_CHILD = [sys.executable, "-I", "-S", "-c", "import signal\nwhile True: signal.pause()"]


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The values that the stub takes from vLLM's flags. `headless`: a rank other than 0, which serves no HTTP."""

    model: str
    names: tuple[str, ...]
    uds: str | None
    host: str
    port: int
    headless: bool
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)

    @classmethod
    def parse(cls, argv: Sequence[str]) -> CommandLine:
        """`argv` without the program's name. SystemExit without a model, as vLLM."""
        flags: dict[str, list[str]] = {}
        name, rest = "", list(argv)
        for word in rest:
            if word.startswith("-") and len(word) > 1 and not word[1].isdigit():
                name, given, value = word.lstrip("-").replace("_", "-").partition("=")
                flags[name] = [value] if given else []
            else:
                flags.setdefault(name, []).append(word)
        places = flags.get("", [])
        model = (flags.get("model") or places[1 if places[:1] == ["serve"] else 0 :] or [""])[0]
        if not model:
            raise SystemExit("stub: a model is needed: serve MODEL, or --model MODEL")
        return cls(
            model=model,
            names=tuple(flags.get("served-model-name") or (model,)),
            uds=flags.get("uds", [None])[0],
            host=flags.get("host", ["0.0.0.0"])[0],
            port=int(flags.get("port", ["8000"])[0]),
            headless="headless" in flags,
            flags=flags,
        )


@dataclass(frozen=True, slots=True)
class Life:
    """How the process lives and dies."""

    start_delay_s: float = 0.0
    load_bytes: int = 0
    load_gate: str = ""
    exit_at: str = "none"
    exit_code: int = 1
    ignore_sigterm: bool = False
    children: int = 0
    core: bool = False
    record: str | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> tuple[Life, Behaviour]:
        """SystemExit names a variable that is unknown or cannot be read: a test with a typing error must not pass."""
        given = {name.removeprefix(_PREFIX).lower(): value for name, value in environ.items() if name.startswith(_PREFIX)}
        answering = {one.name: type(one.default) for one in fields(Behaviour)}
        living = {one.name: str if one.default is None else type(one.default) for one in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in given.items():
            kind = answering.get(name) or living.get(name)
            try:
                values[name] = (value == "1") if kind is bool else kind(value)  # type: ignore[misc]
            except (TypeError, ValueError):
                raise SystemExit(
                    f"stub: {_PREFIX}{name.upper()}={value!r} is unknown or cannot be read; see tests/stub/__main__.py"
                ) from None
        exit_at = values.get("exit_at", "none")
        if exit_at not in ("none", "start", "load"):
            raise SystemExit(f"stub: {_PREFIX}EXIT_AT={exit_at!r} is not one of none, start, load")
        life = cls(**{name: value for name, value in values.items() if name in living})
        return life, Behaviour(**{name: value for name, value in values.items() if name in answering})


async def start_stub(
    *,
    uds: str | Path | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    models: Sequence[str] = ("stub",),
    **behaviour: Any,
) -> StubEngine:
    """A stub inside the caller's loop; `async with await start_stub(...) as engine`. `behaviour` are the fields of Behaviour.

    `engine.url` and `engine.uds` say where it listens.
    """
    engine = StubEngine(models=tuple(models), behaviour=Behaviour(**behaviour), uds=str(uds) if uds else None)
    listener = _bind(engine.uds, host, port)
    await _listen(engine, listener)
    if uds is None:
        engine.url = f"http://{host}:{listener.getsockname()[1]}"
    return engine


def main(argv: Sequence[str] | None = None) -> int:
    """The process; returns its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    life, behaviour = Life.read(os.environ)
    line = CommandLine.parse(argv)
    children = _spawn(life.children)
    if life.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if life.record:
        _record(Path(life.record), argv, children)
    _log("APIServer", "api_utils.py:286", f"non-default args: {{'model_tag': '{line.model}', 'model': '{line.model}'}}")
    if life.exit_at == "start":
        return life.exit_code
    lock = Lock(key_of(os.environ)) if KEY_FILE in os.environ else None
    engine = StubEngine(models=line.names, lock=lock, behaviour=behaviour, uds=line.uds)
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = asyncio.new_event_loop  # type: ignore[assignment]
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_live(line, life, engine, children))


async def _live(line: CommandLine, life: Life, engine: StubEngine, children: list[subprocess.Popen[bytes]]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT,) if life.ignore_sigterm else (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    # vLLM binds before it loads and listens after: until then the socket's file is there and refuses connections.
    if life.core and children:
        loop.add_reader(os.pidfd_open(children[-1].pid), _core_died, stop)
    listener = None if line.headless else _bind(line.uds, line.host, line.port)
    load, kv = StubLoad(line.flags, life.load_bytes, life.load_gate), StubKv(line.flags, os.environ)
    team = StubTeam.of(line.flags)
    if team is not None:
        engine.stalled = team.stalled
        await team.meet(stop)
    status = None if stop.is_set() else await _load(life, engine, load, kv, stop)
    if status is None and not stop.is_set():
        if listener is not None:
            await _listen(engine, listener)
        _serving(line)
        await stop.wait()
    _log("APIServer", "launcher.py:254", "[shutdown] API server: shutdown triggered")
    await engine.close()
    if team is not None:
        await team.close()
    if listener is not None:
        listener.close()
    for child in children:
        child.terminate()
    return status or 0


def _core_died(stop: asyncio.Event) -> None:
    if not stop.is_set():
        _log("APIServer", "core_client.py:817", "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup", level="WARNING")
        os._exit(1)


async def _load(life: Life, engine: StubEngine, load: StubLoad, kv: StubKv, stop: asyncio.Event) -> int | None:
    """vLLM's start, spread over start_delay_s. Returns an exit status when it is to fail half-way."""
    pause_s = life.start_delay_s / 4
    _log("APIServer", "model.py:733", "Resolved architecture: StubForCausalLM")
    _log("EngineCore", "core.py:133", f"Initializing a V1 LLM engine (v0.32.0) with config: model='{engine.models[0]}'")
    _log("Worker", "gpu_model_runner.py:68", f"Starting to load model {engine.models[0]}...")
    _log("Worker", "weight_utils.py:1108", "Filesystem type for checkpoints: EXT4. Checkpoint size: 0.25 GiB. Available RAM: 100.00 GiB.")
    _shards(0, 0.0)
    load.begin()
    await load.go_on(stop, pause_s, 0.5)
    _shards(1, pause_s)
    if life.exit_at == "load":
        load.fail("model-2.safetensors: layers.1.weight: it is cut off, as the stub was told. Fetch the file again.")
        _log("EngineCore", "core.py:1512", "EngineCore failed to start.", level="ERROR")
        _log("EngineCore", "core.py:1512", "torch.OutOfMemoryError: CUDA out of memory, as the stub was told.", level="ERROR")
        os._exit(life.exit_code)
    await load.pass_gate(stop)
    await load.go_on(stop, pause_s, 1.0)
    load.done()
    _shards(2, 2 * pause_s)
    _log("Worker", "default_loader.py:501", f"Loading weights took {2 * pause_s:.2f} seconds")
    _log("Worker", "gpu_model_runner.py:4311", f"Model loading took 0.25 GiB memory and {2 * pause_s:.6f} seconds")
    try:
        size = await kv.size(stop, pause_s)
    except CacheRefused as sentence:
        _log("EngineCore", "core.py:1512", "EngineCore failed to start.", level="ERROR")
        _log("EngineCore", "core.py:1512", f"ValueError: {sentence}", level="ERROR")
        return life.exit_code
    _log("Worker", "gpu_worker.py:402", f"Available KV cache memory: {size.gib} GiB")
    told = f"GPU KV cache size: {size.tokens:,} tokens, Maximum concurrency for {size.of:,} tokens per request: {size.requests:.2f}x"
    _log("EngineCore", "kv_cache_utils.py:2327", told)
    await pause(stop, pause_s)
    kv.ready()
    _log("EngineCore", "core.py:402", f"init engine (profile, create kv cache, warmup model) took {2 * pause_s:.2f} s")
    return None


def _serving(line: CommandLine) -> None:
    if line.headless:
        return
    where = f"unix:{line.uds}" if line.uds else f"http://{line.host}:{line.port}"
    _log("APIServer", "entry.py:140", f"Starting vLLM server on {where}")
    for text in (f"Started server process [{os.getpid()}]", "Waiting for application startup.", "Application startup complete."):
        _say(sys.stderr, f"INFO:     {text}")


def _bind(uds: str | None, host: str, port: int) -> socket.socket:
    """Like vLLM, does not remove a socket file that is in the way."""
    if uds is not None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(uds if uds is not None else (host, port))
    except OSError:
        listener.close()
        raise
    return listener


async def _listen(engine: StubEngine, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()

    def connect() -> StubProtocol:
        return StubProtocol(engine)

    if listener.family == socket.AF_UNIX:
        engine.server = await loop.create_unix_server(connect, sock=listener, backlog=_BACKLOG)
    else:
        engine.server = await loop.create_server(connect, sock=listener, backlog=_BACKLOG)


def _spawn(count: int) -> list[subprocess.Popen[bytes]]:
    """The first inherits an ignored SIGTERM, so that there is no instant at which one would end it."""
    if not count:
        return []
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stubborn = subprocess.Popen(_CHILD, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, before)
    return [stubborn, *(subprocess.Popen(_CHILD, stdin=subprocess.DEVNULL) for _ in range(count - 1))]


def _record(path: Path, argv: list[str], children: list[subprocess.Popen[bytes]]) -> None:
    """Written beside and renamed, so that a reader sees all of it or nothing."""
    content = {"argv": argv, "environ": dict(os.environ), "pid": os.getpid(), "children": [child.pid for child in children]}
    part = path.with_name(path.name + ".part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(content, file)
    part.rename(path)


def _shards(done: int, elapsed_s: float) -> None:
    clock = f"{int(elapsed_s) // 60:02d}:{int(elapsed_s) % 60:02d}"
    times = f"{clock}<{clock},  1.00it/s" if done else f"{clock}<?, ?it/s"
    bar = f"Loading safetensors checkpoint shards: {done * 50:3d}% Completed | {done}/2 [{times}]"
    _say(sys.stderr, f"\r{bar}\n")


def _log(process: str, place: str, text: str, *, level: str = "INFO") -> None:
    _say(sys.stdout, f"({process} pid={os.getpid()}) {level} {time.strftime('%m-%d %H:%M:%S')} [{place}] {text}")


def _say(stream: TextIO, line: str) -> None:
    """stdout and stderr are where vLLM's log goes, so that is where the stub's is."""
    stream.write(line + "\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
