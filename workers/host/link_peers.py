"""Finds the machines at the other end of each QSFP link: one echo request to all nodes of the link. Never joins, never leaves the link.

`sparkd nodes` offers each machine that answers and is not in the cluster. The answer also makes the kernel learn its addresses, which the
neighbour table then shows.
"""

from __future__ import annotations

import re
import select
import socket
import time
from pathlib import Path

# systemd's names of a card's ports. In tests a virtual pair with such a name stands for a cable.
_PORT = re.compile(r"en(?:P\d+)?p\d+s\d+f\d+(?:np\d+)?")
MELLANOX = "0x15b3"
ALL_NODES = "ff02::1"  # RFC 4291, 2.7.1: all IPv6 nodes of one link
# RFC 4443, 4.1 and 4.2; the kernel sets the checksum, and the identifier of an unprivileged socket.
ECHO_REQUEST = bytes((128, 0, 0, 0, 0x73, 0x70, 0, 1))
ECHO_REPLY = 129
ANSWER_S = 0.1


def knock(answer_s: float = ANSWER_S) -> list[dict[str, str]]:
    """[{"dev", "dst"}]: link-local addresses that answered within answer_s seconds; empty where the kernel does not let this user ask."""
    ports = {index: name for index, name in socket.if_nameindex() if _is_port(name)}
    if not ports:
        return []
    try:
        # Unprivileged echo sockets are a matter of net.ipv4.ping_group_range (icmp(7)), which systemd opens to everybody.
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM, socket.IPPROTO_ICMPV6) as ours:
            return _answers(ours, ports, answer_s)
    except OSError:
        return []


def _is_port(name: str) -> bool:
    if _PORT.fullmatch(name):
        return True
    try:
        return (Path("/sys/class/net") / name / "device/vendor").read_text().strip() == MELLANOX
    except OSError:
        return False


def _answers(ours: socket.socket, ports: dict[int, str], answer_s: float) -> list[dict[str, str]]:
    ours.setblocking(False)
    for index in ports:
        try:
            ours.sendto(ECHO_REQUEST, (ALL_NODES, 0, 0, index))
        except OSError:
            continue  # no link, or no IPv6 there
    answers: dict[tuple[str, str], None] = {}
    until_s = time.monotonic() + answer_s
    while (left_s := until_s - time.monotonic()) > 0 and select.select([ours], [], [], left_s)[0]:
        try:
            packet, (address, _, _, index) = ours.recvfrom(512)
        except OSError:
            continue
        if index in ports and packet[:1] == bytes((ECHO_REPLY,)):
            answers[ports[index], str(address).partition("%")[0]] = None
    return [{"dev": name, "dst": address} for name, address in answers]
