"""Owns the proof of how a model's ranks on several nodes talk: NCCL's own lines of each, judged once. Never decides what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from sparkd.fabric_findings import FAIL, OK, WARN, Finding
from sparkd.fabric_nodes import FabricNodes
from sparkd.nccl_log import IB, judge, parse
from sparkd.state import RankHandle

_ORDER = (FAIL, WARN, OK)


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
        told, found = await asyncio.gather(
            fabric.environment(handle.node_id, peers, rdma=True, configured=configured),
            lines(handle),
        )
        said = parse(found)
        return judge(said, _expected({**told, **configured}, said.asked), handle.node_id)

    judged = [one for each in await asyncio.gather(*map(of, handles)) for one in each]
    about = f"NCCL of {handles[0].model}" if handles else ""
    return tuple(sorted((replace(one, about=about) for one in judged), key=lambda one: _ORDER.index(one.verdict)))


def told_of(found: Iterable[Finding]) -> str:
    """In one line, for an event."""
    return " ".join(f"{one.verdict}, {one.node}, {one.check}: {one.evidence}. {one.cure}".rstrip() for one in found)


def _expected(told: Mapping[str, str], asked: str | None) -> tuple[str, ...]:
    """The RDMA devices that NCCL was told to take, by its own word where the node cannot be read; none where an operator wants sockets."""
    if told.get("NCCL_NET", IB) != IB:
        return ()
    names = told.get("NCCL_IB_HCA", asked or "")
    return () if names.startswith("^") else tuple(name.partition(":")[0] for name in names.lstrip("=").split(",") if name)
