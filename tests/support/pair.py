"""Two nodes in network namespaces with the daemon on one of them, and what a test asks or does to a model over both. Never fakes a part."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.daemon_process import DaemonProcess
from tests.support.namespaces import Namespace, two_nodes
from tests.support.ray_node import RayNode, reserve_gib
from tests.support.waiting import until

RAY_PORT = 6379
OFFERED_GIB = 4
# A model over both that answers slowly enough to be disturbed.
SLOW = {"SPARKD_STUB_TOKENS": "400", "SPARKD_STUB_CHUNK_INTERVAL_S": "0.05"}


@dataclass
class Stream:
    """A client in the middle of an answer, on a thread of its own in the first node."""

    pair: Pair
    text: str = ""
    status: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)

    def start(self) -> Stream:
        threading.Thread(target=self._read, daemon=True).start()
        assert self.began.wait(20), "an answer begins"
        return self

    def _read(self) -> None:
        body = {"model": "pair", "stream": True, "messages": [{"role": "user", "content": "x"}]}
        try:
            with (
                self.pair.here.entered(),
                httpx.Client(timeout=60, trust_env=False) as client,
                client.stream("POST", f"{self.pair.daemon.url}/v1/chat/completions", json=body) as answer,
            ):
                self.status = answer.status_code
                for line in answer.iter_lines():
                    self.text += line + "\n"
                    self.began.set()
        except httpx.HTTPError as error:
            self.text += type(error).__name__
        finally:
            self.ended.set()

    @property
    def clean(self) -> bool:
        """It ended with its answer, an error event or a status, not in the middle of nothing."""
        return self.ended.is_set() and (self.status >= 400 or "[DONE]" in self.text or '"error"' in self.text)


@dataclass
class Pair:
    here: Namespace
    there: Namespace
    daemon: DaemonProcess
    ray_node: RayNode

    def both(self) -> None:
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

    def again(self, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """READY without a hand: other processes, on both nodes, and nothing of the earlier ones."""
        self.both()
        until(lambda: self.daemon.model("pair").get("restarts"), "it failed", 0.1)
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
        return [pid for pid in (*self.here.pids(), *self.there.pids()) if b"workers.stub" in command_of(pid)]

    def engine_of(self, rank: dict[str, Any]) -> int:
        """The engine's process below the rank's shim."""
        return next(pid for pid in self.engines() if _stat(pid)[0] == rank["pid"])

    def child_of(self, rank: dict[str, Any]) -> int:
        """The shim's own child, whatever engine it is."""
        return next(pid for pid in self.members(rank) if _stat(pid)[0] == rank["pid"])

    def members(self, rank: dict[str, Any]) -> list[int]:
        return [pid for pid in (*self.here.pids(), *self.there.pids()) if _stat(pid)[1] == rank["pid"]]

    def answers_quickly(self) -> bool:
        try:
            answer = self.daemon.client.post(
                "/v1/chat/completions",
                json={"model": "pair", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]},
                timeout=3.0,
            )
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    def answers(self) -> bool:
        answer = self.daemon.chat("pair", "hello", max_tokens=2)
        return answer.status_code == 200 and bool(answer.json()["choices"][0]["message"]["content"])


@contextlib.contextmanager
def two_sparks(folder: Path, models: dict[str, dict[str, Any]]) -> Iterator[Pair]:
    """Started, with Ray connected on the first; the second joins, and is started again whenever it ends. At the end everything is killed.

    folder: short, for the sockets of Ray.
    """
    with contextlib.ExitStack() as afterwards, two_nodes() as (here, there), here.entered():
        made = _built(folder, here, there, models)
        afterwards.callback(made.daemon.forget)
        try:
            made.daemon.start()
            made.daemon.settled()
            made.daemon.ray_connected()
            shutil.copy(made.daemon.state_dir / "ray.token", made.ray_node.state_dir / "ray.token")
            made.ray_node.start()
            made.ray_node.keep()
            yield made
        finally:
            made.ray_node.leave()
            made.daemon.client.close()
            for process in (made.daemon.process, made.ray_node.process):
                if process:
                    process.kill()
                    process.wait(10)


def shared_model(folder: Path, **env: str) -> dict[str, Any]:
    """The configuration of a stub over both nodes."""
    folder.mkdir(exist_ok=True)
    return {"model": str(folder), "memory_gib": 3, "tensor_parallel": 2, "env": env}


def command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _built(folder: Path, here: Namespace, there: Namespace, models: dict[str, dict[str, Any]]) -> Pair:
    for name in ("a", "b/state"):
        (folder / name).mkdir(parents=True)
    first = {
        "cluster": {"node_ip": here.address, "port": RAY_PORT},
        "memory": {"guard": "off", "os_reserve_gib": reserve_gib(OFFERED_GIB)},
        "engine": {"entrypoint": "workers.stub", "stop_timeout_s": 2},
        "backoff": {"initial_s": 1, "max_s": 4},
        "models": models,
    }
    second = {
        "cluster": {"node_ip": there.address, "address": f"{here.address}:{RAY_PORT}"},
        "memory": {"guard": "off", "os_reserve_gib": reserve_gib(OFFERED_GIB)},
    }
    return Pair(here, there, DaemonProcess(folder / "a", first), RayNode(there, folder / "b", second))


def _stat(pid: int) -> tuple[int, int]:
    """Parent and session."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(words[1]), int(words[3])
    return -1, -1
