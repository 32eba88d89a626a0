"""Owns what NCCL's own lines prove of the transport: network, devices, GPU Direct, errors; and the verdict on it. Never reads a file.

The wording is that of NCCL's logs on Sparks (2.27 to 2.31), which `NCCL_DEBUG=INFO` makes it print.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sparkd.fabric.checks import BOTH_RAILS, BOTH_RAILS_GB_S, FAIL, LAN_GB_S, OK, ONE_RAIL_GB_S, SOCKETS_GB_S, WARN, Finding

IB, SOCKET = "IB", "Socket"
LINE_CHARS = 4096  # longer than any of NCCL's; what else is in a log may be of any length
# A line begins with `host:pid:tid [device] ` in a log and with a rank's tag in vLLM's: none of these is anchored there.
_NETWORK = re.compile(r"Using network (\S.*?)\s*$")
_ASSIGNED = re.compile(r"Assigned NET plugin (\S+) to comm")
_USING_IB = re.compile(r"NET/IB ?: Using (.*?)(?:; OOB (\S+?):([0-9.]+)<\d+>)?\s*$")
_DEVICE = re.compile(r"\[\d+\](\S+?):\d+/(\S+)")
_USING_SOCKET = re.compile(r"NET/Socket ?: Using (.*)$")
_SOCKET_DEVICE = re.compile(r"\[\d+\](\S+?):([0-9a-fA-F.:]+)<\d+>")
_VIA = re.compile(r"Channel \S+ : \S+ -> \S+ (?:\[\w+\] )?via NET/(.+?)(?:/GDRDMA(?:\(\w+\))?)?(?:/Shared)?\s*$")
_VIA_NUMBER = re.compile(r"^(.*?)/(\d+)$")
_GPU_DIRECT = re.compile(r"GPU Direct RDMA\s*(?:\(\w+\)\s*)?(\w+) for HCA \d+ '([^']+)'")
_OVERRIDDEN = re.compile(r"Subnet-aware routing: overriding dev (\d+) with dev (\d+)")
_VIRTUAL = re.compile(r"Made virtual device \[\d+\] name=(\S+)")
_ASKED = re.compile(r"NCCL_IB_HCA set to (\S+)")
_MISTYPED = re.compile(r"Requested properties for vNic (\d+), only (\d+) vNics have been created")
_QUEUE_PAIR = re.compile(r"ibv_modify_qp failed with (\d+) ([^,\n]*)")
_QP_PART = re.compile(r"(?:on dev|dev) ([^\s:,]+):\d+|local GID (?!index)(\S+?)(?:,|$)|remote GID (\S+?)(?:,|$)")
_LINE_CONTINUES = 4  # lines that ibv_modify_qp's complaint may be spread over


@dataclass(frozen=True, slots=True)
class QueuePair:
    """One refused connection: errno and its words, this end's device, and both ends' GIDs where the line tells them."""

    number: int
    words: str
    device: str = ""
    local: str = ""
    remote: str = ""


@dataclass(frozen=True, slots=True)
class Transport:
    """The facts of one rank's log. network: IB, Socket, a plugin's own name, None where it did not say yet. devices: RDMA devices that NCCL
    took; bootstrap: interface of the first contact; socket: that of NET/Socket. used: numbers of the devices that channels go over.

    overridden: (device, taken instead) of subnet-aware routing. gpu_direct: True where a line says enabled and none Disabled.
    """

    network: str | None = None
    devices: tuple[str, ...] = ()
    bootstrap: str | None = None
    socket: str | None = None
    used: tuple[int, ...] = ()
    overridden: tuple[tuple[int, int], ...] = ()
    gpu_direct: bool | None = None
    no_device: bool = False
    mistyped: bool = False
    asked: str | None = None
    plugin: str | None = None
    refused: tuple[QueuePair, ...] = ()

    @property
    def carrying(self) -> tuple[str, ...]:
        """Devices that traffic goes over, by name: those taken, less those that another one takes the place of."""
        gone = {number for number, instead in self.overridden if number != instead}
        return tuple(name for number, name in enumerate(self.devices) if number not in gone)


def parse(lines: Iterable[str]) -> Transport:
    """All of a rank's lines since its start, in order; lines that are not NCCL's are passed over. Where NCCL says something twice, the last
    counts."""
    text = [line[:LINE_CHARS].rstrip("\n") for line in lines]
    fields: dict[str, object] = {}
    devices: list[str] = []
    direct: set[str] = set()
    used: list[int] = []
    overridden: list[tuple[int, int]] = []
    for line in text:
        if match := _USING_IB.search(line):
            # `Using [RO]` without a number stands there too where no device was found.
            devices = [name for name, _ in _DEVICE.findall(match[1])]
            fields["bootstrap"] = match[2] or fields.get("bootstrap")
        elif match := _VIRTUAL.search(line):
            devices = [*devices, *(name for name in match[1].split("+") if name not in devices)]
        elif match := _NETWORK.search(line):
            fields["network"] = match[1]
        elif match := _USING_SOCKET.search(line):
            first = _SOCKET_DEVICE.search(match[1])
            fields["socket"] = first[1] if first else None
        elif match := _VIA.search(line):
            _channel(match[1], used, fields)
        elif match := _GPU_DIRECT.search(line):
            direct.add(match[1].lower())
        elif match := _OVERRIDDEN.search(line):
            overridden.append((int(match[1]), int(match[2])))
        elif match := _ASKED.search(line):
            fields["asked"] = match[1]
        elif _MISTYPED.search(line):
            fields["mistyped"] = True
        elif match := _ASSIGNED.search(line):
            fields.setdefault("network", match[1])
        elif "NET/IB : No device found" in line:
            fields["no_device"] = True
    if "network" not in fields and fields.get("socket"):
        fields["network"] = SOCKET
    return Transport(
        devices=tuple(devices),
        used=tuple(dict.fromkeys(used)),
        overridden=tuple(overridden),
        gpu_direct=None if not direct else "disabled" not in direct,
        refused=tuple(_refused(text)),
        **fields,  # type: ignore[arg-type]  # each by the name and the type of its field
    )


def judge(transport: Transport, expected: Iterable[str], node: str = "") -> tuple[Finding, ...]:
    """Findings on NCCL's transport, worst first. None while NCCL has not logged its network and nothing has gone wrong.

    expected: the RDMA devices that NCCL is configured to use on this node, both twins of a cable; none where it should use sockets.
    """
    order = (FAIL, WARN, OK)
    return tuple(sorted(_judged(transport, tuple(expected), node), key=lambda finding: order.index(finding.verdict)))


def least_normal_gb_s(rails: int, *, lan: bool = False) -> float:
    """The least normal bus bandwidth, 10^9 bytes/s. rails: RDMA devices that carry it, 0 for sockets; lan: over the 10GbE port."""
    if rails == 0:
        return LAN_GB_S if lan else SOCKETS_GB_S
    return ONE_RAIL_GB_S if rails == 1 else BOTH_RAILS_GB_S[0]


def judge_rate(measured_gb_s: float, rails: int, node: str = "", *, lan: bool = False) -> Finding:
    """A measured bus bandwidth beside what is normal. rails: RDMA devices that carry it, 0 for sockets; lan: over the 10GbE port.

    The bounds of the verdict, 85 % and half of the normal, are ours: owners' good runs differ by about 15 %.
    """
    low = least_normal_gb_s(rails, lan=lan)
    normal = BOTH_RAILS if rails > 1 else f"{low:g}"
    way = f"{rails} rail{'s' if rails > 1 else ''}" if rails else "sockets over 10GbE" if lan else "sockets over the ConnectX-7"
    evidence = f"{measured_gb_s:.1f} GB/s over {way}, {normal} is normal"
    if measured_gb_s >= 0.85 * low:
        return Finding("rate", OK, node, "NCCL", evidence)
    if rails:
        cure = "Look at MTU, speed and both twins in `sparkd fabric`; a card that came up wrong (13 Gb/s) needs all power cut for a minute."
    else:
        cure = "Look at the link's MTU and speed in `sparkd fabric`, and at its other traffic."
    return Finding("rate", WARN if measured_gb_s >= 0.5 * low else FAIL, node, "NCCL", evidence, cure)


def _judged(transport: Transport, expected: tuple[str, ...], node: str) -> Iterator[Finding]:
    yield from (_refusal(pair, node) for pair in transport.refused)
    if transport.mistyped:
        cure = "NCCL_IB_HCA names a device that is not there, which NCCL leaves out silently: take the names of `sparkd fabric --env`."
        yield Finding(
            "hca", FAIL, node, "NCCL_IB_HCA", f"a device is missing of {transport.asked or ', '.join(expected) or 'those named'}", cure
        )
    if transport.network == SOCKET:
        yield _sockets(transport, expected, node)
    elif transport.no_device and expected:
        yield Finding("network", FAIL, node, "NCCL", "NET/IB: no device found", _no_device(transport, expected))
    elif transport.network and expected:
        yield from _rdma(transport, expected, node)
    if transport.gpu_direct:
        cure = "Remove NCCL_NET_GDR_LEVEL and the like: GPU Direct RDMA does not work on a Spark, whose buffers go through the host."
        yield Finding("gpu-direct", WARN, node, "NCCL", "GPU Direct RDMA enabled", cure)


def _rdma(transport: Transport, expected: tuple[str, ...], node: str) -> Iterator[Finding]:
    evidence = f"network {transport.network}" + (f" over {', '.join(transport.carrying)}" if transport.devices else "")
    if transport.network != IB:
        yield Finding("network", OK, node, "NCCL", f"{evidence}, a plugin's name: port counters tell whether it is RDMA")
    missing = [name for name in expected if name not in transport.carrying]
    if transport.devices and missing:
        reason = "it is not in NCCL_IB_HCA or its name is mistyped"
        if any(name in transport.devices for name in missing):
            reason = "subnet-aware routing gave its traffic to another device, as it does where twins are in one subnet"
        half = len(expected) - len(missing) == 1
        rate = f"{ONE_RAIL_GB_S} of {BOTH_RAILS} GB/s are left" if half else "a part of the links lies idle"
        cure = f"Nothing goes over {', '.join(missing)} ({rate}): {reason}; compare with `sparkd fabric --env`."
        yield Finding("rails", FAIL, node, "NCCL", evidence, cure)
    elif transport.network == IB:
        off = "" if transport.gpu_direct is None else ", GPU Direct off as it must be" if not transport.gpu_direct else ""
        yield Finding("network", OK, node, "NCCL", evidence + off)


def _sockets(transport: Transport, expected: tuple[str, ...], node: str) -> Finding:
    evidence = "network Socket" + (f" on {transport.socket}" if transport.socket else "")
    if not expected:
        return Finding("network", OK, node, "NCCL", evidence)
    return Finding("network", FAIL, node, "NCCL", evidence, _no_device(transport, expected))


def _no_device(transport: Transport, expected: tuple[str, ...]) -> str:
    names = transport.asked.lstrip("=^").split(",") if transport.asked else []
    if names and not {name.partition(":")[0] for name in names} & set(expected):
        reason = f"NCCL_IB_HCA is {transport.asked} and this node's devices are {', '.join(expected)}"
    else:
        reason = "in a container /dev/infiniband or memlock is missing, or NCCL_IB_HCA holds names of interfaces"
    lost = f"{SOCKETS_GB_S} GB/s by sockets over the ConnectX-7 and {LAN_GB_S:g} over 10GbE, instead of {BOTH_RAILS}"
    return f"{lost}: {reason}; NCCL_NET=IB makes NCCL fail instead of falling back."


def _refusal(pair: QueuePair, node: str) -> Finding:
    evidence = f"ibv_modify_qp failed with {pair.number} {pair.words}".rstrip()
    evidence += f" on {pair.device}" if pair.device else ""
    evidence += f", local GID {pair.local}" if pair.local else ""
    evidence += f", remote GID {pair.remote}" if pair.remote else ""
    if pair.number == 110:
        cure = "The two ends are in different subnets or the cable leads to another node: `sparkd fabric` shows which ports are connected."
    elif pair.remote.startswith("fe80"):
        cure = "The other end's twin has no IPv4 address: give it one, or leave its device out of NCCL_IB_HCA on both nodes."
    elif pair.remote == "::" or pair.local == "::":
        cure = "NCCL_IB_GID_INDEX points at an empty entry, since the index differs from node to node: leave it unset."
    else:
        cure = "The GID of one end cannot be used: leave NCCL_IB_GID_INDEX unset, and compare both ends with `sparkd fabric`."
    return Finding("queue pair", FAIL, node, pair.device or "NCCL", evidence, cure)


def _channel(via: str, used: list[int], fields: dict[str, object]) -> None:
    match = _VIA_NUMBER.match(via)
    name, number = (match[1], int(match[2])) if match else (via, 0)
    if name not in (IB, SOCKET):
        fields["plugin"] = name
        fields.setdefault("network", name)
    else:
        fields.setdefault("network", name)
    if number not in used:
        used.append(number)


def _refused(text: list[str]) -> Iterator[QueuePair]:
    """The complaint's parts stand on one line, or on those after it."""
    for index, line in enumerate(text):
        if not (match := _QUEUE_PAIR.search(line)):
            continue
        parts = {"device": "", "local": "", "remote": ""}
        for number, more in enumerate(text[index : index + _LINE_CONTINUES]):
            if number and _QUEUE_PAIR.search(more):
                break
            for device, local, remote in _QP_PART.findall(more):
                for name, value in (("device", device), ("local", local), ("remote", remote)):
                    parts[name] = parts[name] or value
        yield QueuePair(int(match[1]), match[2].strip().removesuffix(" on dev").strip(), **parts)
