"""Reads a node's network, from /sys and by `ip` (addresses, routes, neighbours), into plain JSON.

psutil has neither routes nor neighbours nor RDMA ports, and its counters of an interface stay near 0 under RoCE.

Under a root path other than / the answers of `ip` are read from files of that folder, so that a folder can stand for a node.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from workers.host import regular_file
from workers.host.bounded_child import ProgramOutput, ask

ROOT = Path("/")
IP_TIMEOUT_S = 3.0
# Questions to `ip`, by the file that has the answer where the root is not /. `ip` reads netlink, which answers for the network namespace of
# the process; /sys shows the namespace that it was mounted from. -details adds phys_port_name and the PCI address (iproute2 5.13).
QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "ip-address.json": ("-details", "address", "show"),
    "ip-route.json": ("-4", "route", "show"),
    "ip-neighbour.json": ("neighbour", "show"),
}
# The variables that sparkd computes for an engine. A node's own environment may set them differently, so the node reports these, no other.
VARIABLES = (
    "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_NET", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_MERGE_NICS",
    "NCCL_IB_SUBNET_AWARE_ROUTING", "NCCL_NET_PLUGIN", "NCCL_DEBUG", "MAX_JOBS", "FLASHINFER_NVCC_THREADS",
)  # fmt: skip
# NVIDIA's package dgx-spark-mlnx-hotplug powers the ConnectX-7 off where no cable is plugged and this file is there.
HOTPLUG_MARK = "etc/nvidia/cx7-hotplug-enabled"
GPUS = "proc/driver/nvidia/gpus"
# The driver's names of GPUs that share the host's memory. On a node without any GPU the engine is one for CPUs.
_UNIFIED = re.compile(r"^Model:.*\b(GB10|Thor|Orin)\b", re.MULTILINE)
_ZERO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
WORD_BYTES = 4  # of port_xmit_data and port_rcv_data: Documentation/ABI/stable/sysfs-class-infiniband


def sample(root: Path = ROOT) -> dict[str, Any]:
    """The facts at this moment. Blocks, for at most three IP_TIMEOUT_S. trouble: the answers that could not be read; a missing file is
    none.

    {"host", "interfaces", "rdma", "routes", "neighbours", "hotplug", "unified", "environment", "trouble"}. speed in Mb/s, counters in
    bytes. unified: whether no GPU of the node has memory of its own.
    """
    here = root == ROOT
    trouble: list[str] = []
    answers = {name: _asked(root, name, trouble) for name in QUESTIONS}
    return {
        "host": socket.gethostname() if here else (_text(root / "etc/hostname") or root.name).partition("\n")[0],
        "interfaces": _interfaces(root, answers["ip-address.json"]),
        "rdma": [port for name in _names(root / "sys/class/infiniband") for port in _rdma(root / "sys/class/infiniband" / name)],
        "routes": [_picked(row, "dst", "dev") for row in answers["ip-route.json"] or []],
        "neighbours": [_picked(row, "dst", "dev", "lladdr", "state") for row in answers["ip-neighbour.json"] or []],
        "hotplug": (root / HOTPLUG_MARK).exists(),
        "unified": shares_memory(root),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ} if here else {},
        "trouble": trouble,
    }


def shares_memory(root: Path = ROOT) -> bool:
    """Whether no GPU of the node has memory of its own."""
    return all(_UNIFIED.search(_text(root / GPUS / gpu / "information") or "") for gpu in _names(root / GPUS))


def _asked(root: Path, name: str, trouble: list[str]) -> list[dict[str, Any]] | None:
    answer = ask(["ip", "-json", *QUESTIONS[name]], IP_TIMEOUT_S) if root == ROOT else _captured(root / name)
    problem = answer.trouble
    if problem is None:
        try:
            # A question without an answer is an empty object in some releases.
            return [row for row in json.loads(answer.text) if row]
        except ValueError:
            problem = "its answer is no JSON"
    trouble.append(f"`{' '.join(['ip', *QUESTIONS[name]])}`: {problem}")
    return None


def _captured(path: Path) -> ProgramOutput:
    text = _text(path)
    return ProgramOutput(text or "", None if text is not None else "ip is not installed")


def _interfaces(root: Path, links: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Every interface but loopback; from /sys alone where `ip` gave no answer."""
    folder = root / "sys/class/net"
    listed: list[dict[str, Any]] = [{"ifname": name} for name in _names(folder)] if links is None else links
    return [_interface(folder / link["ifname"], link) for link in listed if link.get("ifname", "lo") != "lo"]


def _interface(path: Path, link: Mapping[str, Any]) -> dict[str, Any]:
    here = _is_the_same(path, link)
    device = path / "device"

    def said(name: str) -> str | None:
        return _text(path / name) if here else None

    flags = link.get("flags")
    up = "UP" in flags if flags is not None else (_flags(said("flags")) & 1) == 1  # IFF_UP, linux/if.h
    # EINVAL while it is switched off: then the kernel does not know whether a cable is there.
    carrier = said("carrier") if here or flags is None else str(int("LOWER_UP" in flags)) if up else None
    pci = os.path.basename(os.path.realpath(device)) if here and device.exists() else link.get("parentdev")
    return {
        "name": link["ifname"],
        "mac": link.get("address") or said("address"),
        "mtu": link.get("mtu") or _number(said("mtu")),
        "up": up,
        "carrier": None if carrier is None else carrier == "1",
        "speed_mbps": _number(said("speed")),
        "port_name": said("phys_port_name") or link.get("phys_port_name"),
        "pci": pci,
        "vendor": _text(device / "vendor") if here else None,
        "pci_gts": _number(_text(device / "current_link_speed") if here else None),
        "pci_lanes": _number(_text(device / "current_link_width") if here else None),
        "wireless": here and ((path / "wireless").exists() or (path / "phy80211").exists()),
        "physical": (here and device.exists()) or (not here and "parentdev" in link),
        "rdma": _names(device / "infiniband") if here else [],
        "addresses": [
            {"address": row["local"], "prefix": row["prefixlen"]} for row in link.get("addr_info", ()) if row.get("family") == "inet"
        ],
    }


def _is_the_same(path: Path, link: Mapping[str, Any]) -> bool:
    """Whether the folder in /sys is that of this interface, not of one with the same name in another network namespace."""
    if not path.exists():
        return False
    index, mac = _text(path / "ifindex"), _text(path / "address")
    return link.get("ifindex", index) in (index, _number(index)) and link.get("address", mac) == mac


def _rdma(path: Path) -> Iterable[dict[str, Any]]:
    """An entry for each port of an RDMA device; a Spark's devices have one port each."""
    for number in filter(_is_number, _names(path / "ports")):
        port = path / "ports" / number
        yield {
            "name": path.name,
            "state": _text(port / "state"),
            "rate": _text(port / "rate"),
            "link_layer": _text(port / "link_layer"),
            "gids": list(_gids(port)),
            "sent_bytes": _bytes(port / "counters/port_xmit_data"),
            "received_bytes": _bytes(port / "counters/port_rcv_data"),
        }


def _gids(port: Path) -> Iterable[dict[str, Any]]:
    """The entries that are in use. An empty one is all zero, and its type cannot be read (EINVAL)."""
    for index in sorted(map(int, filter(_is_number, _names(port / "gids")))):
        gid = _text(port / f"gids/{index}")
        if gid and gid != _ZERO_GID:
            yield {"index": index, "gid": gid, "type": _text(port / f"gid_attrs/types/{index}")}


def _bytes(path: Path) -> int | None:
    words = _number(_text(path))
    return None if words is None else int(words * WORD_BYTES)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 10


def _picked(entry: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: entry[name] for name in names if name in entry}


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text(path: Path) -> str | None:
    """The text of a file; None where it is missing, unknown to the driver (EOPNOTSUPP) or not readable at present (EINVAL)."""
    try:
        return regular_file.read(path).decode(errors="replace").strip()
    except OSError:
        return None


def _number(text: str | None) -> int | float | None:
    """The number that a text begins with (`32.0 GT/s PCIe`); None for -1, the speed of a link that is down."""
    word = (text or "").split(" ")[0]
    try:
        value = float(word)
    except ValueError:
        return None
    if value < 0:
        return None
    return int(value) if value.is_integer() else value


def _flags(text: str | None) -> int:
    try:
        return int(text or "0", 16)
    except ValueError:
        return 0
