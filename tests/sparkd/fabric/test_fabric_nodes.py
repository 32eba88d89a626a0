"""The readings that the daemon keeps of its nodes, and what each rank is given out of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from sparkd.errors import AgentLost
from sparkd.fabric.fabric_nodes import FabricNodes, ray_environment
from tests.support.fabric_tree import readings
from tests.support.facts import lacking

A, B = "192.168.100.11", "192.168.100.12"


class Agents:
    """By address, what each answers; None does not answer."""

    def __init__(self, *raw: Mapping[str, Any] | None) -> None:
        self.raw = dict(zip((A, B), raw, strict=False))
        self.nodes = FabricNodes(self.read)

    async def read(self, node: str) -> Mapping[str, Any]:
        found = self.raw[node]
        if found is None:
            raise AgentLost("The agent does not answer.")
        return found

    async def environment(self, node: str, *peers: str, rdma: bool = True, **configured: str) -> dict[str, str]:
        return await self.nodes.environment(node, peers, rdma=rdma, configured=configured)


def pair() -> Agents:
    return Agents(*readings("pair-different-ports").values())


@pytest.mark.parametrize("which", [A, B])
async def test_a_node_that_cannot_be_read_is_named_and_stops_no_rank(which: str, caplog: pytest.LogCaptureFixture) -> None:
    silent, blind = pair(), pair()
    silent.raw[which] = None
    blind.raw[which] = {**(blind.raw[which] or {}), "trouble": ["`ip address show`: not installed"]}
    with caplog.at_level(logging.WARNING, "sparkd.cluster"):
        assert await silent.environment(A, B) == await blind.environment(A, B) == {}

    silence, trouble = (record.getMessage() for record in caplog.records)
    assert lacking(silence, which, "agent") + lacking(trouble, which, "`ip address show`: not installed") == []


async def test_the_nodes_that_may_share_a_model() -> None:
    agents = pair()
    assert await agents.nodes.unlinked([A, B], rdma=True) == {}
    assert await agents.nodes.team([B, A], 2, rdma=True) == ((B, A), "")

    agents = Agents(*readings("half-trained").values())
    told = await agents.nodes.unlinked([A, B], rdma=True)
    assert told == {2: (await agents.nodes.team([A, B], 2, rdma=True))[1]}
    assert lacking(told[2], "mtu: 9000") == []
    agents.raw[B] = None
    blind = f"the network of {B} cannot be read, so its rails are unknown: `sparkd fabric` and the daemon's log say why"
    assert await agents.nodes.unlinked([A, B], rdma=True) == {2: blind}
    assert await agents.nodes.team([A, B], 2, rdma=True) == ((), blind)
    assert await agents.nodes.unlinked([A], rdma=True) == {}


async def test_stages_of_a_pipeline_go_to_linked_nodes_first_and_else_to_any() -> None:
    assert await pair().nodes.team([B, A], 2, rdma=True, linked=False) == ((B, A), "")
    lonely = Agents(*readings("lan-only").values())
    assert await lonely.nodes.team([B, A], 2, rdma=True, linked=False) == ((B, A), "")


def test_a_nodes_ray_is_told_its_interface_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = readings("pair-different-ports")["spark-1"]
    monkeypatch.setattr("sparkd.fabric.fabric_nodes.sample", lambda: raw)
    names = {"NCCL_SOCKET_IFNAME": "=enp1s0f1np1", "GLOO_SOCKET_IFNAME": "enp1s0f1np1", "TP_SOCKET_IFNAME": "enp1s0f1np1"}

    assert ray_environment(A, {}) == names | {"VLLM_HOST_IP": A}
    del names["GLOO_SOCKET_IFNAME"]
    assert ray_environment(A, {"GLOO_SOCKET_IFNAME": "eth7"}) == names | {"VLLM_HOST_IP": A}
    monkeypatch.setattr("sparkd.fabric.fabric_nodes.sample", lambda: raw | {"trouble": ["`ip address show`: not installed"]})
    assert ray_environment(A, {}) == {}
