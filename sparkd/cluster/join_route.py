"""By which of its addresses a node reaches a head, and whether that is a cable between Sparks."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address

from sparkd.errors import ConfigError
from sparkd.fabric.checks import BOTH_RAILS, LAN_GB_S
from sparkd.fabric.interfaces import LAN, QSFP, WIFI, Cage, Fabric, NetworkInterface


@dataclass(frozen=True, slots=True)
class Route:
    """The address by which a node reaches a head.

    node_ip: this node's address in the cluster
    why: where it comes from, one sentence
    warning: a faster route, where there is one
    """

    node_ip: str
    why: str
    warning: str | None = None


def route_to(head: str, routed: str, fabric: Fabric | None, choice: str | None = None) -> Route:
    """The route to a head. Raises ConfigError for a choice that this node does not have.

    head: the head's IPv4 address
    routed: the address that the kernel would talk to it from
    fabric: this node, None where its network cannot be read
    choice: the operator's choice
    """
    if choice is not None:
        _checked(choice)
    if fabric is None:
        return Route(choice or routed, f"{choice or routed} comes from " + ("--node-ip." if choice else "the kernel's route."))
    own = fabric.holding(IPv4Address(choice or routed))
    if own is None:
        if choice:
            had = ", ".join(f"{address.ip} ({each.name})" for each in fabric.interfaces if each.linked for address in each.addresses)
            raise ConfigError(f"--node-ip {choice}: this node has no such address; it has {had or 'none'}.")
        return Route(routed, f"{routed} comes from the kernel's route; sparkd knows no interface of this node with it.")
    near = next((address.network for address in own.addresses if IPv4Address(head) in address.network), None)
    via = f"in {near} with the head" if near else "by a route, not in one subnet with the head"
    reason = f"{choice or routed} is {_named(own, fabric)}, {via}{', set by --node-ip' if choice else ''}."
    return Route(choice or routed, reason, _beside_the_cable(head, own, fabric))


def _checked(address: str) -> None:
    try:
        IPv4Address(address)
    except ValueError:
        raise ConfigError(f"--node-ip {address} is no IPv4 address: the nodes of a cluster talk to each other by IPv4.") from None


def _named(own: NetworkInterface, fabric: Fabric) -> str:
    if own.kind == QSFP:
        cage = _cage(own, fabric)
        speed = f", {own.speed_mbps // 1000}G" if own.speed_mbps else ""
        return f"{own.name} (QSFP{f', {cage.label}' if cage else ''}{speed}, MTU {own.mtu})"
    return f"{own.name} ({ {LAN: 'LAN', WIFI: 'Wi-Fi'}.get(own.kind, 'neither QSFP nor LAN') })"


def _beside_the_cable(head: str, own: NetworkInterface, fabric: Fabric) -> str | None:
    """A warning where a cable is there, and the head is reached by another interface."""
    rails = [f"{twin.name} {twin.addresses[0]}" for twin in fabric.twins if twin.linked and twin.addresses]
    if own.kind == QSFP or not rails:
        return None
    speed = f"at about {LAN_GB_S:g} of {BOTH_RAILS} GB/s"
    return f"{head} is reached without the cable, {speed}: join by the head's address on it (here: {', '.join(rails)})."


def _cage(own: NetworkInterface, fabric: Fabric) -> Cage | None:
    return next((cage for cage in fabric.cages if own in cage.twins), None)
