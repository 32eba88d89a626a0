"""Reads the networks of the daemon's nodes, and makes each rank's environment out of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparkd.errors import ClusterError
from sparkd.fabric.environment import environment, settings
from sparkd.fabric.interfaces import Fabric, fabrics_of, with_proofs
from sparkd.fabric.links import teams, unlinked
from workers.host.network import VARIABLES, sample

log = logging.getLogger("sparkd.cluster")

Reading = Mapping[str, Any]


class FabricNodes:
    """The networks of the nodes.

    read: asks one node what workers.host.network.sample says there; it raises ClusterError without an answer.
    proved: returns the pairs of nodes between which a live NCCL test has passed.
    """

    def __init__(
        self,
        read: Callable[[str], Awaitable[Reading]],
        proved: Callable[[], frozenset[frozenset[str]]] = frozenset,
    ) -> None:
        self._read = read
        self._proved = proved

    async def fabrics(self, nodes: Sequence[str]) -> dict[str, Fabric]:
        """The networks of those that could be read; the faults of the others are in the log."""
        seen: dict[str, Reading] = {}
        for node, raw in zip(nodes, await asyncio.gather(*map(self._reading, nodes)), strict=True):
            if raw is None:
                log.warning("the network of %s cannot be read: its agent does not answer", node)
            elif raw["trouble"]:
                log.warning("the network of %s cannot be read: %s", node, "; ".join(raw["trouble"]))
            else:
                seen[node] = raw
        try:
            fabrics = fabrics_of(seen)
            return with_proofs(fabrics, self._proved())
        except (LookupError, TypeError, ValueError) as error:
            # Another release's agent, or a kernel that says what no other does.
            log.warning("the networks of %s cannot be understood: %s", ", ".join(seen), error)
            return {}

    async def environment(
        self, node: str, peers: Sequence[str] = (), *, rdma: bool, configured: Mapping[str, str], pipeline: bool = False
    ) -> dict[str, str]:
        """Variables of the rank on `node`, whose other ranks are on `peers`; none where one of these nodes cannot be read.

        rdma, configured, pipeline: see fabric_environment.settings.
        """
        fabrics = await self.fabrics([node, *peers])
        if len(fabrics) <= len(peers):
            return {}
        if not peers:
            # A node by itself has no peers, so it needs no names.
            fabrics = {node: replace(fabrics[node], address=None)}
        own = fabrics[node]
        others = [other for other in fabrics.values() if other is not own]
        return environment(settings(own, others, rdma=rdma, configured=configured, pipeline=pipeline))

    async def unlinked(self, nodes: Sequence[str], *, rdma: bool) -> dict[int, str]:
        """By number of nodes, from two to all: why that many cannot share a model by tensor parallelism now, and the fix.

        rdma: False for engines on CPUs.
        """
        return _unlinked(nodes, await self.fabrics(nodes), rdma)

    async def team(self, nodes: Sequence[str], size: int, *, rdma: bool, linked: bool = True) -> tuple[tuple[str, ...], str]:
        """(the first `size` nodes that can share a model, ""); ((), the reason) where there are not enough.

        size: 2 to all nodes.
        rdma: see `unlinked`.
        linked: whether the ranks need a rail between each two. Stages of a pipeline do not: the first nodes do where too few are linked.
        """
        fabrics = await self.fabrics(nodes)
        groups = teams([*fabrics.values()], size, rdma=rdma)
        if not groups and not linked:
            return tuple(nodes[:size]), ""
        if not groups:
            return (), _unlinked(nodes, fabrics, rdma)[size]
        return groups[0], ""

    async def _reading(self, node: str) -> Reading | None:
        try:
            return await self._read(node)
        except ClusterError:
            return None


def _unlinked(nodes: Sequence[str], fabrics: Mapping[str, Fabric], rdma: bool) -> dict[int, str]:
    dark = ", ".join(node for node in nodes if node not in fabrics)
    blind = f"the network of {dark} cannot be read, so its rails are unknown: `sparkd fabric` and the daemon's log say why"
    return unlinked([*fabrics.values()], rdma=rdma) | dict.fromkeys(range(max(2, len(fabrics) + 1), len(nodes) + 1), blind)


def ray_environment(node_ip: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Interface names and the address that this node's Ray gives to what it starts; without what `environ` says itself. Blocks.

    vLLM's Ray executor copies the driver's NCCL_* and VLLM_* to where they are not set, and never GLOO_*: names that differ from node
    to node have to be in each raylet's environment (vllm/v1/executor/ray_executor_v2.py, initialize_worker).
    """
    try:
        raw = sample() | {"environment": {name: environ[name] for name in VARIABLES if name in environ}}
    except OSError as error:
        log.warning("the network of this node cannot be read: %s", error.strerror or error)
        return {}
    if raw["trouble"]:
        log.warning("the network of this node cannot be read: %s", "; ".join(raw["trouble"]))
        return {}
    (fabric,) = fabrics_of({node_ip: raw}).values()
    return environment([setting for setting in settings(replace(fabric, unified=False), rdma=False) if setting.source == "computed"])
