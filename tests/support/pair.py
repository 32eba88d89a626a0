"""Two nodes in network namespaces with the daemon on one of them, and what a test asks or does to a model over both. Never fakes a part."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.stub import stub_engine
from tests.support.daemon_process import ROOT, DaemonProcess
from tests.support.namespaces import Namespace, two_nodes
from tests.support.processes import command_of, parent_of, session_of
from tests.support.ray_node import RayNode, reserve_gib
from tests.support.stream import Stream as ClientStream
from tests.support.waiting import HUNG_S, until

RAY_PORT = 6379
OFFERED_GIB = 4


class Stream(ClientStream):
    """A client in the first node that asks the model over both."""

    def __init__(self, pair: Pair, model: str = "pair", **fields: Any) -> None:
        super().__init__(pair.daemon.url, model, inside=pair.here.entered, **fields)


@dataclass
class Pair:
    here: Namespace
    there: Namespace
    daemon: DaemonProcess
    ray_node: RayNode

    @property
    def head(self) -> str:
        return f"{self.here.address}:{RAY_PORT}"

    def sparkd(self, *words: str, node: Namespace | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """A command on the first node, or on another."""
        with (node or self.here).entered():
            return subprocess.run(
                [sys.executable, "-m", "sparkd", *words],
                cwd=ROOT,
                env=os.environ | {"SPARKD_URL": self.daemon.url},
                input=stdin,
                capture_output=True,
                text=True,
                timeout=HUNG_S,
                check=False,
            )

    def start(self) -> None:
        self.daemon.start()
        self.daemon.settled()
        self.daemon.ray_connected()

    def both(self) -> None:
        """Both nodes are in sight, by their agents."""

        def seen() -> bool:
            nodes = (self.daemon.get("/admin/v1/nodes") or {"nodes": []})["nodes"]
            return len(nodes) == 2 and all(node["agent"] for node in nodes)

        until(seen, "both nodes", 0.2)

    def ready(self) -> list[dict[str, Any]]:
        """The ranks, rank 0's first."""
        self.both()
        if self.daemon.model("pair")["want"] != "RUNNING":
            self.daemon.load("pair")
        return list(self.daemon.wait_for("pair", "READY")["ranks"])

    def unloaded(self, model: str) -> None:
        if self.daemon.model(model)["state"] != "STOPPED":
            self.daemon.unload(model)
        self.daemon.wait_for(model, "STOPPED")

    def again(self, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """READY without a hand: other processes, on both nodes, and nothing of the earlier ones."""
        self.both()
        until(lambda: self.daemon.model("pair").get("failures"), "it failed", 0.1)
        after = list(self.daemon.wait_for("pair", "READY")["ranks"])
        assert {rank["pid"] for rank in after}.isdisjoint(rank["pid"] for rank in before)
        assert [pid for rank in before for pid in self.members(rank)] == []
        assert len(self.engines()) == len(after) == 2
        assert self.answers()
        return after

    def failure(self, since_s: float, model: str = "pair") -> tuple[str, float]:
        """Why it failed first since then, and how many seconds later that was noticed."""

        failures = until(lambda: self.failures(since_s, model), "the failure", 0.2)
        assert failures is not None
        return failures[0]

    def failures(self, since_s: float, model: str = "pair") -> list[tuple[str, float]]:
        """The reason of each failure since then, and how many seconds later it was noticed."""
        events = (self.daemon.get("/admin/v1/events?limit=1000") or {"events": []})["events"]
        failed = [event for event in events if event["kind"] == "failed" and event["model"] == model and event["at_s"] >= since_s]
        return [(event["data"]["reason"], event["at_s"] - since_s) for event in failed]

    def engines(self) -> list[int]:
        return [pid for pid in (*self.here.pids(), *self.there.pids()) if "tests.stub" in command_of(pid)]

    def engine_of(self, rank: dict[str, Any]) -> int:
        """The engine's process below the rank's shim."""
        return next(pid for pid in self.engines() if parent_of(pid) == rank["pid"])

    def child_of(self, rank: dict[str, Any]) -> int:
        """The shim's own child, whatever engine it is."""
        return next(pid for pid in self.members(rank) if parent_of(pid) == rank["pid"])

    def members(self, rank: dict[str, Any]) -> list[int]:
        return [pid for pid in (*self.here.pids(), *self.there.pids()) if session_of(pid) == rank["pid"]]

    def answers(self) -> bool:
        answer = self.daemon.chat("pair", "hello", max_tokens=2)
        return answer.status_code == 200 and bool(answer.json()["choices"][0]["message"]["content"])


@contextlib.contextmanager
def two_sparks(folder: Path, models: dict[str, dict[str, Any]], *, gpus: bool = False) -> Iterator[Pair]:
    """Started, with Ray connected on the first; the second joins, and is started again when it ends. At the end everything is killed.

    gpus: the first node has this machine's first GPU, the second its second.
    """
    with two_nodes() as (here, there), here.entered():
        made = gpu_pair_of(folder, here, there, models) if gpus else pair_of(folder, here, there, models)
        with started(made):
            token = (made.daemon.state_dir / "ray.token").read_bytes()
            made.ray_node.start("join", made.head, "--token", "-", stdin=token)
            made.both()
            made.ray_node.keep()
            yield made


@contextlib.contextmanager
def started(made: Pair) -> Iterator[None]:
    """The daemon with its Ray. At the end everything on both nodes is killed."""
    try:
        made.start()
        yield
    finally:
        made.ray_node.leave()
        made.daemon.client.close()
        for process in (made.daemon.process, made.ray_node.process):
            if process:
                process.kill()
                process.wait()
        for node in (made.here, made.there):
            node.empty()
        made.daemon.forget()
        shutil.rmtree(made.ray_node.runtime_dir, ignore_errors=True)


def shared_model(folder: Path, **env: str) -> dict[str, Any]:
    """The configuration of a stub over both nodes."""
    folder.mkdir(exist_ok=True)
    return stub_engine(**env) | {"model": str(folder), "memory_gib": 3, "tensor_parallel": 2}


def gpu_pair_of(folder: Path, here: Namespace, there: Namespace, models: dict[str, dict[str, Any]]) -> Pair:
    made = pair_of(folder, here, there, models)
    settings = {"cluster": {"node_ip": here.address, "port": RAY_PORT}, "backoff": {"initial_s": 1, "max_s": 4}, "models": models}
    made.daemon.configure(settings)
    made.ray_node.settings = {"memory": {"guard": "off"}}
    for process, gpu in ((made.daemon, "0"), (made.ray_node, "1")):
        process.environ["CUDA_VISIBLE_DEVICES"] = gpu
    return made


def pair_of(
    folder: Path,
    here: Namespace,
    there: Namespace,
    models: dict[str, dict[str, Any]],
    *,
    there_gib: int = OFFERED_GIB,
    environ: Mapping[str, str] | None = None,
) -> Pair:
    """Both share one file system, as two Sparks never do: their folders differ. environ: of both."""
    for name in ("a", "b/state"):
        (folder / name).mkdir(parents=True)
    engine = {"stop_timeout_s": 2}
    first = {
        "cluster": {"node_ip": here.address, "port": RAY_PORT},
        "memory": {"guard": "off", "os_reserve_gib": reserve_gib(OFFERED_GIB)},
        "engine": engine,
        "backoff": {"initial_s": 1, "max_s": 4},
        "models": models,
    }
    second = {"memory": {"guard": "off", "os_reserve_gib": reserve_gib(there_gib)}, "engine": engine}
    own, other = ({**(environ or {}), "HF_HOME": str(folder / name / "hub")} for name in ("a", "b"))
    return Pair(here, there, DaemonProcess(folder / "a", first, own), RayNode(there, folder / "b", second, environ=other))
