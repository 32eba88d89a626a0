"""Owns the proof of how a model's ranks on several nodes talk: NCCL's own lines and the RDMA ports' counters. Never decides what comes of
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparkd.fabric.checks import BOTH_RAILS, FAIL, LAN_GB_S, OK, ONE_RAIL_GB_S, SOCKETS_GB_S, WARN, Finding
from sparkd.fabric.environment import environment, settings
from sparkd.fabric.interfaces import fabrics_of, traffic
from sparkd.fabric.nccl_log import IB, SOCKET, judge, parse
from sparkd.fabric.readings import FabricNodes
from sparkd.state.nouns import RankHandle

_ORDER = (FAIL, WARN, OK)
# A first chat over two nodes moves a MiB even of a model of 135 M parameters: two all-reduces a layer, of each token of the question.
LEAST_BYTES = 16 << 10
# A message of some KiB goes over one of NCCL's channels and so over one twin: only what is larger tells that the other lies idle.
JUDGED_BYTES = 1 << 20
IDLE_SHARE = 0.01


async def proof(
    handles: Sequence[RankHandle],
    fabric: FabricNodes,
    lines: Callable[[RankHandle], Awaitable[list[str]]],
    configured: Mapping[str, str],
) -> tuple[Finding, ...]:
    """Worst first; nothing of an engine that uses no NCCL, as those for CPUs. node: a rank's address in the cluster.

    lines: what NCCL wrote since a rank's start. configured: the model's environment, as its ranks were started with it. Raises
    ClusterError.
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
    return in_order(replace(finding, about=about) for finding in judged)


def moved(
    handles: Sequence[RankHandle],
    before: Mapping[str, Mapping[str, Any] | None],
    after: Mapping[str, Mapping[str, Any] | None],
    configured: Mapping[str, str],
) -> tuple[Finding, ...]:
    """The traffic of the RDMA ports of each of their nodes between two readings, the first chat between them; worst first.

    before, after: by node, what workers.host.network.sample answered. Nothing where a node cannot be read, has no RDMA to use, or is
    meant to use sockets.
    """
    nodes = list(dict.fromkeys(handle.node_id for handle in handles))
    read = {node: raw for node in nodes if (raw := after.get(node)) is not None and not raw["trouble"]}
    if len(read) < len(nodes) or any(before.get(node) is None for node in nodes):
        return ()
    then, now = fabrics_of({node: before[node] or {} for node in nodes}), fabrics_of(read)
    findings = []
    for node in nodes:
        env = environment(settings(now[node], [now[other] for other in nodes if other != node], configured=configured, pipeline=True))
        if expected := _expected(env, None):
            counted = traffic(then[node], now[node])
            findings.append(replace(_counted({name: counted.get(name, 0) for name in expected}, node), about=f"NCCL of {handles[0].model}"))
    return in_order(findings)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Worst first."""
    return tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.verdict)))


def told_of(findings: Iterable[Finding]) -> str:
    """In one line, for an event."""
    return " ".join(f"{each.verdict}, {each.node}, {each.check}: {each.evidence}. {each.cure}".rstrip() for each in findings)


def _counted(moved_bytes: Mapping[str, int], node: str) -> Finding:
    """The finding on traffic. moved_bytes: by each RDMA device that NCCL is configured to use."""
    evidence = f"{', '.join(f'{name} {size / 1e6:.2f} MB' for name, size in moved_bytes.items())} during the first chat"
    most = max(moved_bytes.values())
    if most < LEAST_BYTES:
        lost = f"{SOCKETS_GB_S} GB/s by sockets over the ConnectX-7 and {LAN_GB_S:g} over 10GbE, instead of {BOTH_RAILS}"
        return Finding(
            "traffic", FAIL, node, "RDMA", evidence, f"Its ranks do not talk by RDMA ({lost}): see its log, and `sparkd fabric --env`."
        )
    idle = [name for name, size in moved_bytes.items() if size < IDLE_SHARE * most]
    if idle and most >= JUDGED_BYTES:
        cure = f"{', '.join(idle)} lies idle ({ONE_RAIL_GB_S} of {BOTH_RAILS} GB/s): see the findings on its twin and cable."
        return Finding("traffic", WARN, node, "RDMA", evidence, cure)
    return Finding("traffic", OK, node, "RDMA", evidence)


def _blind(node: str) -> Finding:
    cure = "`sparkd fabric` and the daemon's log say why; without them sparkd cannot tell whether RDMA should have been used."
    return Finding("network", WARN, node, "NCCL", "network Socket, and the network of its node cannot be read", cure)


def _expected(env: Mapping[str, str], listed: str | None) -> tuple[str, ...]:
    """The RDMA devices that NCCL is configured to use; those in NCCL's log where the node cannot be read; none for sockets."""
    if env.get("NCCL_NET", IB) != IB:
        return ()
    names = env.get("NCCL_IB_HCA", listed or "")
    return () if names.startswith("^") else tuple(name.partition(":")[0] for name in names.lstrip("=").split(",") if name)
