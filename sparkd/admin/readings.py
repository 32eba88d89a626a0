"""Owns what the admin API reads from the nodes: how they are linked, and the logs of engines. Never changes anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkd.cluster.cluster import Cluster
from sparkd.control.registry import Registry
from sparkd.fabric.rates import Rate
from sparkd.fabric.report import report
from workers.host.network import VARIABLES


async def fabric_of(registry: Registry, cluster: Cluster, rates: Sequence[Rate] = ()) -> dict[str, Any]:
    """See sparkd.fabric.report."""
    readings, env = await cluster.fabric(), registry.config.engine.env
    proved = [transport for record in registry.records.values() for transport in record.attempt.transport]
    return report(readings, {name: env[name].get_secret_value() for name in VARIABLES if name in env}, proved, rates)


async def log_of(registry: Registry, cluster: Cluster, name: str, cursor: str | None, max_bytes: int, rank: int = 0) -> dict[str, str]:
    """The log of one rank of the engine: {"text", "cursor"}; give the cursor back to go on from there. Raises UnknownModel."""
    record = registry.find(name)
    other = next((handle for handle in record.attempt.handles if rank and handle.rank == rank), None)
    node, path = (other.node_id, other.log_path) if other else (record.attempt.node_id, None if rank else record.observed.log_path)
    if path is None:
        return {"text": "", "cursor": cursor or ""}
    return await cluster.launcher.read_log(node, path, cursor, max_bytes)
