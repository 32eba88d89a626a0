"""Reads from NCCL's own lines which network its ranks use, over which devices, and what failed; and judges that.

The wording is that of NCCL's logs on Sparks (2.27 to 2.31), which `NCCL_DEBUG=INFO` makes it print.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sparkd.fabric.checks import BOTH_RAILS, FAIL, LAN_GB_S, OK, ONE_RAIL_GB_S, SOCKETS_GB_S, WARN, Finding
from sparkd.fabric.environment import rdma_devices

IB, SOCKET = "IB", "Socket"
LINE_CHARS = 4096  # longer than any of NCCL's; what else is in a log may be of any length
# A line begins with `host:pid:tid [device] ` in a log and with a rank's tag in vLLM's: none of these is anchored there.
_NETWORK = re.compile(r"Using network (\S.*?)\s*$")
_ASSIGNED = re.compile(r"Assigned NET plugin (\S+) to comm")
_VIA = re.compile(r"Channel \S+ : \S+ -> \S+ (?:\[\w+\] )?via NET/(.+?)(?:/\d+)?(?:/GDRDMA(?:\(\w+\))?)?(?:/Shared)?\s*$")
_USING_IB = re.compile(r"NET/IB ?: Using (.*)$")
_DEVICE = re.compile(r"\[\d+\](\S+?):\d+/\S+")
_VIRTUAL = re.compile(r"Made virtual device \[\d+\] name=(\S+)")
_OVERRIDDEN = re.compile(r"Subnet-aware routing: overriding dev (\d+) with dev (\d+)")
_USING_SOCKET = re.compile(r"NET/Socket ?: Using (?:\[\d+\](\S+?):)?")
_ASKED = re.compile(r"NCCL_IB_HCA set to (\S+)")
_NO_DEVICE = "NET/IB : No device found"
_MISTYPED = "Requested properties for vNic"
_REFUSED = "ibv_modify_qp failed"
_REFUSED_LINES = 4  # NCCL may spread the complaint over these
_REFUSED_PART = re.compile(rf"{_REFUSED} with \d+ [^,\n]*?(?= on dev|,|$)|dev [^\s:,]+(?=:\d)|(?:local|remote) GID (?!index)[^\s,]+")
_TIMED_OUT = f"{_REFUSED} with 110 "


@dataclass(frozen=True, slots=True)
class Transport:
    """The facts of one rank's log.

    network: IB, Socket, a plugin's own name, None where NCCL has not named it yet.
    devices: RDMA devices that NCCL's traffic goes over.
    socket: the interface of NET/Socket.
    asked: NCCL_IB_HCA, as NCCL read it.
    errors: NCCL's own words.
    """

    network: str | None = None
    devices: tuple[str, ...] = ()
    socket: str | None = None
    asked: str | None = None
    errors: tuple[str, ...] = ()


def parse(lines: Iterable[str]) -> Transport:
    """All of a rank's lines since its start, in order. If NCCL says something twice, the last counts."""
    text = [line[:LINE_CHARS].rstrip("\n") for line in lines]
    network = in_use = socket = asked = None
    devices: list[str] = []
    overridden: set[int] = set()
    errors: list[str] = []
    for number, line in enumerate(text):
        if match := _USING_IB.search(line):
            devices = _DEVICE.findall(match[1])
        elif match := _VIRTUAL.search(line):
            devices += [name for name in match[1].split("+") if name not in devices]
        elif match := _OVERRIDDEN.search(line):
            overridden.add(int(match[1]))
        elif match := _NETWORK.search(line):
            network = match[1]
        elif match := _ASSIGNED.search(line) or _VIA.search(line):
            in_use = in_use or match[1]
        elif match := _USING_SOCKET.search(line):
            socket, in_use = match[1], in_use or SOCKET
        elif match := _ASKED.search(line):
            asked = match[1]
        elif _REFUSED in line:
            errors.append(_refused(text[number : number + _REFUSED_LINES]))
        else:
            errors += [words for words in (_NO_DEVICE, _MISTYPED) if words in line]
    carrying = tuple(name for number, name in enumerate(devices) if number not in overridden)
    return Transport(network or in_use, carrying, socket, asked, tuple(dict.fromkeys(errors)))


def judge(transport: Transport, expected: Iterable[str], node: str = "") -> tuple[Finding, ...]:
    """Findings on NCCL's transport, worst first. None while NCCL has not logged its network and nothing has gone wrong.

    expected: the RDMA devices that NCCL is configured to use on this node, both twins of a cable; none where it should use sockets.
    """
    order = (FAIL, WARN, OK)
    return tuple(sorted(_judged(transport, tuple(expected), node), key=lambda finding: order.index(finding.verdict)))


def _judged(transport: Transport, expected: tuple[str, ...], node: str) -> Iterator[Finding]:
    for error in transport.errors:
        if error.startswith(_TIMED_OUT):
            cure = "The ends are in different subnets, or the cable leads to another node: `sparkd fabric` shows which ports are connected."
            yield Finding("queue pair", FAIL, node, "NCCL", error, cure)
        elif error.startswith(_REFUSED):
            cure = "One end's GID cannot be used: give every twin in NCCL_IB_HCA an IPv4 address, and leave NCCL_IB_GID_INDEX unset."
            yield Finding("queue pair", FAIL, node, "NCCL", error, cure)
        elif error == _MISTYPED:
            cure = "NCCL leaves a device out that is not there: set NCCL_IB_HCA to the names of `sparkd fabric --env`."
            named = transport.asked or ", ".join(expected) or "those named"
            yield Finding("hca", FAIL, node, "NCCL_IB_HCA", f"a device is missing of {named}", cure)
    if transport.network == SOCKET:
        yield _sockets(transport, expected, node)
    elif _NO_DEVICE in transport.errors and expected:
        yield Finding("network", FAIL, node, "NCCL", "NET/IB: no device found", _no_device(transport, expected))
    elif transport.network and expected:
        yield _rdma(transport, expected, node)


def _rdma(transport: Transport, expected: tuple[str, ...], node: str) -> Finding:
    evidence = f"network {transport.network}" + (f" over {', '.join(transport.devices)}" if transport.devices else "")
    missing = [name for name in expected if name not in transport.devices]
    if not transport.devices or not missing:
        return Finding("network", OK, node, "NCCL", evidence)
    half = len(expected) - len(missing) == 1
    rate = f"{ONE_RAIL_GB_S} of {BOTH_RAILS} GB/s are left" if half else "a part of the links lies idle"
    reason = "its name is missing or mistyped in NCCL_IB_HCA, or both twins are in one subnet"
    return Finding(
        "rails", FAIL, node, "NCCL", evidence, f"Nothing goes over {', '.join(missing)} ({rate}): {reason}; see `sparkd fabric --env`."
    )


def _sockets(transport: Transport, expected: tuple[str, ...], node: str) -> Finding:
    evidence = "network Socket" + (f" on {transport.socket}" if transport.socket else "")
    if not expected:
        return Finding("network", OK, node, "NCCL", evidence)
    return Finding("network", FAIL, node, "NCCL", evidence, _no_device(transport, expected))


def _no_device(transport: Transport, expected: tuple[str, ...]) -> str:
    asked = rdma_devices(transport.asked or "")
    if asked and not set(asked) & set(expected):
        reason = f"NCCL_IB_HCA is {transport.asked} and this node's devices are {', '.join(expected)}"
    else:
        reason = "in a container /dev/infiniband or memlock is missing, or NCCL_IB_HCA holds names of interfaces"
    lost = f"{SOCKETS_GB_S} GB/s by sockets over the ConnectX-7 and {LAN_GB_S:g} over 10GbE, instead of {BOTH_RAILS}"
    return f"{lost}: {reason}; NCCL_NET=IB makes NCCL fail instead of falling back."


def _refused(lines: Sequence[str]) -> str:
    """The refused connection with its device and both GIDs, which stand on the same line or on the next ones."""
    own = [lines[0]]
    for line in lines[1:]:
        if _REFUSED in line:
            break
        own.append(line)
    return ", ".join(part for line in own for part in _REFUSED_PART.findall(line))
