"""Makes the answer about the fabric out of raw readings: nodes, cables, findings and each node's environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Any, get_type_hints

from pydantic import AliasPath, BaseModel, ConfigDict, Field, create_model

from sparkd.fabric.checks import Finding, findings, unanswered, worst
from sparkd.fabric.environment import Setting, settings
from sparkd.fabric.interfaces import fabrics_of, with_proofs
from sparkd.fabric.links import cable_findings, cables_of, expects_rdma, rails, teams, topology
from sparkd.fabric.peers import peers
from sparkd.fabric.rates import Rate, proofs, shown
from sparkd.fabric.rates import finding as rated


class _Answer(BaseModel):
    """Made of the nouns of the fabric, or of such an answer again."""

    model_config = ConfigDict(from_attributes=True, populate_by_name=True)


class Interface(_Answer):
    name: str
    mac: str | None
    pci: str | None
    up: bool
    carrier: bool | None
    speed_mbps: int | None
    mtu: int | None
    addresses: list[IPv4Interface]
    rdma: str | None = Field(None, validation_alias=AliasPath("rdma", "name"))
    rdma_state: str | None = Field(None, validation_alias=AliasPath("rdma", "state"))
    gid_index: int | None
    sent_bytes: int | None = Field(None, validation_alias=AliasPath("rdma", "sent_bytes"))
    received_bytes: int | None = Field(None, validation_alias=AliasPath("rdma", "received_bytes"))


class FabricCage(_Answer):
    number: int
    label: str
    linked: bool
    twins: list[Interface]


class FabricNode(_Answer):
    """node: its name here and in cables, findings and rates, the host's where that tells nodes apart
    address: in the cluster
    """

    node: str
    host: str | None
    address: IPv4Address | None
    cages: list[FabricCage]
    lan: list[Interface] = Field(validation_alias="lans")
    wifi: list[Interface] = Field(validation_alias="wifis")


class Rail(_Answer):
    a: str = Field(validation_alias=AliasPath("a", "name"))
    b: str = Field(validation_alias=AliasPath("b", "name"))
    network: IPv4Network
    rdma: bool
    problem: str | None


class Cable(_Answer):
    a: str
    a_cage: str = Field(validation_alias=AliasPath("a_cage", "label"))
    b: str
    b_cage: str = Field(validation_alias=AliasPath("b_cage", "label"))
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


class Offered(_Answer):
    """A machine at the other end of a cable that could join. seen: (interface, address, MAC)."""

    node: str
    cage: str
    seen: list[tuple[str, str, str]]
    answers: bool
    told: str


class TensorParallel(_Answer):
    """Whether all nodes may share a model, why not, and which pairs may."""

    all: bool
    reason: str | None
    pairs: list[list[str]]


class FabricReport(_Answer):
    nodes: list[FabricNode]
    cables: list[Cable]
    topology: str
    rates: list[RateBody]  # type: ignore[valid-type]
    offered: list[Offered]
    tensor_parallel: TensorParallel
    findings: list[Finding]
    verdict: str
    environment: dict[str, list[Setting]]


def report(
    readings: Mapping[str, Mapping[str, Any] | None],
    configured: Mapping[str, str] | None = None,
    proved: Iterable[Mapping[str, str]] = (),
    rates: Sequence[Rate] = (),
) -> dict[str, Any]:
    """A FabricReport as plain JSON.

    readings: by a node's address in the cluster or its name, what `workers.host.network.sample` answered; None without an answer
    configured: variables of sparkd.yaml's engine.env that count over what is computed
    proved: findings on the ranks that run, of the fields of a Finding, with a node's address for its name
    rates: what was measured between the nodes, by their addresses
    """
    fabrics = fabrics_of({node: raw for node, raw in readings.items() if raw is not None})
    fabrics = with_proofs(fabrics, proofs(rates))
    rates = [rate for rate in rates if rate.pair <= fabrics.keys()]
    nodes = [*fabrics.values()]
    silent = [node for node, raw in readings.items() if raw is None]
    cables, rdma = cables_of(nodes), expects_rdma(nodes)
    judged = (
        *map(unanswered, silent),
        *(finding for node in nodes for finding in findings(node)),
        *cable_findings(nodes, cables, rdma=rdma),
        *map(rated, rates),
        *(Finding(**proof) for proof in proved),
    )
    together, reason = rails(nodes, rdma=rdma)
    answer = FabricReport.model_validate(
        {
            "nodes": nodes,
            "cables": cables,
            "topology": topology(nodes, cables),
            "rates": [shown(rate) for rate in rates],
            "offered": peers(nodes, silent),
            "tensor_parallel": {"all": together, "reason": reason, "pairs": teams(nodes, 2, rdma=rdma)},
            "findings": judged,
            "verdict": worst(judged),
            "environment": {
                node.node: settings(node, [other for other in nodes if other is not node], rdma=rdma, configured=configured)
                for node in nodes
            },
        }
    )
    return answer.model_dump(mode="json")
