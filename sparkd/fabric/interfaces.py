"""Describes one node's network: cages of the ConnectX-7 and their twins, RDMA ports, GIDs, LAN, Wi-Fi."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Any

from sparkd.state.rows import noun_of

QSFP, LAN, WIFI, OTHER = "qsfp", "lan", "wifi", "other"
FULL_MBPS = 200_000  # of either twin, whatever the 100 Gb/s of its PCIe link let through
GOOD_MTU = 9000
MELLANOX = "0x15b3"
LINK_LOCAL = IPv4Network("169.254.0.0/16")
# GRH, UDP, BTH, XRC, ATOMICETH and ICRC of one packet: iboe_get_mtu, include/rdma/ib_addr.h.
_ROCE_BYTES = 40 + 8 + 12 + 4 + 28 + 4
_RDMA_MTUS = (4096, 2048, 1024, 512, 256)
# systemd's names of a port: function, then the driver's port name. The digit of either is the cage.
_PORT_IN_NAME = re.compile(r"en(?:P\d+)?p\d+s\d+f(\d)(?:np(\d))?")
_PORT_NAME = re.compile(r"p(\d+)")


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a RoCE port's table.

    v2: RoCE v2
    ip: its IPv4 address, None for a link-local IPv6 one
    """

    index: int
    v2: bool
    ip: IPv4Address | None


@dataclass(frozen=True, slots=True)
class Rdma:
    """One RDMA port. state as the kernel's word (ACTIVE, DOWN), rate in Gb/s; counters in bytes since it came up."""

    name: str
    state: str
    rate_gbps: float | None
    link_layer: str
    gids: tuple[Gid, ...]
    sent_bytes: int | None = None
    received_bytes: int | None = None

    def gid_index(self, ip: IPv4Address) -> int | None:
        """The RoCE v2 entry with this address, the only one that a peer in its subnet can use. It moves when addresses change."""
        return next((gid.index for gid in self.gids if gid.v2 and gid.ip == ip), None)


@dataclass(frozen=True, slots=True)
class NetworkInterface:
    """One network device.

    kind: qsfp, lan, wifi or other
    cage: 0 beside the RJ45 socket, 1 the outer one; None but for qsfp
    carrier: None while the interface is down
    speed_mbps: None where the driver does not report it
    addresses: IPv4 only
    """

    name: str
    kind: str
    cage: int | None
    mac: str
    mtu: int
    up: bool
    carrier: bool | None
    speed_mbps: int | None
    pci: str | None
    pci_gts: float | None
    pci_lanes: int | None
    physical: bool
    addresses: tuple[IPv4Interface, ...]
    rdma: Rdma | None

    @property
    def linked(self) -> bool:
        return self.up and bool(self.carrier)

    @property
    def gid_index(self) -> int | None:
        """The RoCE v2 entry of its first address that has one."""
        indices = (self.rdma.gid_index(address.ip) for address in self.addresses) if self.rdma else ()
        return next((index for index in indices if index is not None), None)

    @property
    def carries_rdma(self) -> bool:
        return self.linked and self.rdma is not None and self.rdma.state == "ACTIVE" and self.gid_index is not None

    def shares(self, other: NetworkInterface) -> IPv4Network | None:
        """A subnet that both have an address in."""
        theirs = {address.network for address in other.addresses}
        return next((address.network for address in self.addresses if address.network in theirs), None)


@dataclass(frozen=True, slots=True)
class Cage:
    """One QSFP socket. Its twins are one cable's two halves, each behind a PCIe link of its own in a PCI domain of its own."""

    number: int
    label: str
    twins: tuple[NetworkInterface, ...]

    @property
    def linked(self) -> bool:
        return any(twin.linked for twin in self.twins)

    @property
    def virtual(self) -> bool:
        """A pair of virtual interfaces that stands for a cable, in tests: neither speed nor RDMA can be asked of it."""
        return not any(twin.physical for twin in self.twins)


@dataclass(frozen=True, slots=True)
class Fabric:
    """One node.

    routes: (destination, interface)
    neighbours: (interface, address, MAC) of whoever answered there
    environment: what its own process environment says of the variables that sparkd computes
    address: the node's in the cluster, None where it has none
    unified: whether CPU and GPU share its memory
    answers: (interface, link-local address) of who answered just now
    proved: names of nodes to which a live NCCL test has passed
    """

    node: str
    host: str
    cages: tuple[Cage, ...]
    lans: tuple[NetworkInterface, ...]
    wifis: tuple[NetworkInterface, ...]
    others: tuple[NetworkInterface, ...]
    routes: tuple[tuple[str, str], ...]
    neighbours: tuple[tuple[str, str, str], ...]
    hotplug: bool
    environment: Mapping[str, str]
    trouble: tuple[str, ...]
    address: IPv4Address | None = None
    unified: bool = True
    answers: frozenset[tuple[str, str]] = frozenset()
    proved: frozenset[str] = frozenset()

    @property
    def twins(self) -> tuple[NetworkInterface, ...]:
        return tuple(twin for cage in self.cages for twin in cage.twins)

    @property
    def interfaces(self) -> tuple[NetworkInterface, ...]:
        return (*self.twins, *self.lans, *self.wifis, *self.others)

    def sees(self, interface: NetworkInterface, mac: str) -> bool:
        return any(name == interface.name and seen == mac for name, _, seen in self.neighbours)

    def holding(self, ip: IPv4Address) -> NetworkInterface | None:
        return next((interface for interface in self.interfaces if any(own.ip == ip for own in interface.addresses)), None)


def fabric_of(node: str, raw: Mapping[str, Any]) -> Fabric:
    """The answer of `workers.host.network.sample`, in this module's nouns. node: its address in the cluster, as everywhere else, or what
    the caller calls it."""
    rdma = _rdma_of(raw["rdma"])
    interfaces = [_interface(link, rdma) for link in raw["interfaces"]]
    own = _address(node)
    return Fabric(
        node=node,
        host=str(raw["host"]),
        cages=_cages([interface for interface in interfaces if interface.kind == QSFP]),
        lans=_best_first(interface for interface in interfaces if interface.kind == LAN),
        wifis=_best_first(interface for interface in interfaces if interface.kind == WIFI),
        others=_best_first(interface for interface in interfaces if interface.kind == OTHER),
        routes=tuple((str(row.get("dst")), str(row.get("dev"))) for row in raw["routes"]),
        neighbours=tuple(_neighbours(raw["neighbours"])),
        hotplug=bool(raw["hotplug"]),
        environment=dict(raw["environment"]),
        trouble=tuple(raw["trouble"]),
        address=None if own is None or own.is_loopback else own,
        unified=bool(raw["unified"]),
        answers=frozenset((str(row["dev"]), str(row["dst"])) for row in raw.get("answers", ())),
    )


def fabrics_of(readings: Mapping[str, Mapping[str, Any]]) -> dict[str, Fabric]:
    return {node: fabric_of(node, raw) for node, raw in readings.items()}


def with_proofs(nodes: Mapping[str, Fabric], passed: Collection[frozenset[str]]) -> dict[str, Fabric]:
    """passed: pairs of these nodes between which a live NCCL test has passed."""
    to = {node: frozenset(other for other in nodes if frozenset((node, other)) in passed) for node in nodes}
    return {node: replace(fabric, proved=to[node]) for node, fabric in nodes.items()}


def rdma_mtu(mtu: int) -> int:
    """Bytes of one RDMA packet's payload that a link of this MTU allows: 1024 for 1500, 4096 for 9000."""
    return next((size for size in _RDMA_MTUS if size <= mtu - _ROCE_BYTES), _RDMA_MTUS[-1])


def traffic(before: Fabric, after: Fabric) -> dict[str, int]:
    """Bytes that each RDMA device of the node sent and received between two looks. Under RoCE the interfaces' own counters stay near 0."""

    def counted(fabric: Fabric) -> dict[str, int]:
        ports = (twin.rdma for twin in fabric.twins if twin.rdma)
        return {port.name: (port.sent_bytes or 0) + (port.received_bytes or 0) for port in ports}

    earlier = counted(before)
    return {name: max(0, total - earlier.get(name, 0)) for name, total in counted(after).items()}


def _interface(raw: Mapping[str, Any], rdma: Mapping[str, Rdma]) -> NetworkInterface:
    kind, cage = _kind(raw)
    computed = {
        "kind": kind,
        "cage": cage,
        "mac": raw["mac"] or "",
        "mtu": raw["mtu"] or 0,
        "addresses": [f"{address['address']}/{address['prefix']}" for address in raw["addresses"]],
        "rdma": next((rdma[name] for name in raw["rdma"] if name in rdma), None),
    }
    return noun_of(NetworkInterface, {**raw, **computed})


def _kind(raw: Mapping[str, Any]) -> tuple[str, int | None]:
    """The driver's port name says which cage; PCI addresses do not, since the twins of one cage differ in them.

    Where it says nothing, the digit in systemd's name does, also of a virtual pair that stands for a cable; then the PCI function.
    """
    if raw["wireless"]:
        return WIFI, None
    of_name = _PORT_IN_NAME.fullmatch(str(raw["name"]))
    mellanox = raw["vendor"] == MELLANOX or bool(raw["rdma"])
    if mellanox or of_name or (raw["vendor"] is None and raw["port_name"]):
        if match := _PORT_NAME.fullmatch(str(raw["port_name"] or "")):
            return QSFP, int(match[1])
        if of_name and not raw["port_name"]:
            return QSFP, int(of_name[2] or of_name[1])
        if mellanox and not raw["port_name"] and raw["pci"] and str(raw["pci"])[-2:-1] == ".":
            return QSFP, int(str(raw["pci"])[-1], 16)
    return (LAN if raw["physical"] else OTHER), None


def _cages(twins: list[NetworkInterface]) -> tuple[Cage, ...]:
    """Twins in the order of their PCI domains. A Spark has one card."""
    numbers = sorted({twin.cage for twin in twins if twin.cage is not None})
    return tuple(
        Cage(number, f"cage {number}", tuple(sorted((twin for twin in twins if twin.cage == number), key=_by_pci))) for number in numbers
    )


def _by_pci(interface: NetworkInterface) -> tuple[str, str]:
    # A name's first capital P is the PCI domain: without one it is domain 0.
    return interface.pci or ("1" if "P" in interface.name else "0"), interface.name


def _best_first(interfaces: Iterable[NetworkInterface]) -> tuple[NetworkInterface, ...]:
    def rank(interface: NetworkInterface) -> tuple[bool, bool, int, str]:
        return not interface.linked, not interface.addresses, -(interface.speed_mbps or 0), interface.name

    return tuple(sorted(interfaces, key=rank))


def _rdma_of(raw: Iterable[Mapping[str, Any]]) -> dict[str, Rdma]:
    """By device; its first port, which is the only one on a Spark."""
    ports: dict[str, Rdma] = {}
    for device in raw:
        rate = re.match(r"[0-9]{1,9}(\.[0-9]+)?", str(device["rate"] or ""))
        computed = {
            "state": str(device["state"] or "").partition(": ")[2] or "unknown",
            "rate_gbps": rate[0] if rate else None,
            "link_layer": device["link_layer"] or "unknown",
            "gids": [_gid(gid) for gid in device["gids"]],
        }
        ports.setdefault(device["name"], noun_of(Rdma, {**device, **computed}))
    return ports


def _gid(raw: Mapping[str, Any]) -> Gid:
    try:
        ip = ipaddress.IPv6Address(str(raw["gid"])).ipv4_mapped
    except ValueError:
        ip = None
    return Gid(int(raw["index"]), raw["type"] == "RoCE v2", ip)


def _neighbours(raw: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, str, str]]:
    for row in raw:
        if row.get("lladdr") and "FAILED" not in row.get("state", ()):
            yield str(row.get("dev")), str(row.get("dst")), str(row["lladdr"])


def _address(text: str | None) -> IPv4Address | None:
    try:
        return IPv4Address(text or "")
    except ValueError:
        return None
