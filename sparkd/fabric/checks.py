"""Judges one node's network: verdict, the values that were read, the cure.

The rates are those of nccl-tests on pairs of Sparks: 13.9 GB/s over one rail, 20 to 24 over both, 2.1 by sockets over the ConnectX-7,
1 over the 10GbE port (logs of owners, NVIDIA's playbooks and their issues 25 and 102).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Network

from sparkd.fabric.interfaces import FULL_MBPS, GOOD_MTU, LINK_LOCAL, Cage, Fabric, NetworkInterface, rdma_mtu

OK, WARN, FAIL = "ok", "warn", "fail"
ONE_RAIL_GB_S = 13.9
BOTH_RAILS_GB_S = (20.0, 24.0)
BOTH_RAILS = f"{BOTH_RAILS_GB_S[0]:g} to {BOTH_RAILS_GB_S[1]:g}"
SOCKETS_GB_S = 2.1
LAN_GB_S = 1.0
# The speed of each of the two links that tie the ConnectX-7 to the chip: PCIe 5, four lanes.
PCI_GTS, PCI_LANES = 32.0, 4


@dataclass(frozen=True, slots=True)
class Finding:
    """node: whose, or `a - b` of a cable between two
    about: what was looked at
    cure: empty where nothing has to be done
    command: the one command of the cure, None if it names none, or several
    """

    check: str
    verdict: str
    node: str
    about: str
    evidence: str
    cure: str = ""
    command: str | None = None


def unanswered(node: str) -> Finding:
    """The finding for a node whose agent gives no answer."""
    command = "sparkd status"
    return Finding("agent", FAIL, node, "agent", "it does not answer", f"See `{command}`, and sparkd-ray on that node.", command)


def findings(fabric: Fabric) -> tuple[Finding, ...]:
    """The findings on one node by itself, in the order in which they depend on each other."""
    if fabric.trouble:
        # A value that was not read must not be called wrong.
        blind = ("address", "gid", "subnets", "route")
        return (*_readable(fabric), *(finding for finding in _cables(fabric) if finding.check not in blind))
    return (*_cables(fabric), *_lan(fabric))


def worst(judged: tuple[Finding, ...]) -> str:
    return max((finding.verdict for finding in judged), key=(OK, WARN, FAIL).index, default=OK)


def _readable(fabric: Fabric) -> Iterator[Finding]:
    cure = "Install iproute2 where the daemon runs, so that addresses, routes and neighbours can be read."
    yield Finding("readable", FAIL, fabric.node, "addresses", "; ".join(fabric.trouble), cure)


def _cables(fabric: Fabric) -> Iterator[Finding]:
    if not fabric.cages:
        armed = ", hot-plug powers the card off without a cable" if fabric.hotplug else ""
        cure = "To link two Sparks, plug a QSFP cable in; if one is plugged already, restart both so that the card comes back."
        yield Finding("connectx", OK, fabric.node, "ConnectX-7", f"not on the PCI bus{armed}", cure)
        return
    linked = [cage for cage in fabric.cages if cage.linked]
    if not linked:
        off = [twin.name for twin in fabric.twins if not twin.up]
        evidence = ", ".join(f"{twin.name} {_carrier(twin)}" for twin in fabric.twins)
        if off:
            cure = f"Switch them on to see whether a cable is there: {_switch_on(off)}."
            yield Finding("cable", WARN, fabric.node, "QSFP", evidence, cure)
        else:
            yield Finding("cable", OK, fabric.node, "QSFP", evidence, "To link two Sparks, plug a QSFP cable in.")
        return
    yield Finding("cable", OK, fabric.node, "QSFP", ", ".join(f"{cage.label}: {_numbers(cage)}" for cage in linked))
    for cage in linked:
        if cage.virtual:
            yield from _addressed(fabric, cage)
            continue
        yield from _twins(fabric, cage)
        yield from _physical(fabric, cage)
        yield from _addressed(fabric, cage)
        yield from _rdma(fabric, cage)
    yield from _subnets(fabric, linked)


def _twins(fabric: Fabric, cage: Cage) -> Iterator[Finding]:
    """One cable needs both: each has half of its rate."""
    evidence = ", ".join(f"{twin.name} {_carrier(twin)}" for twin in cage.twins)
    linked = [twin for twin in cage.twins if twin.linked]
    if len(linked) > 1:
        yield Finding("twins", OK, fabric.node, cage.label, evidence)
        return
    off = [twin.name for twin in cage.twins if not twin.up]
    half = f"one twin alone reaches {ONE_RAIL_GB_S} of {BOTH_RAILS} GB/s"
    if len(cage.twins) < 2:
        cure = f"The card's other half is missing and {half}: shut down, cut the power for a minute, and start again."
    elif off:
        cure = f"Switch it on, since {half}: {_switch_on(off)}."
    else:
        cure = f"Both ends of one cable lead here and {half}: reseat it, then restart."
    yield Finding("twins", WARN, fabric.node, cage.label, evidence, cure)


def _physical(fabric: Fabric, cage: Cage) -> Iterator[Finding]:
    linked = [twin for twin in cage.twins if twin.linked]
    mtus = ", ".join(f"{twin.name} {twin.mtu} (RDMA packets of {rdma_mtu(twin.mtu)} bytes)" for twin in linked)
    if len({twin.mtu for twin in linked}) > 1:
        yield Finding("mtu", WARN, fabric.node, cage.label, mtus, f"Give both twins one MTU, {GOOD_MTU}, at both ends of the cable.")
    elif any(twin.mtu < GOOD_MTU for twin in linked):
        cure = f"Set mtu: {GOOD_MTU} for both twins in netplan, at both ends: 1500 costs 10 to 20 % (all_gather 19 to 21 GB/s)."
        yield Finding("mtu", WARN, fabric.node, cage.label, mtus, cure)
    else:
        yield Finding("mtu", OK, fabric.node, cage.label, mtus)
    speeds = ", ".join(f"{twin.name} {_speed(twin)}" for twin in linked)
    if any((twin.speed_mbps or 0) < FULL_MBPS for twin in linked):
        cure = "The link trained below 200G: reseat the cable, or force 200G-baseCR4 on the switch's port."
        yield Finding("speed", WARN, fabric.node, cage.label, speeds, cure)
    else:
        yield Finding("speed", OK, fabric.node, cage.label, speeds)
    for twin in linked:
        if (twin.pci_gts or PCI_GTS) < PCI_GTS or (twin.pci_lanes or PCI_LANES) < PCI_LANES:
            evidence = f"{twin.pci}: {twin.pci_gts or 0:g} GT/s, {twin.pci_lanes} lanes; {PCI_GTS:g} and {PCI_LANES} are normal"
            cure = "The card's PCIe link trained too low: shut down, cut the power for a minute, and start again."
            yield Finding("pci", WARN, fabric.node, twin.name, evidence, cure)


def _addressed(fabric: Fabric, cage: Cage) -> Iterator[Finding]:
    linked = [twin for twin in cage.twins if twin.linked]
    bare = [twin.name for twin in linked if not twin.addresses]
    evidence = ", ".join(f"{twin.name} {_addresses(twin)}" for twin in linked)
    if not bare:
        yield Finding("address", OK, fabric.node, cage.label, evidence)
    elif len(bare) == len(linked):
        cure = f"Give {' and '.join(bare)} an IPv4 address each in netplan, in two subnets that the other end has too."
        yield Finding("address", FAIL, fabric.node, cage.label, evidence, cure)
    else:
        half = f"RDMA over it ends in `ibv_modify_qp failed`, and without it {ONE_RAIL_GB_S} of {BOTH_RAILS} GB/s are left"
        cure = f"Give {bare[0]} an IPv4 address too, in a subnet of its own: {half}."
        yield Finding("address", WARN, fabric.node, cage.label, evidence, cure)


def _rdma(fabric: Fabric, cage: Cage) -> Iterator[Finding]:
    linked = [twin for twin in cage.twins if twin.linked]
    dead = [twin for twin in linked if twin.rdma is None or twin.rdma.state != "ACTIVE" or twin.rdma.link_layer != "Ethernet"]
    evidence = ", ".join(f"{twin.name} {_port(twin)}" for twin in linked)
    if any(twin.rdma is None for twin in dead):
        cure = f"Load mlx5_ib (in a container: --device=/dev/infiniband --ulimit memlock=-1); without RDMA {SOCKETS_GB_S} GB/s are left."
        yield Finding("rdma", FAIL, fabric.node, cage.label, evidence, cure)
    elif dead:
        cure = "The link is up and its RDMA port is not, so NCCL fails minutes later: restart both nodes, then reseat the cable."
        yield Finding("rdma", FAIL, fabric.node, cage.label, evidence, cure)
    else:
        yield Finding("rdma", OK, fabric.node, cage.label, evidence)
    living = [twin for twin in linked if twin not in dead and twin.addresses]
    if not living:
        return
    evidence = ", ".join(f"{twin.rdma.name} {_gid(twin)}" for twin in living if twin.rdma)
    if all(twin.gid_index is not None for twin in living):
        yield Finding("gid", OK, fabric.node, cage.label, evidence)
    else:
        names = " ".join(twin.name for twin in living if twin.gid_index is None)
        cure = f"The card has no entry for the address, which leads to `remote GID ::`: take {names} down and up again."
        yield Finding("gid", FAIL, fabric.node, cage.label, evidence, cure)


def _subnets(fabric: Fabric, linked: list[Cage]) -> Iterator[Finding]:
    """Two interfaces in one subnet send through whichever the routing table names first. NVIDIA ships both layouts."""
    members: dict[IPv4Network, list[NetworkInterface]] = {}
    for cage in linked:
        for twin in (twin for twin in cage.twins if twin.linked):
            for network in dict.fromkeys(address.network for address in twin.addresses):
                members.setdefault(network, []).append(twin)
    for network, twins in members.items():
        if len(twins) < 2:
            continue
        route = next((device for destination, device in fabric.routes if destination == str(network)), "none")
        evidence = f"{', '.join(twin.name for twin in twins)} are in {network}, its route is {route}"
        across = len({twin.cage for twin in twins}) > 1
        if network == LINK_LOCAL:
            reason = "link-local addresses change with a restart and put all into one subnet"
        else:
            reason = "only the route's device answers for both" if not across else "two cables in one subnet reach the wrong node"
        verdict = FAIL if across and network != LINK_LOCAL else WARN
        yield Finding("subnets", verdict, fabric.node, "QSFP", evidence, f"Give each twin a subnet of its own in netplan: {reason}.")
    for name in sorted({device for destination, device in fabric.routes if destination == "default"}):
        if any(twin.name == name for cage in linked for twin in cage.twins):
            cure = "Take the gateway out of its netplan entry: everything else would go over the cable."
            yield Finding("route", WARN, fabric.node, name, f"the default route is on {name}", cure)


def _lan(fabric: Fabric) -> Iterator[Finding]:
    lan = next((interface for interface in fabric.lans if interface.linked and interface.addresses), None)
    if lan:
        yield Finding("lan", OK, fabric.node, lan.name, f"{_speed(lan)}, {_addresses(lan)}")
        return
    wifi = next((interface for interface in fabric.wifis if interface.linked and interface.addresses), None)
    if wifi:
        cure = "Plug the RJ45 cable in: LAN traffic (a ring's first contact, downloads, clients) is unsteady over Wi-Fi."
        yield Finding("lan", WARN, fabric.node, wifi.name, f"Wi-Fi only, {_addresses(wifi)}", cure)
    elif fabric.lans:
        evidence = ", ".join(f"{interface.name} {_carrier(interface)}, {_addresses(interface)}" for interface in fabric.lans)
        yield Finding("lan", WARN, fabric.node, fabric.lans[0].name, evidence, "Plug the RJ45 cable in, or give it an address.")


def _carrier(interface: NetworkInterface) -> str:
    if not interface.up:
        return "is switched off"
    return "up" if interface.linked else "no cable"


def _speed(interface: NetworkInterface) -> str:
    mbps = interface.speed_mbps
    return f"{mbps // 1000}G" if mbps and mbps >= 1000 else f"{mbps or '?'}M"


def _addresses(interface: NetworkInterface) -> str:
    return " ".join(map(str, interface.addresses)) or "no IPv4 address"


def _port(twin: NetworkInterface) -> str:
    if twin.rdma is None:
        return "has no RDMA device"
    rate = f" {twin.rdma.rate_gbps:g} Gb/s" if twin.rdma.rate_gbps else ""
    layer = "" if twin.rdma.link_layer == "Ethernet" else f" {twin.rdma.link_layer}"
    return f"{twin.rdma.name} {twin.rdma.state}{rate}{layer}"


def _gid(twin: NetworkInterface) -> str:
    return f"index {twin.gid_index}" if twin.gid_index is not None else f"no RoCE v2 entry for {_addresses(twin)}"


def _numbers(cage: Cage) -> str:
    return " + ".join(twin.name for twin in cage.twins if twin.linked)


def _switch_on(names: list[str]) -> str:
    return ", ".join(f"`ip link set {name} up`" for name in names)
