"""An upgrade in place, under load: the files of a release are replaced below its daemon, and the next daemon is of this tree.

The old release is the last one whose modules all lay in one folder, so every handle, actor and process that it leaves has old names.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import tarfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from tests.support.activated import ActivatedDaemon
from tests.support.daemon_process import ROOT, alive
from tests.support.waiting import HUNG_S, until

# `git archive` of its packages: a clone need not have the history.
OLD = ROOT / "tests" / "fixtures" / "flat_release.tar.xz"
PACKAGES = ("sparkd", "workers", "configs")
ENGINES = ("quick", "slow", "other")
# More than the buffers between the stub and a client that does not read: such a stream goes on until the client reads.
MANY = 60_000
STREAMS = 8


@pytest.fixture(scope="module", params=["stub", pytest.param("vllm", marks=pytest.mark.rest)])
def old(request: pytest.FixtureRequest, chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActivatedDaemon]:
    """A daemon of the old release that serves two stub engines and another. Its `root` is the installation that is upgraded."""
    folder = tmp_path_factory.mktemp("upgrade")
    installation = folder / "installation"
    extract(installation)
    (folder / "model").mkdir()
    # A stub engine was of the package then.
    stub = {"model": str(folder / "model"), "memory_gib": 1, "entrypoint": "workers.stub", "preload": True}
    # What vLLM knows of its model classes stands in the user's folder: found out anew it costs a start 8 s.
    known = str(Path.home() / ".cache" / "vllm")
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CACHE_ROOT": known}
    engine = {"model": str(chat_model), "dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "env": environment}
    other = {"stub": stub, "vllm": engine | {"preload": True}}[request.param]
    models = {"quick": stub, "slow": stub | {"env": {"SPARKD_STUB_TOKENS": str(MANY)}}, "other": other}
    environ = {"PYTHONPATH": str(installation), "XDG_CACHE_HOME": str(folder / "cache")}
    # As long as a stream is held.
    waits = {"unload_timeout_s": HUNG_S, "limits": {"client_write_timeout_s": HUNG_S}}
    made = ActivatedDaemon(folder, waits | {"engine": {"stop_timeout_s": 2}, "models": models}, environ)
    made.root, made.program = installation, "sparkd"
    made.start()
    try:
        made.settled()
        made.ray_connected()
        for name in ENGINES:
            made.wait_for(name, "READY")
        yield made
    finally:
        made.gone()


def extract(folder: Path) -> None:
    with tarfile.open(OLD) as archive:
        archive.extractall(folder, filter="data")


def replace(installation: Path) -> None:
    """As `pip install .` does: the old files go, those of this tree come."""
    for name in PACKAGES:
        shutil.rmtree(installation / name)
        shutil.copytree(ROOT / name, installation / name, ignore=shutil.ignore_patterns("__pycache__"))


def ask(daemon: ActivatedDaemon, model: str, *, stream: bool) -> None:
    """Over a connection of its own."""
    body = {"model": model, "stream": stream, "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
    response = httpx.post(f"{daemon.url}/v1/chat/completions", json=body, timeout=HUNG_S, trust_env=False)
    assert response.status_code == 200, f"{model}: {response.text}"


class HeldStream:
    """A streamed answer of the model `slow` whose client does not read until `rest`, so that it is in flight as long as the test wants."""

    def __init__(self, daemon: ActivatedDaemon) -> None:
        body = json.dumps({"model": "slow", "stream": True, "messages": [{"role": "user", "content": "x"}], "max_tokens": MANY})
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._socket.settimeout(HUNG_S)
        self._socket.connect(("127.0.0.1", daemon.port))
        fields = f"host: localhost\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}"
        self._socket.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{fields}\r\n\r\n{body}".encode())

    def rest(self) -> bytes:
        """The last bytes of the answer, once it has ended."""
        with self._socket:
            end = b""
            while data := self._socket.recv(1 << 20):
                end = (end + data)[-100:]
            return end


class Askers:
    """Each asks one model again and again, streamed and not, until `end` or the end of its context. answered: how many answers each has,
    by its place in `models`."""

    def __init__(self, daemon: ActivatedDaemon, models: Sequence[str], pool: ThreadPoolExecutor) -> None:
        self.answered = [0] * len(models)
        self._over = threading.Event()
        self._tasks = [pool.submit(self._ask, daemon, model, place) for place, model in enumerate(models)]

    def go_on(self) -> None:
        """Wait until each has two more answers."""
        before = list(self.answered)
        until(lambda: all(now > then + 1 for now, then in zip(self.answered, before, strict=True)), f"answers beyond {before}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def end(self) -> None:
        self._over.set()
        for task in self._tasks:
            task.result()

    def _ask(self, daemon: ActivatedDaemon, model: str, place: int) -> None:
        while not self._over.is_set():
            ask(daemon, model, stream=self.answered[place] % 2 == 0)
            self.answered[place] += 1


def agent_pids(daemon: ActivatedDaemon) -> set[int]:
    return {int(process["pid"]) for process in daemon.status()["costs"]["ray"] if "Agent" in process["name"]}


def events(daemon: ActivatedDaemon, kind: str) -> list[dict[str, Any]]:
    told = daemon.client.get("/admin/v1/events", params={"limit": 1000}).json()["events"]
    return [event for event in told if event["kind"] == kind]


def test_an_upgrade_under_load_restarts_no_engine_and_replaces_the_agent(old: ActivatedDaemon) -> None:
    pids, agents = [old.pid_of(name) for name in ENGINES], agent_pids(old)
    assert len(agents) == 1
    with ThreadPoolExecutor(3 + STREAMS) as pool, Askers(old, ("quick", "quick", "other"), pool) as askers:
        askers.go_on()
        streams = [HeldStream(old) for _ in range(STREAMS)]
        until(lambda: old.model("slow").get("in_flight") == STREAMS, "all streams run")
        replace(old.root)
        assert old.process is not None
        old.process.send_signal(signal.SIGTERM)
        until(lambda: any("STOPPING=1" in message for message in old.told), "its end has begun")
        ends = list(pool.map(HeldStream.rest, streams))
        old.process.wait(HUNG_S)
        old.start()
        old.settled()
        askers.go_on()
        askers.end()
        assert [b"data: [DONE]" in end for end in ends] == [True] * STREAMS

    old.ray_connected()
    until(lambda: agent_pids(old) and not agent_pids(old) & agents, "the agent is of this tree")
    until(lambda: not any(alive(pid) for pid in agents), "the old one has ended")
    assert [old.pid_of(name) for name in ENGINES] == pids
    assert [(old.model(name)["state"], old.model(name)["failures"]) for name in ENGINES] == [("READY", 0)] * 3
    assert {event["model"] for event in events(old, "adopted")} == set(ENGINES)
    assert old.status()["conditions"] == []

    # An engine of the old release ends when it is unloaded.
    engine = old.pid_of("other")
    old.unload("other")
    old.wait_for("other", "STOPPED")
    assert not alive(engine)
    old.load("quick")
    old.wait_for("quick", "READY")
    assert old.chat("quick", "hi").status_code == 200
