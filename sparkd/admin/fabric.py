"""The admin API's routes of the fabric: how the nodes are linked, and a measurement of the rate between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body
from pydantic import BaseModel, Field

from sparkd.admin.answers import Accepted, accepted, answers
from sparkd.admin.bandwidth import Bandwidth
from sparkd.cluster.cluster import Cluster
from sparkd.control.registry import Registry
from sparkd.fabric.rates import Rate
from sparkd.fabric.report import FabricReport, report
from workers.host.network import VARIABLES


class Measuring(BaseModel, extra="forbid"):
    """Between which nodes a rate is measured.

    nodes: `all` in sight, or two or more addresses.
    force: measure although a model uses them.
    """

    nodes: Literal["all"] | Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=2, max_length=16)] = "all"
    force: bool = False


def register_fabric(api: APIRouter, registry: Registry, cluster: Cluster, bandwidth: Bandwidth) -> None:
    @api.get(
        "/fabric", **answers(FabricReport), summary="How the nodes are linked: cages, rails, cables, findings, and each node's environment"
    )
    async def fabric() -> dict[str, Any]:
        return await fabric_of(registry, cluster, bandwidth.rates.all())

    @api.post("/fabric/measure", status_code=202, summary="Measure the rate between each two nodes, with at most 512 MiB for each pair")
    async def measure(between: Annotated[Measuring, Body(default_factory=Measuring)]) -> Accepted:
        return accepted(await bandwidth.start(between.nodes, force=between.force))


async def fabric_of(registry: Registry, cluster: Cluster, rates: Sequence[Rate] = ()) -> dict[str, Any]:
    """See sparkd.fabric.report."""
    readings, env = await cluster.fabric(), registry.config.engine.env
    proved = [transport for record in registry.records.values() for transport in record.attempt.transport]
    return report(readings, {name: env[name].get_secret_value() for name in VARIABLES if name in env}, proved, rates)
