"""The daemon's parts that the page's stream is made of, over nodes and models that are made up. Never starts Ray or an engine.

Started by tests.bench.page with --port, --folder, --nodes, --models and --loaded. A line on its standard input starts the stream and its
series.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from sparkd.admin.app import admin_app
from sparkd.admin.live import Live
from sparkd.config.config import load_config
from sparkd.execution.boundary import Boundary
from sparkd.gateway.client_connection import client_connection
from sparkd.gateway.edge import Edge
from sparkd.gateway.limits import ClientLimits
from sparkd.gateway.rates import Rates
from sparkd.gateway.server import gateway_server
from sparkd.state.nouns import EngineMemory, Reading
from sparkd.state.series import Series
from sparkd.state.snapshot import Snapshot
from sparkd.state.store import Store
from tests.support.admin_parts import parts_of
from tests.support.fakes import FakeCluster, supervised

GIB = 1 << 30


class MadeUp:
    """A supervisor over made-up nodes; its snapshots have the engines of the loaded models besides."""

    def __init__(self, supervisor: Any, loaded: int, nodes: list[str]) -> None:
        self._supervisor = supervisor
        self._engines = tuple(EngineMemory(f"model-{number}", nodes[number % len(nodes)], GIB, 40 * GIB) for number in range(loaded))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._supervisor, name)

    def snapshot(self) -> Snapshot:
        return replace(self._supervisor.snapshot(), engines=self._engines)


class MadeUpScraper:
    watched = False

    def __init__(self, loaded: int, chance: random.Random) -> None:
        self._loaded = loaded
        self._chance = chance

    def rates(self) -> Mapping[str, Rates]:
        def figure() -> float:
            return self._chance.random() * 100

        values = [figure() for _ in range(12)]
        return {f"model-{number}": Rates(*values, acceptance=(0.9, 0.5)) for number in range(self._loaded)}


class Nodes(FakeCluster):
    """Each look finds other figures on every node."""

    def __init__(self, count: int, chance: random.Random) -> None:
        super().__init__()
        self.agents = tuple(f"10.0.{number // 250}.{number % 250 + 1}" for number in range(count))
        self._chance = chance

    async def observe(self) -> Any:
        now_s = time.time()
        self.node_readings = {node: self._reading(node, now_s) for node in self.agents}
        return await super().observe()

    def _reading(self, node: str, now_s: float) -> Reading:
        free = int(self._chance.random() * 40 * GIB)
        return Reading(
            *(node, now_s, 120 * GIB, free + 5 * GIB, free, 5 * GIB, 0, 0),
            psi_full_avg10=self._chance.random(),
            slope_bytes_per_s=float(-free),
            unaccounted_bytes=free // 2,
            gpu_power_w=40 * self._chance.random(),
            gpu_busy_percent=96.0,
            gpu_celsius=60.0,
            gpu_clock_mhz=2411.0,
            gpu_throttled=(),
            gpu_name="NVIDIA GB10",
        )

    async def fabric(self) -> dict[str, Any]:
        return {}

    async def everywhere(self, method: str, *arguments: Any) -> dict[str, Any]:
        return {node: [] for node in self.agents}


async def serve(asked: argparse.Namespace) -> None:
    chance = random.Random(1)
    cluster = Nodes(asked.nodes, chance)
    models = {f"model-{number}": {"model": str(asked.folder), "ttl": number} for number in range(asked.models)}
    config = load_config(None, flags={"models": models, "state_dir": str(asked.folder)}, environ={})
    store = Store(config.state_dir / "state.db")
    boundary = Boundary(time.monotonic)

    async def ask(model: str, timeout_s: float) -> None:
        return None

    real = supervised(config, store, cluster, ask, time.monotonic, time.time)
    supervisor: Any = MadeUp(real, asked.loaded, list(cluster.agents))
    controlled: Any = (supervisor, real.registry, real.journal, cluster)
    scraper: Any = MadeUpScraper(asked.loaded, chance)
    live = Live(*controlled, scraper, list, series=Series(config.state_dir / "state.db"), boundary=boundary)
    edge = Edge(supervisor, admin=admin_app(*controlled, parts_of(live=live)), live=lambda: (True, {}), ready=lambda: (True, {}))
    server = gateway_server(edge, client_connection(ClientLimits()), drain_s=0.1, boundary=boundary)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.run_until_told([socket.create_server(("127.0.0.1", asked.port))]))
        tasks.create_task(real.run())
        await asyncio.to_thread(sys.stdin.readline)
        tasks.create_task(live.run())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.page_target")
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("port", "nodes", "models", "loaded"):
        parser.add_argument(f"--{name}", type=int, required=True)
    asked = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(asked))


if __name__ == "__main__":
    main()
