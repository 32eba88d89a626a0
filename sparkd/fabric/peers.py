"""Lists the machines at the end of a QSFP cable that could join."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address

from sparkd.fabric.interfaces import Cage, Fabric


@dataclass(frozen=True, slots=True)
class Peer:
    """A machine that is not a node of the cluster.

    node, cage: where it was met
    seen: (interface, address, MAC), IPv4 first
    answers: whether it has answered just now; else the kernel knows it from before
    """

    node: str
    cage: str
    seen: tuple[tuple[str, str, str], ...]
    answers: bool

    @property
    def told(self) -> str:
        """`10.0.0.2 on enp1s0f0np0 (spark-1, cage 0) answers`."""
        name, address, _ = self.seen[0]
        return f"{address} on {name} ({self.node}, {self.cage}) {'answers' if self.answers else 'was met'}"


def peers(nodes: Sequence[Fabric], members: Collection[str] = ()) -> tuple[Peer, ...]:
    """The peers of all nodes in their order; one that two of them have met is offered once. members: addresses of nodes
    of the cluster whose other addresses could not be read."""
    ours = {interface.mac for node in nodes for interface in node.interfaces if interface.mac}
    ours |= {mac for node in nodes for _, address, mac in node.neighbours if address in members}
    taken: set[str] = set()
    offered = []
    for node in nodes:
        for cage in node.cages:
            for peer in _of_cage(node, cage, ours):
                macs = {mac for *_, mac in peer.seen}
                if not macs & taken and not any(address in members for _, address, _ in peer.seen):
                    offered.append(peer)
                taken |= macs
    return tuple(offered)


def _of_cage(node: Fabric, cage: Cage, ours: set[str]) -> Iterator[Peer]:
    """Both twins of a cage lead to one node, unless a switch is between: then each MAC address counts as a node of its own."""
    twins = {twin.name for twin in cage.twins if twin.linked}
    met = sorted((entry for entry in node.neighbours if entry[0] in twins and entry[2] not in ours), key=_ipv4_first)
    macs = {name: {mac for other, _, mac in met if other == name} for name in twins}
    groups = [met] if all(len(each) <= 1 for each in macs.values()) else [[row for row in met if row[2] == mac] for mac in _ordered(met)]
    for group in filter(None, groups):
        yield Peer(node.node, cage.label, tuple(group), any((name, address) in node.answers for name, address, _ in group))


def _ordered(met: Sequence[tuple[str, str, str]]) -> list[str]:
    return list(dict.fromkeys(mac for *_, mac in met))


def _ipv4_first(entry: tuple[str, str, str]) -> tuple[bool, str, str]:
    name, address, _ = entry
    try:
        IPv4Address(address)
    except ValueError:
        return True, name, address
    return False, name, address
