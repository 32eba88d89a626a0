"""The admin API's routes of the fabric: how the nodes are linked, and a measurement of the rate between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_type_hints

from fastapi import APIRouter, Body
from pydantic import BaseModel, Field, create_model

from sparkd.admin.answers import Accepted, Offered, accepted, answers
from sparkd.admin.bandwidth import Bandwidth
from sparkd.cluster.cluster import Cluster
from sparkd.control.registry import Registry
from sparkd.errors import UnknownRoute
from sparkd.fabric.checks import Finding
from sparkd.fabric.environment import Setting
from sparkd.fabric.rates import Rate
from sparkd.fabric.report import report
from workers.host.network import VARIABLES


class Interface(BaseModel):
    name: str
    mac: str | None
    pci: str | None
    up: bool
    carrier: bool | None
    speed_mbps: int | None
    mtu: int | None
    addresses: list[str]
    rdma: str | None
    rdma_state: str | None
    gid_index: int | None
    sent_bytes: int | None
    received_bytes: int | None


class FabricCage(BaseModel):
    number: int
    label: str
    linked: bool
    twins: list[Interface]


class FabricNode(BaseModel):
    """node: its name here and in cables, findings and rates, the host's where that tells nodes apart; address: in the cluster."""

    node: str
    host: str | None
    address: str | None
    cages: list[FabricCage]
    lan: list[Interface]
    wifi: list[Interface]


class Rail(BaseModel):
    a: str
    b: str
    network: str
    rdma: bool
    problem: str | None


class Cable(BaseModel):
    a: str
    a_cage: str
    b: str
    b_cage: str
    seen: bool
    rails: list[Rail]


# A measured rate, and its verdict.
RateBody = create_model(
    "Rate",
    __doc__="The rate measured between two nodes.",
    **{name: (kind, ...) for name, kind in get_type_hints(Rate).items()},  # type: ignore[call-overload]
    normal_gb_s=(str | None, ...),
    verdict=(str, ...),
    told=(str, ...),
)


class TensorParallel(BaseModel):
    """Whether all nodes may share a model, why not, and which pairs may."""

    all: bool
    reason: str | None
    pairs: list[list[str]]


class FabricReport(BaseModel):
    nodes: list[FabricNode]
    cables: list[Cable]
    topology: str
    rates: list[RateBody]  # type: ignore[valid-type]
    offered: list[Offered]
    tensor_parallel: TensorParallel
    findings: list[Finding]
    verdict: str
    environment: dict[str, list[Setting]]


class Measuring(BaseModel, extra="forbid"):
    """Between which nodes a rate is measured. nodes: `all` in sight, or two or more addresses; force: although a model uses them."""

    nodes: Literal["all"] | Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=2, max_length=16)] = "all"
    force: bool = False


def register_fabric(api: APIRouter, registry: Registry, cluster: Cluster, bandwidth: Bandwidth | None) -> None:
    @api.get(
        "/fabric", **answers(FabricReport), summary="How the nodes are linked: cages, rails, cables, findings, and each node's environment"
    )
    async def fabric() -> dict[str, Any]:
        return await fabric_of(registry, cluster, bandwidth.rates.all() if bandwidth else ())

    @api.post("/fabric/measure", status_code=202, summary="Measure the rate between each two nodes, with at most 512 MiB for each pair")
    async def measure(between: Annotated[Measuring, Body(default_factory=Measuring)]) -> Accepted:
        if bandwidth is None:
            raise UnknownRoute("This daemon bandwidth nothing.")
        return accepted(await bandwidth.start(between.nodes, force=between.force))


async def fabric_of(registry: Registry, cluster: Cluster, rates: Sequence[Rate] = ()) -> dict[str, Any]:
    """See sparkd.fabric.report."""
    readings, env = await cluster.fabric(), registry.config.engine.env
    proved = [transport for record in registry.records.values() for transport in record.attempt.transport]
    return report(readings, {name: env[name].get_secret_value() for name in VARIABLES if name in env}, proved, rates)
