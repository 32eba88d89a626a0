"""An upgrade in place, under load: the files of a release are replaced below its daemon, and the next daemon is of this tree.

The old release is the last one whose modules all lay in one folder, so every handle, actor and process that it leaves has old names.
"""

from __future__ import annotations

import shutil
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
from tests.support.waiting import until

# `git archive` of its packages: a clone need not have the history.
OLD = ROOT / "tests" / "fixtures" / "flat_release.tar.xz"
PACKAGES = ("sparkd", "workers", "configs")
ENGINES = ("quick", "slow", "real")
# A stream of the stub lasts about 4 s.
SLOW = {"SPARKD_STUB_TOKENS": "80", "SPARKD_STUB_CHUNK_INTERVAL_S": "0.05"}
START_S = 240.0


@pytest.fixture(scope="module")
def old(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActivatedDaemon]:
    """A daemon of the old release that serves two stub engines and a real one. Its `root` is the installation that is upgraded."""
    folder = tmp_path_factory.mktemp("upgrade")
    installation = folder / "installation"
    extract(installation)
    (folder / "model").mkdir()
    stub = {"model": str(folder / "model"), "memory_gib": 1, "entrypoint": "workers.stub", "preload": True}
    engine = {"model": str(chat_model), "dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "env": {"VLLM_CPU_KVCACHE_SPACE": "1"}}
    models = {"quick": stub, "slow": stub | {"env": SLOW}, "real": engine | {"preload": True}}
    environ = {"PYTHONPATH": str(installation), "XDG_CACHE_HOME": str(folder / "cache")}
    made = ActivatedDaemon(folder, {"engine": {"stop_timeout_s": 2}, "models": models}, environ)
    made.root = installation
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


def ask(daemon: ActivatedDaemon, model: str, *, stream: bool, tokens: int = 8) -> str:
    """Over a connection of its own; the whole answer."""
    body = {"model": model, "stream": stream, "messages": [{"role": "user", "content": "x"}], "max_tokens": tokens}
    response = httpx.post(f"{daemon.url}/v1/chat/completions", json=body, timeout=240, trust_env=False)
    assert response.status_code == 200, f"{model}: {response.text}"
    return response.text


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


@pytest.mark.timeout(600)
def test_an_upgrade_under_load_restarts_no_engine_and_replaces_the_agent(old: ActivatedDaemon) -> None:
    pids, agents = [old.pid_of(name) for name in ENGINES], agent_pids(old)
    assert len(agents) == 1
    with ThreadPoolExecutor(12) as pool, Askers(old, ("quick", "quick", "real"), pool) as askers:
        askers.go_on()
        streams = [pool.submit(ask, old, "slow", stream=True, tokens=80) for _ in range(8)]
        until(lambda: old.model("slow").get("in_flight") == 8, "all streams run")
        replace(old.root)
        old.restart()
        old.settled()
        askers.go_on()
        askers.end()
        assert [stream.result().endswith("data: [DONE]\n\n") for stream in streams] == [True] * 8

    old.ray_connected()
    until(lambda: agent_pids(old) and not agent_pids(old) & agents, "the agent is of this tree")
    assert [alive(pid) for pid in agents] == [False]
    assert [old.pid_of(name) for name in ENGINES] == pids
    assert [(old.model(name)["state"], old.model(name)["failures"]) for name in ENGINES] == [("READY", 0)] * 3
    assert {event["model"] for event in events(old, "adopted")} == set(ENGINES)
    assert old.status()["conditions"] == []


@pytest.mark.timeout(600)
def test_an_engine_of_the_old_release_ends_when_it_is_unloaded(old: ActivatedDaemon) -> None:
    pid = old.pid_of("real")
    old.unload("real")
    old.wait_for("real", "STOPPED")
    assert not alive(pid)
    old.load("real")
    old.wait_for("real", "READY")
    assert old.chat("real", "hi").status_code == 200
