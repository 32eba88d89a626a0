"""Owns the fabric as plain JSON: nodes, cables, findings and each node's environment, out of raw readings. Never reads one, never draws."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sparkd.fabric.checks import Finding, findings, unanswered, worst
from sparkd.fabric.environment import settings
from sparkd.fabric.interfaces import Fabric, NetworkInterface, fabrics_of, with_proofs
from sparkd.fabric.links import Link, cable_findings, cables_of, expects_rdma, rails, teams, topology
from sparkd.fabric.peers import peers
from sparkd.fabric.rates import Rate, proofs, shown, with_loss
from sparkd.fabric.rates import finding as rated


def report(
    readings: Mapping[str, Mapping[str, Any] | None],
    configured: Mapping[str, str] | None = None,
    proved: Iterable[Mapping[str, str]] = (),
    rates: Sequence[Rate] = (),
) -> dict[str, Any]:
    """readings: by a node's address in the cluster or its name, what `workers.host.network.sample` answered; None without an answer.

    configured: variables of sparkd.yaml's engine.env that count over what is computed. proved: findings on the ranks that run, of the
    fields of a Finding, with a node's address for its name. rates: what was measured between the nodes, by their addresses.
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
        *with_loss((Finding(**proof) for proof in proved), rates),
    )
    together, reason = rails(nodes, rdma=rdma)
    return {
        "nodes": [_node(node) for node in nodes],
        "cables": [_cable(cable) for cable in cables],
        "topology": topology(nodes, cables),
        "rates": [shown(rate) for rate in rates],
        "offered": [asdict(peer) | {"told": peer.told} for peer in peers(nodes, silent)],
        "tensor_parallel": {"all": together, "reason": reason, "pairs": [list(pair) for pair in teams(nodes, 2, rdma=rdma)]},
        "findings": [asdict(finding) for finding in judged],
        "verdict": worst(judged),
        "environment": {node.node: _environment(node, nodes, rdma, configured) for node in nodes},
    }


def _environment(node: Fabric, nodes: Sequence[Fabric], rdma: bool, configured: Mapping[str, str] | None) -> list[dict[str, str | None]]:
    peers = [other for other in nodes if other is not node]
    return [asdict(setting) for setting in settings(node, peers, rdma=rdma, configured=configured)]


def _node(node: Fabric) -> dict[str, Any]:
    return {
        "node": node.node,
        "host": node.host,
        "address": str(node.address) if node.address else None,
        "cages": [
            {"number": cage.number, "label": cage.label, "linked": cage.linked, "twins": [_interface(twin) for twin in cage.twins]}
            for cage in node.cages
        ],
        "lan": [_interface(interface) for interface in node.lans],
        "wifi": [_interface(interface) for interface in node.wifis],
    }


def _interface(interface: NetworkInterface) -> dict[str, Any]:
    return {
        "name": interface.name,
        "mac": interface.mac,
        "pci": interface.pci,
        "up": interface.up,
        "carrier": interface.carrier,
        "speed_mbps": interface.speed_mbps,
        "mtu": interface.mtu,
        "addresses": [str(address) for address in interface.addresses],
        "rdma": interface.rdma.name if interface.rdma else None,
        "rdma_state": interface.rdma.state if interface.rdma else None,
        "gid_index": interface.gid_index,
        "sent_bytes": interface.rdma.sent_bytes if interface.rdma else None,
        "received_bytes": interface.rdma.received_bytes if interface.rdma else None,
    }


def _cable(cable: Link) -> dict[str, Any]:
    return {
        "a": cable.a,
        "a_cage": cable.a_cage.label,
        "b": cable.b,
        "b_cage": cable.b_cage.label,
        "seen": cable.seen,
        "rails": [
            {"a": rail.a.name, "b": rail.b.name, "network": str(rail.network), "rdma": rail.rdma, "problem": rail.problem}
            for rail in cable.rails
        ],
    }
