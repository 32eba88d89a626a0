"""One model over two nodes: two network namespaces, the daemon in one, `sparkd ray-node` in the other, and whatever may break between."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_process import DaemonProcess, until
from tests.namespaces import Namespace, two_nodes
from tests.ray_node import RayNode, reserve_gib

RAY_PORT = 6379
OFFERED_GIB = 4
DETECTED_S = 10.0


@dataclass
class Pair:
    here: Namespace
    there: Namespace
    daemon: DaemonProcess
    ray_node: RayNode

    def both(self, timeout_s: float = 90.0) -> None:
        def seen() -> bool:
            nodes = (self.daemon.get("/admin/v1/nodes") or {"nodes": []})["nodes"]
            return len(nodes) == 2 and all(node["agent"] for node in nodes)

        until(seen, timeout_s, "both nodes", 0.2)

    def ready(self) -> list[dict[str, Any]]:
        """The ranks, rank 0's first."""
        self.both()
        if self.daemon.model("pair")["want"] != "RUNNING":
            self.daemon.load("pair")
        return list(self.daemon.wait_for("pair", "READY", 90)["ranks"])

    def engines(self) -> list[int]:
        return [pid for pid in (*self.here.pids(), *self.there.pids()) if b"workers.stub" in _command(pid)]

    def engine_of(self, rank: dict[str, Any]) -> int:
        """The engine's process below the rank's shim."""
        return next(pid for pid in self.engines() if _parent(pid) == rank["pid"])

    def answers(self) -> bool:
        return self.daemon.chat("pair", "hello", max_tokens=2).status_code == 200


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("team")
    with two_nodes() as (here, there), here.entered():
        made = _built(folder, here, there)
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


def test_a_model_over_two_nodes_has_a_rank_on_each_and_answers(pair: Pair) -> None:
    first, second = pair.ready()

    assert [(rank["node_id"], rank["rank"], rank["world"]) for rank in (first, second)] == [
        (pair.here.address, 0, 2),
        (pair.there.address, 1, 2),
    ]
    assert second["attempt"] == first["rank_id"]
    assert pair.answers()


def _built(folder: Path, here: Namespace, there: Namespace) -> Pair:
    for name in ("model", "a", "b/state"):
        (folder / name).mkdir(parents=True)
    slow = {"SPARKD_STUB_TOKENS": "400", "SPARKD_STUB_CHUNK_INTERVAL_S": "0.05"}
    first = {
        "cluster": {"node_ip": here.address, "port": RAY_PORT},
        "memory": {"os_reserve_gib": reserve_gib(OFFERED_GIB)},
        "engine": {"entrypoint": "workers.stub", "stop_timeout_s": 2},
        "backoff": {"initial_s": 1, "max_s": 4},
        "models": {"pair": {"model": str(folder / "model"), "memory_gib": 3, "tensor_parallel": 2, "env": slow}},
    }
    second = {
        "cluster": {"node_ip": there.address, "address": f"{here.address}:{RAY_PORT}"},
        "memory": {"os_reserve_gib": reserve_gib(OFFERED_GIB)},
    }
    return Pair(here, there, DaemonProcess(folder / "a", first), RayNode(there, folder / "b", second))


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return -1
