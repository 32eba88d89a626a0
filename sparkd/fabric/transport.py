"""Proves how a model's ranks on several nodes talk, by NCCL's own lines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from sparkd.fabric.checks import FAIL, OK, WARN, Finding
from sparkd.fabric.environment import rdma_devices
from sparkd.fabric.fabric_nodes import FabricNodes
from sparkd.fabric.nccl_log import IB, SOCKET, judge, parse
from sparkd.state.nouns import RankHandle

_ORDER = (FAIL, WARN, OK)


async def proof(
    handles: Sequence[RankHandle],
    fabric: FabricNodes,
    lines: Callable[[RankHandle], Awaitable[list[str]]],
    configured: Mapping[str, str],
) -> tuple[Finding, ...]:
    """Findings on each rank, worst first; nothing of an engine that uses no NCCL, as those for CPUs. node: a rank's address in the cluster.

    lines: returns what NCCL wrote since a rank's start
    configured: the model's environment, as its ranks were started with it

    Raises ClusterError.
    """
    nodes = list(dict.fromkeys(handle.node_id for handle in handles))

    async def of(handle: RankHandle) -> tuple[Finding, ...]:
        peers = [node for node in nodes if node != handle.node_id]
        env, nccl_lines = await asyncio.gather(
            # Nodes without rails between each two share a model as a pipeline only; the placer has reported it.
            fabric.environment(handle.node_id, peers, rdma=True, configured=configured, pipeline=True),
            lines(handle),
        )
        transport = parse(nccl_lines)
        if transport.network == SOCKET and not env and not transport.asked and "NCCL_NET" not in configured:
            return (_blind(handle.node_id),)
        return judge(transport, _expected({**env, **configured}, transport.asked), handle.node_id)

    judged = [finding for each in await asyncio.gather(*map(of, handles)) for finding in each]
    about = f"NCCL of {handles[0].model}" if handles else ""
    return tuple(sorted((replace(finding, about=about) for finding in judged), key=lambda finding: _ORDER.index(finding.verdict)))


def transport_summary(findings: Iterable[Finding]) -> str:
    """In one line, for an event."""
    return " ".join(f"{each.verdict}, {each.node}, {each.check}: {each.evidence}. {each.cure}".rstrip() for each in findings)


def _blind(node: str) -> Finding:
    cure = "`sparkd fabric` and the daemon's log say why; without them sparkd cannot tell whether RDMA should have been used."
    return Finding("network", WARN, node, "NCCL", "network Socket, and the network of its node cannot be read", cure)


def _expected(env: Mapping[str, str], listed: str | None) -> tuple[str, ...]:
    """The RDMA devices that NCCL is configured to use; those in NCCL's log where the node cannot be read; none for sockets."""
    return rdma_devices(env.get("NCCL_IB_HCA", listed or "")) if env.get("NCCL_NET", IB) == IB else ()
