"""Writes a folder that stands for a Spark's /, from the few words of a scenario. The values are those of published Sparks.

A file that the kernel would refuse to read (EINVAL, EOPNOTSUPP) is a link to itself, which cannot be read either.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Interface
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from sparkd.fabric.report import report
from workers.host.network import sample

SCENARIOS = Path(__file__).parents[1] / "fixtures" / "fabric"
UNREADABLE = object()
# Thousands of small files: a disk needs seconds for them.
MEMORY = Path("/dev/shm")
ALWAYS = ("MAX_JOBS", "FLASHINFER_NVCC_THREADS", "NCCL_DEBUG")
_KNOWN = {
    "cx7", "cables", "addresses", "mtu", "speed", "rate", "lan", "wifi", "rdma", "first_gid", "no_gid", "down", "no_carrier", "missing",
    "rename", "no_port_name", "port_name", "met", "default", "pci", "others", "virtual", "hotplug", "no_ip",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Twin:
    """One of the four interfaces of a Spark's ConnectX-7; mac: what is added to the last byte of the node's."""

    name: str
    rdma: str
    pci: str
    cage: int
    mac: int


TWINS = (
    Twin("enp1s0f0np0", "rocep1s0f0", "0000:01:00.0", 0, 1),
    Twin("enp1s0f1np1", "rocep1s0f1", "0000:01:00.1", 1, 2),
    Twin("enP2p1s0f0np0", "roceP2p1s0f0", "0002:01:00.0", 0, 5),
    Twin("enP2p1s0f1np1", "roceP2p1s0f1", "0002:01:00.1", 1, 6),
)
OTHERS = ("docker0", "br-0a1b2c3d4e5f", "veth1a2b3c4", "tailscale0")


@cache
def scenarios() -> dict[str, dict[str, Any]]:
    return {path.stem: yaml.safe_load(path.read_text()) for path in sorted(SCENARIOS.glob("*.yaml"))}


def write_nodes(folder: Path, nodes: Mapping[str, Mapping[str, Any] | None]) -> list[Path]:
    """A folder for each node of a scenario, in its order."""
    macs = {name: f"4c:bb:47:00:{16 + number:02x}:11" for number, name in enumerate(nodes)}
    return [_write(folder / name, name, said or {}, macs) for name, said in nodes.items()]


def mac_of(base: str, twin: Twin) -> str:
    return f"{base[:-2]}{int(base[-2:], 16) + twin.mac:02x}"


def _write(root: Path, name: str, said: Mapping[str, Any], macs: Mapping[str, str]) -> Path:
    if unknown := set(said) - _KNOWN:
        raise AssertionError(f"{name}: {unknown} means nothing in a scenario")
    files: dict[str, object] = {"etc/hostname": f"{name}\n"}
    if said.get("hotplug"):
        files["etc/nvidia/cx7-hotplug-enabled"] = ""
    links: list[dict[str, Any]] = [_link("lo", 1, "00:00:00:00:00:00", 65536, ["127.0.0.1/8"])]
    real = [] if said.get("cx7") == "absent" else [twin for twin in TWINS if twin.name not in said.get("missing", ())]
    for index, twin in enumerate(real, 3):
        links.append(_twin(root, files, twin, index, said, mac_of(macs[name], twin)))
    links += _beside(root, files, said, macs[name])
    met = [
        {"dst": address, "dev": device, "lladdr": _mac_there(far, macs), "state": ["REACHABLE"]}
        for device, ends in said.get("met", {}).items()
        for address, far in ends.items()
    ]
    routes = [
        {"dst": str(IPv4Interface(address).network), "dev": link["ifname"], "protocol": "kernel", "scope": "link"}
        for link in links[1:]
        for address in link["cidr"]
    ]
    if default := said.get("default", "enP7s7"):
        routes.insert(0, {"dst": "default", "gateway": "192.168.1.1", "dev": default, "flags": []})
    for link in links:
        del link["cidr"]
    if not said.get("no_ip"):
        answers = {
            "ip-address": [*links, {}],
            "ip-route": routes,
            "ip-neighbour": [*met, {"dst": "10.9.9.9", "dev": "x", "state": ["FAILED"]}],
        }
        files |= {f"{question}.json": json.dumps(answer) for question, answer in answers.items()}
    _lay(root, files)
    return root


def _twin(root: Path, files: dict[str, object], twin: Twin, index: int, said: Mapping[str, Any], mac: str) -> dict[str, Any]:
    """One function of the card, the interface and the RDMA device on it, as symbolic links from the classes into the tree of devices."""
    name = said.get("rename", {}).get(twin.name, twin.name)
    linked = twin.cage in said.get("cables", ()) and twin.name not in said.get("no_carrier", ())
    up = twin.name not in said.get("down", ())
    addresses = _many(said.get("addresses", {}).get(twin.name, ()))
    mtu = _of(said.get("mtu"), twin.name, 9000)
    speed = _of(said.get("speed"), twin.name, 200_000)
    virtual = twin.name in said.get("virtual", ())
    flags = [*(["UP"] if up else []), *(["LOWER_UP"] if linked and up else ["NO-CARRIER"])]
    link = _link(name, index, mac, mtu, addresses, flags)
    if virtual:
        net = _class(root, files, "net", name, f"sys/devices/virtual/net/{name}")
        _interface(files, net, link, up, linked, None, UNREADABLE)
        return link
    device = f"sys/devices/pci{twin.pci[:4]}:00/{twin.pci[:4]}:00:00.0/{twin.pci}"
    net = _class(root, files, "net", name, f"{device}/net/{name}")
    port_name = UNREADABLE if said.get("no_port_name") else said.get("port_name", {}).get(twin.name, f"p{twin.cage}")
    _interface(files, net, link, up, linked, speed if linked and up else None, port_name)
    (root / device).mkdir(parents=True, exist_ok=True)
    (root / net / "device").symlink_to(f"../../../{twin.pci}")
    files |= {f"{device}/vendor": "0x15b3", f"{device}/device": "0x1021"}
    files |= {f"{device}/current_link_speed": f"{_of(said.get('pci'), twin.name, 32.0)} GT/s PCIe", f"{device}/current_link_width": "4"}
    rdma = said.get("rdma", {}).get(twin.name, "ACTIVE" if linked and up else "DOWN")
    if rdma != "none":
        rate = said.get("rate", "200 Gb/sec (4X HDR)" if linked else "10 Gb/sec (4X SDR)")
        _rdma(root, files, device, twin, name, mac, addresses, rdma, rate, said)
    return link


def _interface(
    files: dict[str, object], net: str, link: Mapping[str, Any], up: bool, linked: bool, speed: int | None, port_name: object
) -> None:
    files |= {
        f"{net}/ifindex": str(link["ifindex"]),
        f"{net}/address": link["address"],
        f"{net}/mtu": str(link["mtu"]),
        f"{net}/operstate": "up" if up and linked else "down",
        f"{net}/carrier": UNREADABLE if not up else str(int(linked)),
        f"{net}/speed": UNREADABLE if not up else str(-1 if speed is None else speed),
        f"{net}/phys_port_name": port_name,
        f"{net}/flags": hex(0x1002 | int(up)),
    }


def _rdma(
    root: Path,
    files: dict[str, object],
    device: str,
    twin: Twin,
    name: str,
    mac: str,
    addresses: Iterable[str],
    state: str,
    rate: str,
    said: Mapping[str, Any],
) -> None:
    """Link-local entries first, as many as put the first RoCE v2 one with an IPv4 address at `first_gid`; v1 even, v2 odd."""
    folder = _class(root, files, "infiniband", twin.rdma, f"{device}/infiniband/{twin.rdma}")
    (root / folder / "device").symlink_to(f"../../../{twin.pci}")
    port = f"{folder}/ports/1"
    number = {"DOWN": 1, "INIT": 2, "ARMED": 3, "ACTIVE": 4}[state]
    files |= {
        f"{port}/state": f"{number}: {state}",
        f"{port}/rate": rate,
        f"{port}/link_layer": "Ethernet",
        f"{port}/counters/port_xmit_data": "250000000",
        f"{port}/counters/port_rcv_data": "125000000",
    }
    first = _of(said.get("first_gid"), twin.name, 3)
    local = [f"fe80:0000:0000:0000:4ebb:47ff:fe{mac[9:11]}:{mac[12:14]}{mac[15:]}"] * ((first - 1) // 2)
    mapped = [] if twin.name in said.get("no_gid", ()) else [_mapped(address) for address in addresses]
    gids = [(gid, kind) for gid in (*local, *mapped) for kind in ("IB/RoCE v1", "RoCE v2")]
    for index in range(len(gids) + 2):
        gid, kind = gids[index] if index < len(gids) else ("0000:0000:0000:0000:0000:0000:0000:0000", UNREADABLE)
        files |= {f"{port}/gids/{index}": gid, f"{port}/gid_attrs/types/{index}": kind}


def _beside(root: Path, files: dict[str, object], said: Mapping[str, Any], base: str) -> Iterable[dict[str, Any]]:
    """The RJ45 port, Wi-Fi, and what containers and tunnels leave in the list."""
    lan = said.get("lan", "192.168.1.10/24")
    link = _link("enP7s7", 2, base, 1500, _many(lan), ["UP", "LOWER_UP"] if lan else ["UP", "NO-CARRIER"])
    _physical(root, files, link, "0007:01:00.0", "0x10ec", bool(lan), 10_000 if lan else None)
    yield link
    wifi = said.get("wifi")
    link = _link("wlP9s9", 20, "58:02:05:00:20:8c", 1500, _many(wifi), ["UP", "LOWER_UP"] if wifi else ["UP", "NO-CARRIER"])
    net = _physical(root, files, link, "0009:01:00.0", "0x14c3", bool(wifi), None)
    files[f"{net}/wireless/status"] = "0x0"
    files[f"{net}/speed"] = UNREADABLE
    yield link
    for index, name in enumerate(OTHERS if said.get("others") else (), 30):
        link = _link(name, index, "aa:ac:e4:00:30:bd", 1500, [f"172.17.{index}.1/16"])
        _interface(files, _class(root, files, "net", name, f"sys/devices/virtual/net/{name}"), link, True, True, None, UNREADABLE)
        yield link


def _physical(root: Path, files: dict[str, object], link: dict[str, Any], pci: str, vendor: str, linked: bool, speed: int | None) -> str:
    device = f"sys/devices/pci{pci[:4]}:00/{pci[:4]}:00:00.0/{pci}"
    net = _class(root, files, "net", link["ifname"], f"{device}/net/{link['ifname']}")
    (root / net / "device").symlink_to(f"../../../{pci}")
    files[f"{device}/vendor"] = vendor
    _interface(files, net, link, True, linked, speed, UNREADABLE)
    return net


def _class(root: Path, files: dict[str, object], kind: str, name: str, target: str) -> str:
    """`sys/class/KIND/NAME` leads into the tree of devices; its folder there."""
    entry = root / "sys/class" / kind / name
    entry.parent.mkdir(parents=True, exist_ok=True)
    (root / target).mkdir(parents=True, exist_ok=True)
    entry.symlink_to(f"../../{target.removeprefix('sys/')}")
    return target


def _link(name: str, index: int, mac: str, mtu: int, addresses: Iterable[str], flags: Iterable[str] = ("UP", "LOWER_UP")) -> dict[str, Any]:
    cidr = list(addresses)
    inet = [{"family": "inet", "local": one.partition("/")[0], "prefixlen": int(one.partition("/")[2]), "scope": "global"} for one in cidr]
    six = {"family": "inet6", "local": "fe80::1", "prefixlen": 64, "scope": "link"}
    return {"ifindex": index, "ifname": name, "flags": [*flags], "mtu": mtu, "address": mac, "addr_info": [*inet, six], "cidr": cidr}


def _mac_there(far: str, macs: Mapping[str, str]) -> str:
    """`spark-2/enp1s0f0np0`, or a MAC address as it is."""
    node, _, name = far.partition("/")
    return mac_of(macs[node], next(twin for twin in TWINS if twin.name == name)) if name else far


def _mapped(address: str) -> str:
    a, b, c, d = IPv4Interface(address).ip.packed
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def _many(value: Any) -> list[str]:
    return [] if not value else [value] if isinstance(value, str) else list(value)


def _of(value: Any, name: str, otherwise: Any) -> Any:
    """A scenario's value for all twins, or a map of those that differ."""
    return value.get(name, otherwise) if isinstance(value, dict) else otherwise if value is None else value


def _lay(root: Path, files: Mapping[str, object]) -> None:
    for folder in {os.path.dirname(name) for name in files}:
        os.makedirs(root / folder, exist_ok=True)
    for name, content in files.items():
        path = f"{root}/{name}"
        if content is UNREADABLE:
            os.symlink(os.path.basename(path), path)
        else:
            with open(path, "w") as file:
                file.write(f"{content}\n")


@cache
def readings(name: str) -> dict[str, dict[str, Any]]:
    """What is read off a scenario's nodes. Written and read once; nobody changes it."""
    with TemporaryDirectory(prefix="sparkd-test-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        return {root.name: sample(root) for root in write_nodes(Path(folder), scenarios()[name]["nodes"])}


def expected_of(name: str) -> dict[str, Any]:
    """What a scenario's `expect` is compared with: the report on its nodes, in fewer words."""
    found = report(readings(name))
    fine: dict[str, list[str]] = {}
    wrong = []
    for one in found["findings"]:
        if one["verdict"] == "ok" and not one["cure"]:
            fine.setdefault(one["node"], []).append(one["check"])
        else:
            wrong.append({"is": f"{one['verdict']} {one['check']}, {one['node']}, {one['about']}"} | _only(one, "evidence", "cure"))
    return {
        "verdict": found["verdict"],
        "topology": found["topology"],
        "cables": [_line(cable) for cable in found["cables"]],
        "tensor_parallel": found["tensor_parallel"]["reason"] or "ok",
        "pairs": [" ".join(pair) for pair in found["tensor_parallel"]["pairs"]],
        "findings": wrong,
        "fine": fine,
        "environment": {
            node: {one["name"]: one["value"] for one in settings if one["name"] not in ALWAYS}
            for node, settings in found["environment"].items()
        },
    }


def _only(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _line(cable: Mapping[str, Any]) -> str:
    rails = ", ".join(f"{rail['a']}-{rail['b']}{'' if rail['rdma'] else ' no RDMA'}" for rail in cable["rails"])
    return f"{cable['a']} {cable['a_cage']} - {cable['b']} {cable['b_cage']}{' met' if cable['seen'] else ''}: {rails or 'no rail'}"
