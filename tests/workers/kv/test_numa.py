"""A host of several NUMA nodes: what those have that a process is bound to. Files by the kernel's formats (drivers/base/node.c)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from workers.kv.memory import MemoryReading, host
from workers.kv.numa import nodes_bound
from workers.kv.request import CacheRequest
from workers.kv.settings import CacheSettings

MIB, GIB = 2**20, 2**30
# Of each node in MiB: total, free, active and inactive file pages, reclaimable slabs.
FULL, EMPTY = (64 * 1024, 2 * 1024, 512, 1536, 1024), (64 * 1024, 60 * 1024, 0, 1024, 0)


def node(number: int, total: int, free: int, active: int, inactive: int, slabs: int) -> str:
    fields = {
        "MemTotal": total,
        "MemFree": free,
        "MemUsed": total - free,
        "Active": active + 7,
        "Active(anon)": 7,
        "Inactive(anon)": 0,
        "Active(file)": active,
        "Inactive(file)": inactive,
        "FilePages": active + inactive,
        "KReclaimable": slabs,
        "SReclaimable": slabs,
    }
    lines = [f"Node {number} {name + ':':<16}{size * 1024:8d} kB" for name, size in fields.items()]
    return "\n".join([*lines, f"Node {number} HugePages_Total:     0"]) + "\n"


def machine(tmp_path: Path, nodes: Sequence[tuple[int, ...]], allowed: str = "0-1") -> tuple[Path, Path]:
    """(/proc, /sys/devices/system/node). The kernel keeps 1 GiB of what could be had for itself."""
    proc, folder = tmp_path / "proc", tmp_path / "node"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "status").write_text(f"Name:\tx\nMems_allowed:\t3\nMems_allowed_list:\t{allowed}\n")
    total, free, active, inactive, slabs = (sum(one[at] for one in nodes) for at in range(5))
    available = free + active + inactive + slabs - 1024
    (proc / "meminfo").write_text(
        f"MemTotal: {total * 1024} kB\nMemFree: {free * 1024} kB\nMemAvailable: {available * 1024} kB\n"
        f"Active(file): {active * 1024} kB\nInactive(file): {inactive * 1024} kB\nKReclaimable: {slabs * 1024} kB\n"
    )
    for number, numbers in enumerate(nodes):
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}" / "meminfo").write_text(node(number, *numbers))
    (folder / "possible").write_text("0-1\n")
    return proc, folder


def bound(*nodes: int) -> Any:
    return lambda: frozenset(nodes) if nodes else None


@pytest.mark.parametrize(
    ("allowed", "bound_to", "kept"),
    [
        ("0-1", bound(), None),
        ("0-1", bound(1), {1}),
        ("1", bound(), {1}),  # cpuset.mems of a container
        ("0-7", bound(), None),  # nodes that are possible and not there
        ("0", bound(1), None),  # the kernel would refuse it
    ],
)
def test_which_nodes_count(tmp_path, allowed, bound_to, kept):
    proc, folder = machine(tmp_path, [FULL, EMPTY], allowed)
    assert nodes_bound(proc, folder, bound_to) == (None if kept is None else frozenset(kept))


def test_a_machine_without_nodes_has_all_its_memory(tmp_path):
    assert nodes_bound(tmp_path, tmp_path / "node", bound(0)) is None


@pytest.mark.parametrize(
    ("kept", "total_gib", "room_mib"),
    [
        ({0}, 64, 2048 + 2048 + 1024 - 512),  # half of what the kernel keeps
        (None, 128, 65 * 1024),
        ({5}, 128, 65 * 1024),  # a node that does not say what it has
    ],
)
def test_the_room_is_that_of_the_nodes_bound(tmp_path, kept, total_gib, room_mib):
    proc, folder = machine(tmp_path, [FULL, EMPTY])
    reading = host(proc, tmp_path, None if kept is None else frozenset(kept), folder)
    assert (reading.total / GIB, reading.room / MIB) == (total_gib, room_mib)
    assert reading.free / MIB == {1: 60 * 1024, 0: 2 * 1024}.get(min(kept or {9}), 62 * 1024)


def test_a_rank_on_another_node_takes_nothing_of_this_ones_and_shares_its_limits(tmp_path):
    alone = MemoryReading(64 * GIB, 60 * GIB, 60 * GIB, 0, cgroup_left=100 * GIB, sharers=1, ranks=2)
    both = MemoryReading(128 * GIB, 60 * GIB, 60 * GIB, 0, cgroup_left=100 * GIB, sharers=2, ranks=2)
    assert [one.room // GIB for one in (alone, both)] == [50, 30]
    assert [one.size // GIB for one in (alone, both)] == [64, 64]
    wish = CacheRequest(CacheSettings(margin_bytes=4 * GIB, reserved_bytes=40 * GIB), lambda: 10 * GIB)
    for one in (alone, both):
        assert wish.margin(one) == 2 * GIB, "4 GiB of the machine"
        kept = wish.reserved(one)
        assert kept is not None and (kept.ranks, kept.bytes) == (2, 40 * GIB)
