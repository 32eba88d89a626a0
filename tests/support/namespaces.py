"""Two nodes on one machine: network namespaces joined by a cable, and the way into each. Never starts anything that is tested."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.waiting import HUNG_S, until

# A cable is two rails, its twins, as on a Spark. Its ends are in different ports, so the names differ: what Ray copies from one node to the
# other (GLOO_SOCKET_IFNAME) is wrong there.
PORTS = (("enp1s0f0np0", "enP2p1s0f0np0"), ("enp1s0f1np1", "enP2p1s0f1np1"))
NETEM = ("netem", "loss", "25%", "delay", "150ms", "100ms")
BUCKET = ("tbf", "rate", "128kbit", "burst", "3000", "latency", "300ms")
NEW_NETWORK = 0x40000000  # CLONE_NEWNET, linux/sched.h

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Namespace:
    """One node's network: its loopback, and its end of the cable. twins: the interfaces there; address: of the first, the second's ends
    alike in the next subnet."""

    name: str
    address: str
    twins: tuple[str, ...]

    @property
    def interface(self) -> str:
        return self.twins[0]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread is inside, and what it starts: sockets, threads and processes. The rest of this process stays outside."""
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self.name}") as inside:
            _enter(inside.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def pids(self) -> list[int]:
        """Every process inside, but for this one and those that it asks with."""
        return [pid for pid in map(int, _ip("netns", "pids", self.name).split()) if pid != os.getpid() and Path(f"/proc/{pid}").exists()]

    def listeners(self) -> list[tuple[str, int]]:
        """(address, pid) of every TCP socket that somebody inside listens on; an address is like `192.168.100.10:6379` or `*:8000`."""
        found = []
        for line in _run("ip", "netns", "exec", self.name, "ss", "-Hltnp").splitlines():
            # A process's own name may have spaces.
            owner = re.search(r"pid=(\d+)", line)
            found.append((line.split()[3], int(owner[1]) if owner else 0))
        return found

    def empty(self) -> None:
        """Every process inside is killed."""

        def emptied() -> bool:
            for pid in (pids := self.pids()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        until(emptied, f"{self.name} is empty", 0.1)

    def plug(self, *, up: bool) -> None:
        """This end of the cable: pulled out, or in again."""
        for twin in self.twins:
            _ip("-n", self.name, "link", "set", twin, "up" if up else "down")

    def impair(self) -> str:
        """From now on this end of the cable loses and delays packets, without a word to anybody; what does it. Until `mend`.

        netem where the kernel has it (sch_netem), else a token bucket so small that it queues and drops (sch_tbf).
        """
        for how in (NETEM, BUCKET):
            try:
                for twin in self.twins:
                    _run("ip", "netns", "exec", self.name, "tc", "qdisc", "replace", "dev", twin, "root", *how)
            except AssertionError:
                continue
            return how[0]
        raise AssertionError("This kernel has neither sch_netem nor sch_tbf: load one of them (modprobe sch_netem).")

    def mend(self) -> None:
        for twin in self.twins:
            _run("ip", "netns", "exec", self.name, "tc", "qdisc", "del", "dev", twin, "root")

    def set_mtu(self, mtu: int) -> None:
        """Of this end of the cable alone, on both rails."""
        for twin in self.twins:
            _ip("-n", self.name, "link", "set", twin, "mtu", str(mtu))


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Namespace, Namespace]]:
    """192.168.100.10 and .11. At the end every process inside is killed and both are removed, whatever happened.

    Fails in one sentence where this user may not make them.
    """
    if os.geteuid() != 0:
        raise AssertionError("Two nodes are two network namespaces, and only root may make them: run this test as root.")
    first, second = (
        Namespace(f"sparkd-{os.getpid()}-{letter}", f"192.168.100.{number}", twins)
        for letter, number, twins in zip("ab", (10, 11), PORTS, strict=True)
    )
    nodes = (first, second)
    try:
        for node in nodes:
            _ip("netns", "add", node.name)
            _ip("-n", node.name, "link", "set", "lo", "up")
        for near, far in zip(first.twins, second.twins, strict=True):
            _ip("link", "add", near, "netns", first.name, "type", "veth", "peer", "name", far, "netns", second.name)
        for node in nodes:
            for number, twin in enumerate(node.twins):
                _ip("-n", node.name, "address", "add", f"{node.address.replace('.100.', f'.{100 + number}.')}/24", "dev", twin)
            node.plug(up=True)
        yield first, second
    finally:
        for node in nodes:
            _remove(node)


def _remove(node: Namespace) -> None:
    if not Path(f"/run/netns/{node.name}").exists():
        return

    node.empty()
    _ip("netns", "delete", node.name)


def _enter(descriptor: int) -> None:
    # os.setns came with Python 3.12.
    if _libc.setns(descriptor, NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HUNG_S, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
